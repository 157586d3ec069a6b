// What the Metal vocabulary (metal/), the runtime (this folder) and Python (library.py) say to one another.
// Every struct here has a ctypes mirror in labkit/kernels/simulator/library.py: change both together.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lk {

struct Triple { uint32_t x, y, z; };

// The attributes of one thread, by Metal's names: of the grid, of its threadgroup, and its own.
struct Attributes {
  Triple grid_size, grid_origin, threads_per_grid, threadgroups_per_grid;
  Triple threadgroup_position_in_grid, threads_per_threadgroup, dispatch_threads_per_threadgroup;
  uint32_t threads_per_simdgroup, thread_execution_width;
  uint32_t simdgroups_per_threadgroup, quadgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup, dispatch_quadgroups_per_threadgroup;
  Triple thread_position_in_threadgroup, thread_position_in_grid;
  uint32_t simdgroup_index_in_threadgroup, quadgroup_index_in_threadgroup;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, thread_index_in_quadgroup;
};

// Combines what the lanes of a simdgroup brought (64 bytes a lane) into one value, once for all lanes of `mask`.
typedef void (*Reduce)(const char* slots, uint32_t mask, void* out);

// What a lane sees after a simdgroup exchange: every lane's 64 bytes, the combined value, who took part.
struct Exchange { const char* slots; const char* combined; uint32_t mask, lane; };

// Which simdgroup operation a lane waits in; lanes that meet must agree on it and on the line.
enum Operation { kSimdBarrier = 1, kReduce, kShuffle, kShuffleXor, kShuffleDown, kShuffleUp, kFill, kBroadcast, kPrefix, kVote, kMatrix };

enum BarrierFlags { kFlagDevice = 1, kFlagThreadgroup = 2 };

enum AtomicKind { kAtomicLoad, kAtomicStore, kAtomicUpdate };

// One threadgroup array of the kernel, described by the translation unit that declares it.
// It lies in a section of its own, with a gap that belongs to nobody before or behind it.
struct Storage { const char* name; char *begin, *end, *section_begin, *section_end; int line; };

enum BufferKind { kInput, kOutput, kInitialisedOutput };
struct Buffer { char* data; uint64_t bytes; uint32_t itemsize, kind; };

enum FaultKind {
  kRaceInSimdgroup = 1, kRaceBetweenSimdgroups, kRaceBetweenThreadgroups, kOutOfBoundsRead, kOutOfBoundsWrite,
  kUninitialisedRead, kWriteToInput, kDivergentBarrier, kBarrierAfterExit, kDivergentSimd, kInactiveLane, kMisaligned,
  kDeadlock, kCrash, kStopped
};

struct Fault {
  uint32_t kind, thread, threadgroup, other_thread, other_threadgroup, size, mask, signal;
  int32_t buffer, storage, line, other_line;  // buffer or storage is -1 where it does not apply
  int64_t byte;
  uint64_t pc, other_pc, count, address;
};

// One load or store instruction of the kernel, with all that went through it.
struct Site {
  uint64_t pc, bytes, requests, lines, sectors;
  int32_t buffer, storage;
  uint32_t write, accesses;
};

struct BufferCount {
  uint64_t bytes[2], requests[2], lines[2], sectors[2];  // [read, written]
  uint64_t footprint_lines[2], unwritten_bytes, first_unwritten;
};

struct Counters {
  uint64_t threadgroups, threads, barriers, simd_barriers, simd_operations, atomics, switches, threadgroup_bytes,
      threadgroup_read, threadgroup_written;
};

constexpr int kMaxFaults = 64, kMaxBuffers = 128;

struct Request {
  void** arguments;
  const Buffer* buffers;
  uint32_t buffer_count, grid[3], threadgroup[3], check, resident, order, seed;
  char* workspace;  // fiber stacks, then simdgroups; see lk_workspace_bytes
  uint64_t workspace_bytes;
};

struct Result {
  Counters counters;
  BufferCount buffers[kMaxBuffers];
  Fault faults[kMaxFaults];
  int32_t fault_count, storage_count;
};

}  // namespace lk

extern "C" {
// Called by the Metal vocabulary.
lk::Exchange lk_exchange(const void* value, size_t bytes, lk::Reduce reduce, int operation, int line);
void lk_threadgroup_barrier(unsigned flags, int line);
void lk_simdgroup_barrier(unsigned flags, int line);
void lk_atomic_fence(unsigned flags);
void lk_atomic_before(const volatile void* p, unsigned bytes, int kind, void* pc);
void lk_atomic_after(const volatile void* p, int kind, bool changed);
void lk_inactive_lane(uint32_t source, int line);

// Defined by each kernel's translation unit.
void lk_thread_main(void** arguments, const lk::Attributes* t);
extern const lk::Storage lk_storage[];
extern const int lk_storage_count;
}
