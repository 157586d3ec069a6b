// Metal's vocabulary on CUDA, in sections (labkit/kernels/header.py): it goes before `namespace mlx::core::cu`, in which MLX
// puts the kernel. A using-declaration there lets Metal's name win over CUDA's of the same spelling.
// LK_LANES is the mask of the lanes that take part: all 32, unless the launch leaves a simdgroup incomplete.
#define LK_DEVICE __device__ __forceinline__
#define METAL_FUNC __device__ __forceinline__
#define LABKIT_CUDA 1
#define LK_THREAD (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define LK_LANE (LK_THREAD & 31u)
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
struct lk_triple { uint x, y, z; };
namespace metal {}

//@provides INFINITY NAN M_PI_F M_E_F M_LN2_F M_LOG2E_F M_SQRT2_F FLT_MAX
#undef INFINITY
#undef NAN
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define FLT_MAX 3.402823466e+38f

//@provides half bfloat bfloat16_t float16_t
typedef __half half;
typedef __nv_bfloat16 bfloat;
typedef __nv_bfloat16 bfloat16_t;
typedef __half float16_t;
// CUDA finds mixed arithmetic ambiguous; Metal's rules: with float it is float, with an integer the small type stays.
template <class A> struct lk_kind { static constexpr int value = 0; };
#define LK_KIND(t, kind) template <> struct lk_kind<t> { static constexpr int value = kind; };
LK_KIND(float, 1) LK_KIND(double, 1) LK_KIND(int, 2) LK_KIND(unsigned, 2) LK_KIND(long, 2) LK_KIND(unsigned long, 2) LK_KIND(short, 2)
LK_KIND(unsigned short, 2) LK_KIND(signed char, 2) LK_KIND(unsigned char, 2) LK_KIND(char, 2) LK_KIND(bool, 2) LK_KIND(long long, 2)
LK_KIND(unsigned long long, 2)
LK_DEVICE float lk_widen(__half h) { return __half2float(h); }
LK_DEVICE float lk_widen(__nv_bfloat16 h) { return __bfloat162float(h); }
#define LK_IF(kinds) template <class A, cuda::std::enable_if_t<(lk_kind<A>::value & kinds) != 0, int> = 0> LK_DEVICE
#define LK_MIXED(H, op) \
  LK_IF(1) float operator op(A a, H b) { return (float)a op lk_widen(b); } \
  LK_IF(1) float operator op(H a, A b) { return lk_widen(a) op (float)b; } \
  LK_IF(2) H operator op(A a, H b) { return H((float)a) op b; } \
  LK_IF(2) H operator op(H a, A b) { return a op H((float)b); }
#define LK_COMPARED(H, op) \
  LK_IF(3) bool operator op(A a, H b) { return (float)a op lk_widen(b); } \
  LK_IF(3) bool operator op(H a, A b) { return lk_widen(a) op (float)b; }
#define LK_ALL_MIXED(H) LK_MIXED(H, +) LK_MIXED(H, -) LK_MIXED(H, *) LK_MIXED(H, /) LK_COMPARED(H, <) LK_COMPARED(H, >) \
  LK_COMPARED(H, <=) LK_COMPARED(H, >=) LK_COMPARED(H, ==) LK_COMPARED(H, !=)
LK_ALL_MIXED(__half) LK_ALL_MIXED(__nv_bfloat16)

//@provides lk_float
template <class T> LK_DEVICE float lk_float(T v) { return static_cast<float>(v); }
LK_DEVICE float lk_float(__half v) { return __half2float(v); }
LK_DEVICE float lk_float(__nv_bfloat16 v) { return __bfloat162float(v); }

