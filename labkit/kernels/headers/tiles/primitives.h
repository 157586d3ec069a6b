// What tiles stand on, with a branch per target where one instruction does it. The other branch is plain Metal: it is what the
// simulator runs, lane by lane in the layout that CUDA's tensor cores use.

//@provides four_words two_words
METAL_FUNC uint4 four_words(uint x, uint y, uint z, uint w) {
  uint4 v;
  v.x = x, v.y = y, v.z = z, v.w = w;
  return v;
}
METAL_FUNC uint2 two_words(uint x, uint y) {
  uint2 v;
  v.x = x, v.y = y;
  return v;
}

//@provides load16_stream
// 16 bytes that nobody reads again: on CUDA past the first-level cache. (LABKIT_COHERENT: see `load16_if`.)
template <class P> METAL_FUNC uint4 load16_stream(P p, bool wanted = true) {
#if defined(__CUDACC__)
#if defined(LABKIT_COHERENT)
#define LK_STREAM "ld.global.L1::no_allocate.L2::128B.v4.u32"
#define LK_BEHIND : "memory"
#else
#define LK_STREAM "ld.global.nc.L1::no_allocate.L2::128B.v4.u32"
#define LK_BEHIND
#endif
  // A predicate, not a branch: loads stay together. Volatile: they stay where they are, before the arithmetic.
  uint4 v;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"
               " @p " LK_STREAM " {%0, %1, %2, %3}, [%4];\n}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(static_cast<uint>(wanted)) LK_BEHIND);
  return v;
#else
  return wanted ? *p : four_words(0, 0, 0, 0);
#endif
}

//@provides load16_if load8_if
// Words that others read too, or zeros. (LABKIT_COHERENT: other threadgroups of the same launch may have written them, which rules
// out the read-only path, and keeps these loads behind the barrier that waited for it.)
template <class P> METAL_FUNC uint4 load16_if(P p, bool wanted) {
#if defined(__CUDACC__) && !defined(LABKIT_COHERENT)
  uint4 v;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"
      " @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(static_cast<uint>(wanted)));
  return v;
#else
  return wanted ? *p : four_words(0, 0, 0, 0);
#endif
}
template <class P> METAL_FUNC uint2 load8_if(P p, bool wanted) {
#if defined(__CUDACC__) && !defined(LABKIT_COHERENT)
  uint2 v;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n @p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"(static_cast<uint>(wanted)));
  return v;
#else
  return wanted ? *p : two_words(0, 0);
#endif
}

//@provides is_half
template <class T> struct is_half { static constexpr constant bool value = false; };
template <> struct is_half<half> { static constexpr constant bool value = true; };

//@provides float_low float_high
// The two numbers of a pair packed in a word, the first in the low half.
template <class T> METAL_FUNC float float_low(uint pair) {
  return is_half<T>::value ? static_cast<float>(as_type<half>(static_cast<ushort>(pair))) : as_type<float>(pair << 16);
}
template <class T> METAL_FUNC float float_high(uint pair) {
  return is_half<T>::value ? static_cast<float>(as_type<half>(static_cast<ushort>(pair >> 16))) : as_type<float>(pair & 0xffff0000u);
}

//@provides pack_pair
template <class T> METAL_FUNC uint pack_pair(T low, T high) {
  return static_cast<uint>(as_type<ushort>(low)) | (static_cast<uint>(as_type<ushort>(high)) << 16);
}

//@provides low_halves high_halves
METAL_FUNC uint low_halves(uint a, uint b) {
#if defined(__CUDACC__)
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xffffu) | (b << 16);
#endif
}
METAL_FUNC uint high_halves(uint a, uint b) {
#if defined(__CUDACC__)
  return __byte_perm(a, b, 0x7632);
#else
  return (a >> 16) | (b & 0xffff0000u);
#endif
}

//@provides masked_or
// (word & mask) | bits, which NVIDIA's compiler makes two instructions of where both are constants.
METAL_FUNC uint masked_or(uint word, uint mask, uint bits) {
#if defined(__CUDACC__)
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
#else
  return (word & mask) | bits;
#endif
}

