// A thread takes one word of one token's row, and the scale and bias of its group. Rows that the matrix does not have are not read.
constexpr uint PER_WORD = 32 / BITS, WORDS = K / PER_WORD;
uint row = thread_position_in_grid.x / WORDS, word = thread_position_in_grid.x % WORDS;
if (row < uint(count)) {
  int64_t token = static_cast<int64_t>(tokens[row]);
  if (token < 0) token += N;
  float q[PER_WORD];
  if (token < 0 || token >= N) {
    for (uint i = 0; i < PER_WORD; i++) q[i] = NAN;
  } else {
    size_t line = static_cast<size_t>(token), group = line * (K / GROUP) + word * PER_WORD / GROUP;
    unpack_word<BITS>(w[line * WORDS + word], q);
    float scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
    for (uint i = 0; i < PER_WORD; i++) q[i] = scale * q[i] + bias;
  }
  for (uint i = 0; i < PER_WORD; i += 4) Values<4, T>::store(y + size_t(row) * K + word * PER_WORD + i, q + i);
}
