// Blocks of CUDA threads on the host, one after the other: each thread is a fiber that runs until it has to wait for
// others of its warp or block. What breaks CUDA's rules is a `failure`, or shows in results: nothing that a block or a
// grid has not written yet holds a likely value. How blocks see each other's writes is not emulated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace emulated {

// In which order blocks, and the threads of a block, come. Shuffled ones give way at atomics too.
enum class Order : int64_t { kAscending = 0, kDescending = 1, kShuffled = 2 };

// What a caller sets before a launch, and reads behind it.
struct Run {
  Order order = Order::kAscending;
  std::function<void()> block_starts, grid_waits;
  std::function<void(const int32_t*)> acquires;
  std::string failure;  // the first one
  int64_t launches = 0, blocks = 0;
};
extern Run run;

void fail(const std::string& what);
void seed_random(uint64_t seed);
uint64_t random_word();

// Memory between pages that nobody may touch, as near to the last one as `alignment` allows.
class Guarded {
 public:
  Guarded(size_t bytes, size_t alignment);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* at() const { return at_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, pages_;
  char *base_, *at_;
};

void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

// The words of all threads of this one's warp or block, once each has come with one; 0 of those that have exited.
const uint64_t* meet_warp(const char* operation, uint64_t word);
const uint64_t* meet_block(const char* operation, uint64_t word);
int threads_of_block();
void give_way();      // other threads run
void may_give_way();  // to other threads, where these are shuffled
void grid_wait();

// What nobody has written, which is not the same for every block.
inline void poison(char* at, size_t bytes) {
  constexpr int kBytes[] = {0xff, 0x7f, 0x01};
  std::memset(at, kBytes[run.blocks % 3], bytes);
}

// The variable of a block that is declared at `Where`, a type of its own.
template <class T, class Where>
T& shared(const Where&) {
  static const Guarded memory(sizeof(T), alignof(T));
  static int64_t block = -1;
  if (block != run.blocks) poison(memory.at(), memory.bytes());
  block = run.blocks;
  return *reinterpret_cast<T*>(memory.at());
}

char* dynamic_memory();
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(dynamic_memory());
}

}  // namespace emulated
