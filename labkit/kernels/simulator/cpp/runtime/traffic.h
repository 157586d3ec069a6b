// Counts what a kernel reads and writes, as a memory system sees it: the 32 lanes' n-th execution of one load or store is
// one request, and costs the 128-byte lines and 32-byte sectors that it touches. Lanes that read different buffers there
// make a request to each.
//
// Each lane logs its accesses; when no lane of the simdgroup can go on, the logs are laid side by side and emptied.
#pragma once
#include "state.h"

namespace lk {

constexpr uint64_t kLineBytes = 128, kSectorBytes = 32;
constexpr size_t kLogCapacity = 2048;

inline uint32_t site_index(uint64_t pc, int buffer, int storage, bool write) {
  uint64_t key = pc | uint64_t(buffer + 1) << 48;  // code lies in the low 47 bits
  auto& [known_key, known_site] = launch.recent_sites[(pc + buffer) % std::size(launch.recent_sites)];
  if (known_key == key) return known_site;
  auto [it, fresh] = launch.site_of_access.try_emplace(key, launch.sites.size());
  if (fresh) {
    Site s{};
    s.pc = pc; s.buffer = buffer; s.storage = storage; s.write = write;
    launch.sites.push_back(s);
  }
  known_key = key;
  return known_site = it->second;
}

// Distinct blocks of `block` bytes under the accesses of one request.
inline uint32_t distinct_blocks(const Access* const* a, int n, uint64_t block) {
  uint64_t seen[2 * kWidth + 2];
  uint32_t count = 0;
  for (int i = 0; i < n; i++) {
    uint64_t last = (a[i]->address + a[i]->bytes - 1) / block;
    for (uint64_t b = a[i]->address / block; b <= last; b++) {
      uint32_t k = count;
      while (k && seen[k - 1] != b) k--;
      if (!k && count < 2 * kWidth + 2) seen[count++] = b;
    }
  }
  return count;
}

inline void count_request(const Access* const* a, int n) {
  uint32_t lines = distinct_blocks(a, n, kLineBytes), sectors = distinct_blocks(a, n, kSectorBytes);
  BufferCount& b = launch.result->buffers[a[0]->buffer];
  Site& s = launch.sites[a[0]->site];
  int w = a[0]->write;
  b.requests[w]++; b.lines[w] += lines; b.sectors[w] += sectors;
  s.requests++; s.lines += lines; s.sectors += sectors;
}

inline void empty_logs(Simdgroup& s) {
  const Lane* active[kWidth];
  int n = 0;
  bool same = true;
  for (uint32_t i = 0; i < kWidth; i++)
    if (s.all >> i & 1 && !s.lanes[i].log.empty()) {
      active[n++] = &s.lanes[i];
      same &= s.lanes[i].log.size() == active[0]->log.size();
    }
  if (!n) return;
  size_t length = active[0]->log.size();
  for (int i = 1; same && i < n; i++)
    for (size_t k = 0; same && k < length; k++) same = active[i]->log[k].site == active[0]->log[k].site;
  const Access* request[kWidth];
  if (same) {
    for (size_t k = 0; k < length; k++) {
      for (int i = 0; i < n; i++) request[i] = &active[i]->log[k];
      count_request(request, n);
    }
  } else {  // lanes took different ways: line up the n-th execution of each instruction
    std::map<uint64_t, std::vector<const Access*>> requests;
    for (int i = 0; i < n; i++) {
      std::map<uint32_t, uint64_t> executed;
      for (const Access& a : active[i]->log) requests[(uint64_t)a.site << 32 | executed[a.site]++].push_back(&a);
    }
    for (auto& r : requests) count_request(r.second.data(), r.second.size());
  }
  for (uint32_t i = 0; i < kWidth; i++) if (s.all >> i & 1) s.lanes[i].log.clear();
}

inline void count_access(int buffer, uint64_t offset, uint32_t bytes, bool write, uint32_t site) {
  launch.result->buffers[buffer].bytes[write] += bytes;
  launch.sites[site].bytes += bytes;
  launch.sites[site].accesses++;
  std::vector<uint64_t>& touched = launch.buffers[buffer].lines[write];
  for (uint64_t l = offset / kLineBytes; l <= (offset + bytes - 1) / kLineBytes; l++) touched[l / 64] |= 1ull << (l & 63);
  launch.lane->log.push_back({offset, site, (uint16_t)bytes, write, (uint8_t)buffer});
}

}  // namespace lk
