// Metal's vocabulary for a C++20 compiler: what a kernel's text may use, over the fibers of ../runtime.
#pragma once
#include "atomics.h"
#include "matrix.h"

// Metal's compiler takes attributes and pragmas that this one does not know.
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wattributes"

using namespace metal;
using float16_t = metal::half;
using bfloat16_t = metal::bfloat;

// What a text may ask about where it is compiled.
#define LABKIT_SIMULATOR 1
#define __METAL_VERSION__ 320
#define METAL_FUNC inline __attribute__((always_inline))
#define MTL_CONST

// Limits, and constants as floats: the compiler's own, and the nearest float to each.
#define INT_MIN (-INT_MAX - 1)
#define INT_MAX __INT_MAX__
#define UINT_MAX (INT_MAX * 2u + 1u)
#define FLT_MIN __FLT_MIN__
#define FLT_MAX __FLT_MAX__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX static_cast<half>(65504.0f)
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define M_E_F 0x1.5bf0a8p+1f
#define M_PI_F 0x1.921fb6p+1f
#define M_LN2_F 0x1.62e430p-1f
#define M_LOG2E_F 0x1.715476p+0f
#define M_SQRT2_F 0x1.6a09e6p+0f

// Last, since C++ headers use some of these words: address spaces mean nothing to this compiler. Clang checks them
// (labkit/kernels/address_spaces.py); the translation marks threadgroup arrays.
#define kernel
#define thread
#define threadgroup
#define constant
#define device
#define coherent(scope)
