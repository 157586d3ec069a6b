// Metal's vocabulary on CUDA, in sections (labkit/kernels/header.py), before `namespace mlx::core::cu`, in which MLX puts the
// kernel: a using-declaration there lets Metal's name win over CUDA's of the same spelling.
// This file: what every kernel has, constants, the 16-bit floats.
//
// LK_LANES, defined before all this, is the mask of the lanes that take part: all 32, unless the launch leaves a simdgroup
// incomplete.
#define LABKIT_CUDA 1
#define METAL_FUNC __device__ __forceinline__
#define LK_DEVICE __device__ __forceinline__
#define LK_THREAD ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x)
#define LK_LANE (LK_THREAD % 32u)
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
struct lk_triple { uint x, y, z; };  // of an attribute of which only elements are asked for
namespace metal {}

//@provides INFINITY NAN FLT_MAX M_PI_F M_E_F M_LN2_F M_LOG2E_F M_SQRT2_F
#undef INFINITY
#undef NAN
#define INFINITY __uint_as_float(0x7f800000u)
#define NAN __uint_as_float(0x7fc00000u)
#define FLT_MAX __uint_as_float(0x7f7fffffu)
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

//@provides lk_float
template <class Number> LK_DEVICE float lk_float(Number value) { return static_cast<float>(value); }
template <> LK_DEVICE float lk_float(__half value) { return __half2float(value); }
template <> LK_DEVICE float lk_float(__nv_bfloat16 value) { return __bfloat162float(value); }

//@provides half float16_t bfloat bfloat16_t
using half = __half;
using float16_t = __half;
using bfloat = __nv_bfloat16;
using bfloat16_t = __nv_bfloat16;
// A 16-bit float beside a number of another kind: CUDA finds that ambiguous. In Metal the result is a float beside floats, and of
// the small type beside integers.
template <class A> inline constexpr bool lk_small = cuda::std::is_same_v<A, __half> || cuda::std::is_same_v<A, __nv_bfloat16>;
template <class A> inline constexpr bool lk_real = cuda::std::is_same_v<A, float> || cuda::std::is_same_v<A, double>;
template <class A> inline constexpr bool lk_whole = cuda::std::is_integral_v<A>;
#define LK_BETWEEN(condition) template <class A, class B, cuda::std::enable_if_t<condition, int> = 0> LK_DEVICE
#define LK_ARITHMETIC(op)                                                                             \
  LK_BETWEEN(lk_small<A> && lk_real<B>) float operator op(A a, B b) { return lk_float(a) op float(b); } \
  LK_BETWEEN(lk_real<A> && lk_small<B>) float operator op(A a, B b) { return float(a) op lk_float(b); } \
  LK_BETWEEN(lk_small<A> && lk_whole<B>) A operator op(A a, B b) { return a op A(float(b)); }         \
  LK_BETWEEN(lk_whole<A> && lk_small<B>) B operator op(A a, B b) { return B(float(a)) op b; }
#define LK_COMPARISON(op)                                                                                               \
  LK_BETWEEN(lk_small<A> && (lk_real<B> || lk_whole<B>)) bool operator op(A a, B b) { return lk_float(a) op float(b); } \
  LK_BETWEEN((lk_real<A> || lk_whole<A>) && lk_small<B>) bool operator op(A a, B b) { return float(a) op lk_float(b); }
LK_ARITHMETIC(+) LK_ARITHMETIC(-) LK_ARITHMETIC(*) LK_ARITHMETIC(/)
LK_COMPARISON(==) LK_COMPARISON(!=) LK_COMPARISON(<) LK_COMPARISON(<=) LK_COMPARISON(>) LK_COMPARISON(>=)

//@provides as_type
namespace metal {
template <class To, class From> LK_DEVICE To as_type(From from) {
  static_assert(sizeof(From) == sizeof(To), "as_type keeps the bits: both types need the same size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
}

//@provides numeric_limits
namespace metal {
template <class T> struct numeric_limits : cuda::std::numeric_limits<T> {};
}

//@provides is_same is_same_v conditional_t enable_if_t is_integral_v true_type false_type integral_constant bool_constant
namespace metal {
using cuda::std::is_same; using cuda::std::is_same_v; using cuda::std::is_integral_v;
using cuda::std::conditional_t; using cuda::std::enable_if_t;
using cuda::std::integral_constant; using cuda::std::bool_constant; using cuda::std::true_type; using cuda::std::false_type;
}
