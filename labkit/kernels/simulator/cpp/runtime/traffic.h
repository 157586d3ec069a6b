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
  uint32_t& number = launch.site_of_access[key];
  if (!number) {
    Site s{};
    s.pc = pc; s.buffer = buffer; s.storage = storage; s.write = write;
    launch.sites.push_back(s);
    number = launch.sites.size();
  }
  known_key = key;
  return known_site = number - 1;
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

// Lanes that took different ways: the n-th execution of a load or store in each of them is one request.
inline void count_divergent(const Lane* const* active, int n) {
  typedef std::vector<uint32_t> Numbers;
  Numbers executed, first(launch.sites.size() + 1);  // first[s]: the number of site s's first request
  auto for_accesses = [&](auto visit) {
    for (int i = 0; i < n; i++) {
      executed.assign(launch.sites.size(), 0);
      for (const Access& a : active[i]->log) visit(a, executed[a.site]++);
    }
  };
  auto running_sums = [](Numbers& v) { for (size_t i = 1; i < v.size(); i++) v[i] += v[i - 1]; };
  for_accesses([&](const Access& a, uint32_t nth) { first[a.site + 1] = std::max(first[a.site + 1], nth + 1); });
  running_sums(first);
  Numbers end(first.back() + 1);  // where the accesses of a request lie: first how many, then their end
  for_accesses([&](const Access& a, uint32_t nth) { end[first[a.site] + nth + 1]++; });
  running_sums(end);
  std::vector<const Access*> ordered(end.back());
  Numbers next(end);
  for_accesses([&](const Access& a, uint32_t nth) { ordered[next[first[a.site] + nth]++] = &a; });
  for (size_t r = 0; r + 1 < end.size(); r++) count_request(&ordered[end[r]], end[r + 1] - end[r]);
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
  if (!same) count_divergent(active, n);
  for (size_t k = 0; same && k < length; k++) {
    for (int i = 0; i < n; i++) request[i] = &active[i]->log[k];
    count_request(request, n);
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
