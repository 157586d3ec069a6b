// Shared by the sampling kernels. A simdgroup takes a strip of 128 tokens: lane l has tokens l, 32 + l, 64 + l and 96 + l, so
// that loads are whole lines whatever the vocabulary's size, one word of an allowed-token mask serves 32 lanes, and one Philox
// call gives the lane's four numbers.

//@provides Strip load_strip
struct Strip {
  float x[4];
};

// Logits of one strip: -inf past the vocabulary, where the mask forbids, and for NaN; the largest float for +inf.
template <bool MASKED, class Row, class Mask>
METAL_FUNC Strip load_strip(Row row, Mask mask, uint strip, uint lane, uint vocabulary) {
  Strip strip_;
  for (uint j = 0; j < 4; j++) {
    uint token = 128 * strip + 32 * j + lane;
    float x = -INFINITY;
    if (token < vocabulary) {
      x = static_cast<float>(row[token]);
      if (MASKED) x = (mask[4 * strip + j] >> lane) & 1u ? x : -INFINITY;
      x = isnan(x) ? -INFINITY : min(x, 3.402823466e38f);
    }
    strip_.x[j] = x;
  }
  return strip_;
}

//@provides Philox philox
struct Philox {
  uint word[4];
};

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
METAL_FUNC Philox philox(uint counter0, uint counter1, uint key0, uint key1) {
  uint a = counter0, b = counter1, c = 0, d = 0;
  for (int round = 0; round < 10; round++) {
    ulong first = ulong(a) * 0xD2511F53ul, second = ulong(c) * 0xCD9E8D57ul;
    a = uint(second >> 32) ^ b ^ key0;
    b = uint(second);
    c = uint(first >> 32) ^ d ^ key1;
    d = uint(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  Philox result;
  result.word[0] = a;
  result.word[1] = b;
  result.word[2] = c;
  result.word[3] = d;
  return result;
}

//@provides gumbel
// -log(-log(1 - t)) for t = (bits + 1/2) / 2^32. Small t decide draws, so -log(1 - t) keeps its relative accuracy there:
// log(u) * t / (1 - u) for u = 1 - t as rounded (Kahan).
METAL_FUNC float gumbel(uint bits) {
  float t = (static_cast<float>(bits) + 0.5f) * 2.3283064365386963e-10f;
  float u = max(1.0f - t, 2.9802322387695312e-8f);
  float exponential = u == 1.0f ? t : -metal::precise::log(u) * (t / (1.0f - u));
  return -metal::precise::log(exponential);
}

//@provides perturb
// Gumbel-max scores of a strip: logit / temperature + noise that depends on (seed, step, token) alone. A temperature below
// 1e-6 draws nothing: the scores are the logits.
METAL_FUNC Strip perturb(Strip logits, float temperature, uint strip, uint lane, uint step, ulong seed) {
  if (temperature < 1e-6f) return logits;
  float inverse = 1.0f / temperature;
  Philox noise = philox(32 * strip + lane, step, uint(seed), uint(seed >> 32));
  Strip scores;
  for (uint j = 0; j < 4; j++) {
    float score = max(logits.x[j] * inverse + gumbel(noise.word[j]), -3.402823466e38f);
    scores.x[j] = logits.x[j] == -INFINITY ? -INFINITY : score;
  }
  return scores;
}