//@provides mma_16x8x16
// acc += A B for a simdgroup, A of 16x16, B of 16x8, in pairs along k. Lane l, with r = l / 4 and c = l % 4, holds
//   a: A[r][2c..], A[r + 8][2c..], A[r][2c + 8..], A[r + 8][2c + 8..]    b: B[2c..][r], B[2c + 8..][r]
//   acc: C[r][2c], C[r][2c + 1], C[r + 8][2c], C[r + 8][2c + 1]
template <class T> METAL_FUNC void mma_16x8x16(thread float* acc, uint4 a, uint2 b, uint lane) {
#if defined(__CUDACC__)
  if constexpr (is_half<T>::value) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
#else
  uint r = lane / 4, c = lane % 4;
  for (uint k = 0; k < 4; k++) {
    uint4 left = simd_shuffle(a, static_cast<ushort>(4 * r + k));
    for (uint i = 0; i < 2; i++) {
      uint2 right = simd_shuffle(b, static_cast<ushort>(4 * (2 * c + i) + k));
      acc[i] += float_low<T>(left.x) * float_low<T>(right.x) + float_high<T>(left.x) * float_high<T>(right.x);
      acc[i] += float_low<T>(left.z) * float_low<T>(right.y) + float_high<T>(left.z) * float_high<T>(right.y);
      acc[i + 2] += float_low<T>(left.y) * float_low<T>(right.x) + float_high<T>(left.y) * float_high<T>(right.x);
      acc[i + 2] += float_low<T>(left.w) * float_low<T>(right.y) + float_high<T>(left.w) * float_high<T>(right.y);
    }
  }
#endif
}

//@provides AsyncCopies
// 16-byte copies from device to threadgroup memory that run while the thread computes, in batches: up to STAGES batches of
// COPIES. A copy has landed, for the thread that issued it, once `wait` says so. Without cp.async the bytes wait in registers.
template <int COPIES, int STAGES> struct AsyncCopies {
#if defined(__CUDACC__)
  METAL_FUNC void copy(threadgroup uint4* to, const device uint4* from, bool valid) {
    // An invalid source is not read: zeros are written.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint>(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(valid ? 16 : 0) : "memory");
  }
  METAL_FUNC void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int LEFT> METAL_FUNC void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#else
  uint4 data[STAGES][COPIES];
  threadgroup uint4* target[STAGES][COPIES];
  int count[STAGES];
  int oldest = 0, newest = 0, filling = 0;
  METAL_FUNC void copy(threadgroup uint4* to, const device uint4* from, bool valid) {
    data[newest % STAGES][filling] = valid ? *from : four_words(0, 0, 0, 0);
#if defined(LABKIT_SIMULATOR)
    *to = four_words(~0u, ~0u, ~0u, ~0u);  // may land as early as now: who still reads what was there is in a race
#endif
    target[newest % STAGES][filling++] = to;
  }
  METAL_FUNC void commit() {
    count[newest++ % STAGES] = filling;
    filling = 0;
  }
  template <int LEFT> METAL_FUNC void wait() {
    for (; oldest + LEFT < newest; oldest++) {
      int batch = oldest % STAGES;
      for (int i = 0; i < count[batch]; i++) *target[batch][i] = data[batch][i];
    }
  }
#endif
};

//@provides LaneReads
// What a lane reads for itself, or zeros where nothing is wanted: SIXTEENS pieces of 16 bytes and FOURS of 4 a batch, BATCHES
// batches in flight, which wait in registers.
template <int SIXTEENS, int FOURS, int BATCHES> struct LaneReads {
  uint4 pieces[BATCHES][SIXTEENS];
  uint words[BATCHES][FOURS > 0 ? FOURS : 1];
  METAL_FUNC void send16(uint batch, int i, const device uint4* from, bool wanted) {
    pieces[batch % BATCHES][i] = wanted ? *from : four_words(0, 0, 0, 0);
  }
  METAL_FUNC void send4(uint batch, int i, const device uint* from, bool wanted) {
    words[batch % BATCHES][i] = wanted ? *from : 0;
  }
  METAL_FUNC uint4 get16(uint batch, int i) { return pieces[batch % BATCHES][i]; }
  METAL_FUNC uint get4(uint batch, int i) { return words[batch % BATCHES][i]; }
};

//@provides swiglu
METAL_FUNC float swiglu(float gate, float up) { return gate / (1.0f + exp(-gate)) * up; }