//@provides vec float2 float3 float4 int2 int3 int4 uint2 uint3 uint4 short2 short4 ushort2 ushort4 char2 char4 uchar2 uchar4 long2 ulong2 long3 ulong3 long4 ulong4 short3 ushort3 char3 uchar3
#define LK_VECTOR vec
#define LK_ELEMENTS LK_DEVICE T& operator[](int i) { return (&x)[i]; } LK_DEVICE T operator[](int i) const { return (&x)[i]; }
namespace metal {
template <class T, int N> struct vec;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  static constexpr int size = 2;
  T x, y;
  vec() = default;
  LK_DEVICE vec(T s) : x(s), y(s) {}
  LK_DEVICE vec(T a, T b) : x(a), y(b) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 2> o) : x(T(o.x)), y(T(o.y)) {}
  LK_ELEMENTS
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  static constexpr int size = 3;
  T x, y, z;
  vec() = default;
  LK_DEVICE vec(T s) : x(s), y(s), z(s) {}
  LK_DEVICE vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 3> o) : x(T(o.x)), y(T(o.y)), z(T(o.z)) {}
  LK_ELEMENTS
};
template <class T> struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) vec<T, 4> {
  static constexpr int size = 4;
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    struct { vec<T, 2> xy, zw; };
    struct { vec<T, 2> lo, hi; };
  };
  vec() = default;
  LK_DEVICE vec(T s) : x(s), y(s), z(s), w(s) {}
  LK_DEVICE vec(T a_, T b_, T c_, T d_) : x(a_), y(b_), z(c_), w(d_) {}
  LK_DEVICE vec(vec<T, 2> p, vec<T, 2> q) : x(p.x), y(p.y), z(q.x), w(q.y) {}
  LK_DEVICE vec(vec<T, 3> p, T q) : x(p.x), y(p.y), z(p.z), w(q) {}
  template <class U> LK_DEVICE explicit vec(vec<U, 4> o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
  LK_ELEMENTS
};
#define LK_EACH _Pragma("unroll") for (int i = 0; i < N; i++)
#define LK_WITH template <class T, int N, class S, cuda::std::enable_if_t<cuda::std::is_convertible_v<S, T>, int> = 0> LK_DEVICE
#define LK_VECTOR_OPERATOR(op) \
  template <class T, int N> LK_DEVICE vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    LK_EACH a[i] = T(a[i] op b[i]); \
    return a; \
  } \
  LK_WITH vec<T, N> operator op(vec<T, N> a, S s) { return a op vec<T, N>(T(s)); } \
  LK_WITH vec<T, N> operator op(S s, vec<T, N> a) { return vec<T, N>(T(s)) op a; } \
  template <class T, int N, class S> LK_DEVICE vec<T, N>& operator op##=(vec<T, N>& a, S s) { return a = a op s; }
LK_VECTOR_OPERATOR(+) LK_VECTOR_OPERATOR(-) LK_VECTOR_OPERATOR(*) LK_VECTOR_OPERATOR(/)
LK_VECTOR_OPERATOR(&) LK_VECTOR_OPERATOR(|) LK_VECTOR_OPERATOR(^) LK_VECTOR_OPERATOR(<<) LK_VECTOR_OPERATOR(>>)
template <class T, int N> LK_DEVICE vec<T, N> operator-(vec<T, N> a) {
  LK_EACH a[i] = T(-a[i]);
  return a;
}
#define LK_VECTOR_NAMES(t) typedef vec<t, 2> t##2; typedef vec<t, 3> t##3; typedef vec<t, 4> t##4;
LK_VECTOR_NAMES(float) LK_VECTOR_NAMES(int) LK_VECTOR_NAMES(uint) LK_VECTOR_NAMES(short) LK_VECTOR_NAMES(ushort)
LK_VECTOR_NAMES(char) LK_VECTOR_NAMES(uchar) LK_VECTOR_NAMES(long) LK_VECTOR_NAMES(ulong)
}  // namespace metal
namespace mlx::core::cu {
#define LK_USE(t) using metal::t##2; using metal::t##3; using metal::t##4;
LK_USE(float) LK_USE(int) LK_USE(uint) LK_USE(short) LK_USE(ushort) LK_USE(char) LK_USE(uchar) LK_USE(long) LK_USE(ulong)
}

