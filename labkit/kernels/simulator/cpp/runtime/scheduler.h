// Runs the lanes of a simdgroup until each of them waits, and completes simdgroup operations and barriers.
//
// A lane that reaches a simdgroup operation switches straight to the next lane of its simdgroup; the last lane to arrive
// completes the operation for all and goes on. Only a simdgroup in which nobody can go on returns to the main loop.
#pragma once
#include "race_detector.h"
#include "state.h"
#include "traffic.h"

namespace lk {

inline Lane* lane_of(Simdgroup& s, int i) { return s.lanes + i; }

template <class Visit> inline void for_lanes(uint32_t mask, Visit visit) {
  for (; mask; mask &= mask - 1) visit(__builtin_ctz(mask));
}

// The lanes of `group` have all brought their values: combine them and let the lanes go.
inline void complete_operation(Simdgroup& s, uint32_t group, uint32_t live) {
  Lane& first = *lane_of(s, __builtin_ctz(group));
  int set = s.slot_set;
  if (group != live) {  // a divergent group: move its values aside, the others' stay where they are
    set = 2 + (s.next_partial++ & 15);
    memcpy(s.slots[set], s.slots[s.slot_set], sizeof s.slots[0]);
  } else {
    s.slot_set ^= 1;
  }
  if (first.reduce) first.reduce(s.slots[set][0], group, s.combined[set]);
  Counters& c = launch.result->counters;
  if (first.operation == kSimdBarrier) {
    c.simd_barriers++;
    if (first.flags & kFlagThreadgroup) s.threadgroup_epoch++;
    if (first.flags & kFlagDevice) s.device_epoch++;
  } else {
    c.simd_operations++;
  }
  for_lanes(group, [&](int i) {
    Lane& l = *lane_of(s, i);
    l.state = kReady; l.mask = group; l.exchange = set;
  });
  s.waiting &= ~group;
  s.ready |= group;
  launch.progress++;
}

// No lane of `s` is ready: complete an operation if one can be. False when only the threadgroup can help.
inline bool resolve(Simdgroup& s) {
  uint32_t live = s.all & ~s.done;
  if (launch.check) empty_logs(s);
  uint32_t log_full = 0, waiting = 0;
  for_lanes(s.waiting, [&](int i) { (lane_of(s, i)->state == kLogFull ? log_full : waiting) |= 1u << i; });
  if (log_full) {
    for_lanes(log_full, [&](int i) { lane_of(s, i)->state = kReady; });
    s.waiting &= ~log_full;
    s.ready |= log_full;
    return true;
  }
  // A lane that polls an atomic may still come to the operation the others wait in: let the main loop run it first.
  if (!waiting || s.spinning) return false;
  Lane* lowest = nullptr;  // divergent lanes: the smallest line first
  for_lanes(waiting, [&](int i) { Lane* l = lane_of(s, i); if (!lowest || l->line < lowest->line) lowest = l; });
  uint32_t group = 0;
  for_lanes(waiting, [&](int i) {
    Lane* l = lane_of(s, i);
    if (l->line == lowest->line && l->operation == lowest->operation) group |= 1u << i;
  });
  if (group != s.all && launch.check) {
    Fault f = fault_at_line(kDivergentSimd, lowest->line);
    f.mask = group; f.address = s.all;
    Lane* running = launch.lane;
    launch.lane = lowest;
    report(f);
    launch.lane = running;
  }
  complete_operation(s, group, live);
  return true;
}

// All live lanes wait in the same operation: the common case, without looking at anything else.
inline bool resolve_uniform(Simdgroup& s) {
  uint32_t live = s.all & ~s.done;
  if (s.waiting != live || !live) return false;
  Lane& first = *lane_of(s, __builtin_ctz(live));
  for (uint32_t m = live; m; m &= m - 1) {
    Lane& l = *lane_of(s, __builtin_ctz(m));
    if (l.line != first.line || l.operation != first.operation || l.state != kInSimd) return false;
  }
  complete_operation(s, live, live);
  return true;
}

// The running lane has entered a waiting state; its bit is already moved.
inline void wait(Lane* me) {
  Simdgroup& s = *launch.simdgroup;
  if (!s.ready && !((!launch.check && resolve_uniform(s)) || resolve(s))) { leave_to_scheduler(me); return; }
  if (s.ready >> me->lane & 1) return;  // the last to arrive goes on
  switch_to(me, lane_of(s, pick_lane(s.ready, me->lane)));
}

inline void wait_as(LaneState state, uint32_t Simdgroup::*bits) {
  Lane* me = launch.lane;
  Simdgroup& s = *launch.simdgroup;
  uint32_t bit = 1u << me->lane;
  if (launch.check) settle_doubtful_write();
  me->state = state;
  s.ready &= ~bit;
  s.*bits |= bit;
  if (__builtin_expect(stop_requested, 0)) { report(fault_at_line(kStopped, me->line)); abort_launch(); }
  wait(me);
}

inline void fiber_main() {
  lk_thread_main(launch.request->arguments, &launch.lane->attributes);
  launch.progress++;
  wait_as(kDone, &Simdgroup::done);
  __builtin_trap();  // a finished lane is never resumed
}

// Every thread of `g` waits in a threadgroup barrier or has ended. True if a barrier was passed.
inline bool pass_barrier(Threadgroup& g) {
  Lane* first = nullptr;
  Lane *elsewhere = nullptr, *ended = nullptr;
  for (uint32_t i = 0; i < g.thread_count; i++) {
    Lane& l = g.lanes[i];
    if (l.state != kInBarrier) { ended = &l; continue; }
    if (!first) first = &l;
    else if (l.line != first->line) elsewhere = &l;
  }
  if (!first) return false;
  launch.result->counters.barriers++;
  launch.progress++;
  auto diverged = [&](uint32_t kind, Lane* other) {
    Fault f = fault_at_line(kind, first->line);
    f.other_thread = other->index; f.other_line = kind == kDivergentBarrier ? other->line : 0;
    f.other_threadgroup = g.index;
    launch.lane = first;
    report(f);
    launch.lane = nullptr;
  };
  if (launch.check && elsewhere) diverged(kDivergentBarrier, elsewhere);
  if (launch.check && ended) diverged(kBarrierAfterExit, ended);
  if (first->flags & kFlagThreadgroup) g.threadgroup_epoch++;
  if (first->flags & kFlagDevice) {
    g.device_epoch++;
    if (launch.check) device_fence(g);
  }
  for (uint32_t i = 0; i < g.simd_count; i++) {
    Simdgroup& s = g.simdgroups[i];
    for_lanes(s.in_barrier, [&](int k) { lane_of(s, k)->state = kReady; });
    s.ready |= s.in_barrier;
    s.in_barrier = 0;
  }
  return true;
}

// Lanes that polled an atomic may look again.
inline bool wake_spinning(Threadgroup& g) {
  bool any = false;
  for (uint32_t i = 0; i < g.simd_count; i++) {
    Simdgroup& s = g.simdgroups[i];
    for_lanes(s.spinning, [&](int k) { lane_of(s, k)->state = kReady; });
    s.ready |= s.spinning;
    any |= s.spinning != 0;
    s.spinning = 0;
  }
  return any;
}

// Runs `g` until each thread waits for something outside of its simdgroup.
inline void run_simdgroups(Threadgroup& g) {
  launch.group = &g;
  uint32_t start = launch.order == kShuffled ? next_random() % g.simd_count : 0;
  for (uint32_t i = 0; i < g.simd_count; i++) {
    uint32_t k = launch.order == kReverse ? g.simd_count - 1 - i : (i + start) % g.simd_count;
    Simdgroup& s = g.simdgroups[k];
    launch.simdgroup = &s;
    while (s.ready || resolve(s)) {
      Lane* l = lane_of(s, pick_lane(s.ready, launch.order == kReverse ? 32 : -1));
      enter(l);
      switch_context(launch.main_context, l->context);
      launch.lane = nullptr;
      if (launch.aborted) return;
    }
  }
}

}  // namespace lk

