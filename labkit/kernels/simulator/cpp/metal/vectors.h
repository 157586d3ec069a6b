// Metal's vector types. A whole vector is always read and written by one access of its full width, as a GPU does, so that
// traffic is counted rightly; one component by an access of that component.
#pragma once
#include "scalars.h"

namespace metal {

template <class T, int N> struct vec;

// Two components of a vector that lie anywhere in it: v.xy, v.zx = ...
template <class T, int Lanes, int A, int B> struct swizzle2 {
  T v[Lanes];
  LK_INLINE operator vec<T, 2>() const;
  LK_INLINE swizzle2& operator=(vec<T, 2> o);
};
template <class T, int Lanes, int A, int B, int C> struct swizzle3 {
  T v[Lanes];
  LK_INLINE operator vec<T, 3>() const;
  LK_INLINE swizzle3& operator=(vec<T, 3> o);
};

template <class T, int N> struct components;
template <class T> struct components<T, 2> {
  union {
    T v[2];
    struct { T x, y; };
    struct { T r, g; };
    swizzle2<T, 2, 0, 1> xy; swizzle2<T, 2, 1, 0> yx; swizzle2<T, 2, 0, 0> xx; swizzle2<T, 2, 1, 1> yy;
  };
};
template <class T> struct components<T, 3> {
  union {
    T v[4];
    struct { T x, y, z; };
    struct { T r, g, b; };
    swizzle2<T, 4, 0, 1> xy; swizzle2<T, 4, 1, 0> yx; swizzle2<T, 4, 1, 2> yz; swizzle2<T, 4, 0, 2> xz; swizzle2<T, 4, 2, 0> zx;
    swizzle3<T, 4, 2, 1, 0> zyx; swizzle3<T, 4, 1, 2, 0> yzx; swizzle3<T, 4, 2, 0, 1> zxy;
  };
};
template <class T> struct components<T, 4> {
  union {
    T v[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    swizzle2<T, 4, 0, 1> xy; swizzle2<T, 4, 1, 0> yx; swizzle2<T, 4, 2, 3> zw; swizzle2<T, 4, 3, 2> wz; swizzle2<T, 4, 1, 2> yz;
    swizzle2<T, 4, 0, 2> xz; swizzle2<T, 4, 1, 3> yw; swizzle2<T, 4, 0, 3> xw; swizzle2<T, 4, 0, 1> rg; swizzle2<T, 4, 2, 3> ba;
    swizzle2<T, 4, 0, 1> lo; swizzle2<T, 4, 2, 3> hi;
    swizzle3<T, 4, 0, 1, 2> xyz; swizzle3<T, 4, 1, 2, 3> yzw; swizzle3<T, 4, 0, 1, 2> rgb;
  };
};

template <int Bytes> struct raw_bits;
template <> struct raw_bits<2> { typedef uint16_t __attribute__((may_alias)) type; };
template <> struct raw_bits<4> { typedef uint32_t __attribute__((may_alias)) type; };
template <> struct raw_bits<8> { typedef uint64_t __attribute__((may_alias)) type; };
template <> struct raw_bits<16> { typedef uint64_t type __attribute__((vector_size(16), may_alias)); };
template <> struct raw_bits<32> { typedef uint64_t type __attribute__((vector_size(32), may_alias)); };

template <class T, int N> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : components<T, N> {
  using components<T, N>::v;
  typedef T element;
  static constexpr int size = N;
  typedef typename raw_bits<sizeof(T) * (N == 3 ? 4 : N)>::type bits;

  vec() = default;
  LK_INLINE vec(const vec& o) { *(bits*)this = *(const bits*)&o; }
  LK_INLINE vec& operator=(const vec& o) {
    *(bits*)this = *(const bits*)&o;
    return *this;
  }
  template <class A, class = std::enable_if_t<std::is_convertible_v<A, T> && !std::is_same_v<A, vec>>>
  LK_INLINE vec(A s) { for (int i = 0; i < N; i++) v[i] = T(s); }
  LK_INLINE vec(T a, T b) requires(N == 2) { v[0] = a; v[1] = b; }
  LK_INLINE vec(T a, T b, T c) requires(N == 3) { v[0] = a; v[1] = b; v[2] = c; }
  LK_INLINE vec(vec<T, 2> a, T b) requires(N == 3) { v[0] = a.v[0]; v[1] = a.v[1]; v[2] = b; }
  LK_INLINE vec(T a, T b, T c, T d) requires(N == 4) { v[0] = a; v[1] = b; v[2] = c; v[3] = d; }
  LK_INLINE vec(vec<T, 2> a, vec<T, 2> b) requires(N == 4) { v[0] = a.v[0]; v[1] = a.v[1]; v[2] = b.v[0]; v[3] = b.v[1]; }
  LK_INLINE vec(vec<T, 2> a, T b, T c) requires(N == 4) { v[0] = a.v[0]; v[1] = a.v[1]; v[2] = b; v[3] = c; }
  LK_INLINE vec(vec<T, 3> a, T b) requires(N == 4) { v[0] = a.v[0]; v[1] = a.v[1]; v[2] = a.v[2]; v[3] = b; }
  template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
  LK_INLINE explicit vec(vec<U, N> o) { for (int i = 0; i < N; i++) v[i] = T(o.v[i]); }

  LK_INLINE T& operator[](int i) { return v[i]; }
  LK_INLINE T operator[](int i) const { return v[i]; }
#define LK_VECTOR_ASSIGN(op) \
  LK_INLINE vec& operator op##=(vec b) { vec r = *this; for (int i = 0; i < N; i++) r.v[i] = T(r.v[i] op b.v[i]); return *this = r; }
  LK_VECTOR_ASSIGN(+) LK_VECTOR_ASSIGN(-) LK_VECTOR_ASSIGN(*) LK_VECTOR_ASSIGN(/)
  LK_VECTOR_ASSIGN(&) LK_VECTOR_ASSIGN(|) LK_VECTOR_ASSIGN(^) LK_VECTOR_ASSIGN(<<) LK_VECTOR_ASSIGN(>>) LK_VECTOR_ASSIGN(%)
#undef LK_VECTOR_ASSIGN
};

template <class T, int L, int A, int B> LK_INLINE swizzle2<T, L, A, B>::operator vec<T, 2>() const { return {v[A], v[B]}; }
template <class T, int L, int A, int B> LK_INLINE swizzle2<T, L, A, B>& swizzle2<T, L, A, B>::operator=(vec<T, 2> o) {
  v[A] = o.v[0]; v[B] = o.v[1];
  return *this;
}
template <class T, int L, int A, int B, int C> LK_INLINE swizzle3<T, L, A, B, C>::operator vec<T, 3>() const { return {v[A], v[B], v[C]}; }
template <class T, int L, int A, int B, int C>
LK_INLINE swizzle3<T, L, A, B, C>& swizzle3<T, L, A, B, C>::operator=(vec<T, 3> o) {
  v[A] = o.v[0]; v[B] = o.v[1]; v[C] = o.v[2];
  return *this;
}

// By value: an operand in memory is then read as a whole.
#define LK_VECTOR_OPERATOR(op, R)                                                                                            \
  template <class T, int N> LK_INLINE vec<R, N> operator op(vec<T, N> a, vec<T, N> b) {                                      \
    vec<R, N> r; for (int i = 0; i < N; i++) r.v[i] = R(a.v[i] op b.v[i]); return r; }                                       \
  template <class T, int N, class S, class = std::enable_if_t<std::is_convertible_v<S, T> && Scalar<S>>>                     \
  LK_INLINE vec<R, N> operator op(vec<T, N> a, S s) { return a op vec<T, N>(s); }                                            \
  template <class T, int N, class S, class = std::enable_if_t<std::is_convertible_v<S, T> && Scalar<S>>>                     \
  LK_INLINE vec<R, N> operator op(S s, vec<T, N> a) { return vec<T, N>(s) op a; }
LK_VECTOR_OPERATOR(+, T) LK_VECTOR_OPERATOR(-, T) LK_VECTOR_OPERATOR(*, T) LK_VECTOR_OPERATOR(/, T) LK_VECTOR_OPERATOR(%, T)
LK_VECTOR_OPERATOR(&, T) LK_VECTOR_OPERATOR(|, T) LK_VECTOR_OPERATOR(^, T) LK_VECTOR_OPERATOR(<<, T) LK_VECTOR_OPERATOR(>>, T)
LK_VECTOR_OPERATOR(<, bool) LK_VECTOR_OPERATOR(>, bool) LK_VECTOR_OPERATOR(<=, bool) LK_VECTOR_OPERATOR(>=, bool)
LK_VECTOR_OPERATOR(==, bool) LK_VECTOR_OPERATOR(!=, bool)
#undef LK_VECTOR_OPERATOR
template <class T, int N> LK_INLINE vec<T, N> operator-(vec<T, N> a) { for (int i = 0; i < N; i++) a.v[i] = T(-a.v[i]); return a; }
template <class T, int N> LK_INLINE vec<T, N> operator~(vec<T, N> a) { for (int i = 0; i < N; i++) a.v[i] = T(~a.v[i]); return a; }
template <class T, int N> LK_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T r = T(a.v[0] * b.v[0]);
  for (int i = 1; i < N; i++) r = T(r + a.v[i] * b.v[i]);
  return r;
}
template <int N> LK_INLINE bool any(vec<bool, N> a) { for (int i = 0; i < N; i++) if (a.v[i]) return true; return false; }
template <int N> LK_INLINE bool all(vec<bool, N> a) { for (int i = 0; i < N; i++) if (!a.v[i]) return false; return true; }

#define LK_VECTOR_NAMES(t) typedef vec<t, 2> t##2; typedef vec<t, 3> t##3; typedef vec<t, 4> t##4;
LK_VECTOR_NAMES(float) LK_VECTOR_NAMES(half) LK_VECTOR_NAMES(bfloat) LK_VECTOR_NAMES(int) LK_VECTOR_NAMES(uint) LK_VECTOR_NAMES(long)
LK_VECTOR_NAMES(ulong) LK_VECTOR_NAMES(short) LK_VECTOR_NAMES(ushort) LK_VECTOR_NAMES(char) LK_VECTOR_NAMES(uchar) LK_VECTOR_NAMES(bool)
#undef LK_VECTOR_NAMES

// Packed vectors have the alignment of one component.
template <class T, int N> struct packed_vec {
  T v[N];
  packed_vec() = default;
  LK_INLINE packed_vec(vec<T, N> o) { for (int i = 0; i < N; i++) v[i] = o.v[i]; }
  LK_INLINE operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r.v[i] = v[i]; return r; }
  LK_INLINE T& operator[](int i) { return v[i]; }
  LK_INLINE T operator[](int i) const { return v[i]; }
};
typedef packed_vec<float, 2> packed_float2; typedef packed_vec<float, 3> packed_float3; typedef packed_vec<float, 4> packed_float4;
typedef packed_vec<half, 2> packed_half2; typedef packed_vec<half, 3> packed_half3; typedef packed_vec<half, 4> packed_half4;
typedef packed_vec<uint, 2> packed_uint2; typedef packed_vec<uint, 3> packed_uint3; typedef packed_vec<uint, 4> packed_uint4;

template <class T> struct element_of { typedef T type; };
template <class T, int N> struct element_of<vec<T, N>> { typedef T type; };

}  // namespace metal