//@provides dot
namespace metal {
template <class T, int N> LK_DEVICE T dot(vec<T, N> a, vec<T, N> b) {
  T r = T(a[0] * b[0]);
  _Pragma("unroll") for (int i = 1; i < N; i++) r = T(r + a[i] * b[i]);
  return r;
}
}
namespace mlx::core::cu { using metal::dot; }

//@provides packed_float2 packed_float3 packed_float4
namespace metal {
template <class T, int N> struct packed_vec {
  T v[N];
  LK_DEVICE operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = v[i]; return r; }
};
typedef packed_vec<float, 2> packed_float2; typedef packed_vec<float, 3> packed_float3; typedef packed_vec<float, 4> packed_float4;
}

//@provides half2 half3 half4 bfloat2 bfloat3 bfloat4
namespace mlx::core::cu {
typedef metal::vec<half, 2> half2; typedef metal::vec<half, 3> half3; typedef metal::vec<half, 4> half4;
typedef metal::vec<bfloat, 2> bfloat2; typedef metal::vec<bfloat, 3> bfloat3; typedef metal::vec<bfloat, 4> bfloat4;
}

//@provides as_type
namespace metal {
template <class To, class From> LK_DEVICE To as_type(From f) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits: both types need the same size");
  To t;
  memcpy(&t, &f, sizeof t);
  return t;
}
}

//@provides mem_flags threadgroup_barrier simdgroup_barrier atomic_thread_fence
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
LK_DEVICE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
// A superset of Metal's promise: __syncthreads orders shared and device memory of the block.
LK_DEVICE void threadgroup_barrier(mem_flags flags) {
  if ((int)flags & 1) __threadfence();
  __syncthreads();
}
LK_DEVICE void simdgroup_barrier(mem_flags) { __syncwarp(LK_LANES); }
template <class... Any> LK_DEVICE void atomic_thread_fence(mem_flags, Any...) { __threadfence(); }
}

//@provides lk_shuffle
namespace metal {
// __shfl_sync moves 4 and 8 bytes; other sizes go as words.
template <class T, class Move> LK_DEVICE T lk_moved(T v, Move move) {
  constexpr int words = (sizeof(T) + 3) / 4;
  uint w[words] = {};
  memcpy(w, &v, sizeof v);
  _Pragma("unroll") for (int i = 0; i < words; i++) w[i] = move(w[i]);
  memcpy(&v, w, sizeof v);
  return v;
}
template <class T> LK_DEVICE T lk_shuffle(T v, uint lane) { return lk_moved(v, [=](uint w) { return __shfl_sync(LK_LANES, w, lane); }); }
template <class T> LK_DEVICE T lk_shuffle_xor(T v, uint mask) { return lk_moved(v, [=](uint w) { return __shfl_xor_sync(LK_LANES, w, mask); }); }
}

//@provides simd_shuffle simd_broadcast simd_broadcast_first simd_shuffle_xor
namespace metal {
template <class T> LK_DEVICE T simd_shuffle(T v, ushort lane) { return lk_shuffle(v, lane); }
template <class T> LK_DEVICE T simd_broadcast(T v, ushort lane) { return lk_shuffle(v, lane); }
template <class T> LK_DEVICE T simd_broadcast_first(T v) { return lk_shuffle(v, __ffs(LK_LANES) - 1); }
template <class T> LK_DEVICE T simd_shuffle_xor(T v, ushort mask) { return lk_shuffle_xor(v, mask); }
}

//@provides simd_shuffle_down simd_shuffle_up simd_shuffle_rotate_down simd_shuffle_rotate_up
namespace metal {
template <class T> LK_DEVICE T simd_shuffle_down(T v, ushort delta) { T r = lk_shuffle(v, (LK_LANE + delta) & 31u); return LK_LANE + delta < 32u ? r : v; }
template <class T> LK_DEVICE T simd_shuffle_up(T v, ushort delta) { T r = lk_shuffle(v, (LK_LANE - delta) & 31u); return LK_LANE >= delta ? r : v; }
template <class T> LK_DEVICE T simd_shuffle_rotate_down(T v, ushort delta) { return lk_shuffle(v, (LK_LANE + delta) & 31u); }
template <class T> LK_DEVICE T simd_shuffle_rotate_up(T v, ushort delta) { return lk_shuffle(v, (LK_LANE - delta) & 31u); }
}

