// One row's share of a fingerprint (fingerprint.cpp): a hash of each 8-byte word and of its place, added up.

#pragma once

#include <cstdint>
#include <cstring>

namespace vocabshard::cpu {
namespace {

constexpr int64_t kWordBytes = 8;

uint64_t word_hash(uint64_t x, uint64_t key) {
  const uint64_t y = x ^ key;
  return (y & 0xffffffffu) * (y >> 32) + (x << 32 | x >> 32);
}

uint64_t row_hash(const unsigned char* row, int64_t bytes, uint64_t key, const uint64_t* columns) {
  const int64_t words = bytes / kWordBytes;
  uint64_t sum = 0;
  for (int64_t w = 0; w < words; ++w) {
    uint64_t x;
    std::memcpy(&x, row + w * kWordBytes, kWordBytes);
    sum += word_hash(x, key + columns[w]);
  }
  if (bytes % kWordBytes) {  // the last word is filled up with zeros
    uint64_t x = 0;
    std::memcpy(&x, row + words * kWordBytes, static_cast<size_t>(bytes % kWordBytes));
    sum += word_hash(x, key + columns[words]);
  }
  return sum;
}

}  // namespace
}  // namespace vocabshard::cpu
