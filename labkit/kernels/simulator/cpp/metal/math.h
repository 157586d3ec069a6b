// Metal's math functions. 16-bit floats are computed in float and rounded once; fast:: and precise:: are the same here.
#pragma once
#include "vectors.h"

namespace metal {

// What a function of floats gives for a number: 16-bit floats keep their type, all other numbers become floats.
template <Scalar T> using floating = std::conditional_t<SmallFloat<T>, T, float>;
template <Scalar A, Scalar B> using floating2 = std::conditional_t<std::same_as<A, B>, floating<A>, float>;

inline namespace functions {

#define LK_OF_ONE(name, ...)                                                                \
  template <Scalar T> LK_INLINE floating<T> name(T number) {                                \
    float x = float(number);                                                                \
    return floating<T>(__VA_ARGS__);                                                        \
  }                                                                                         \
  template <Vector V> LK_INLINE vec_of<V> name(const V& v) {                                \
    vec_of<V> out = whole(v);                                                               \
    for (int i = 0; i < out.size; i++) out.v[i] = name(out.v[i]);                           \
    return out;                                                                             \
  }
#define LK_OF_TWO(name, ...)                                                                \
  template <Scalar A, Scalar B> LK_INLINE floating2<A, B> name(A first, B second) {         \
    float x = float(first), y = float(second);                                              \
    return floating2<A, B>(__VA_ARGS__);                                                    \
  }                                                                                         \
  template <class A, class B> requires Meet<A, B> LK_INLINE auto name(const A& a, const B& b) { \
    meeting_of<A, B> out(a), other(b);                                                      \
    for (int i = 0; i < out.size; i++) out.v[i] = name(out.v[i], other.v[i]);               \
    return out;                                                                             \
  }
#define LK_C(name) LK_OF_ONE(name, __builtin_##name##f(x))
#define LK_C2(name) LK_OF_TWO(name, __builtin_##name##f(x, y))

LK_C(exp) LK_C(exp2) LK_C(log) LK_C(log2) LK_C(log10)
LK_C(sqrt) LK_C(fabs)
LK_C(floor) LK_C(ceil) LK_C(trunc) LK_C(rint) LK_C(round)
LK_C(sin) LK_C(cos) LK_C(tan) LK_C(asin) LK_C(acos) LK_C(atan)
LK_C(sinh) LK_C(cosh) LK_C(tanh) LK_C(asinh) LK_C(acosh) LK_C(atanh)
LK_C2(pow) LK_C2(fmod) LK_C2(atan2) LK_C2(copysign) LK_C2(fmax) LK_C2(fmin)
LK_OF_ONE(exp10, __builtin_powf(10.0f, x))
LK_OF_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))
LK_OF_ONE(sinpi, __builtin_sinf(3.14159265358979f * x))
LK_OF_ONE(cospi, __builtin_cosf(3.14159265358979f * x))
LK_OF_ONE(fract, x - __builtin_floorf(x))
LK_OF_ONE(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
LK_OF_ONE(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
LK_OF_TWO(powr, __builtin_powf(x, y))
LK_OF_TWO(step, y < x ? 0.0f : 1.0f)
LK_OF_TWO(divide, x / y)
#undef LK_C2
#undef LK_C
#undef LK_OF_TWO
#undef LK_OF_ONE

// Rounded once: a float's product and sum are exact enough in double for a 16-bit float.
template <Scalar T> LK_INLINE floating<T> fma(T a, T b, T c) {
  if constexpr (SmallFloat<T>) return T(float(__builtin_fma(double(float(a)), double(float(b)), double(float(c)))));
  else return __builtin_fmaf(float(a), float(b), float(c));
}
// Numbers of several types: as floats.
template <Scalar A, Scalar B, Scalar C> LK_INLINE float fma(A a, B b, C c) { return __builtin_fmaf(float(a), float(b), float(c)); }
template <Vector V, class B, class C> requires Meet<V, B> && Meet<V, C> LK_INLINE vec_of<V> fma(const V& a, const B& b, const C& c) {
  vec_of<V> out(whole(a)), factors(b), summands(c);
  for (int i = 0; i < out.size; i++) out.v[i] = fma(out.v[i], factors.v[i], summands.v[i]);
  return out;
}
LK_INLINE float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
LK_INLINE float mix(float from, float to, float share) { return from + share * (to - from); }

}  // namespace functions

namespace fast { using namespace functions; }
namespace precise { using namespace functions; }

// ------------------------------------------------------------------ the larger, the smaller, one of two
// Two numbers meet in C++'s common type, but a double (a literal, then) counts as a float.
template <Scalar A, Scalar B> struct common { using type = decltype(A() + B()); };
template <Scalar A> struct common<A, A> { using type = A; };
template <> struct common<double, double> { using type = float; };
template <Scalar A, Scalar B> requires (!std::same_as<A, B> && (std::same_as<A, double> || std::same_as<B, double>))
struct common<A, B> { using type = float; };
template <Scalar A, Scalar B> using common_of = typename common<A, B>::type;

struct Larger {
  template <class T> LK_INLINE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return b > a ? b : a;
    else return T(__builtin_fmaxf(float(a), float(b)));  // of a NaN and a number the number
  }
};
struct Smaller {
  template <class T> LK_INLINE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return b < a ? b : a;
    else return T(__builtin_fminf(float(a), float(b)));
  }
};
#define LK_ORDERED(name, Choice)                                                              \
  template <Scalar A, Scalar B> LK_INLINE common_of<A, B> name(A a, B b) {                    \
    return Choice()(common_of<A, B>(a), common_of<A, B>(b));                                  \
  }                                                                                           \
  template <class A, class B> requires Meet<A, B> LK_INLINE auto name(const A& a, const B& b) { \
    meeting_of<A, B> out(a), other(b);                                                        \
    for (int i = 0; i < out.size; i++) out.v[i] = Choice()(out.v[i], other.v[i]);             \
    return out;                                                                               \
  }                                                                                           \
  template <class T> LK_INLINE T name##3(T a, T b, T c) { return name(name(a, b), c); }