//@provides simd_shuffle_and_fill_up simd_shuffle_and_fill_down
namespace metal {
template <class T> LK_DEVICE T simd_shuffle_and_fill_up(T v, T fill, ushort delta) {
  T r = lk_shuffle(v, (LK_LANE - delta) & 31u), f = lk_shuffle(fill, (LK_LANE - delta) & 31u);
  return LK_LANE >= delta ? r : f;
}
template <class T> LK_DEVICE T simd_shuffle_and_fill_down(T v, T fill, ushort delta) {
  T r = lk_shuffle(v, (LK_LANE + delta) & 31u), f = lk_shuffle(fill, (LK_LANE + delta) & 31u);
  return LK_LANE + delta < 32u ? r : f;
}
}

//@provides quad_shuffle_xor quad_broadcast quad_sum quad_max quad_min
namespace metal {
template <class T> LK_DEVICE T quad_shuffle_xor(T v, ushort mask) { return lk_shuffle_xor(v, mask & 3); }
template <class T> LK_DEVICE T quad_broadcast(T v, ushort lane) { return lk_shuffle(v, (LK_LANE & ~3u) | (lane & 3u)); }
template <class T> LK_DEVICE T quad_sum(T v) { v = T(v + lk_shuffle_xor(v, 1)); return T(v + lk_shuffle_xor(v, 2)); }
template <class T> LK_DEVICE T quad_max(T v) { T o = lk_shuffle_xor(v, 1); v = v < o ? o : v; o = lk_shuffle_xor(v, 2); return v < o ? o : v; }
template <class T> LK_DEVICE T quad_min(T v) { T o = lk_shuffle_xor(v, 1); v = o < v ? o : v; o = lk_shuffle_xor(v, 2); return o < v ? o : v; }
}

//@provides lk_reduce
namespace metal {
// All lanes there: an ascending butterfly. Some missing: one lane after the other.
template <class T, class Op> LK_DEVICE T lk_reduce(T v, Op op) {
  if (LK_LANES == 0xFFFFFFFFu) {
    _Pragma("unroll") for (int d = 1; d < 32; d *= 2) v = op(v, lk_shuffle_xor(v, d));
    return v;
  }
  uint lanes = LK_LANES;
  T r = lk_shuffle(v, __ffs(lanes) - 1);
  for (uint rest = lanes & (lanes - 1); rest; rest &= rest - 1) r = op(r, lk_shuffle(v, __ffs(rest) - 1));
  return r;
}
}

//@provides simd_sum simd_product
namespace metal {
template <class T> LK_DEVICE T simd_sum(T v) { return lk_reduce(v, [](T a, T b) { return T(a + b); }); }
LK_DEVICE uint simd_sum(uint v) { return __reduce_add_sync(LK_LANES, v); }
LK_DEVICE int simd_sum(int v) { return __reduce_add_sync(LK_LANES, v); }
template <class T> LK_DEVICE T simd_product(T v) { return lk_reduce(v, [](T a, T b) { return T(a * b); }); }
}

//@provides simd_max simd_min
namespace metal {
template <class T> LK_DEVICE T simd_max(T v) { return lk_reduce(v, [](T a, T b) { return a < b ? b : a; }); }
LK_DEVICE uint simd_max(uint v) { return __reduce_max_sync(LK_LANES, v); }
LK_DEVICE int simd_max(int v) { return __reduce_max_sync(LK_LANES, v); }
template <class T> LK_DEVICE T simd_min(T v) { return lk_reduce(v, [](T a, T b) { return b < a ? b : a; }); }
LK_DEVICE uint simd_min(uint v) { return __reduce_min_sync(LK_LANES, v); }
LK_DEVICE int simd_min(int v) { return __reduce_min_sync(LK_LANES, v); }
}

