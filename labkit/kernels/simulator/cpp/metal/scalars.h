// Metal's scalar types for a C++20 compiler: bfloat, casts that keep the bits, limits.
#pragma once
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../runtime/interface.h"

// Inlined always: what a sanitized function hands by value to a function that is really called escapes the sanitizer.
#define LK_INLINE inline __attribute__((always_inline))
// Instrumented never: the runtime does the books of these functions itself.
#define LK_OPAQUE __attribute__((no_sanitize("thread"), noinline)) inline
// A last parameter that tells calls apart.
#define LK_CALLER_LINE int line_ = __builtin_LINE()

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

namespace metal {

template <class To, class From> LK_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits: both types need the same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

using half = _Float16;

// The upper half of a float. Made from a number by rounding to nearest even, and read as a float.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class Number> requires std::is_arithmetic_v<Number> || std::same_as<Number, half>
  LK_INLINE bfloat(Number number) : bits(upper_half(static_cast<float>(number))) {}
  LK_INLINE operator float() const { return as_type<float>(uint32_t(bits) << 16); }
  template <class Other> LK_INLINE bfloat& operator+=(Other other) { return *this = bfloat(float(*this) + float(other)); }
  template <class Other> LK_INLINE bfloat& operator-=(Other other) { return *this = bfloat(float(*this) - float(other)); }
  template <class Other> LK_INLINE bfloat& operator*=(Other other) { return *this = bfloat(float(*this) * float(other)); }
  template <class Other> LK_INLINE bfloat& operator/=(Other other) { return *this = bfloat(float(*this) / float(other)); }

 private:
  static LK_INLINE uint16_t upper_half(float number) {
    uint32_t whole = as_type<uint32_t>(number), upper = whole >> 16;
    bool is_nan = (whole << 1) > 0xff000000u;
    if (is_nan) return upper | 0x0040;  // stays one when its lower half is cut off
    uint32_t odd = upper & 1;
    return (whole + 0x7fffu + odd) >> 16;
  }
};

template <class T> concept SmallFloat = std::same_as<T, half> || std::same_as<T, bfloat>;
template <class T> concept Scalar = std::is_arithmetic_v<T> || SmallFloat<T>;

// Arithmetic of a bfloat with another number: with a float (or a double, as literals are in C++) it gives a float; with a bfloat
// or an integer, which becomes a bfloat first, a bfloat.
template <class A, class B> concept WithBfloat =
    (std::same_as<A, bfloat> && (std::same_as<B, bfloat> || std::is_arithmetic_v<B>)) || (std::same_as<B, bfloat> && std::is_arithmetic_v<A>);
template <class A, class B>
using bfloat_result = std::conditional_t<std::is_floating_point_v<A> || std::is_floating_point_v<B>, float, bfloat>;
template <class Number> LK_INLINE float bfloat_operand(Number number) {
  if constexpr (std::is_integral_v<Number>) return float(bfloat(number));
  else return float(number);
}
template <class A, class B> requires WithBfloat<A, B> LK_INLINE bfloat_result<A, B> operator+(A a, B b) {
  return bfloat_result<A, B>(bfloat_operand(a) + bfloat_operand(b));
}
template <class A, class B> requires WithBfloat<A, B> LK_INLINE bfloat_result<A, B> operator-(A a, B b) {
  return bfloat_result<A, B>(bfloat_operand(a) - bfloat_operand(b));
}
template <class A, class B> requires WithBfloat<A, B> LK_INLINE bfloat_result<A, B> operator*(A a, B b) {
  return bfloat_result<A, B>(bfloat_operand(a) * bfloat_operand(b));
}
template <class A, class B> requires WithBfloat<A, B> LK_INLINE bfloat_result<A, B> operator/(A a, B b) {
  return bfloat_result<A, B>(bfloat_operand(a) / bfloat_operand(b));
}
LK_INLINE bfloat operator-(bfloat number) { return as_type<bfloat>(uint16_t(number.bits ^ 0x8000)); }

// What Metal has of <metal_type_traits>.
using std::bool_constant, std::integral_constant, std::true_type, std::false_type;
using std::conditional_t, std::enable_if_t, std::is_integral_v, std::is_same, std::is_same_v;

// The 16-bit floats by the bit patterns of their limits; all other types have the standard library's.
template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <class Float, uint16_t Infinity, uint16_t Nan, uint16_t Largest, uint16_t SmallestNormal, uint16_t Epsilon>
struct small_float_limits {
  static LK_INLINE Float infinity() { return as_type<Float>(Infinity); }
  static LK_INLINE Float quiet_NaN() { return as_type<Float>(Nan); }
  static LK_INLINE Float max() { return as_type<Float>(Largest); }
  static LK_INLINE Float lowest() { return as_type<Float>(uint16_t(Largest | 0x8000)); }
  static LK_INLINE Float min() { return as_type<Float>(SmallestNormal); }
  static LK_INLINE Float epsilon() { return as_type<Float>(Epsilon); }
};
template <> struct numeric_limits<half> : small_float_limits<half, 0x7c00, 0x7e00, 0x7bff, 0x0400, 0x1400> {};
template <> struct numeric_limits<bfloat> : small_float_limits<bfloat, 0x7f80, 0x7fc0, 0x7f7f, 0x0080, 0x3c00> {};

}  // namespace metal