extern "C" lk::Exchange lk_exchange(const void* value, size_t bytes, lk::Reduce reduce, int operation, int line) {
  using namespace lk;
  Lane* me = launch.lane;
  Simdgroup& s = *launch.simdgroup;
  char* slot = s.slots[s.slot_set][me->lane];
  switch (bytes) {  // fixed sizes become single moves
    case 2: memcpy(slot, value, 2); break;
    case 4: memcpy(slot, value, 4); break;
    case 8: memcpy(slot, value, 8); break;
    default: memcpy(slot, value, bytes);
  }
  me->operation = operation; me->line = line; me->reduce = reduce;
  wait_as(kInSimd, &Simdgroup::waiting);
  return {s.slots[me->exchange][0], s.combined[me->exchange], me->mask, me->lane};
}

extern "C" void lk_simdgroup_barrier(unsigned flags, int line) {
  lk::launch.lane->flags = flags;
  lk_exchange(nullptr, 0, nullptr, lk::kSimdBarrier, line);
}

extern "C" void lk_threadgroup_barrier(unsigned flags, int line) {
  using namespace lk;
  launch.lane->line = line;
  launch.lane->flags = flags;
  wait_as(kInBarrier, &Simdgroup::in_barrier);
}

extern "C" uint32_t lk_lane_index() { return lk::launch.lane->lane; }