//@provides simd_and simd_or simd_xor
namespace metal {
template <class T> LK_DEVICE T simd_and(T v) { return lk_reduce(v, [](T a, T b) { return T(a & b); }); }
template <class T> LK_DEVICE T simd_or(T v) { return lk_reduce(v, [](T a, T b) { return T(a | b); }); }
template <class T> LK_DEVICE T simd_xor(T v) { return lk_reduce(v, [](T a, T b) { return T(a ^ b); }); }
}

//@provides simd_prefix_inclusive_sum simd_prefix_exclusive_sum
namespace metal {
template <class T> LK_DEVICE T simd_prefix_inclusive_sum(T v) {
  _Pragma("unroll") for (int d = 1; d < 32; d *= 2) { T o = lk_shuffle(v, (LK_LANE - d) & 31u); if (LK_LANE >= d) v = T(v + o); }
  return v;
}
template <class T> LK_DEVICE T simd_prefix_exclusive_sum(T v) {
  T r = lk_shuffle(simd_prefix_inclusive_sum(v), (LK_LANE - 1) & 31u);
  return LK_LANE ? r : T(0);
}
}

//@provides simd_vote simd_ballot simd_any simd_all simd_is_first simd_active_threads_mask
namespace metal {
struct simd_vote {
  typedef unsigned long vote_t;
  vote_t bits;
  LK_DEVICE explicit operator vote_t() const { return bits; }
  LK_DEVICE explicit operator unsigned long long() const { return bits; }
  LK_DEVICE bool all() const { return (uint)bits == 0xFFFFFFFFu; }
  LK_DEVICE bool any() const { return bits != 0; }
};
LK_DEVICE simd_vote simd_ballot(bool v) { return {__ballot_sync(LK_LANES, v)}; }
LK_DEVICE simd_vote simd_active_threads_mask() { return {__activemask()}; }
LK_DEVICE bool simd_any(bool v) { return __any_sync(LK_LANES, v); }
LK_DEVICE bool simd_all(bool v) { return __all_sync(LK_LANES, v); }
LK_DEVICE bool simd_is_first() { return LK_LANE == __ffs(LK_LANES) - 1; }
}

//@provides precise fast
namespace metal { namespace precise {} namespace fast {} using namespace precise; }

//@provides LK_1
#define LK_1(name, e) LK_DEVICE float name(float x) { return e; } \
  LK_DEVICE __half name(__half h) { float x = __half2float(h); return __float2half(e); } \
  LK_DEVICE __nv_bfloat16 name(__nv_bfloat16 h) { float x = __bfloat162float(h); return __float2bfloat16(e); }

//@provides exp log sqrt rsqrt
namespace metal {
#define LK_MATH(EXP, LOG) LK_1(exp, EXP(x)) LK_1(log, LOG(x)) LK_1(sqrt, ::sqrtf(x)) LK_1(rsqrt, ::rsqrtf(x))
namespace precise { LK_MATH(::expf, ::logf) }
namespace fast { LK_MATH(::__expf, ::__logf) }
}
namespace mlx::core::cu { using metal::precise::exp; using metal::precise::log; using metal::precise::sqrt; using metal::precise::rsqrt; }

//@provides exp2 log2 exp10 log10 pow
namespace metal {
#define LK_POWERS(EXP10, LOG2, LOG10, POW) LK_1(exp2, ::exp2f(x)) LK_1(log2, LOG2(x)) LK_1(exp10, EXP10(x)) LK_1(log10, LOG10(x)) \
  LK_DEVICE float pow(float x, float y) { return POW(x, y); }
namespace precise { LK_POWERS(::exp10f, ::log2f, ::log10f, ::powf) }
namespace fast { LK_POWERS(::__exp10f, ::__log2f, ::__log10f, ::__powf) }
}
namespace mlx::core::cu { using metal::precise::exp2; using metal::precise::log2; using metal::precise::exp10; using metal::precise::log10; using metal::precise::pow; }

