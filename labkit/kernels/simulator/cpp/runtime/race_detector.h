// Finds accesses that nothing orders, by Metal's rules:
//  * a threadgroup_barrier orders the memory named by its flags among the threads of a threadgroup; mem_none orders nothing;
//  * a simdgroup_barrier does so among the lanes of a simdgroup; simdgroup operations order no memory;
//  * threadgroups are ordered only by an atomic that one changes after, and another reads before, a fence or barrier with
//    mem_device (a grid-wide barrier, "the last threadgroup reduces");
//  * two atomic accesses never race, nor do two writes of the same value.
#pragma once
#include "state.h"

namespace lk {

inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

// What other threadgroups published before the atomics that this one has read is now known here; what this one did so far
// is published with the next atomic that it changes.
inline void device_fence(Threadgroup& g) {
  g.acquired.for_each_key([&](uint64_t a) { join(g.clock, launch.atomic_clocks[a]); });
  g.acquired.clear();
  g.published = g.clock;
  if (g.published.size() <= g.index) g.published.resize(g.index + 1, 0);
  g.published[g.index] = g.stamp++;
}

// The kind of race between a recorded access and one that runs now, or 0.
inline uint32_t conflict(const Toucher& past, uint8_t mask, bool atomic, bool device) {
  const Threadgroup& g = *launch.group;
  const Simdgroup& s = *launch.simdgroup;
  uint32_t me = launch.lane->index;
  if (!past.threadgroup || !(past.mask & mask) || (past.atomic && atomic)) return 0;
  uint32_t there = past.threadgroup - 1;
  if (there != g.index) {
    if (!device || (there < g.clock.size() && g.clock[there] >= past.stamp)) return 0;
    return kRaceBetweenThreadgroups;
  }
  if (past.thread == me || past.epoch != (device ? g.device_epoch : g.threadgroup_epoch)) return 0;
  if (past.thread / kWidth != me / kWidth) return kRaceBetweenSimdgroups;
  return past.simd_epoch == (device ? s.device_epoch : s.threadgroup_epoch) ? kRaceInSimdgroup : 0;
}

inline Fault race_fault(uint32_t kind, const Toucher& past, uint32_t site, int buffer, int storage, uint64_t byte, uint32_t size) {
  Fault f = fault_at_access(kind, launch.sites[site].pc, buffer, storage, byte, size);
  f.other_thread = past.thread; f.other_threadgroup = past.threadgroup - 1; f.other_pc = launch.sites[past.site].pc;
  return f;
}

// The running lane has moved on since its doubtful write: did it change the value?
inline void settle_doubtful_write() {
  DoubtfulWrite& d = launch.doubtful;
  if (!d.address) return;
  if (memcmp((const char*)d.address, d.before, d.bytes)) report(d.fault);
  d.address = nullptr;
}

inline void doubt_write(const Fault& f, const volatile void* p, uint32_t bytes) {
  DoubtfulWrite& d = launch.doubtful;
  if (d.address) return;  // one report a write
  if (bytes > sizeof d.before) { report(f); return; }
  d.fault = f; d.address = (const volatile char*)p; d.bytes = bytes;
  memcpy(d.before, (const char*)p, bytes);
}

// Two readers suffice: a third thread that writes conflicts with one of them whichever it is, if they are of two threads
// and, where possible, of two simdgroups.
inline void remember_reader(Cell& c, const Toucher& now) {
  uint32_t simd = now.thread / kWidth;
  for (Toucher& r : c.reads) {
    bool here = r.threadgroup == now.threadgroup;
    bool over = !r.threadgroup || (here && (r.epoch != now.epoch || (r.thread / kWidth == simd && r.simd_epoch != now.simd_epoch)));
    if (over || (here && r.thread == now.thread)) { r = now; return; }
  }
  if (c.reads[0].threadgroup == c.reads[1].threadgroup && c.reads[0].thread / kWidth == c.reads[1].thread / kWidth) c.reads[1] = now;
}

// Checks and records an access to one cell, part of an access to `size` bytes at `p`; `mask` says which of the cell's bytes.
inline void check_order(Cell& c, const volatile void* p, uint64_t byte, uint8_t mask, bool write, bool atomic, uint32_t site,
                        int buffer, int storage, uint32_t size) {
  const Threadgroup& g = *launch.group;
  const Simdgroup& s = *launch.simdgroup;
  bool device = buffer >= 0;
  Toucher now{g.index + 1, device ? g.device_epoch : g.threadgroup_epoch, device ? s.device_epoch : s.threadgroup_epoch,
              g.stamp, site, (uint16_t)launch.lane->index, mask, atomic};
  auto racing = [&](const Toucher& past) {
    uint32_t race = conflict(past, mask, atomic, device);
    if (!race) return false;
    Fault f = race_fault(race, past, site, buffer, storage, byte, size);
    if (write && &past == &c.write) doubt_write(f, p, size);
    else report(f);
    return true;
  };
  if (!racing(c.write) && write && !racing(c.reads[0])) racing(c.reads[1]);
  if (!write) { remember_reader(c, now); return; }
  if (c.write.threadgroup == now.threadgroup && c.write.thread == now.thread && c.write.epoch == now.epoch) now.mask |= c.write.mask;
  c.write = now;
}

}  // namespace lk

extern "C" void lk_atomic_fence(unsigned flags) {
  if ((flags & lk::kFlagDevice) && lk::launch.check) lk::device_fence(*lk::launch.group);
}
