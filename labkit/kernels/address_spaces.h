// Metal for upstream clang's syntax check, in the language that stands nearest to it: C++ for OpenCL (whose pointers without an
// address space are generic: `metal_rules` refuses those). Names without bodies; the types that a function takes are Metal's.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// ------------------------------------------------------------------ words
#define thread __private
#define device __global
#define constant __constant
#define threadgroup __local
#define coherent(scope)
#define METAL_FUNC inline
#define __METAL__ 1
#define __METAL_VERSION__ 310
// Words of OpenCL's own, which are names in Metal.
#define kernel
#define global lk_global
#define local lk_local
#define private lk_private
#define generic lk_generic
#define pipe lk_pipe
#define atomic_int lk_atomic_int
#define atomic_uint lk_atomic_uint
#define atomic_float lk_atomic_float

#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define MAXFLOAT __FLT_MAX__
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
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;
typedef half float16_t;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
#define LK_VECTORS(own)                                   \
  typedef own own##2 __attribute__((ext_vector_type(2))); \
  typedef own own##3 __attribute__((ext_vector_type(3))); \
  typedef own own##4 __attribute__((ext_vector_type(4)));
#define LK_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define LK_FLOATS(X) X(half) X(float)
LK_INTEGERS(LK_VECTORS) LK_FLOATS(LK_VECTORS) LK_VECTORS(bfloat)
#undef LK_VECTORS

namespace metal {

template <class T, int N> using vec __attribute__((ext_vector_type(N))) = T;

// ------------------------------------------------------------------ types about types
template <class T, T value_> struct integral_constant { static constexpr constant T value = value_; };
template <bool truth> using bool_constant = integral_constant<bool, truth>;
using false_type = bool_constant<false>;
using true_type = bool_constant<true>;
template <class A, class B> struct is_same { static constexpr constant bool value = __is_same(A, B); };
template <class A, class B> constexpr constant bool is_same_v = __is_same(A, B);
template <class A, class B> constexpr constant bool is_convertible_v = __is_convertible(A, B);
template <bool, class Yes, class> struct conditional { using type = Yes; };
template <class Yes, class No> struct conditional<false, Yes, No> { using type = No; };
template <bool which, class Yes, class No> using conditional_t = typename conditional<which, Yes, No>::type;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool wanted, class T = void> using enable_if_t = typename enable_if<wanted, T>::type;
template <class T> struct numeric_limits {
  static constexpr T lowest() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T max() { return T(0); }
  static constexpr T epsilon() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};

// What lanes of a simdgroup may hand each other: numbers of up to four bytes, and vectors of them; no bool.
template <class T> constexpr constant bool lk_number = false;
#define LK_NUMBER(own)                                                                     \
  template <> constexpr constant bool lk_number<own> = sizeof(own) <= 4;                   \
  template <> constexpr constant bool lk_number<own##2> = sizeof(own) <= 4;                \
  template <> constexpr constant bool lk_number<own##3> = sizeof(own) <= 4;                \
  template <> constexpr constant bool lk_number<own##4> = sizeof(own) <= 4;
LK_INTEGERS(LK_NUMBER) LK_FLOATS(LK_NUMBER)
#undef LK_NUMBER
template <class T> using lk_if_number = enable_if_t<lk_number<T>>;

// ------------------------------------------------------------------ functions: one for each type, so that mixed types are ambiguous
#define LK_EACH_SIZE(X, own) X(own) X(own##2) X(own##3) X(own##4)
#define LK_T(T, name) T name(T);
#define LK_TT(T, name) T name(T, T);
#define LK_TTT(T, name) T name(T, T, T);
#define LK_ALL_FLOATS(kind, name)                                                                                    \
  kind(float, name) kind(float2, name) kind(float3, name) kind(float4, name)                                         \
  kind(half, name) kind(half2, name) kind(half3, name) kind(half4, name)
#define LK_ONE_INTEGER(kind, name, own) kind(own, name) kind(own##2, name) kind(own##3, name) kind(own##4, name)
#define LK_ALL_INTEGERS(kind, name)                                                                                  \
  LK_ONE_INTEGER(kind, name, char) LK_ONE_INTEGER(kind, name, uchar) LK_ONE_INTEGER(kind, name, short)               \
  LK_ONE_INTEGER(kind, name, ushort) LK_ONE_INTEGER(kind, name, int) LK_ONE_INTEGER(kind, name, uint)                \
  LK_ONE_INTEGER(kind, name, long) LK_ONE_INTEGER(kind, name, ulong)
#define LK_ALL_NUMBERS(kind, name) LK_ALL_FLOATS(kind, name) LK_ALL_INTEGERS(kind, name)
#define LK_F1(name) LK_ALL_FLOATS(LK_T, name)
#define LK_F2(name) LK_ALL_FLOATS(LK_TT, name)

#define LK_FLOAT_FUNCTIONS                                                                             \
  LK_F1(sqrt) LK_F1(rsqrt) LK_F1(exp) LK_F1(exp2) LK_F1(exp10) LK_F1(log) LK_F1(log2) LK_F1(log10)     \
  LK_F2(pow) LK_F2(powr) LK_F2(divide) LK_F2(fmod)                                                     \
  LK_F1(sin) LK_F1(sinpi) LK_F1(sinh) LK_F1(asin) LK_F1(asinh)                                         \
  LK_F1(cos) LK_F1(cospi) LK_F1(cosh) LK_F1(acos) LK_F1(acosh)                                         \
  LK_F1(tan) LK_F1(tanh) LK_F1(atan) LK_F1(atanh) LK_F2(atan2)                                         \
  LK_F1(ceil) LK_F1(floor) LK_F1(round) LK_F1(rint) LK_F1(trunc) LK_F1(fract)                          \
  LK_F1(fabs) LK_F1(sign) LK_F1(saturate) LK_F2(copysign) LK_F2(step) LK_F2(fmax) LK_F2(fmin)
LK_FLOAT_FUNCTIONS
namespace precise { LK_FLOAT_FUNCTIONS }
namespace fast { LK_FLOAT_FUNCTIONS }
LK_ALL_FLOATS(LK_TTT, fma) LK_ALL_FLOATS(LK_TTT, mix)
LK_ALL_NUMBERS(LK_TT, min) LK_ALL_NUMBERS(LK_TT, max) LK_ALL_NUMBERS(LK_TTT, clamp)
LK_ALL_NUMBERS(LK_TTT, min3) LK_ALL_NUMBERS(LK_TTT, max3) LK_ALL_NUMBERS(LK_T, abs)
LK_ALL_INTEGERS(LK_T, clz) LK_ALL_INTEGERS(LK_T, ctz) LK_ALL_INTEGERS(LK_T, popcount) LK_ALL_INTEGERS(LK_T, reverse_bits)
LK_ALL_INTEGERS(LK_TT, mulhi) LK_ALL_INTEGERS(LK_TT, rotate)
bool isnan(float);
bool isnan(half);
bool isinf(float);
bool isinf(half);
bool isfinite(float);
bool isfinite(half);
bool signbit(float);
float ldexp(float, int);
template <class T> T select(T, T, bool);
template <class T> T insert_bits(T, T, uint, uint);
template <class T> T extract_bits(T, uint, uint);
template <class V> auto length(V v) -> decltype(v.x);
template <class V> auto dot(V v, V) -> decltype(v.x);
template <class V> bool all(V);
template <class V> bool any(V);

// ------------------------------------------------------------------ simdgroups
#define LK_REDUCE(name) template <class T, class = lk_if_number<T>> T name(T);
#define LK_MOVE(name) template <class T, class = lk_if_number<T>> T name(T, ushort);
#define LK_FILL(name) template <class T, class = lk_if_number<T>> T name(T, T, ushort);
LK_REDUCE(simd_sum) LK_REDUCE(simd_product) LK_REDUCE(simd_min) LK_REDUCE(simd_max)
LK_REDUCE(simd_and) LK_REDUCE(simd_or) LK_REDUCE(simd_xor)
LK_REDUCE(simd_prefix_exclusive_sum) LK_REDUCE(simd_prefix_inclusive_sum)
LK_REDUCE(simd_prefix_exclusive_product) LK_REDUCE(simd_prefix_inclusive_product)
LK_REDUCE(simd_broadcast_first) LK_MOVE(simd_broadcast) LK_MOVE(simd_shuffle) LK_MOVE(simd_shuffle_xor)
LK_MOVE(simd_shuffle_up) LK_MOVE(simd_shuffle_rotate_up) LK_FILL(simd_shuffle_and_fill_up)
LK_MOVE(simd_shuffle_down) LK_MOVE(simd_shuffle_rotate_down) LK_FILL(simd_shuffle_and_fill_down)
LK_REDUCE(quad_sum) LK_REDUCE(quad_min) LK_REDUCE(quad_max) LK_MOVE(quad_broadcast) LK_MOVE(quad_shuffle_xor)
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

// ------------------------------------------------------------------ order and atomics
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
mem_flags operator|(mem_flags, mem_flags);
void simdgroup_barrier(mem_flags);
void threadgroup_barrier(mem_flags);
enum memory_order { memory_order_relaxed };  // Metal's atomics know no other
// The types that Metal's atomics add, compare and exchange in every language version.
template <class T> struct atomic { static_assert(sizeof(T) == 4 || __is_same(T, bool), "atomics hold int, uint, float or bool"); T value; };
using atomic_bool = atomic<bool>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
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
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*, U, memory_order, memory_order);
LK_ATOMICS_IN(threadgroup)
LK_ATOMICS_IN(device)