//@provides floor ceil trunc rint round fabs sign fract saturate fmod
namespace metal {
#define LK_ROUND LK_1(floor, ::floorf(x)) LK_1(ceil, ::ceilf(x)) LK_1(trunc, ::truncf(x)) LK_1(rint, ::rintf(x)) LK_1(round, ::roundf(x)) \
  LK_1(fabs, ::fabsf(x)) LK_1(sign, float((x > 0) - (x < 0))) LK_1(fract, x - ::floorf(x)) LK_1(saturate, __saturatef(x)) \
  LK_DEVICE float fmod(float x, float y) { return ::fmodf(x, y); }
namespace precise { LK_ROUND }
namespace fast { LK_ROUND }
}
namespace mlx::core::cu {
using metal::precise::floor; using metal::precise::ceil; using metal::precise::trunc; using metal::precise::rint;
using metal::precise::round; using metal::precise::fabs; using metal::precise::fmod;
}

//@provides sin cos tan sinh cosh tanh asin acos atan atan2
namespace metal {
#define LK_ANGLES(SIN, COS) LK_1(sin, SIN(x)) LK_1(cos, COS(x)) LK_1(tan, ::tanf(x)) LK_1(sinh, ::sinhf(x)) LK_1(cosh, ::coshf(x)) \
  LK_1(tanh, ::tanhf(x)) LK_1(asin, ::asinf(x)) LK_1(acos, ::acosf(x)) LK_1(atan, ::atanf(x)) \
  LK_DEVICE float atan2(float x, float y) { return ::atan2f(x, y); }
namespace precise { LK_ANGLES(::sinf, ::cosf) }
namespace fast { LK_ANGLES(::__sinf, ::__cosf) }
}
namespace mlx::core::cu {
using metal::precise::sin; using metal::precise::cos; using metal::precise::tan; using metal::precise::sinh; using metal::precise::cosh;
using metal::precise::tanh; using metal::precise::asin; using metal::precise::acos; using metal::precise::atan; using metal::precise::atan2;
}

//@provides max min fmax fmin
namespace metal {
template <class A, class B> struct lk_common { typedef decltype(A() + B()) type; };
template <class A> struct lk_common<A, A> { typedef A type; };
template <> struct lk_common<float, double> { typedef float type; };
template <> struct lk_common<double, float> { typedef float type; };
// CUDA's own for float: NaN loses, as in Metal.
template <class A, class B> LK_DEVICE typename lk_common<A, B>::type max(A a, B b) { typedef typename lk_common<A, B>::type T; return T(a) < T(b) ? T(b) : T(a); }
template <class A, class B> LK_DEVICE typename lk_common<A, B>::type min(A a, B b) { typedef typename lk_common<A, B>::type T; return T(b) < T(a) ? T(b) : T(a); }
LK_DEVICE float max(float a, float b) { return ::fmaxf(a, b); }
LK_DEVICE float min(float a, float b) { return ::fminf(a, b); }
LK_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
LK_DEVICE float fmin(float a, float b) { return ::fminf(a, b); }
#ifdef LK_VECTOR
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> max(LK_VECTOR<T, N> a, LK_VECTOR<T, N> b) {
  _Pragma("unroll") for (int i = 0; i < N; i++) a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> min(LK_VECTOR<T, N> a, LK_VECTOR<T, N> b) {
  _Pragma("unroll") for (int i = 0; i < N; i++) a[i] = min(a[i], b[i]);
  return a;
}
#endif
}
namespace mlx::core::cu { using metal::max; using metal::min; using metal::fmax; using metal::fmin; }

//@provides max3 min3 clamp abs
namespace metal {
template <class T> LK_DEVICE T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> LK_DEVICE T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T, class A, class B> LK_DEVICE T clamp(T x, A lo, B hi) { return min(max(x, T(lo)), T(hi)); }
template <class T> LK_DEVICE T abs(T x) { return x < T(0) ? T(-x) : x; }
LK_DEVICE float abs(float x) { return ::fabsf(x); }
}
namespace mlx::core::cu { using metal::abs; using metal::clamp; }

//@provides fma
namespace metal {
LK_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
LK_DEVICE __half fma(__half a, __half b, __half c) { return __hfma(a, b, c); }
LK_DEVICE __nv_bfloat16 fma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return __hfma(a, b, c); }
#ifdef LK_VECTOR  // its own name, so that a use of fma alone does not bring the vectors
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> fma(LK_VECTOR<T, N> a, LK_VECTOR<T, N> b, LK_VECTOR<T, N> c) {
  _Pragma("unroll") for (int i = 0; i < N; i++) c[i] = fma(a[i], b[i], c[i]);
  return c;
}
#endif
}
namespace mlx::core::cu { using metal::fma; }

