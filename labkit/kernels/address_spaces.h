// Metal for upstream clang's syntax check: names without bodies, pointers with true address spaces, so that a pointer that goes
// where it must not is an error.
#pragma once

// ------------------------------------------------------------------ words
#define kernel
#define thread
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#define coherent(scope)
#define METAL_FUNC inline
#define __METAL_VERSION__ 320

#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define FLT_EPSILON __FLT_EPSILON__
#define FLT_MIN __FLT_MIN__
#define FLT_MAX __FLT_MAX__
#define UINT_MAX 0xffffffffu
#define INT_MAX 0x7fffffff
#define INT_MIN (-INT_MAX - 1)
#define M_PI_F 3.14159265358979f
#define M_E_F 2.71828182845905f
#define M_LN2_F 0.69314718055995f
#define M_LOG2E_F 1.44269504088896f
#define M_SQRT2_F 1.41421356237310f

// ------------------------------------------------------------------ types
// Each with its vectors of 2 to 4.
#define LK_TYPE(own, name)                                  \
  typedef own name;                                         \
  typedef own name##2 __attribute__((ext_vector_type(2)));  \
  typedef own name##3 __attribute__((ext_vector_type(3)));  \
  typedef own name##4 __attribute__((ext_vector_type(4)));
#define LK_WORD(own)                                        \
  typedef own own##2 __attribute__((ext_vector_type(2)));   \
  typedef own own##3 __attribute__((ext_vector_type(3)));   \
  typedef own own##4 __attribute__((ext_vector_type(4)));
LK_WORD(bool) LK_WORD(char) LK_WORD(short) LK_WORD(int) LK_WORD(long) LK_WORD(float)
LK_TYPE(unsigned char, uchar) LK_TYPE(unsigned short, ushort) LK_TYPE(unsigned int, uint) LK_TYPE(unsigned long, ulong)
LK_TYPE(_Float16, half) LK_TYPE(__bf16, bfloat)
#undef LK_WORD
#undef LK_TYPE
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

