// Metal's vectors. A whole vector is read and written in one access of its width, as a GPU does, so that traffic is counted
// rightly; a component, or several picked ones, by accesses of their own.
//
// Three classes hold components: vec, packed_vec (aligned as one component) and swizzle (components picked out of a vec). All that
// takes vectors takes any of them and works on the vec that `whole` makes of it.
#pragma once
#include "scalars.h"

namespace metal {

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;
template <class T, int Stored, int... Picked> struct swizzle;

template <class V> struct vector_shape { static constexpr int size = 0; };
template <class T, int N> struct vector_shape<vec<T, N>> { using element = T; static constexpr int size = N; };
template <class T, int N> struct vector_shape<packed_vec<T, N>> { using element = T; static constexpr int size = N; };
template <class T, int Stored, int... Picked> struct vector_shape<swizzle<T, Stored, Picked...>> {
  using element = T;
  static constexpr int size = sizeof...(Picked);
};
template <class V> concept Vector = (vector_shape<V>::size > 0);
template <Vector V> using vec_of = vec<typename vector_shape<V>::element, vector_shape<V>::size>;
template <Vector V> LK_INLINE vec_of<V> whole(const V& v) { return v; }

// The vec in which two operands meet: of one shape, or one of them a number that every component meets.
template <class A, class B> struct meeting {};
template <Vector A, Vector B> requires std::same_as<vec_of<A>, vec_of<B>> struct meeting<A, B> { using type = vec_of<A>; };
template <Vector A, Scalar B> struct meeting<A, B> { using type = vec_of<A>; };
template <Scalar A, Vector B> struct meeting<A, B> { using type = vec_of<B>; };
template <class A, class B> using meeting_of = typename meeting<A, B>::type;
template <class A, class B> concept Meet = requires { typename meeting_of<A, B>; };

// v op= other, for whatever has a value to assign to.
#define LK_ASSIGNMENTS(Self)                                                                                     \
  LK_ASSIGNMENT(Self, +) LK_ASSIGNMENT(Self, -) LK_ASSIGNMENT(Self, *) LK_ASSIGNMENT(Self, /) LK_ASSIGNMENT(Self, %) \
  LK_ASSIGNMENT(Self, &) LK_ASSIGNMENT(Self, |) LK_ASSIGNMENT(Self, ^) LK_ASSIGNMENT(Self, <<) LK_ASSIGNMENT(Self, >>)
#define LK_ASSIGNMENT(Self, op) \
  template <class Other> requires Meet<Self, Other> LK_INLINE Self& operator op##=(const Other& other) { return *this = *this op other; }

// Components of a vec that stores `Stored` of them, from wherever they lie: v.zx is swizzle<T, 4, 2, 0>.
template <class T, int Stored, int... Picked> struct swizzle {
  using value = vec<T, sizeof...(Picked)>;
  T stored[Stored];

  swizzle() = default;
  LK_INLINE operator value() const { return value(stored[Picked]...); }
  LK_INLINE swizzle& operator=(value v) {
    int next = 0;
    ((stored[Picked] = v[next++]), ...);
    return *this;
  }
  // A copy of one swizzle to another assigns what is picked, not all that is stored.
  LK_INLINE swizzle& operator=(const swizzle& other) { return *this = value(other); }
  LK_ASSIGNMENTS(swizzle)
};

// One storage by all its names.
template <class T, int N> struct named;
template <class T> struct named<T, 2> {
  template <int... Picked> using pick = swizzle<T, 2, Picked...>;
  union {
    T v[2];
    struct { T x, y; };
    struct { T r, g; };
    pick<0, 1> xy;
    pick<1, 0> yx;
    pick<0, 0> xx;
    pick<1, 1> yy;
  };
};
template <class T> struct named<T, 3> {
  template <int... Picked> using pick = swizzle<T, 4, Picked...>;
  union {
    T v[4];  // the fourth is never read
    struct { T x, y, z; };
    struct { T r, g, b; };
    pick<0, 1> xy;
    pick<1, 0> yx;
    pick<0, 2> xz;
    pick<2, 0> zx;
    pick<1, 2> yz;
    pick<2, 1> zy;
    pick<1, 2, 0> yzx;
    pick<2, 0, 1> zxy;
    pick<2, 1, 0> zyx;
  };
};
template <class T> struct named<T, 4> {
  template <int... Picked> using pick = swizzle<T, 4, Picked...>;
  union {
    T v[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    pick<0, 1> xy, lo, rg;
    pick<2, 3> zw, hi, ba;
    pick<1, 0> yx;
    pick<3, 2> wz;
    pick<0, 2> xz;
    pick<2, 0> zx;
    pick<1, 3> yw;
    pick<3, 1> wy;
    pick<0, 3> xw;
    pick<3, 0> wx;
    pick<1, 2> yz;
    pick<2, 1> zy;
    pick<0, 1, 2> xyz, rgb;
    pick<1, 2, 3> yzw;
    pick<2, 1, 0> zyx;
    pick<1, 2, 0> yzx;
    pick<2, 0, 1> zxy;
    pick<0, 1, 3> xyw;
    pick<0, 2, 3> xzw;
    pick<1, 0, 3, 2> yxwz;
    pick<2, 3, 0, 1> zwxy;
    pick<3, 2, 1, 0> wzyx;
  };
};

// A type of a vector's width, as which it is moved whole.
using move16 = uint32_t __attribute__((vector_size(16), may_alias));
using move32 = uint32_t __attribute__((vector_size(32), may_alias));
using move2 = uint16_t __attribute__((may_alias));
using move4 = uint32_t __attribute__((may_alias));
using move8 = uint64_t __attribute__((may_alias));
template <int Bytes> struct mover;
template <> struct mover<2> { using type = move2; };
template <> struct mover<4> { using type = move4; };
template <> struct mover<8> { using type = move8; };
template <> struct mover<16> { using type = move16; };
template <> struct mover<32> { using type = move32; };

template <class Part> constexpr int components_in() { return Vector<Part> ? vector_shape<Part>::size : 1; }

template <class T, int N> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : named<T, N> {
  using named<T, N>::v;
  using element = T;
  static constexpr int size = N;
  using moved = typename mover<sizeof(T) * (N == 3 ? 4 : N)>::type;

  vec() = default;
  LK_INLINE vec(const vec& other) { *this = other; }
  LK_INLINE vec& operator=(const vec& other) {
    *reinterpret_cast<moved*>(this) = *reinterpret_cast<const moved*>(&other);
    return *this;
  }
  // One number for all components.
  template <class Number> requires std::convertible_to<Number, T> && (!Vector<Number>)
  LK_INLINE vec(Number number) {
    for (int i = 0; i < N; i++) v[i] = T(number);
  }
  // Numbers and smaller vectors in a row, N components in all.
  template <class First, class Second, class... More> requires (components_in<First>() + components_in<Second>() + (0 + ... + components_in<More>()) == N)
  LK_INLINE vec(const First& first, const Second& second, const More&... more) {
    int next = 0;
    put(next, first);
    put(next, second);
    (put(next, more), ...);
  }
  // From components of another type; of the same type a swizzle or packed_vec converts by itself.
  template <Vector Other> requires (vector_shape<Other>::size == N && !std::same_as<typename vector_shape<Other>::element, T>)
  LK_INLINE explicit vec(const Other& other) {
    auto from = whole(other);
    for (int i = 0; i < N; i++) v[i] = T(from.v[i]);
  }

  LK_INLINE T& operator[](int i) { return v[i]; }
  LK_INLINE T operator[](int i) const { return v[i]; }
  LK_ASSIGNMENTS(vec)

 private:
  template <class Part> LK_INLINE void put(int& next, const Part& part) {
    if constexpr (Vector<Part>) {
      auto from = whole(part);
      for (int i = 0; i < from.size; i++) v[next++] = T(from.v[i]);
    } else {
      v[next++] = T(part);
    }
  }
};
#undef LK_ASSIGNMENT
#undef LK_ASSIGNMENTS

template <class T, int N> struct packed_vec {
  T v[N];
  packed_vec() = default;
  template <Vector Other> requires std::same_as<vec_of<Other>, vec<T, N>>
  LK_INLINE packed_vec(const Other& other) {
    vec<T, N> from(other);
    for (int i = 0; i < N; i++) v[i] = from.v[i];
  }
  LK_INLINE operator vec<T, N>() const {
    vec<T, N> to;
    for (int i = 0; i < N; i++) to.v[i] = v[i];
    return to;
  }
  LK_INLINE T& operator[](int i) { return v[i]; }
  LK_INLINE T operator[](int i) const { return v[i]; }
};

// Component by component. Operands are made whole first: one that lies in memory is read at once.
#define LK_COMPONENTWISE(op, Component)                                                       \
  template <class A, class B> requires Meet<A, B> LK_INLINE auto operator op(const A& a, const B& b) { \
    using Shape = meeting_of<A, B>;                                                           \
    Shape left(a), right(b);                                                                  \
    vec<Component, Shape::size> out;                                                          \
    for (int i = 0; i < out.size; i++) out.v[i] = Component(left.v[i] op right.v[i]);         \
    return out;                                                                               \
  }
#define LK_SAME(op) LK_COMPONENTWISE(op, typename Shape::element)
#define LK_TRUTH(op) LK_COMPONENTWISE(op, bool)
LK_SAME(+) LK_SAME(-) LK_SAME(*) LK_SAME(/) LK_SAME(%) LK_SAME(&) LK_SAME(|) LK_SAME(^) LK_SAME(<<) LK_SAME(>>)
LK_TRUTH(==) LK_TRUTH(!=) LK_TRUTH(<) LK_TRUTH(>) LK_TRUTH(<=) LK_TRUTH(>=)
#undef LK_TRUTH
#undef LK_SAME
#undef LK_COMPONENTWISE

// f of every component.
template <Vector V, class F> LK_INLINE vec_of<V> each(const V& given, F f) {
  vec_of<V> out = whole(given);
  for (int i = 0; i < out.size; i++) out.v[i] = typename vec_of<V>::element(f(out.v[i]));
  return out;
}
struct Negative { template <class T> LK_INLINE T operator()(T x) const { return T(-x); } };
struct Complement { template <class T> LK_INLINE T operator()(T x) const { return T(~x); } };
template <Vector V> LK_INLINE vec_of<V> operator-(const V& v) { return each(v, Negative()); }
template <Vector V> LK_INLINE vec_of<V> operator~(const V& v) { return each(v, Complement()); }

template <Vector A, Vector B> requires Meet<A, B> LK_INLINE auto dot(const A& a, const B& b) {
  auto products = whole(a) * whole(b);
  auto sum = products.v[0];
  for (int i = 1; i < products.size; i++) sum = decltype(sum)(sum + products.v[i]);
  return sum;
}
template <int N> LK_INLINE bool any(vec<bool, N> v) {
  bool found = false;
  for (int i = 0; i < N; i++) found |= v.v[i];
  return found;
}
template <int N> LK_INLINE bool all(vec<bool, N> v) {
  bool found = true;
  for (int i = 0; i < N; i++) found &= v.v[i];
  return found;
}

#define LK_NAMED(t)           \
  using t##2 = vec<t, 2>;     \
  using t##3 = vec<t, 3>;     \
  using t##4 = vec<t, 4>;     \
  using packed_##t##2 = packed_vec<t, 2>; \
  using packed_##t##3 = packed_vec<t, 3>; \
  using packed_##t##4 = packed_vec<t, 4>;
LK_NAMED(bool) LK_NAMED(char) LK_NAMED(uchar) LK_NAMED(short) LK_NAMED(ushort) LK_NAMED(int) LK_NAMED(uint) LK_NAMED(long) LK_NAMED(ulong)
LK_NAMED(half) LK_NAMED(bfloat) LK_NAMED(float)
#undef LK_NAMED

template <class T> struct element_of { using type = T; };
template <Vector V> struct element_of<V> { using type = typename vector_shape<V>::element; };

}  // namespace metal