//@provides select mix isnan isinf isfinite
namespace metal {
template <class T> LK_DEVICE T select(T a, T b, bool c) { return c ? b : a; }
LK_DEVICE float mix(float a, float b, float t) { return a + (b - a) * t; }
LK_DEVICE bool isnan(float x) { return x != x; }
LK_DEVICE bool isinf(float x) { return ::fabsf(x) == __int_as_float(0x7f800000); }
LK_DEVICE bool isfinite(float x) { return ::fabsf(x) < __int_as_float(0x7f800000); }
}
namespace mlx::core::cu { using metal::isnan; using metal::isinf; using metal::isfinite; }

//@provides popcount clz ctz extract_bits insert_bits mulhi rotate reverse_bits
namespace metal {
LK_DEVICE uint popcount(uint x) { return __popc(x); }
LK_DEVICE ulong popcount(ulong x) { return __popcll(x); }
LK_DEVICE uint clz(uint x) { return __clz(x); }
LK_DEVICE uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }
LK_DEVICE uint extract_bits(uint x, uint offset, uint bits) { return bits ? (x >> offset) & (bits >= 32 ? 0xFFFFFFFFu : (1u << bits) - 1) : 0; }
LK_DEVICE uint insert_bits(uint base, uint x, uint offset, uint bits) {
  uint m = (bits >= 32 ? 0xFFFFFFFFu : (1u << bits) - 1) << offset;
  return (base & ~m) | ((x << offset) & m);
}
LK_DEVICE uint mulhi(uint a, uint b) { return __umulhi(a, b); }
LK_DEVICE int mulhi(int a, int b) { return __mulhi(a, b); }
LK_DEVICE uint rotate(uint x, uint n) { return __funnelshift_l(x, x, n); }
LK_DEVICE uint reverse_bits(uint x) { return __brev(x); }
}

//@provides numeric_limits
namespace metal {
template <class T> struct numeric_limits : cuda::std::numeric_limits<T> {};
}

//@provides is_same is_same_v conditional_t enable_if_t is_integral_v true_type false_type integral_constant bool_constant
namespace metal {
using cuda::std::bool_constant; using cuda::std::conditional_t; using cuda::std::enable_if_t; using cuda::std::false_type;
using cuda::std::integral_constant; using cuda::std::is_integral_v; using cuda::std::is_same; using cuda::std::is_same_v; using cuda::std::true_type;
}

