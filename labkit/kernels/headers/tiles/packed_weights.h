// Weights in MLX's affine layout: a word holds 8 weights of 4 bits or 4 of 8, the first in the lowest bits; a group of
// consecutive weights of a row has one scale and one bias, weight = scale * q + bias.

//@provides unpack_word
// The integers q of one word as exact floats: 8 of 4 bits or 4 of 8.
template <int BITS> METAL_FUNC void unpack_word(uint word, thread float* q) {
#if defined(__CUDACC__)
  // As the mantissa of 1024 + q, two at a time: converting integers runs at a quarter of the rate.
  const uint mask = BITS == 4 ? 0x000f000fu : 0x00ff00ffu;
  for (int i = 0; i < 16 / BITS; i++) {
    uint pair = ((word >> (BITS * i)) & mask) | 0x64006400u;
    __half2 value = __hsub2(*reinterpret_cast<__half2*>(&pair), __half2half2(__ushort_as_half(0x6400)));
    q[i] = __low2float(value);
    q[i + 16 / BITS] = __high2float(value);
  }
#else
  for (int i = 0; i < 32 / BITS; i++) q[i] = static_cast<float>((word >> (BITS * i)) & ((1u << BITS) - 1));
#endif
}

//@provides OffsetPairs
// The 8 nibbles of a word as four pairs (0, 4), (1, 5), (2, 6), (3, 7) of 16-bit floats with an offset, by masks alone: the
// nibble becomes the top of the mantissa of 16. With 8 bits the odd nibbles are the high halves of bytes: the pairs hold
// bytes (0, 2) and (1, 3) in two parts each, 16 + low and 256 + 16 high.
template <class T, int BITS> struct OffsetPairs {
  static constexpr constant float OFFSET = BITS == 4 ? 16.0f : 272.0f;  // what a weight's parts carry too much
  static METAL_FUNC uint4 of(uint word) {
    if (is_half<T>::value) {
      const uint mask = 0x03c003c0u, even = 0x4c004c00u, odd = BITS == 4 ? even : 0x5c005c00u;
      return four_words(masked_or(word << 6, mask, even), masked_or(word << 2, mask, odd), masked_or(word >> 2, mask, even),
                        masked_or(word >> 6, mask, odd));
    }
    const uint mask = 0x00780078u, even = 0x41804180u, odd = BITS == 4 ? even : 0x43804380u;
    return four_words(masked_or(word << 3, mask, even), masked_or(word >> 1, mask, odd), masked_or(word >> 5, mask, even),
                      masked_or(word >> 9, mask, odd));
  }
};

//@provides dequantize8
// 8 consecutive weights, scale * q + bias rounded once to T, as pairs (0, 1), (2, 3), (4, 5), (6, 7). `high` is the second word
// of 8-bit weights.
template <class T, int BITS> METAL_FUNC uint4 dequantize8(uint low, uint high, T scale, T bias) {
#if defined(__CUDACC__)
  if constexpr (!is_half<T>::value) {
    __nv_bfloat162 s = __bfloat162bfloat162(scale), b = __bfloat162bfloat162(bias);
    const uint base = 0x43004300u;  // 128, whose mantissa has room for seven bits
    __nv_bfloat162 zero = *reinterpret_cast<const __nv_bfloat162*>(&base);
    uint out[4];
    uint upper = low >> 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __nv_bfloat162 q;
      if constexpr (BITS == 4) {
        uint pair = (__byte_perm(low, upper, 0x4400 + 0x1111 * i) & 0x000f000fu) | base;
        q = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&pair), zero);
      } else {
        uint bytes = __byte_perm(i < 2 ? low : high, 0, i % 2 ? 0x4342 : 0x4140);
        uint small = (bytes & 0x000f000fu) | base, large = ((bytes >> 4) & 0x000f000fu) | base;
        q = __hfma2(__hsub2(*reinterpret_cast<__nv_bfloat162*>(&large), zero), __float2bfloat162_rn(16.0f),
                    __hsub2(*reinterpret_cast<__nv_bfloat162*>(&small), zero));
      }
      q = __hfma2(q, s, b);
      out[i] = *reinterpret_cast<uint*>(&q);
    }
    return four_words(out[0], out[1], out[2], out[3]);
  } else {
    __half2 s = __half2half2(scale), b = __half2half2(bias);
    const uint base = 0x64006400u;  // 1024
    __half2 zero = *reinterpret_cast<const __half2*>(&base);
    uint out[4];
    uint upper = low >> 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint pair;
      if constexpr (BITS == 4) pair = (__byte_perm(low, upper, 0x4400 + 0x1111 * i) & 0x000f000fu) | base;
      else pair = __byte_perm(i < 2 ? low : high, 0, i % 2 ? 0x4342 : 0x4140) | base;
      __half2 q = __hfma2(__hsub2(*reinterpret_cast<__half2*>(&pair), zero), s, b);
      out[i] = *reinterpret_cast<uint*>(&q);
    }
    return four_words(out[0], out[1], out[2], out[3]);
  }
#else
  float q[8], s = static_cast<float>(scale), b = static_cast<float>(bias);
  unpack_word<BITS>(low, q);
  if (BITS == 8) unpack_word<BITS>(high, q + 4);
  uint4 out;
  for (int i = 0; i < 4; i++) out[i] = pack_pair<T>(static_cast<T>(s * q[2 * i] + b), static_cast<T>(s * q[2 * i + 1] + b));
  return out;
#endif
}
