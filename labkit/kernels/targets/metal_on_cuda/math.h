// Metal's arithmetic functions. Those of one float also take the 16-bit floats, rounded once; `fast::` has the hardware's own.

//@provides precise fast
namespace metal { namespace precise {} namespace fast {} using namespace precise; }

//@provides LK_UNARY
#define LK_UNARY(name, value)                                                           \
  LK_DEVICE float name(float x) { return value; }                                       \
  LK_DEVICE __half name(__half small) {                                                 \
    float x = __half2float(small);                                                      \
    return __float2half(value);                                                         \
  }                                                                                     \
  LK_DEVICE __nv_bfloat16 name(__nv_bfloat16 small) {                                   \
    float x = __bfloat162float(small);                                                  \
    return __float2bfloat16(value);                                                     \
  }
// The names win over CUDA's where the kernel stands.
#define LK_WINS(name) namespace mlx::core::cu { using metal::precise::name; }

//@provides exp log sqrt rsqrt
namespace metal {
#define LK_ROOTS LK_UNARY(sqrt, ::sqrtf(x)) LK_UNARY(rsqrt, ::rsqrtf(x))
namespace precise { LK_UNARY(exp, ::expf(x)) LK_UNARY(log, ::logf(x)) LK_ROOTS }
namespace fast { LK_UNARY(exp, ::__expf(x)) LK_UNARY(log, ::__logf(x)) LK_ROOTS }
}
LK_WINS(exp) LK_WINS(log) LK_WINS(sqrt) LK_WINS(rsqrt)

//@provides exp2 exp10 log2 log10 pow
namespace metal {
namespace precise {
LK_UNARY(exp2, ::exp2f(x)) LK_UNARY(exp10, ::exp10f(x)) LK_UNARY(log2, ::log2f(x)) LK_UNARY(log10, ::log10f(x))
LK_DEVICE float pow(float base, float power) { return ::powf(base, power); }
}
namespace fast {
LK_UNARY(exp2, ::exp2f(x)) LK_UNARY(exp10, ::__exp10f(x)) LK_UNARY(log2, ::__log2f(x)) LK_UNARY(log10, ::__log10f(x))
LK_DEVICE float pow(float base, float power) { return ::__powf(base, power); }
}
}
LK_WINS(exp2) LK_WINS(exp10) LK_WINS(log2) LK_WINS(log10) LK_WINS(pow)

//@provides floor ceil trunc rint round fabs sign fract saturate fmod
namespace metal {
#define LK_ROUNDING                                                                                        \
  LK_UNARY(floor, ::floorf(x)) LK_UNARY(ceil, ::ceilf(x)) LK_UNARY(trunc, ::truncf(x))                     \
  LK_UNARY(rint, ::rintf(x)) LK_UNARY(round, ::roundf(x)) LK_UNARY(fract, x - ::floorf(x))                 \
  LK_UNARY(fabs, ::fabsf(x)) LK_UNARY(sign, float((x > 0) - (x < 0))) LK_UNARY(saturate, __saturatef(x))   \
  LK_DEVICE float fmod(float x, float by) { return ::fmodf(x, by); }
namespace precise { LK_ROUNDING }
namespace fast { LK_ROUNDING }
}
LK_WINS(floor) LK_WINS(ceil) LK_WINS(trunc) LK_WINS(rint) LK_WINS(round) LK_WINS(fabs) LK_WINS(fmod)

//@provides sin cos tan asin acos atan atan2 sinh cosh tanh
namespace metal {
#define LK_ANGLES                                                                                          \
  LK_UNARY(tan, ::tanf(x)) LK_UNARY(asin, ::asinf(x)) LK_UNARY(acos, ::acosf(x)) LK_UNARY(atan, ::atanf(x)) \
  LK_UNARY(sinh, ::sinhf(x)) LK_UNARY(cosh, ::coshf(x)) LK_UNARY(tanh, ::tanhf(x))                         \
  LK_DEVICE float atan2(float up, float right) { return ::atan2f(up, right); }
namespace precise { LK_UNARY(sin, ::sinf(x)) LK_UNARY(cos, ::cosf(x)) LK_ANGLES }
namespace fast { LK_UNARY(sin, ::__sinf(x)) LK_UNARY(cos, ::__cosf(x)) LK_ANGLES }
}
LK_WINS(sin) LK_WINS(cos) LK_WINS(tan) LK_WINS(asin) LK_WINS(acos) LK_WINS(atan) LK_WINS(atan2)
LK_WINS(sinh) LK_WINS(cosh) LK_WINS(tanh)

