#include "cpu/threads.h"

#include <cfenv>
#include <cstring>
#include <system_error>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace vocabshard::cpu {

#if defined(__x86_64__)
constexpr unsigned kPlainMxcsr = 0x1f80;

PlainFloat::PlainFloat() {
  const unsigned mode = _mm_getcsr();
  std::memcpy(saved_, &mode, sizeof mode);
  _mm_setcsr(kPlainMxcsr);
}

PlainFloat::~PlainFloat() {
  unsigned mode;
  std::memcpy(&mode, saved_, sizeof mode);
  _mm_setcsr(mode);
}
#else
PlainFloat::PlainFloat() {
  static_assert(sizeof(std::fenv_t) <= sizeof saved_, "room for the floating-point environment");
  std::fenv_t mode;
  std::fegetenv(&mode);
  std::memcpy(saved_, &mode, sizeof mode);
  std::fesetenv(FE_DFL_ENV);
}

PlainFloat::~PlainFloat() {
  std::fenv_t mode;
  std::memcpy(&mode, saved_, sizeof mode);
  std::fesetenv(&mode);
}
#endif

Team::Team(int threads) {
  const int count = threads < 1 ? 1 : (threads > kMaxThreads ? kMaxThreads : threads);
  threads_.reserve(static_cast<size_t>(count) - 1);
  try {
    for (int worker = 1; worker < count; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
  } catch (const std::system_error&) {
    // fewer threads give the same bytes
  }
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::drain(int worker) {
  for (int64_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) (*task_)(i, worker);
}

void Team::serve(int worker) {
  PlainFloat plain;
  int64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    lock.unlock();
    drain(worker);
    lock.lock();
    if (--busy_ == 0) idle_.notify_one();
  }
}

void Team::run(int64_t tasks, const std::function<void(int64_t, int)>& task) {
  if (threads_.empty() || tasks < 2) {
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = &task;
    tasks_ = tasks;
    next_.store(0);
    busy_ = static_cast<int>(threads_.size());
    ++round_;
  }
  wake_.notify_all();
  drain(0);
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return busy_ == 0; });
}

}  // namespace vocabshard::cpu
