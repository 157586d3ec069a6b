// What a kernel can see of MLX's header for CUDA, without CUDA's standard library behind it: that takes seconds to
// read, and kernels use a handful of its traits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Sizes as CUDA's own <cuda/std/cstdint> has them at run time: 64 bits are `long long` there, not `long`.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

namespace cuda { namespace std {
template <class T, T V> struct integral_constant { static constexpr T value = V; };
template <bool V> using bool_constant = integral_constant<bool, V>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool C, class T = void> using enable_if_t = typename enable_if<C, T>::type;
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;
template <class From, class To> inline constexpr bool is_convertible_v = __is_convertible_to(From, To);

template <class T> inline constexpr bool is_integral_v = false;
#define INTEGRAL(T) template <> inline constexpr bool is_integral_v<T> = true;
INTEGRAL(bool) INTEGRAL(char) INTEGRAL(signed char) INTEGRAL(unsigned char) INTEGRAL(short) INTEGRAL(unsigned short)
INTEGRAL(int) INTEGRAL(unsigned) INTEGRAL(long) INTEGRAL(unsigned long) INTEGRAL(long long) INTEGRAL(unsigned long long)
#undef INTEGRAL

template <class T, int N> struct array {
  T elements[N];
  __device__ constexpr const T& operator[](int i) const { return elements[i]; }
};

template <class T> struct numeric_limits;
#define LIMITS(T, LOWEST, LARGEST)                                 \
  template <> struct numeric_limits<T> {                           \
    static __device__ constexpr T lowest() { return LOWEST; }      \
    static __device__ constexpr T min() { return LOWEST; }         \
    static __device__ constexpr T max() { return LARGEST; }        \
  };
LIMITS(int, -2147483647 - 1, 2147483647)
LIMITS(unsigned, 0u, 4294967295u)
#undef LIMITS
template <> struct numeric_limits<float> {
  static __device__ constexpr float lowest() { return -3.402823466e+38f; }
  static __device__ constexpr float min() { return 1.175494351e-38f; }
  static __device__ constexpr float max() { return 3.402823466e+38f; }
  static __device__ constexpr float epsilon() { return 1.1920928955e-7f; }
  static __device__ float infinity() { return __int_as_float(0x7f800000); }
  static __device__ float quiet_NaN() { return __int_as_float(0x7fc00000); }
};
}}  // namespace cuda::std

namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}  // namespace mlx::core::cu
