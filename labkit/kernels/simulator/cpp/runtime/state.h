// What the runtime knows while a launch runs: lanes (one fiber each), simdgroups, threadgroups, and the launch itself.
#pragma once

#include <algorithm>
#include <vector>

#include "context_switch.h"
#include "interface.h"
#include "number_map.h"

namespace lk {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint32_t kMaxThreads = 1024, kWidth = 32;

// A lane is READY or waits: for its simdgroup, for its threadgroup, for the traffic log to be emptied, for another
// thread to change an atomic it polls; or it is done.
enum LaneState : uint8_t { kReady, kInSimd, kInBarrier, kLogFull, kSpinning, kDone };

struct Access { uint64_t address; uint32_t site; uint16_t bytes; uint8_t write, buffer; };

struct Lane {
  Context context;
  uint32_t index;  // in the threadgroup
  uint8_t lane;
  LaneState state;
  uint8_t exchange;  // which slot set the last simdgroup operation used
  int operation, line;
  uint32_t flags, mask;
  Reduce reduce;
  Attributes attributes;
  std::vector<Access> log;
};

// Slot sets 0 and 1 alternate between operations that every live lane takes part in; the others serve divergent ones.
constexpr int kSlotSets = 18;
struct Simdgroup {
  Lane* lanes;
  uint32_t all, ready, done, waiting, in_barrier, spinning;
  int slot_set, next_partial;
  uint32_t threadgroup_epoch, device_epoch;
  alignas(64) char slots[kSlotSets][kWidth][64];
  alignas(64) char combined[kSlotSets][64];
};

// Who touched a piece of memory last; threadgroup 0 means nobody, so indices are stored plus one.
struct Toucher {
  uint32_t threadgroup, epoch, simd_epoch, stamp, site;
  uint16_t thread;
  uint8_t mask, atomic;
};
struct Cell { Toucher write, reads[2]; };

// Vector clock: for each threadgroup, up to which of its stamps its device accesses are known to have happened.
typedef std::vector<uint32_t> Clock;

struct Threadgroup {
  uint32_t index, thread_count, simd_count;
  bool finished;
  Lane* lanes;
  Simdgroup* simdgroups;
  uint32_t threadgroup_epoch, device_epoch, stamp;
  Clock clock, published;
  NumberMap<bool> acquired;                // atomics read since the last device fence
  std::vector<char> storage;               // threadgroup memory while another threadgroup runs (resident mode)
  Cell* shadow;                            // one cell per byte of threadgroup memory
};

struct TrackedBuffer {
  char* data;
  uint64_t bytes;
  uint32_t granule, kind;
  Cell* cells;                             // outputs only: an input that is written stops the launch
  std::vector<uint64_t> written_bits, lines[2];
};

// A write that races with another write, seen before it happens: a race only if it changes what the other one left.
struct DoubtfulWrite { Fault fault; const volatile char* address; uint32_t bytes; char before[16]; };

struct Launch {
  const Request* request;
  Result* result;
  bool check, resident, aborted, spin_seen;
  uint32_t order;
  uint64_t random;
  uint64_t progress;                       // grows whenever something happens that a polling thread may wait for
  Threadgroup* group;
  Simdgroup* simdgroup;
  Lane* lane;                              // nullptr outside of the kernel's code
  Context main_context;
  char *private_begin, *private_end;       // fiber stacks and simdgroup slots: never checked
  char *storage_begin, *storage_end;       // all threadgroup arrays with their gaps
  DoubtfulWrite doubtful;                  // address is nullptr when there is none
  std::vector<TrackedBuffer> buffers;
  std::vector<Site> sites;
  NumberMap<uint32_t> site_of_access;      // by instruction and buffer: sites are counted from 1 here
  std::pair<uint64_t, uint32_t> recent_sites[256];  // the same, for most look-ups
  NumberMap<Clock> atomic_clocks;
};

static Launch launch;
static volatile bool stop_requested;

inline uint32_t next_random() {
  launch.random = launch.random * 6364136223846793005ull + 1442695040888963407ull;
  return launch.random >> 33;
}

enum Order { kForward, kReverse, kShuffled };

// The lane that runs next: in a ring upwards, downwards, or any.
inline int pick_lane(uint32_t ready, int after) {
  if (launch.order == kForward) {
    uint32_t higher = after >= 31 ? 0 : ready & ~((2u << after) - 1);
    return __builtin_ctz(higher ? higher : ready);
  }
  if (launch.order == kReverse) {
    uint32_t lower = after < 0 || after > 31 ? 0 : ready & ((1u << after) - 1);
    return 31 - __builtin_clz(lower ? lower : ready);
  }
  int skip = next_random() % __builtin_popcount(ready);
  while (skip--) ready &= ready - 1;
  return __builtin_ctz(ready);
}

inline void enter(Lane* lane) { launch.lane = lane; launch.result->counters.switches++; }
inline void switch_to(Lane* from, Lane* to) { enter(to); switch_context(from->context, to->context); }
inline void leave_to_scheduler(Lane* from) { switch_context(from->context, launch.main_context); }

[[noreturn]] inline void abort_launch() {
  launch.aborted = true;
  Lane* me = launch.lane;
  launch.lane = nullptr;
  leave_to_scheduler(me);
  __builtin_unreachable();
}

// A fault at the place described by `f`; the same fault of the same instruction or line is only counted again.
inline void report(Fault f) {
  Result& r = *launch.result;
  for (int i = 0; i < r.fault_count; i++) {
    Fault& g = r.faults[i];
    if (g.kind == f.kind && g.pc == f.pc && g.line == f.line && g.buffer == f.buffer && g.storage == f.storage) { g.count++; return; }
  }
  if (r.fault_count == kMaxFaults) return;
  f.count = 1;
  if (launch.lane) { f.thread = launch.lane->index; f.threadgroup = launch.group->index; }
  r.faults[r.fault_count++] = f;
}

inline Fault fault_at_line(uint32_t kind, int line) {
  Fault f{};
  f.kind = kind; f.line = line; f.buffer = f.storage = -1;
  return f;
}

inline Fault fault_at_access(uint32_t kind, uint64_t pc, int buffer, int storage, int64_t byte, uint32_t size) {
  Fault f{};
  f.kind = kind; f.pc = pc; f.buffer = buffer; f.storage = storage; f.byte = byte; f.size = size;
  return f;
}

}  // namespace lk
