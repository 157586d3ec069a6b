// One launch: sets up threadgroups and their fibers, drives them, and gathers what was found. Compiled once per compiler
// and flags, then linked into every kernel's library.
#include <cstdlib>
#include <ctime>

#include "guard.h"
#include "memory_check.h"

// Nothing of the C++ library is linked: zig would build it first, and GNU's linker would read it whole for each kernel.
void* operator new(size_t n) { return malloc(n ? n : 1); }
void operator delete(void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
#ifdef __GLIBCXX__
namespace std {  // what its headers call beside: all of them say that memory is out, as malloc's null would
void __throw_bad_alloc() { abort(); }
void __throw_bad_array_new_length() { abort(); }
void __throw_length_error(const char*) { abort(); }
}
#endif

namespace lk {

struct Grid { uint32_t size[3], group[3], groups[3], count; };

inline Grid make_grid(const Request& r) {
  Grid g;
  for (int i = 0; i < 3; i++) {
    g.size[i] = r.grid[i];
    g.group[i] = std::min(r.threadgroup[i], r.grid[i]);
    g.groups[i] = (g.size[i] + g.group[i] - 1) / g.group[i];
  }
  g.count = g.groups[0] * g.groups[1] * g.groups[2];
  return g;
}

inline Attributes make_attributes(const Grid& g, const uint32_t at[3], const uint32_t dims[3], uint32_t i) {
  uint32_t x = i % dims[0], y = i / dims[0] % dims[1], z = i / dims[0] / dims[1];
  uint32_t here = dims[0] * dims[1] * dims[2], full = g.group[0] * g.group[1] * g.group[2];
  Attributes a;
  a.thread_position_in_threadgroup = {x, y, z};
  a.thread_position_in_grid = {at[0] * g.group[0] + x, at[1] * g.group[1] + y, at[2] * g.group[2] + z};
  a.threadgroup_position_in_grid = {at[0], at[1], at[2]};
  a.threads_per_grid = a.grid_size = {g.size[0], g.size[1], g.size[2]};
  a.grid_origin = {0, 0, 0};
  a.threads_per_threadgroup = {dims[0], dims[1], dims[2]};
  a.dispatch_threads_per_threadgroup = {g.group[0], g.group[1], g.group[2]};
  a.threadgroups_per_grid = {g.groups[0], g.groups[1], g.groups[2]};
  a.thread_index_in_threadgroup = i;
  a.thread_index_in_simdgroup = i % kWidth;
  a.simdgroup_index_in_threadgroup = i / kWidth;
  a.simdgroups_per_threadgroup = (here + kWidth - 1) / kWidth;
  a.dispatch_simdgroups_per_threadgroup = (full + kWidth - 1) / kWidth;
  a.thread_execution_width = a.threads_per_simdgroup = kWidth;
  a.thread_index_in_quadgroup = i % 4;
  a.quadgroup_index_in_threadgroup = i / 4;
  a.quadgroups_per_threadgroup = (here + 3) / 4;
  a.dispatch_quadgroups_per_threadgroup = (full + 3) / 4;
  return a;
}

// Threadgroup number `index`, with all its threads ready to start. Groups at the grid's edge are smaller, as Metal's
// dispatchThreads makes them.
inline void start(Threadgroup& t, const Grid& g, uint32_t index, Lane* lanes, Simdgroup* simdgroups, char* stacks) {
  uint32_t at[3] = {index % g.groups[0], index / g.groups[0] % g.groups[1], index / g.groups[0] / g.groups[1]}, dims[3];
  for (int i = 0; i < 3; i++) dims[i] = std::min(g.group[i], g.size[i] - at[i] * g.group[i]);
  t.index = index;
  t.thread_count = dims[0] * dims[1] * dims[2];
  t.simd_count = (t.thread_count + kWidth - 1) / kWidth;
  t.finished = false;
  t.lanes = lanes;
  t.simdgroups = simdgroups;
  t.threadgroup_epoch = t.device_epoch = t.stamp = 1;
  t.clock.clear(); t.published.clear(); t.acquired.clear();
  for (uint32_t i = 0; i < t.thread_count; i++) {
    Lane& l = lanes[i];
    l.index = i; l.lane = i % kWidth; l.state = kReady; l.line = 0; l.flags = 0; l.log.clear();
    l.attributes = make_attributes(g, at, dims, i);
    make_context(l.context, stacks + i * kStackBytes, kStackBytes, i, fiber_main);
  }
  for (uint32_t i = 0; i < t.simd_count; i++) {
    Simdgroup& s = simdgroups[i];
    uint32_t n = std::min(kWidth, t.thread_count - i * kWidth);
    s.lanes = lanes + i * kWidth;
    s.all = s.ready = n == kWidth ? ~0u : (1u << n) - 1;
    s.done = s.waiting = s.in_barrier = s.spinning = 0;
    s.slot_set = s.next_partial = 0;
    s.threadgroup_epoch = s.device_epoch = 1;
  }
  launch.result->counters.threadgroups++;
  launch.result->counters.threads += t.thread_count;
}

// Threadgroup memory starts as NaN and large negative numbers, so that a read of nothing shows in the values too.
inline void poison_storage() {
  for (int i = 0; i < lk_storage_count; i++) memset(lk_storage[i].begin, 0xFF, lk_storage[i].end - lk_storage[i].begin);
}

inline void load_storage(const Threadgroup& g) {
  for (int i = 0; i < lk_storage_count; i++) {
    const Storage& s = lk_storage[i];
    memcpy(s.begin, g.storage.data() + (s.begin - launch.storage_begin), s.end - s.begin);
  }
}

inline void save_storage(Threadgroup& g) {
  for (int i = 0; i < lk_storage_count; i++) {
    const Storage& s = lk_storage[i];
    memcpy(g.storage.data() + (s.begin - launch.storage_begin), s.begin, s.end - s.begin);
  }
}

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Nothing has happened for a long while but polls of atomics.
struct DeadlockWatch {
  uint64_t progress = 0, idle_rounds = 0;
  double since = 0;
  bool expired() {
    if (launch.progress != progress) { progress = launch.progress; idle_rounds = 0; return false; }
    if (!idle_rounds++) since = seconds_now();
    return idle_rounds > 1000 && seconds_now() - since > 0.5;
  }
};

inline void report_deadlock(Threadgroup& g) {
  for (uint32_t i = 0; i < g.simd_count; i++)
    for_lanes(g.simdgroups[i].ready, [&](int k) {
      if (launch.lane) return;
      launch.group = &g;
      launch.lane = lane_of(g.simdgroups[i], k);
      report(fault_at_line(kDeadlock, 0));
    });
  launch.lane = nullptr;
  launch.aborted = true;
}

// Runs the live threadgroups by turns until all have ended. In resident mode their threadgroup memory is swapped.
inline void drive(std::vector<Threadgroup>& live) {
  size_t left = live.size();
  bool swap = live.size() > 1;
  DeadlockWatch watch;
  while (left) {
    bool polled = false;
    for (size_t k = 0; k < live.size() && left; k++) {
      Threadgroup& g = live[launch.order == kReverse ? live.size() - 1 - k : k];
      if (g.finished) continue;
      if (swap) load_storage(g);
      bool polls;
      for (;;) {
        run_simdgroups(g);
        if (launch.aborted) return;
        polls = wake_spinning(g);
        if (polls) break;  // others may run before it looks again
        if (!pass_barrier(g)) { g.finished = true; left--; break; }
      }
      polled |= polls;
      if (swap) save_storage(g);
    }
    if (polled && watch.expired()) {
      for (Threadgroup& g : live) if (!g.finished) { report_deadlock(g); return; }
    }
  }
}

inline void run_launch(const Grid& grid, const std::vector<uint32_t>& order) {
  uint32_t threads = grid.group[0] * grid.group[1] * grid.group[2], simds = (threads + kWidth - 1) / kWidth;
  uint32_t at_once = launch.resident ? grid.count : 1;
  size_t storage = launch.storage_end - launch.storage_begin;
  static std::vector<Lane> lanes;  // kept between launches: a lane's log keeps its capacity
  if (lanes.size() < at_once * threads) lanes = std::vector<Lane>(at_once * threads);
  char* workspace = launch.request->workspace;
  // At the end, behind the stacks and their trap pages.
  Simdgroup* simdgroups = (Simdgroup*)(launch.private_end - (size_t)at_once * simds * sizeof(Simdgroup));
  std::vector<Threadgroup> live(at_once);
  std::vector<Cell*> shadows;
  for (Threadgroup& g : live) {
    g.shadow = launch.check && storage ? (Cell*)calloc(storage, sizeof(Cell)) : nullptr;
    if (g.shadow) shadows.push_back(g.shadow);
    if (at_once > 1) g.storage.assign(storage, (char)0xFF);
  }
  for (uint32_t first = 0; first < grid.count && !launch.aborted; first += at_once) {
    if (launch.check) poison_storage();
    for (uint32_t i = 0; i < at_once; i++)
      start(live[i], grid, order[first + i], lanes.data() + i * threads, simdgroups + i * simds, workspace + (size_t)i * threads * kStackBytes);
    drive(live);
  }
  for (Cell* s : shadows) free(s);
}

inline void track_buffers(const Request& r) {
  for (uint32_t i = 0; i < r.buffer_count; i++) {
    const Buffer& b = r.buffers[i];
    TrackedBuffer t{b.data, b.bytes, std::min<uint32_t>(b.itemsize, 8), b.kind, nullptr, {}, {}};
    for (auto& l : t.lines) l.assign(b.bytes / kLineBytes / 64 + 1, 0);
    if (b.kind != kInput) {
      t.cells = (Cell*)calloc(b.bytes / t.granule + 1, sizeof(Cell));
      t.written_bits.assign(b.bytes / 64 + 1, 0);
    }
    launch.buffers.push_back(std::move(t));
  }
}

inline void finish_buffers() {
  for (size_t i = 0; i < launch.buffers.size(); i++) {
    TrackedBuffer& b = launch.buffers[i];
    BufferCount& c = launch.result->buffers[i];
    for (int w = 0; w < 2; w++) for (uint64_t l : b.lines[w]) c.footprint_lines[w] += __builtin_popcountll(l);
    c.first_unwritten = ~0ull;
    if (b.kind == kOutput && !launch.aborted)
      for (uint64_t k = 0; k < b.bytes; k++)
        if (!(b.written_bits[k / 64] >> (k & 63) & 1)) { c.unwritten_bytes++; c.first_unwritten = std::min(c.first_unwritten, k); }
    free(b.cells);
  }
}

}  // namespace lk

// Runs the kernel. Not reentrant: the caller holds a lock. Returns 1 if the launch was stopped by a fault.
LK_EXPORT int lk_launch(const lk::Request* request, lk::Result* result) {
  using namespace lk;
  launch = Launch{};
  launch.request = request;
  launch.result = result;
  launch.check = request->check;
  launch.resident = request->resident;
  launch.order = request->order;
  launch.private_begin = request->workspace;
  launch.private_end = request->workspace + request->workspace_bytes;
  launch.random = request->seed;
  result->storage_count = lk_storage_count;
  for (int i = 0; i < lk_storage_count; i++) {
    const Storage& s = lk_storage[i];
    if (!i || s.section_begin < launch.storage_begin) launch.storage_begin = s.section_begin;
    if (!i || s.section_end > launch.storage_end) launch.storage_end = s.section_end;
    result->counters.threadgroup_bytes += s.end - s.begin;
  }
  Grid grid = make_grid(*request);
  std::vector<uint32_t> order(grid.count);
  for (uint32_t i = 0; i < grid.count; i++) order[i] = launch.order == kReverse ? grid.count - 1 - i : i;
  if (launch.order == kShuffled) for (uint32_t i = grid.count; i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
  if (launch.check) track_buffers(*request);
  stack_t old_stack;
  guard_signals(&old_stack);
  if (sigsetjmp(launch_entry, 1) == 0) run_launch(grid, order);
  else launch.aborted = true;
  unguard_signals(&old_stack);
  launch.lane = nullptr;
  if (launch.check) finish_buffers();
  return launch.aborted;
}

// Room for `lanes` fibers and `simdgroups`. One for all launches of a process will do, since one runs at a time.
LK_EXPORT uint64_t lk_workspace_bytes(uint64_t lanes, uint64_t simdgroups) { return lanes * lk::kStackBytes + simdgroups * sizeof(lk::Simdgroup); }

// Such room, zeroed and taken from memory only where touched. A trap page lies under each stack.
LK_EXPORT char* lk_reserve_workspace(uint64_t lanes, uint64_t bytes) {
  char* memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (lanes <= lk::kMaxThreads)  // each trap page splits a mapping, and systems allow about 65,000 of them
    for (uint64_t i = 0; i < lanes; i++) mprotect(memory + i * lk::kStackBytes, lk::page_round(1), PROT_NONE);
  return memory;
}

LK_EXPORT void lk_release_workspace(char* memory, uint64_t bytes) { munmap(memory, bytes); }

// Copies the loads and stores that the last check found, at most `room`; returns how many there are.
LK_EXPORT uint64_t lk_sites(lk::Site* out, uint64_t room) {
  for (uint64_t i = 0; i < std::min<uint64_t>(room, lk::launch.sites.size()); i++) out[i] = lk::launch.sites[i];
  return lk::launch.sites.size();
}

// Where this library lies in memory: program counters are reported relative to it in debug information.
LK_EXPORT uint64_t lk_image() { return (uint64_t)lk_image_begin; }
LK_EXPORT const lk::Storage* lk_storage_table() { return lk_storage; }
LK_EXPORT int lk_storage_size() { return lk_storage_count; }
