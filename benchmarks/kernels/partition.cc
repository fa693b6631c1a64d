// Algorithm 1 of Zen on threads, with compare-and-swap: what the kernels are held against on
// a CPU. Compiled by `benchmarks.kernels` where there is a C++ compiler.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

uint32_t rotate(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// MurmurHash3 of four bytes.
uint32_t hash(uint32_t key, uint32_t seed) {
  uint32_t h = seed ^ (rotate(key * 0xCC9E2D51u, 15) * 0x1B873593u);
  h = (rotate(h, 13) * 5 + 0xE6546B64u) ^ 4;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

}  // namespace

// Fills memory [parts][slots + serial], -1 where nothing is, and counts [parts]; returns how
// many found no place.
extern "C" int64_t partition(const int32_t* indices, int64_t count, const uint32_t* seeds,
                             int32_t parts, int32_t hashes, int32_t slots, int32_t serial,
                             int32_t threads, int32_t* memory, int32_t* counts) {
  const int64_t room = slots + serial;
  std::atomic<int64_t> left{0};
  auto run = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const uint32_t part = hash(indices[i], seeds[0]) % parts;
      int32_t* own = memory + part * room;
      bool placed = false;
      for (int k = 1; k <= hashes && !placed; ++k) {
        int32_t empty = -1;
        std::atomic_ref<int32_t> slot(own[hash(indices[i], seeds[k]) % slots]);
        placed = slot.compare_exchange_strong(empty, indices[i], std::memory_order_relaxed);
      }
      if (placed) continue;
      const int32_t ticket = std::atomic_ref<int32_t>(counts[part])++;
      if (ticket < serial) {
        own[slots + ticket] = indices[i];
      } else {
        ++left;
      }
    }
  };
  for (int64_t i = 0; i < parts * room; ++i) memory[i] = -1;
  for (int32_t i = 0; i < parts; ++i) counts[i] = 0;
  std::vector<std::thread> all;
  for (int32_t t = 0; t < threads; ++t) {
    all.emplace_back(run, count * t / threads, count * (t + 1) / threads);
  }
  for (auto& one : all) one.join();
  return left;
}