// ------------------------------------------------------------------ matrices
template <class T, int Across, int Down> struct simdgroup_matrix {
  static_assert(__is_same(T, half) || __is_same(T, float) || __is_same(T, bfloat), "matrices hold half, float or bfloat");
  static_assert(Across == 8 && Down == 8, "matrices are 8 x 8");
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  thread const vec<T, 2>& thread_elements() const;
  thread vec<T, 2>& thread_elements();
};
template <class T> using lk_matrix = simdgroup_matrix<T, 8, 8>;
using simdgroup_bfloat8x8 = lk_matrix<bfloat>;
using simdgroup_half8x8 = lk_matrix<half>;
using simdgroup_float8x8 = lk_matrix<float>;
template <class T, int Across, int Down> simdgroup_matrix<T, Across, Down> make_filled_simdgroup_matrix(T);
#define LK_MATRICES_IN(space)                                                                                         \
  template <class T> void simdgroup_store(lk_matrix<T>, space T*, ulong = 8, ulong2 = 0, bool = false);               \
  template <class T> void simdgroup_load(thread lk_matrix<T>&, const space T*, ulong = 8, ulong2 = 0, bool = false);
LK_MATRICES_IN(threadgroup)
LK_MATRICES_IN(device)
template <class R, class A, class B> void simdgroup_multiply(thread lk_matrix<R>&, lk_matrix<A>, lk_matrix<B>);
template <class R, class A, class B>
void simdgroup_multiply_accumulate(thread lk_matrix<R>&, lk_matrix<A>, lk_matrix<B>, lk_matrix<R>);

}  // namespace metal
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}
template <class T> threadgroup T& lk_storage();
