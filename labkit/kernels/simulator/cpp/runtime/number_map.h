// A map from numbers other than 0 that nothing is taken out of: open addressing, at most half full. The library's own
// maps would be a third of what compiling the runtime costs, and the reason to link every kernel with that library.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace lk {

template <class Value> class NumberMap {
  struct Slot { uint64_t key; Value value; };
  std::vector<Slot> slots;  // a power of two
  size_t count = 0;

  // Where `key` is, or where it would go.
  Slot& slot(uint64_t key) {
    size_t last = slots.size() - 1, k = (key * 0x9E3779B97F4A7C15ull >> 32) & last;
    while (slots[k].key && slots[k].key != key) k = (k + 1) & last;
    return slots[k];
  }

 public:
  // The value of `key`, or nullptr.
  Value* find(uint64_t key) {
    if (slots.empty()) return nullptr;
    Slot& s = slot(key);
    return s.key ? &s.value : nullptr;
  }

  // The value of `key`; a new key has Value{}.
  Value& operator[](uint64_t key) {
    if (2 * count >= slots.size()) {
      std::vector<Slot> old(slots.empty() ? 16 : 2 * slots.size());
      old.swap(slots);
      for (Slot& s : old) if (s.key) std::swap(slot(s.key), s);
    }
    Slot& s = slot(key);
    if (!s.key) { s.key = key; count++; }
    return s.value;
  }

  template <class Visit> void for_each_key(Visit visit) const {
    for (const Slot& s : slots) if (s.key) visit(s.key);
  }

  void clear() {
    slots.clear();
    count = 0;
  }
};

}  // namespace lk
