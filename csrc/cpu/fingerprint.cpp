// The fingerprint of a matrix: a sum of a hash of each 8-byte word and its place, so that parts add up in any order.
#include <atomic>
#include <vector>

#include "api.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace vocabshard {
namespace {

constexpr int64_t kWord = 8;

// SplitMix64's output function (Steele, Lea and Flood, 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t row_key(int64_t row) { return mix(2 * static_cast<uint64_t>(row)); }
uint64_t column_key(int64_t word) { return mix(2 * static_cast<uint64_t>(word) + 1); }

}  // namespace

uint64_t cpu_fingerprint(const void* data, int64_t rows, int64_t row_bytes, int64_t row_stride_bytes, int64_t first_row,
                         int threads) {
  std::vector<uint64_t> columns(static_cast<size_t>(cpu::ceil_div(row_bytes, kWord)));
  for (size_t w = 0; w < columns.size(); ++w) columns[w] = column_key(static_cast<int64_t>(w));
  const int64_t block = cpu::larger(1, (1 << 20) / cpu::larger(row_bytes, 1));
  std::atomic<uint64_t> total{0};
  const auto row_hash = cpu::kernels(-1).row_hash;
  cpu::Team team(threads);
  team.run(cpu::ceil_div(rows, block), [&](int64_t task, int) {
    uint64_t sum = 0;
    for (int64_t r = task * block; r < cpu::smaller(rows, (task + 1) * block); ++r)
      sum += row_hash(static_cast<const unsigned char*>(data) + r * row_stride_bytes, row_bytes, row_key(first_row + r),
                      columns.data());
    total += sum;  // integers: the order does not matter
  });
  return total;
}

}  // namespace vocabshard