namespace metal {

template <class T, int N> using vec __attribute__((ext_vector_type(N))) = T;

// ------------------------------------------------------------------ types about types
template <class T, T constant_> struct integral_constant { static constexpr T value = constant_; };
template <bool truth> using bool_constant = integral_constant<bool, truth>;
using false_type = bool_constant<false>;
using true_type = bool_constant<true>;
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <bool, class Yes, class> struct conditional { using type = Yes; };
template <class Yes, class No> struct conditional<false, Yes, No> { using type = No; };
template <bool which, class Yes, class No> using conditional_t = typename conditional<which, Yes, No>::type;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool wanted, class T = void> using enable_if_t = typename enable_if<wanted, T>::type;
template <class T> struct numeric_limits {
  static constexpr T lowest();
  static constexpr T min();
  static constexpr T max();
  static constexpr T epsilon();
  static constexpr T infinity();
  static constexpr T quiet_NaN();
};
template <class To, class From> To as_type(From);

// ------------------------------------------------------------------ functions, by what they take
#define LK_T(name) template <class T> T name(T);
#define LK_TT(name) template <class T> T name(T, T);
#define LK_TTT(name) template <class T> T name(T, T, T);
#define LK_TLANE(name) template <class T> T name(T, ushort);
#define LK_TTLANE(name) template <class T> T name(T, T, ushort);
#define LK_TEST(name) bool name(float);

#define LK_FLOAT_FUNCTIONS                                                                             \
  LK_T(sqrt) LK_T(rsqrt) LK_T(exp) LK_T(exp2) LK_T(exp10) LK_T(log) LK_T(log2) LK_T(log10)             \
  LK_TT(pow) LK_TT(powr) LK_TT(divide) LK_TT(fmod)                                                     \
  LK_T(sin) LK_T(sinpi) LK_T(sinh) LK_T(asin) LK_T(asinh)                                              \
  LK_T(cos) LK_T(cospi) LK_T(cosh) LK_T(acos) LK_T(acosh)                                              \
  LK_T(tan) LK_T(tanh) LK_T(atan) LK_T(atanh) LK_TT(atan2)                                             \
  LK_T(ceil) LK_T(floor) LK_T(round) LK_T(rint) LK_T(trunc) LK_T(fract)                                \
  LK_T(fabs) LK_T(sign) LK_T(saturate) LK_TT(copysign) LK_TT(step) LK_TT(fmax) LK_TT(fmin)
LK_FLOAT_FUNCTIONS
namespace precise { LK_FLOAT_FUNCTIONS }
namespace fast { LK_FLOAT_FUNCTIONS }
LK_TTT(fma) LK_TTT(mix) LK_TTT(max3) LK_TTT(min3)
LK_TEST(isnan) LK_TEST(isinf) LK_TEST(isfinite) LK_TEST(signbit)
float ldexp(float, int);
// Numbers of two types meet in the wider one.
template <class A, class B> auto min(A a, B b) -> decltype(a + b);
template <class A, class B> auto max(A a, B b) -> decltype(a + b);
template <class T, class Low, class High> T clamp(T, Low, High);
template <class T, class Which> T select(T, T, Which);
template <class V> auto length(V v) -> decltype(v.x + v.x);
template <class V> auto dot(V v, V) -> decltype(v.x + v.x);
template <class V> bool all(V);
template <class V> bool any(V);

LK_T(abs) LK_T(clz) LK_T(ctz) LK_T(popcount) LK_T(reverse_bits) LK_TT(mulhi) LK_TT(rotate)
template <class T> T insert_bits(T, T, uint, uint);
template <class T> T extract_bits(T, uint, uint);

// ------------------------------------------------------------------ simdgroups
LK_T(simd_sum) LK_T(simd_product) LK_T(simd_min) LK_T(simd_max) LK_T(simd_and) LK_T(simd_or) LK_T(simd_xor)
LK_T(simd_prefix_exclusive_sum) LK_T(simd_prefix_inclusive_sum) LK_T(simd_prefix_exclusive_product) LK_T(simd_prefix_inclusive_product)
LK_T(simd_broadcast_first) LK_TLANE(simd_broadcast) LK_TLANE(simd_shuffle) LK_TLANE(simd_shuffle_xor)
LK_TLANE(simd_shuffle_up) LK_TLANE(simd_shuffle_rotate_up) LK_TTLANE(simd_shuffle_and_fill_up)
LK_TLANE(simd_shuffle_down) LK_TLANE(simd_shuffle_rotate_down) LK_TTLANE(simd_shuffle_and_fill_down)
LK_T(quad_sum) LK_T(quad_min) LK_T(quad_max) LK_TLANE(quad_broadcast) LK_TLANE(quad_shuffle_xor)
struct simd_vote {
  using vote_t = uint64_t;
  explicit operator vote_t() const;
  bool any() const;
  bool all() const;
};
simd_vote simd_active_threads_mask();
simd_vote simd_ballot(bool);
bool simd_is_first();
bool simd_all(bool);
bool simd_any(bool);
#undef LK_FLOAT_FUNCTIONS
#undef LK_TEST
#undef LK_TTLANE
#undef LK_TLANE
#undef LK_TTT
#undef LK_TT
#undef LK_T

// ------------------------------------------------------------------ order and atomics
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
mem_flags operator|(mem_flags, mem_flags);
__attribute__((convergent)) void simdgroup_barrier(mem_flags);
__attribute__((convergent)) void threadgroup_barrier(mem_flags);
enum memory_order { memory_order_seq_cst, memory_order_relaxed };
enum thread_scope { thread_scope_device, thread_scope_threadgroup, thread_scope_simdgroup, thread_scope_thread };
void atomic_thread_fence(mem_flags, memory_order = memory_order_seq_cst, thread_scope = thread_scope_device);

template <class T> struct atomic { T value; };
using atomic_bool = atomic<bool>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;
// What atomics and matrices take lies in device or threadgroup memory, never in a thread's own.
#define LK_CHANGES(space, name) template <class T, class U> T name(volatile space atomic<T>*, U, memory_order);
#define LK_ATOMICS_IN(space)                                                                             \
  LK_CHANGES(space, atomic_exchange_explicit)                                                            \
  LK_CHANGES(space, atomic_fetch_add_explicit) LK_CHANGES(space, atomic_fetch_sub_explicit)              \
  LK_CHANGES(space, atomic_fetch_min_explicit) LK_CHANGES(space, atomic_fetch_max_explicit)              \
  LK_CHANGES(space, atomic_fetch_and_explicit) LK_CHANGES(space, atomic_fetch_or_explicit)               \
  LK_CHANGES(space, atomic_fetch_xor_explicit)                                                           \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);              \
  template <class T, class U> void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);    \
  template <class T, class U>                                                                            \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, T*, U, memory_order, memory_order);
LK_ATOMICS_IN(threadgroup)
LK_ATOMICS_IN(device)
#undef LK_ATOMICS_IN
#undef LK_CHANGES

// ------------------------------------------------------------------ matrices
template <class T, int Rows, int Columns> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  const vec<T, 2>& thread_elements() const;
  vec<T, 2>& thread_elements();
};
template <class T> using matrix_8x8 = simdgroup_matrix<T, 8, 8>;
using simdgroup_bfloat8x8 = matrix_8x8<bfloat>;
using simdgroup_half8x8 = matrix_8x8<half>;
using simdgroup_float8x8 = matrix_8x8<float>;
template <class T, int Rows, int Columns> simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T);
#define LK_MATRICES_IN(space)                                                                                     \
  template <class T> void simdgroup_store(matrix_8x8<T>, space T*, ulong = 8, ulong2 = 0, bool = false);          \
  template <class T> void simdgroup_load(matrix_8x8<T>&, const space T*, ulong = 8, ulong2 = 0, bool = false);
LK_MATRICES_IN(threadgroup)
LK_MATRICES_IN(device)
#undef LK_MATRICES_IN
template <class R, class A, class B> void simdgroup_multiply(matrix_8x8<R>&, matrix_8x8<A>, matrix_8x8<B>);
template <class R, class A, class B, class C>
void simdgroup_multiply_accumulate(matrix_8x8<R>&, matrix_8x8<A>, matrix_8x8<B>, matrix_8x8<C>);

}  // namespace metal
using namespace metal;