//@provides max min fmax fmin
namespace metal {
// Two types meet in the one that their sum has; a double literal beside a float stays a float.
template <class A, class B> struct lk_meeting { using type = decltype(A() + B()); };
template <class A> struct lk_meeting<A, A> { using type = A; };
template <> struct lk_meeting<float, double> { using type = float; };
template <> struct lk_meeting<double, float> { using type = float; };
template <class A, class B, class T = typename lk_meeting<A, B>::type> LK_DEVICE T max(A a, B b) { return T(a) < T(b) ? T(b) : T(a); }
template <class A, class B, class T = typename lk_meeting<A, B>::type> LK_DEVICE T min(A a, B b) { return T(b) < T(a) ? T(b) : T(a); }
// CUDA's own for two floats: NaN loses, as in Metal.
LK_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
LK_DEVICE float fmin(float a, float b) { return ::fminf(a, b); }
LK_DEVICE float max(float a, float b) { return ::fmaxf(a, b); }
LK_DEVICE float min(float a, float b) { return ::fminf(a, b); }
#ifdef LK_VECTOR
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> max(LK_VECTOR<T, N> a, LK_VECTOR<T, N> b) {
  LK_ELEMENTWISE a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> min(LK_VECTOR<T, N> a, LK_VECTOR<T, N> b) {
  LK_ELEMENTWISE a[i] = min(a[i], b[i]);
  return a;
}
#endif
}
namespace mlx::core::cu { using metal::max; using metal::min; using metal::fmax; using metal::fmin; }

//@provides max3 min3 clamp abs
namespace metal {
template <class T> LK_DEVICE T max3(T a, T b, T c) { return max(max(b, c), a); }
template <class T> LK_DEVICE T min3(T a, T b, T c) { return min(min(b, c), a); }
template <class T, class Low, class High> LK_DEVICE T clamp(T x, Low low, High high) { return min(max(x, T(low)), T(high)); }
template <class T> LK_DEVICE T abs(T x) { return x < T(0) ? T(-x) : x; }
LK_DEVICE float abs(float x) { return ::fabsf(x); }
}
namespace mlx::core::cu { using metal::clamp; using metal::abs; }

//@provides fma
namespace metal {
LK_DEVICE float fma(float x, float y, float plus) { return ::fmaf(x, y, plus); }
LK_DEVICE __half fma(__half x, __half y, __half plus) { return __hfma(x, y, plus); }
LK_DEVICE __nv_bfloat16 fma(__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 plus) { return __hfma(x, y, plus); }
#ifdef LK_VECTOR  // a name of its own, so that a use of fma alone does not bring the vectors
template <class T, int N> LK_DEVICE LK_VECTOR<T, N> fma(LK_VECTOR<T, N> x, LK_VECTOR<T, N> y, LK_VECTOR<T, N> plus) {
  LK_ELEMENTWISE plus[i] = fma(x[i], y[i], plus[i]);
  return plus;
}
#endif
}
namespace mlx::core::cu { using metal::fma; }

//@provides select mix isnan isinf isfinite
namespace metal {
template <class T> LK_DEVICE T select(T no, T yes, bool which) { return which ? yes : no; }
LK_DEVICE float mix(float from, float to, float share) { return from + (to - from) * share; }
LK_DEVICE bool isnan(float x) { return x != x; }
LK_DEVICE bool isinf(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }
LK_DEVICE bool isfinite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }
}
namespace mlx::core::cu { using metal::isnan; using metal::isinf; using metal::isfinite; }

//@provides popcount clz ctz reverse_bits rotate mulhi
namespace metal {
LK_DEVICE uint popcount(uint word) { return __popc(word); }
LK_DEVICE ulong popcount(ulong word) { return __popcll(word); }
LK_DEVICE uint clz(uint word) { return __clz(word); }
LK_DEVICE uint ctz(uint word) { return word == 0 ? 32 : __ffs(word) - 1; }
LK_DEVICE uint reverse_bits(uint word) { return __brev(word); }
LK_DEVICE uint rotate(uint word, uint left) { return __funnelshift_l(word, word, left); }
LK_DEVICE int mulhi(int a, int b) { return __mulhi(a, b); }
LK_DEVICE uint mulhi(uint a, uint b) { return __umulhi(a, b); }
}

//@provides extract_bits insert_bits
namespace metal {
LK_DEVICE uint lk_low_bits(uint count) { return count < 32 ? (1u << count) - 1 : ~0u; }
LK_DEVICE uint extract_bits(uint word, uint first, uint count) { return count == 0 ? 0 : (word >> first) & lk_low_bits(count); }
LK_DEVICE uint insert_bits(uint word, uint bits, uint first, uint count) {
  uint place = lk_low_bits(count) << first;
  return ((bits << first) & place) | (word & ~place);
}
}
