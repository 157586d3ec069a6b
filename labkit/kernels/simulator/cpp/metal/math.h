// Metal's math functions. fast:: and precise:: give the same values here; half and bfloat are computed in float and rounded.
#pragma once
#include "vectors.h"

namespace metal {

#define LK_FUNCTION1(name, expression)                                                                                       \
  LK_INLINE float name(float x) { return expression; }                                                                       \
  template <SmallFloat H> LK_INLINE H name(H h) { float x = (float)h; return H(expression); }                                \
  template <class A, class = std::enable_if_t<std::is_integral_v<A> || std::is_same_v<A, double>>>                           \
  LK_INLINE float name(A a) { return name((float)a); }                                                                       \
  template <class T, int N> LK_INLINE vec<T, N> name(vec<T, N> a) { for (int i = 0; i < N; i++) a.v[i] = name(a.v[i]); return a; }
#define LK_FUNCTION2(name, expression)                                                                                       \
  LK_INLINE float name(float x, float y) { return expression; }                                                              \
  template <SmallFloat H> LK_INLINE H name(H a, H b) { float x = (float)a, y = (float)b; return H(expression); }             \
  template <class T, int N> LK_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) { for (int i = 0; i < N; i++) a.v[i] = name(a.v[i], b.v[i]); return a; }
#define LK_FUNCTIONS                                                                                                         \
  LK_FUNCTION1(exp, __builtin_expf(x)) LK_FUNCTION1(exp2, __builtin_exp2f(x)) LK_FUNCTION1(exp10, __builtin_powf(10.f, x))   \
  LK_FUNCTION1(log, __builtin_logf(x)) LK_FUNCTION1(log2, __builtin_log2f(x)) LK_FUNCTION1(log10, __builtin_log10f(x))       \
  LK_FUNCTION1(sqrt, __builtin_sqrtf(x)) LK_FUNCTION1(rsqrt, 1.0f / __builtin_sqrtf(x))                                      \
  LK_FUNCTION1(sin, __builtin_sinf(x)) LK_FUNCTION1(cos, __builtin_cosf(x)) LK_FUNCTION1(tan, __builtin_tanf(x))             \
  LK_FUNCTION1(sinpi, __builtin_sinf(3.14159265358979f * x)) LK_FUNCTION1(cospi, __builtin_cosf(3.14159265358979f * x))      \
  LK_FUNCTION1(sinh, __builtin_sinhf(x)) LK_FUNCTION1(cosh, __builtin_coshf(x)) LK_FUNCTION1(tanh, __builtin_tanhf(x))       \
  LK_FUNCTION1(asin, __builtin_asinf(x)) LK_FUNCTION1(acos, __builtin_acosf(x)) LK_FUNCTION1(atan, __builtin_atanf(x))       \
  LK_FUNCTION1(asinh, __builtin_asinhf(x)) LK_FUNCTION1(acosh, __builtin_acoshf(x)) LK_FUNCTION1(atanh, __builtin_atanhf(x)) \
  LK_FUNCTION1(floor, __builtin_floorf(x)) LK_FUNCTION1(ceil, __builtin_ceilf(x)) LK_FUNCTION1(trunc, __builtin_truncf(x))   \
  LK_FUNCTION1(rint, __builtin_rintf(x)) LK_FUNCTION1(round, __builtin_roundf(x)) LK_FUNCTION1(fract, x - __builtin_floorf(x)) \
  LK_FUNCTION1(fabs, __builtin_fabsf(x)) LK_FUNCTION1(sign, float((x > 0) - (x < 0))) LK_FUNCTION1(saturate, x < 0 ? 0.f : x > 1 ? 1.f : x) \
  LK_FUNCTION2(pow, __builtin_powf(x, y)) LK_FUNCTION2(powr, __builtin_powf(x, y)) LK_FUNCTION2(fmod, __builtin_fmodf(x, y)) \
  LK_FUNCTION2(atan2, __builtin_atan2f(x, y)) LK_FUNCTION2(copysign, __builtin_copysignf(x, y)) LK_FUNCTION2(step, y < x ? 0.f : 1.f) \
  LK_FUNCTION2(fmax, __builtin_fmaxf(x, y)) LK_FUNCTION2(fmin, __builtin_fminf(x, y)) LK_FUNCTION2(divide, x / y)
namespace fast { LK_FUNCTIONS }
namespace precise { LK_FUNCTIONS }
LK_FUNCTIONS
#undef LK_FUNCTIONS
#undef LK_FUNCTION2
#undef LK_FUNCTION1

