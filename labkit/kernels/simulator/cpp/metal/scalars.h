// Metal's scalar types, casts and limits for a C++20 compiler.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../runtime/interface.h"

// Always inlined: the sanitizer does not see aggregates that are passed by value to a real call.
#define LK_INLINE inline __attribute__((always_inline))
// Never instrumented: the runtime does the bookkeeping of these itself.
#define LK_OPAQUE __attribute__((no_sanitize("thread"), noinline)) inline
#define LK_CALLER_LINE int line_ = __builtin_LINE()

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace metal {

typedef _Float16 half;

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class A, class = std::enable_if_t<std::is_arithmetic_v<A> || std::is_same_v<A, half>>>
  LK_INLINE bfloat(A v) : bits(round((float)v)) {}
  LK_INLINE operator float() const {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
  LK_INLINE bfloat& operator+=(float v) { return *this = bfloat((float)*this + v); }
  LK_INLINE bfloat& operator-=(float v) { return *this = bfloat((float)*this - v); }
  LK_INLINE bfloat& operator*=(float v) { return *this = bfloat((float)*this * v); }
  LK_INLINE bfloat& operator/=(float v) { return *this = bfloat((float)*this / v); }

 private:
  static LK_INLINE uint16_t round(float f) {  // to nearest even
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 0x40;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};

// bfloat with bfloat or an integer gives bfloat; with float gives float.
#define LK_BFLOAT_OPERATOR(op)                                                                            \
  LK_INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); }               \
  template <class A, class = std::enable_if_t<std::is_integral_v<A>>>                                     \
  LK_INLINE bfloat operator op(bfloat a, A b) { return bfloat((float)a op (float)bfloat(b)); }            \
  template <class A, class = std::enable_if_t<std::is_integral_v<A>>>                                     \
  LK_INLINE bfloat operator op(A a, bfloat b) { return bfloat((float)bfloat(a) op (float)b); }            \
  LK_INLINE float operator op(bfloat a, float b) { return (float)a op b; }                                \
  LK_INLINE float operator op(float a, bfloat b) { return a op (float)b; }
LK_BFLOAT_OPERATOR(+)
LK_BFLOAT_OPERATOR(-)
LK_BFLOAT_OPERATOR(*)
LK_BFLOAT_OPERATOR(/)
#undef LK_BFLOAT_OPERATOR
LK_INLINE bfloat operator-(bfloat a) {
  bfloat r;
  r.bits = a.bits ^ 0x8000;
  return r;
}

template <class T> concept Scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T> concept SmallFloat = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class To, class From> LK_INLINE To as_type(From f) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits: both types need the same size");
  To t;
  __builtin_memcpy(&t, &f, sizeof t);
  return t;
}

using std::bool_constant;
using std::conditional_t;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::true_type;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<bfloat> {
  static LK_INLINE bfloat infinity() { return bfloat(__builtin_inff()); }
  static LK_INLINE bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
  static LK_INLINE bfloat max() { return bfloat(3.38953139e38f); }
  static LK_INLINE bfloat min() { return bfloat(1.17549435e-38f); }
  static LK_INLINE bfloat lowest() { return bfloat(-3.38953139e38f); }
  static LK_INLINE bfloat epsilon() { return bfloat(0.0078125f); }
};
template <> struct numeric_limits<half> {
  static LK_INLINE half infinity() { return half(__builtin_inff()); }
  static LK_INLINE half quiet_NaN() { return half(__builtin_nanf("")); }
  static LK_INLINE half max() { return half(65504.f); }
  static LK_INLINE half min() { return half(6.103515625e-5f); }
  static LK_INLINE half lowest() { return half(-65504.f); }
  static LK_INLINE half epsilon() { return half(0.0009765625f); }
};

}  // namespace metal
