#include "emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

Index threadIdx, blockIdx, gridDim;

namespace emulated {

Run run;

namespace {

constexpr int kMostThreads = 1024, kLanes = 32;
constexpr size_t kStackBytes = 256 << 10;

// Threads that wait for each other, with a word each. Those of the next turn may come before all have read this one's.
struct Meeting {
  int wanted, arrived = 0;
  const char* operation = nullptr;
  uint64_t turn = 0;
  std::vector<uint64_t> words[2];

  explicit Meeting(int threads) : wanted(threads) {
    for (auto& of_turn : words) of_turn.assign(threads, 0);
  }
  void end_turn() {
    arrived = 0;
    ++turn;
    std::fill(words[turn % 2].begin(), words[turn % 2].end(), 0);
  }
};

struct Fiber {
  std::unique_ptr<Guarded> stack;
  jmp_buf at;
  bool started = false, exited = false;
  const Meeting* waits_in = nullptr;  // for the end of this turn
  uint64_t turn = 0;

  bool can_run() const { return !exited && (waits_in == nullptr || waits_in->turn != turn); }
};

Fiber fibers[kMostThreads];
jmp_buf scheduler;
std::vector<Meeting> meetings;  // of the block, then of its warps
const std::function<void()>* body;
std::unique_ptr<Guarded> dynamic;
std::mt19937_64 generator;

Fiber& current() { return fibers[threadIdx.x]; }

// swapcontext would do, but asks the system for the signals of each: it only makes stacks here.
void leave() {
  if (_setjmp(current().at) == 0) _longjmp(scheduler, 1);
}

void run_fiber() {
  while (true) {
    (*body)();
    current().exited = true;
    leave();
  }
}

void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  if (!fiber.stack) fiber.stack = std::make_unique<Guarded>(kStackBytes, 64);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack->at();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_fiber, 0);
  setcontext(&context);
}

const uint64_t* meet(Meeting& meeting, int place, const char* operation, uint64_t word) {
  if (!run.failure.empty()) leave();
  if (meeting.arrived > 0 && std::strcmp(meeting.operation, operation) != 0)
    fail(std::string("waits at ") + operation + " for a thread that waits at " + meeting.operation);
  meeting.operation = operation;
  const uint64_t turn = meeting.turn;
  uint64_t* const words = meeting.words[turn % 2].data();
  words[place] = word;
  if (++meeting.arrived == meeting.wanted) {
    meeting.end_turn();
  } else {
    current().waits_in = &meeting;
    current().turn = turn;
    leave();
  }
  return words;
}

void fail_stuck(int threads) {
  std::map<std::string, int> waiting;
  for (int t = 0; t < threads; ++t)
    if (!fibers[t].exited && fibers[t].waits_in) ++waiting[fibers[t].waits_in->operation];
  std::string what = "nobody can go on:";
  for (const auto& [operation, count] : waiting) what += " " + std::to_string(count) + " wait at " + operation;
  fail(what);
}

void run_block(const std::vector<int>& order) {
  const auto threads = static_cast<int>(order.size());
  meetings.assign(1, Meeting(threads));
  meetings.insert(meetings.end(), threads / kLanes, Meeting(kLanes));
  for (int t = 0; t < threads; ++t) fibers[t].exited = false, fibers[t].waits_in = nullptr;
  Meeting& block = meetings[0];
  for (bool ran = true; ran && run.failure.empty();) {
    ran = false;
    for (int t : order) {
      if (!fibers[t].can_run()) continue;
      ran = true;
      fibers[t].waits_in = nullptr;
      threadIdx.x = t;
      resume(fibers[t]);
      if (fibers[t].exited && --block.wanted > 0 && block.arrived == block.wanted) block.end_turn();
    }
  }
  if (block.wanted == 0) return;
  fail_stuck(threads);
  for (Fiber& fiber : fibers) fiber.started = false;  // what they had begun is left
}

std::vector<int> make_order(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (run.order == Order::kDescending) std::reverse(order.begin(), order.end());
  if (run.order == Order::kShuffled) std::shuffle(order.begin(), order.end(), generator);
  return order;
}

}  // namespace

void fail(const std::string& what) {
  if (run.failure.empty())
    run.failure = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ": " + what;
}

void seed_random(uint64_t seed) { generator.seed(seed); }
uint64_t random_word() { return generator(); }

Guarded::Guarded(size_t bytes, size_t alignment) : bytes_(bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inner = (bytes + page - 1) / page * page;
  pages_ = inner + 2 * page;
  void* const all = mmap(nullptr, pages_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  base_ = static_cast<char*>(all);
  if (all == MAP_FAILED || mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  at_ = base_ + page + (inner - bytes) / alignment * alignment;
}

Guarded::~Guarded() { munmap(base_, pages_); }

void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  if (threads > kMostThreads || threads % kLanes != 0) return fail("such blocks are not emulated");
  body = &kernel;
  dynamic = std::make_unique<Guarded>(shared_bytes, 128);
  gridDim.x = blocks;
  for (int b : make_order(blocks)) {
    if (!run.failure.empty()) return;
    ++run.blocks;
    blockIdx.x = b;
    poison(dynamic->at(), shared_bytes);
    if (run.block_starts) run.block_starts();
    run_block(make_order(threads));
  }
  ++run.launches;
}

const uint64_t* meet_warp(const char* operation, uint64_t word) {
  return meet(meetings[1 + threadIdx.x / kLanes], threadIdx.x % kLanes, operation, word);
}
const uint64_t* meet_block(const char* operation, uint64_t word) {
  return meet(meetings[0], threadIdx.x, operation, word);
}
int threads_of_block() { return static_cast<int>(meetings[0].words[0].size()); }

void give_way() { leave(); }

void may_give_way() {
  if (run.order == Order::kShuffled && random_word() % 4 == 0) leave();
}

void grid_wait() {
  leave();  // or the others would see what this one waited for
  if (run.grid_waits) run.grid_waits();
}

char* dynamic_memory() { return dynamic->at(); }

}  // namespace emulated
