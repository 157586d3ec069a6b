//@provides Values
// VEC values of a row at a time, as floats: whole 4-vectors where rows are multiples of four, else one by one.
template <int VEC, class T>
struct Values;

template <class T>
struct Values<1, T> {
  template <class Row>
  static METAL_FUNC void load(Row row, thread float* v) {
    v[0] = static_cast<float>(row[0]);
  }
  static METAL_FUNC void store(device T* row, thread const float* v) { row[0] = static_cast<T>(v[0]); }
};

template <class T>
struct Values<4, T> {
  static METAL_FUNC void load(const device T* row, thread float* v) {
    metal::vec<T, 4> four = *(const device metal::vec<T, 4>*)row;
    for (int j = 0; j < 4; j++) v[j] = static_cast<float>(four[j]);
  }
  static METAL_FUNC void store(device T* row, thread const float* v) {
    metal::vec<T, 4> four;
    for (int j = 0; j < 4; j++) four[j] = static_cast<T>(v[j]);
    *(device metal::vec<T, 4>*)row = four;
  }
};
