// Metal's vectors, of two to four elements. CUDA's own of the same names have no operators.

//@provides vec float2 float3 float4 int2 int3 int4 uint2 uint3 uint4 short2 short4 ushort2 ushort4 char2 char4 uchar2 uchar4 long2 ulong2 long3 ulong3 long4 ulong4 short3 ushort3 char3 uchar3
#define LK_VECTOR vec
#define LK_INDEXED                                              \
  LK_DEVICE T& operator[](int i) { return (&x)[i]; }            \
  LK_DEVICE T operator[](int i) const { return (&x)[i]; }
namespace metal {
template <class T, int N> struct vec;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  static constexpr int size = 2;
  T x, y;
  vec() = default;
  LK_DEVICE vec(T all) : x(all), y(all) {}
  LK_DEVICE vec(T x_, T y_) : x(x_), y(y_) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 2> from) : x(T(from.x)), y(T(from.y)) {}
  LK_INDEXED
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  static constexpr int size = 3;
  T x, y, z;
  vec() = default;
  LK_DEVICE vec(T all) : x(all), y(all), z(all) {}
  LK_DEVICE vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 3> from) : x(T(from.x)), y(T(from.y)), z(T(from.z)) {}
  LK_INDEXED
};
template <class T> struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) vec<T, 4> {
  static constexpr int size = 4;
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    struct { vec<T, 2> xy, zw; };
    struct { vec<T, 2> lo, hi; };
  };
  vec() = default;
  LK_DEVICE vec(T all) : x(all), y(all), z(all), w(all) {}
  LK_DEVICE vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  LK_DEVICE vec(vec<T, 2> first, vec<T, 2> last) : x(first.x), y(first.y), z(last.x), w(last.y) {}
  LK_DEVICE vec(vec<T, 3> first, T last) : x(first.x), y(first.y), z(first.z), w(last) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 4> from) : x(T(from.x)), y(T(from.y)), z(T(from.z)), w(T(from.w)) {}
  LK_INDEXED
};
#define LK_ELEMENTWISE _Pragma("unroll") for (int i = 0; i < N; i++)
#define LK_SCALAR template <class T, int N, class S, cuda::std::enable_if_t<cuda::std::is_convertible_v<S, T>, int> = 0> LK_DEVICE
#define LK_OPERATOR(op)                                                                          \
  template <class T, int N> LK_DEVICE vec<T, N> operator op(vec<T, N> left, vec<T, N> right) {   \
    LK_ELEMENTWISE left[i] = T(left[i] op right[i]);                                             \
    return left;                                                                                 \
  }                                                                                              \
  LK_SCALAR vec<T, N> operator op(vec<T, N> left, S right) { return left op vec<T, N>(T(right)); } \
  LK_SCALAR vec<T, N> operator op(S left, vec<T, N> right) { return vec<T, N>(T(left)) op right; } \
  template <class T, int N, class R> LK_DEVICE vec<T, N>& operator op##=(vec<T, N>& left, R right) { return left = left op right; }
LK_OPERATOR(+) LK_OPERATOR(-) LK_OPERATOR(*) LK_OPERATOR(/)
LK_OPERATOR(&) LK_OPERATOR(|) LK_OPERATOR(^) LK_OPERATOR(<<) LK_OPERATOR(>>)
template <class T, int N> LK_DEVICE vec<T, N> operator-(vec<T, N> from) {
  LK_ELEMENTWISE from[i] = T(-from[i]);
  return from;
}
#define LK_NAMED(T) using T##2 = vec<T, 2>; using T##3 = vec<T, 3>; using T##4 = vec<T, 4>;
LK_NAMED(float) LK_NAMED(int) LK_NAMED(uint) LK_NAMED(long) LK_NAMED(ulong) LK_NAMED(short) LK_NAMED(ushort) LK_NAMED(char)
LK_NAMED(uchar)
}
namespace mlx::core::cu {
#define LK_TAKEN(T) using metal::T##2; using metal::T##3; using metal::T##4;
LK_TAKEN(float) LK_TAKEN(int) LK_TAKEN(uint) LK_TAKEN(long) LK_TAKEN(ulong) LK_TAKEN(short) LK_TAKEN(ushort) LK_TAKEN(char)
LK_TAKEN(uchar)
}

//@provides half2 half3 half4 bfloat2 bfloat3 bfloat4
namespace mlx::core::cu {
using half2 = metal::vec<half, 2>; using half3 = metal::vec<half, 3>; using half4 = metal::vec<half, 4>;
using bfloat2 = metal::vec<bfloat, 2>; using bfloat3 = metal::vec<bfloat, 3>; using bfloat4 = metal::vec<bfloat, 4>;
}

//@provides packed_float2 packed_float3 packed_float4
namespace metal {
// Elements without a vector's alignment.
template <class T, int N> struct packed_vec {
  T elements[N];
  LK_DEVICE operator vec<T, N>() const {
    vec<T, N> aligned;
    for (int i = 0; i < N; i++) aligned[i] = elements[i];
    return aligned;
  }
};
using packed_float2 = packed_vec<float, 2>; using packed_float3 = packed_vec<float, 3>; using packed_float4 = packed_vec<float, 4>;
}

//@provides dot
namespace metal {
template <class T, int N> LK_DEVICE T dot(vec<T, N> left, vec<T, N> right) {
  vec<T, N> products = left * right;
  T sum = products[0];
  _Pragma("unroll") for (int i = 1; i < N; i++) sum = T(sum + products[i]);
  return sum;
}
}
namespace mlx::core::cu { using metal::dot; }
