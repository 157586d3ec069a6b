// Every load and store of the kernel comes here in check mode: the compiler's thread sanitizer calls these hooks, and no
// sanitizer library is linked. So casts, pointer arithmetic and references in the Metal text need no changes.
#pragma once
#include "race_detector.h"
#include "scheduler.h"

// The ends of this library's image, which hold the kernel's constant tables.
#ifdef __APPLE__
extern char lk_image_begin[] __asm("segment$start$__TEXT");
extern char lk_image_end[] __asm("segment$end$__DATA");
#else
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));
#define lk_image_begin __ehdr_start
#define lk_image_end _end
#endif

namespace lk {

inline bool inside(uint64_t a, const char* begin, const char* end) { return a >= (uint64_t)begin && a < (uint64_t)end; }

[[noreturn]] inline void stop_at(Fault f) {
  report(f);
  abort_launch();
}

inline void check_threadgroup_access(uint64_t a, uint32_t n, bool write, bool atomic, uint64_t pc) {
  Counters& count = launch.result->counters;
  int nearest = 0;  // of a stray address: the array that ends before it
  for (int i = 0; i < lk_storage_count; i++) {
    const Storage& s = lk_storage[i];
    if (a >= (uint64_t)s.begin && (lk_storage[nearest].begin <= s.begin || a < (uint64_t)lk_storage[nearest].begin)) nearest = i;
    if (!inside(a, s.begin, s.end)) continue;
    if (a + n > (uint64_t)s.end) break;
    (write ? count.threadgroup_written : count.threadgroup_read) += n;
    uint32_t site = site_index(pc, -1, i, write);
    launch.sites[site].bytes += n;
    launch.sites[site].accesses++;
    uint64_t first = a - (uint64_t)launch.storage_begin;
    Cell* cells = launch.group->shadow;
    if (!write)
      for (uint32_t k = 0; k < n; k++)
        if (cells[first + k].write.threadgroup != launch.group->index + 1) {
          report(fault_at_access(kUninitialisedRead, pc, -1, i, a - (uint64_t)s.begin, n));
          break;
        }
    for (uint32_t k = 0; k < n; k++) check_order(cells[first + k], (const void*)a, a - (uint64_t)s.begin + k, 1, write, atomic, site, -1, i, n);
    return;
  }
  stop_at(fault_at_access(write ? kOutOfBoundsWrite : kOutOfBoundsRead, pc, -1, nearest, (int64_t)(a - (uint64_t)lk_storage[nearest].begin), n));
}

inline void check_output_access(TrackedBuffer& b, int index, uint64_t offset, uint32_t n, bool write, bool atomic, uint64_t pc, uint32_t site) {
  if (b.kind == kOutput && !write)
    for (uint64_t k = offset; k < offset + n; k++)
      if (!(b.written_bits[k / 64] >> (k & 63) & 1)) { report(fault_at_access(kUninitialisedRead, pc, index, -1, offset, n)); break; }
  if (write) for (uint64_t k = offset; k < offset + n; k++) b.written_bits[k / 64] |= 1ull << (k & 63);
  uint32_t g = b.granule;
  for (uint64_t at = offset; at < offset + n;) {
    uint64_t cell = at / g, end = std::min<uint64_t>(offset + n, (cell + 1) * g);
    uint8_t mask = 0;
    for (; at < end; at++) mask |= 1u << (at % g);
    check_order(b.cells[cell], b.data + offset, cell * g, mask, write, atomic, site, index, -1, n);
  }
}

inline void access(const volatile void* p, uint32_t n, bool write, uint64_t pc, bool atomic, bool aligned) {
  if (!launch.check || !launch.lane) return;
  settle_doubtful_write();
  if (__builtin_expect(stop_requested, 0)) stop_at(fault_at_line(kStopped, launch.lane->line));
  uint64_t a = (uint64_t)p;
  if (inside(a, launch.private_begin, launch.private_end)) return;
  if (aligned && n > 1 && a % n) stop_at(fault_at_access(kMisaligned, pc, -1, -1, a, n));
  if (inside(a, launch.storage_begin, launch.storage_end)) { check_threadgroup_access(a, n, write, atomic, pc); return; }
  size_t count = launch.buffers.size(), nearest = 0;
  uint64_t distance = ~0ull;
  for (size_t i = 0; i < count; i++) {
    TrackedBuffer& b = launch.buffers[i];
    uint64_t begin = (uint64_t)b.data, end = begin + b.bytes;
    if (a >= begin && a + n <= end) {
      if (write && b.kind == kInput) stop_at(fault_at_access(kWriteToInput, pc, i, -1, a - begin, n));
      uint32_t site = site_index(pc, i, -1, write);
      if (b.cells) check_output_access(b, i, a - begin, n, write, atomic, pc, site);
      count_access(i, a - begin, n, write, site);
      if (launch.lane->log.size() >= kLogCapacity) wait_as(kLogFull, &Simdgroup::waiting);
      return;
    }
    uint64_t d = a < begin ? begin - a : a - end + 1;
    if (d < distance) { distance = d; nearest = i; }
  }
  if (inside(a, lk_image_begin, lk_image_end)) return;  // constant tables of the kernel
  bool known = count && distance <= 1ull << 35;
  Fault f = fault_at_access(write ? kOutOfBoundsWrite : kOutOfBoundsRead, pc, known ? (int)nearest : -1, -1,
                            known ? (int64_t)(a - (uint64_t)launch.buffers[nearest].data) : 0, n);
  f.address = a;
  stop_at(f);
}

}  // namespace lk