LK_ORDERED(max, Larger)
LK_ORDERED(min, Smaller)
#undef LK_ORDERED

template <Scalar T, Scalar Low, Scalar High> LK_INLINE T clamp(T x, Low low, High high) { return min(max(x, T(low)), T(high)); }
template <Vector V, class Low, class High> LK_INLINE vec_of<V> clamp(const V& v, const Low& low, const High& high) {
  return min(max(whole(v), vec_of<V>(low)), vec_of<V>(high));
}

struct Absolute {
  template <class T> LK_INLINE T operator()(T x) const {
    if constexpr (std::is_unsigned_v<T>) return x;
    else if constexpr (std::same_as<T, float>) return __builtin_fabsf(x);
    else return float(x) < 0.0f ? T(-x) : x;
  }
};
template <Scalar T> LK_INLINE T abs(T x) { return Absolute()(x); }
template <Vector V> LK_INLINE vec_of<V> abs(const V& v) { return each(v, Absolute()); }

template <class T> LK_INLINE T select(T otherwise, T if_true, bool which) { return which ? if_true : otherwise; }
template <class T, int N> LK_INLINE vec<T, N> select(vec<T, N> otherwise, vec<T, N> if_true, vec<bool, N> which) {
  vec<T, N> out;
  for (int i = 0; i < N; i++) out.v[i] = which.v[i] ? if_true.v[i] : otherwise.v[i];
  return out;
}
template <Vector V> LK_INLINE auto length(const V& v) { return sqrt(dot(v, v)); }

LK_INLINE bool isnan(float x) { return x != x; }
LK_INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
LK_INLINE bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
LK_INLINE bool signbit(float x) { return as_type<uint>(x) >> 31; }

// ------------------------------------------------------------------ the bits of integers
template <std::integral T> LK_INLINE T popcount(T x) { return T(__builtin_popcountll(std::make_unsigned_t<T>(x))); }
LK_INLINE uint clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }
LK_INLINE ulong clz(ulong x) { return x == 0 ? 64 : __builtin_clzl(x); }
LK_INLINE uint ctz(uint x) { return x == 0 ? 32 : __builtin_ctz(x); }
LK_INLINE ulong ctz(ulong x) { return x == 0 ? 64 : __builtin_ctzl(x); }
LK_INLINE uint low_bits(uint count) { return count < 32 ? (1u << count) - 1u : 0xffffffffu; }
LK_INLINE uint extract_bits(uint x, uint offset, uint count) { return count == 0 ? 0 : x >> offset & low_bits(count); }
LK_INLINE int extract_bits(int x, uint offset, uint count) {
  if (count == 0) return 0;
  uint above = 32 - count;  // the field is brought to the top, and down again with its sign
  return int(uint(x) << (above - offset)) >> above;
}
LK_INLINE uint insert_bits(uint base, uint field, uint offset, uint count) {
  uint place = low_bits(count) << offset;
  return (base & ~place) | (field << offset & place);
}
LK_INLINE uint mulhi(uint a, uint b) { return ulong(a) * ulong(b) >> 32; }
LK_INLINE int mulhi(int a, int b) { return long(a) * long(b) >> 32; }
LK_INLINE uint rotate(uint x, uint left) { return left % 32 == 0 ? x : x << left % 32 | x >> (32 - left % 32); }
LK_INLINE uint reverse_bits(uint x) {
  for (uint half_ = 16, mask = 0x0000ffffu; half_; half_ /= 2, mask ^= mask << half_) x = (x >> half_ & mask) | (x & mask) << half_;
  return x;
}

}  // namespace metal
