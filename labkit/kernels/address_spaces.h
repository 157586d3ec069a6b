// Metal's vocabulary for upstream clang's -fsyntax-only: real address spaces and native vector types, no implementations.
#pragma once
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define coherent(scope)
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define __METAL_VERSION__ 320

typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef unsigned long size_t; typedef long ptrdiff_t;
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long uint64_t;
typedef _Float16 half; typedef __bf16 bfloat; typedef half float16_t; typedef bfloat bfloat16_t;
#define LK_VECTORS(t)                                   \
  typedef t t##2 __attribute__((ext_vector_type(2)));   \
  typedef t t##3 __attribute__((ext_vector_type(3)));   \
  typedef t t##4 __attribute__((ext_vector_type(4)));
LK_VECTORS(float) LK_VECTORS(half) LK_VECTORS(bfloat) LK_VECTORS(int) LK_VECTORS(uint) LK_VECTORS(long) LK_VECTORS(ulong)
LK_VECTORS(short) LK_VECTORS(ushort) LK_VECTORS(char) LK_VECTORS(uchar)
typedef bool bool2 __attribute__((ext_vector_type(2))); typedef bool bool4 __attribute__((ext_vector_type(4)));
#undef LK_VECTORS

namespace metal {
template <class T, int N> using vec __attribute__((ext_vector_type(N))) = T;
template <class T, T v> struct integral_constant { static constexpr T value = v; };
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type; typedef bool_constant<false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class X, class Y> struct conditional { typedef X type; };
template <class X, class Y> struct conditional<false, X, Y> { typedef Y type; };
template <bool B, class X, class Y> using conditional_t = typename conditional<B, X, Y>::type;
template <bool B, class T = void> struct enable_if { typedef T type; };
template <class T> struct enable_if<false, T> {};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <class T> struct numeric_limits {
  static constexpr T infinity(); static constexpr T quiet_NaN(); static constexpr T max(); static constexpr T min();
  static constexpr T lowest(); static constexpr T epsilon();
};

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags) __attribute__((convergent));
void simdgroup_barrier(mem_flags) __attribute__((convergent));

#define LK_1(f) template <class T> T f(T);
LK_1(simd_sum) LK_1(simd_product) LK_1(simd_max) LK_1(simd_min) LK_1(simd_and) LK_1(simd_or) LK_1(simd_xor) LK_1(simd_broadcast_first)
LK_1(simd_prefix_inclusive_sum) LK_1(simd_prefix_exclusive_sum) LK_1(simd_prefix_inclusive_product) LK_1(simd_prefix_exclusive_product)
LK_1(quad_sum) LK_1(quad_max) LK_1(quad_min)
#define LK_LANE(f) template <class T> T f(T, ushort);
LK_LANE(simd_shuffle) LK_LANE(simd_shuffle_xor) LK_LANE(simd_shuffle_down) LK_LANE(simd_shuffle_up) LK_LANE(simd_shuffle_rotate_down)
LK_LANE(simd_shuffle_rotate_up) LK_LANE(simd_broadcast) LK_LANE(quad_shuffle_xor) LK_LANE(quad_broadcast)
template <class T> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T> T simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote { typedef uint64_t vote_t; explicit operator vote_t() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool); simd_vote simd_active_threads_mask(); bool simd_any(bool); bool simd_all(bool); bool simd_is_first();

#define LK_MATH LK_1(exp) LK_1(exp2) LK_1(exp10) LK_1(log) LK_1(log2) LK_1(log10) LK_1(sqrt) LK_1(rsqrt) LK_1(sin) LK_1(cos) LK_1(tan) \
  LK_1(sinpi) LK_1(cospi) LK_1(sinh) LK_1(cosh) LK_1(tanh) LK_1(asin) LK_1(acos) LK_1(atan) LK_1(asinh) LK_1(acosh) LK_1(atanh)        \
  LK_1(floor) LK_1(ceil) LK_1(trunc) LK_1(rint) LK_1(round) LK_1(fract) LK_1(fabs) LK_1(sign) LK_1(saturate)                           \
  LK_2(pow) LK_2(powr) LK_2(fmod) LK_2(atan2) LK_2(copysign) LK_2(step) LK_2(fmax) LK_2(fmin) LK_2(divide)
#define LK_2(f) template <class T> T f(T, T);
namespace fast { LK_MATH }
namespace precise { LK_MATH }
LK_MATH
LK_1(abs) LK_1(popcount) LK_1(clz) LK_1(ctz) LK_1(reverse_bits) LK_2(mulhi) LK_2(rotate)
template <class T> T fma(T, T, T);
template <class T> T max3(T, T, T);
template <class T> T min3(T, T, T);
template <class T> T mix(T, T, T);
float ldexp(float, int);
// Metal's overloads take a mixture of arithmetic types; the result is the wider.
template <class A, class B> auto max(A a, B b) -> decltype(a + b);
template <class A, class B> auto min(A a, B b) -> decltype(a + b);
template <class T, class A, class B> T clamp(T, A, B);
template <class T, class C> T select(T, T, C);
template <class T> auto dot(T a, T) -> decltype(a.x + a.x);
template <class T> auto length(T a) -> decltype(a.x + a.x);
template <class T> bool any(T);
template <class T> bool all(T);
bool isnan(float); bool isinf(float); bool isfinite(float); bool signbit(float);
template <class T> T extract_bits(T, uint, uint);
template <class T> T insert_bits(T, T, uint, uint);
template <class To, class From> To as_type(From);

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
void atomic_thread_fence(mem_flags, memory_order = memory_order_seq_cst, thread_scope = thread_scope_device);
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<float> atomic_float; typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
#define LK_ATOMIC(space)                                                                                              \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                           \
  template <class T, class U> void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);                 \
  template <class T, class U> T atomic_fetch_add_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_fetch_sub_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_fetch_max_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_fetch_min_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_fetch_and_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_fetch_or_explicit(volatile space atomic<T>*, U, memory_order);                 \
  template <class T, class U> T atomic_fetch_xor_explicit(volatile space atomic<T>*, U, memory_order);                \
  template <class T, class U> T atomic_exchange_explicit(volatile space atomic<T>*, U, memory_order);                 \
  template <class T, class U> bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, T*, U, memory_order, memory_order);
LK_ATOMIC(device) LK_ATOMIC(threadgroup)

template <class T, int R, int C> struct simdgroup_matrix {
  simdgroup_matrix(); explicit simdgroup_matrix(T diagonal);
  vec<T, 2>& thread_elements(); const vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8; typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define LK_MATRIX(space)                                                                                                      \
  template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false);    \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);
LK_MATRIX(device) LK_MATRIX(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B> void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
}  // namespace metal
using namespace metal;