LK_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <SmallFloat H> LK_INLINE H fma(H a, H b, H c) { return H((float)__builtin_fma((double)(float)a, (double)(float)b, (double)(float)c)); }
template <class T, int N> LK_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) { for (int i = 0; i < N; i++) c.v[i] = fma(a.v[i], b.v[i], c.v[i]); return c; }
LK_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
template <Scalar T> LK_INLINE T abs(T x) {
  if constexpr (std::is_unsigned_v<T>) return x;
  else if constexpr (std::is_same_v<T, float>) return __builtin_fabsf(x);
  else return (float)x < 0 ? T(-x) : x;
}
template <class T, int N> LK_INLINE vec<T, N> abs(vec<T, N> a) { for (int i = 0; i < N; i++) a.v[i] = abs(a.v[i]); return a; }

// max and min of two scalar types: their common type, in which float and double literals count as float.
template <class A, class B> struct common { typedef decltype(A() + B()) type; };
template <class A> struct common<A, A> { typedef A type; };
template <> struct common<float, double> { typedef float type; };
template <> struct common<double, float> { typedef float type; };
template <Scalar A, Scalar B> LK_INLINE typename common<A, B>::type max(A a, B b) {
  typedef typename common<A, B>::type T;
  if constexpr (std::is_integral_v<T>) return T(a) < T(b) ? T(b) : T(a);
  else return T(__builtin_fmaxf((float)a, (float)b));
}
template <Scalar A, Scalar B> LK_INLINE typename common<A, B>::type min(A a, B b) {
  typedef typename common<A, B>::type T;
  if constexpr (std::is_integral_v<T>) return T(b) < T(a) ? T(b) : T(a);
  else return T(__builtin_fminf((float)a, (float)b));
}
template <class T, int N> LK_INLINE vec<T, N> max(vec<T, N> a, vec<T, N> b) { for (int i = 0; i < N; i++) a.v[i] = max(a.v[i], b.v[i]); return a; }
template <class T, int N> LK_INLINE vec<T, N> min(vec<T, N> a, vec<T, N> b) { for (int i = 0; i < N; i++) a.v[i] = min(a.v[i], b.v[i]); return a; }
template <class T, int N, Scalar S> LK_INLINE vec<T, N> max(vec<T, N> a, S b) { return max(a, vec<T, N>(b)); }
template <class T, int N, Scalar S> LK_INLINE vec<T, N> min(vec<T, N> a, S b) { return min(a, vec<T, N>(b)); }
template <Scalar T> LK_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <Scalar T> LK_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <Scalar T, Scalar A, Scalar B> LK_INLINE T clamp(T x, A lo, B hi) { return min(max(x, T(lo)), T(hi)); }
template <class T, int N, class A, class B> LK_INLINE vec<T, N> clamp(vec<T, N> x, A lo, B hi) { return min(max(x, vec<T, N>(lo)), vec<T, N>(hi)); }
template <class T> LK_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> LK_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) { for (int i = 0; i < N; i++) if (c.v[i]) a.v[i] = b.v[i]; return a; }
LK_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N> LK_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
LK_INLINE bool isnan(float x) { return __builtin_isnan(x); }
LK_INLINE bool isinf(float x) { return __builtin_isinf(x); }
LK_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
LK_INLINE bool signbit(float x) { return __builtin_signbit(x); }

// ------------------------------------------------------------------ integers
template <class T> LK_INLINE T popcount(T x) { return T(__builtin_popcountll((std::make_unsigned_t<T>)x)); }
LK_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
LK_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
LK_INLINE ulong clz(ulong x) { return x ? __builtin_clzl(x) : 64; }
LK_INLINE ulong ctz(ulong x) { return x ? __builtin_ctzl(x) : 64; }
LK_INLINE uint extract_bits(uint x, uint offset, uint bits) { return bits ? (x >> offset) & (bits >= 32 ? ~0u : (1u << bits) - 1) : 0; }
LK_INLINE int extract_bits(int x, uint offset, uint bits) { return bits ? (int)((uint)x << (32 - bits - offset)) >> (32 - bits) : 0; }
LK_INLINE uint insert_bits(uint base, uint x, uint offset, uint bits) {
  uint m = (bits >= 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~m) | ((x << offset) & m);
}
LK_INLINE uint mulhi(uint a, uint b) { return (uint64_t)a * b >> 32; }
LK_INLINE int mulhi(int a, int b) { return (int64_t)a * b >> 32; }
LK_INLINE uint rotate(uint x, uint n) { return x << (n & 31) | x >> (-n & 31); }
LK_INLINE uint reverse_bits(uint x) {
  uint r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}

}  // namespace metal
