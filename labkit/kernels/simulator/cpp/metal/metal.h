// Metal's vocabulary for a C++20 compiler: what a kernel's text may use, over the fibers of ../runtime.
#pragma once
#pragma GCC diagnostic ignored "-Wattributes"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "atomics.h"
#include "matrix.h"

using namespace metal;
typedef metal::bfloat bfloat16_t;
typedef metal::half float16_t;

#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define HALF_MAX ((half)65504.0f)
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define METAL_FUNC inline __attribute__((always_inline))
#define MTL_CONST
#define __METAL_VERSION__ 320
#define LABKIT_SIMULATOR 1

// Address spaces are checked by clang (labkit/kernels/address_spaces.py). Threadgroup arrays are marked by the translation.
#define device
#define constant
#define thread
#define threadgroup
#define kernel
#define coherent(scope)