#define LK_PC ((uint64_t)__builtin_return_address(0))
#define LK_HOOKS(N) \
  extern "C" void __tsan_read##N(void* a) { lk::access(a, N, false, LK_PC, false, true); } \
  extern "C" void __tsan_write##N(void* a) { lk::access(a, N, true, LK_PC, false, true); } \
  extern "C" void __tsan_unaligned_read##N(void* a) { lk::access(a, N, false, LK_PC, false, false); } \
  extern "C" void __tsan_unaligned_write##N(void* a) { lk::access(a, N, true, LK_PC, false, false); } \
  extern "C" void __tsan_read_write##N(void* a) { lk::access(a, N, false, LK_PC, false, true); lk::access(a, N, true, LK_PC + 1, false, true); } \
  extern "C" void __tsan_volatile_read##N(void* a) { lk::access(a, N, false, LK_PC, false, true); } \
  extern "C" void __tsan_volatile_write##N(void* a) { lk::access(a, N, true, LK_PC, false, true); }
LK_HOOKS(1) LK_HOOKS(2) LK_HOOKS(4) LK_HOOKS(8) LK_HOOKS(16)
extern "C" void __tsan_read_range(void* a, size_t n) { if (n) lk::access(a, n, false, LK_PC, false, false); }
extern "C" void __tsan_write_range(void* a, size_t n) { if (n) lk::access(a, n, true, LK_PC, false, false); }
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
extern "C" void* __tsan_memset(void* p, int c, size_t n) { if (n) lk::access(p, n, true, LK_PC, false, false); return memset(p, c, n); }
extern "C" void* __tsan_memcpy(void* d, const void* s, size_t n) {
  if (n) { lk::access(s, n, false, LK_PC, false, false); lk::access(d, n, true, LK_PC + 1, false, false); }
  return memcpy(d, s, n);
}
extern "C" void* __tsan_memmove(void* d, const void* s, size_t n) {
  if (n) { lk::access(s, n, false, LK_PC, false, false); lk::access(d, n, true, LK_PC + 1, false, false); }
  return memmove(d, s, n);
}

extern "C" void lk_atomic_before(const volatile void* p, unsigned bytes, int kind, void* pc) {
  using namespace lk;
  launch.result->counters.atomics++;
  if (kind != kAtomicStore) access(p, bytes, false, (uint64_t)pc, true, true);
  if (kind != kAtomicLoad) access(p, bytes, true, (uint64_t)pc + (kind == kAtomicUpdate), true, true);
}

// An atomic that changes nothing may be a poll: let the other threads run before the next look.
extern "C" void lk_atomic_after(const volatile void* p, int kind, bool changed) {
  using namespace lk;
  Threadgroup& g = *launch.group;
  if (launch.check) {
    if (kind != kAtomicStore && launch.atomic_clocks.find((uint64_t)p)) g.acquired[(uint64_t)p] = true;
    if (kind != kAtomicLoad && !g.published.empty()) join(launch.atomic_clocks[(uint64_t)p], g.published);
  }
  if (changed) launch.progress++;
  else wait_as(kSpinning, &Simdgroup::spinning);
}

extern "C" void lk_inactive_lane(uint32_t source, int line) {
  using namespace lk;
  if (!launch.check) return;
  Fault f = fault_at_line(kInactiveLane, line);
  f.other_thread = source;
  report(f);
}