//@provides atomic atomic_int atomic_uint atomic_float memory_order_relaxed memory_order_seq_cst thread_scope_device thread_scope_threadgroup
namespace metal {
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<float> atomic_float;
// MLX has no atomic outputs on CUDA: a plain pointer is taken for an atomic one.
template <class T> LK_DEVICE T* lk_inside(T* p) { return p; }
template <class T> LK_DEVICE T* lk_inside(atomic<T>* p) { return &p->value; }
template <class T> LK_DEVICE T* lk_inside(volatile atomic<T>* p) { return const_cast<T*>(&p->value); }
template <class P, class V> LK_DEVICE auto atomic_fetch_add_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicAdd(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_sub_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicAdd(a, decltype(*a + *a)(-v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_max_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicMax(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_min_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicMin(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_and_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicAnd(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_or_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicOr(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_fetch_xor_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicXor(a, decltype(*a + *a)(v)); }
template <class P, class V> LK_DEVICE auto atomic_exchange_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); return atomicExch(a, decltype(*a + *a)(v)); }
template <class P> LK_DEVICE auto atomic_load_explicit(P* p, memory_order) { auto* a = lk_inside(p); return *(volatile decltype(*a + *a)*)a; }
template <class P, class V> LK_DEVICE void atomic_store_explicit(P* p, V v, memory_order) { auto* a = lk_inside(p); *(volatile decltype(*a + *a)*)a = decltype(*a + *a)(v); }
template <class P, class E, class V> LK_DEVICE bool atomic_compare_exchange_weak_explicit(P* p, E* expected, V desired, memory_order, memory_order) {
  auto* a = lk_inside(p);
  E old = atomicCAS(a, *expected, E(desired));
  bool equal = old == *expected;
  *expected = old;
  return equal;
}
}

//@provides simdgroup_matrix make_filled_simdgroup_matrix simdgroup_load simdgroup_store simdgroup_multiply_accumulate simdgroup_multiply simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8
// Right everywhere, slow: 32 shuffles for each 8x8x8 product. A kernel that lives on it deserves an own CUDA text.
namespace metal {
template <class T, int R, int C> struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  LK_DEVICE explicit simdgroup_matrix(T diagonal);
  LK_DEVICE vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8; typedef simdgroup_matrix<__half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<__nv_bfloat16, 8, 8> simdgroup_bfloat8x8;
LK_DEVICE uint lk_row() { return ((LK_LANE / 4) & 4) + (LK_LANE / 2) % 4; }
LK_DEVICE uint lk_column() { return ((LK_LANE / 4) & 2) * 2 + (LK_LANE % 2) * 2; }
LK_DEVICE uint lk_lane_of(uint row, uint column) { return (row & 4) * 4 + ((column >> 2) & 1) * 8 + (row & 3) * 2 + ((column >> 1) & 1); }
template <class T, int R, int C> LK_DEVICE simdgroup_matrix<T, R, C>::simdgroup_matrix(T diagonal) {
  for (uint i = 0; i < 2; i++) elements[i] = lk_row() == lk_column() + i ? diagonal : T(0.0f);
}
template <class T, int R, int C> LK_DEVICE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(v);
  return m;
}
template <class T, class P> LK_DEVICE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* p, ulong per_row = 8, ulong2 o = ulong2(0ul), bool transpose = false) {
  for (int i = 0; i < 2; i++) m.elements[i] = T(transpose ? p[(o.y + lk_column() + i) * per_row + o.x + lk_row()] : p[(o.y + lk_row()) * per_row + o.x + lk_column() + i]);
}
template <class T, class P> LK_DEVICE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P* p, ulong per_row = 8, ulong2 o = ulong2(0ul), bool transpose = false) {
  for (int i = 0; i < 2; i++) (transpose ? p[(o.y + lk_column() + i) * per_row + o.x + lk_row()] : p[(o.y + lk_row()) * per_row + o.x + lk_column() + i]) = P(m.elements[i]);
}
template <class D, class A, class B, class C>
LK_DEVICE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  float sum[2] = {lk_float(c.elements[0]), lk_float(c.elements[1])};
  float left[2] = {lk_float(a.elements[0]), lk_float(a.elements[1])}, right[2] = {lk_float(b.elements[0]), lk_float(b.elements[1])};
  _Pragma("unroll") for (uint k = 0; k < 8; k++) {
    uint from = lk_lane_of(lk_row(), k), to = lk_lane_of(k, lk_column());
    float even = lk_shuffle(left[0], from), odd = lk_shuffle(left[1], from), factor = k & 1 ? odd : even;
    for (int i = 0; i < 2; i++) sum[i] += factor * lk_shuffle(right[i], to);
  }
  for (int i = 0; i < 2; i++) d.elements[i] = D(sum[i]);
}
template <class D, class A, class B> LK_DEVICE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f)));
}
}
