// Worker threads of one call, the floating-point environment they compute in, and aligned scratch memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace vocabshard::cpu {

// Round to nearest, subnormals kept, exceptions masked; the caller's modes come back at the end.
class PlainFloat {
 public:
  PlainFloat();
  ~PlainFloat();
  PlainFloat(const PlainFloat&) = delete;
  PlainFloat& operator=(const PlainFloat&) = delete;

 private:
  alignas(8) unsigned char saved_[64];
};

constexpr int kMaxThreads = 64;  // bounds the scratch memory of all workers together

// Threads that live as long as one call. The caller is worker 0. Which worker runs a task must not matter.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }
  // task(i, worker) for all i in [0, tasks), and returns when all are done. Tasks must not throw.
  void run(int64_t tasks, const std::function<void(int64_t, int)>& task);

 private:
  void drain(int worker);
  void serve(int worker);

  PlainFloat float_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::atomic<int64_t> next_{0};
  const std::function<void(int64_t, int)>* task_ = nullptr;
  int64_t tasks_ = 0, round_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

// Uninitialised, 64-byte aligned.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(count < 1 ? 1 : count) * sizeof(T), std::align_val_t(64)))) {}
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(T* x) const { ::operator delete(x, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Free> data_;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

}  // namespace vocabshard::cpu
