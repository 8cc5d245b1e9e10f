// Over blocks of fp32 logits: what truncations and draws need of each row (docs/operators/sampling.md). Rows are tasks.
#include "sampling.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "api.h"
#include "cpu/threads.h"

namespace vocabshard {

using namespace cpu;

namespace {

struct Row {
  const float* z;
  int64_t columns, start;
  const float* scales;
  float scale;
  int64_t n;

  float y(float x) const { return scales ? mul(x, scales[n]) : (scale != 1.0f ? mul(x, scale) : x); }
};

// f(row, n) for all rows.
template <class F>
void each_row(const SamplingBlock& block, const CpuRun& run, F f) {
  if (block.logits.dtype != kF32 || (block.logits.cols > 1 && block.logits.col_stride != 1))
    throw std::invalid_argument("logits must be fp32 with a column stride of 1");
  Team team(run.threads);
  team.run(block.logits.rows, [&](int64_t n, int) {
    f(Row{static_cast<const float*>(block.logits.data) + n * block.logits.row_stride, block.valid, block.vocab_start,
          block.scales, block.scale, n},
      n);
  });
}

}  // namespace

void cpu_sampling_maxima(const SamplingBlock& block, int64_t* out, const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    int64_t best = kKeepAll;
    for (int64_t v = 0; v < row.columns; ++v) {
      if (is_nan(row.z[v])) {
        best = kNoArrival;
        break;
      }
      best = larger(best, place_of(row.z[v], row.start + v));
    }
    out[n] = best;
  });
}

void cpu_sampling_histogram(const SamplingBlock& block, const int32_t* k_max, const int64_t* cut, const int64_t* prefix,
                            int level, int64_t* counts, int64_t* masses, const CpuRun& run) {
  if (level < 0 || level > 2) throw std::invalid_argument("level must be 0, 1 or 2");
  const int shift = kRadixShift[level], width = kRadixBits[level];
  const int64_t bins = int64_t{1} << width;
  each_row(block, run, [&](const Row& row, int64_t n) {
    std::fill_n(counts + n * bins, bins, 0);
    if (masses) std::fill_n(masses + n * bins, bins, 0);
    const float logit = cut_logit(cut[n]);
    const int32_t tie = cut_tie(cut[n]);
    for (int64_t v = 0; v < row.columns; ++v) {
      const uint64_t u = radix_key(row.z[v]);
      if (static_cast<int64_t>(u >> (shift + width)) != prefix[n]) continue;
      if (is_cut(row.z[v], row.start + v, logit, tie)) continue;
      const int64_t at = n * bins + static_cast<int64_t>((u >> shift) & static_cast<uint64_t>(bins - 1));
      counts[at] += 1;
      if (masses) masses[at] += mass_of(row.y(row.z[v]), k_max[n]);
    }
  });
}

void cpu_sampling_floor(const SamplingBlock& block, const float* threshold, int64_t* out, const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    int64_t lowest = kEveryTie;
    for (int64_t v = 0; v < row.columns; ++v)
      if (row.y(row.z[v]) >= threshold[n]) lowest = smaller(lowest, order_of(row.z[v]));
    out[n] = lowest;
  });
}

void cpu_sampling_equal(const SamplingBlock& block, const int64_t* order, const int64_t* nth, int64_t* out,
                        const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    out[n] = -1;
    int64_t left = nth[n];
    for (int64_t v = 0; v < row.columns && left > 0; ++v)
      if (order_of(row.z[v]) == order[n] && --left == 0) out[n] = row.start + v;
  });
}

void cpu_sampling_draw(const SamplingBlock& block, const int64_t* cut, int64_t seed, const int64_t* row_keys,
                       int64_t* arrival, int64_t* id, int64_t* order, const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    const float logit = cut_logit(cut[n]);
    const int32_t tie = cut_tie(cut[n]);
    int64_t best = kNoArrival, winner = -1, group = -1;
    float z = neg_inf();
    Philox words{};
    for (int64_t v = 0; v < row.columns; ++v) {
      const int64_t global = row.start + v;
      if (is_neg_inf(row.z[v]) || is_cut(row.z[v], global, logit, tie)) continue;
      if (global >> 2 != group) {
        group = global >> 2;
        words = column_words(group, 0, seed, row_keys[n]);
      }
      const uint32_t x = words.word[global & 3];
      const uint32_t second = x < kSecondBelow ? column_words(group, 1, seed, row_keys[n]).word[global & 3] : 0;
      const int64_t at = arrival_of(clock_of(x, second), row.y(row.z[v]));
      if (at < best) {
        best = at;
        winner = global;
        z = row.z[v];
      }
    }
    arrival[n] = best;
    id[n] = winner;
    order[n] = order_of(z);
  });
}

void cpu_sampling_best(const SamplingBlock& block, int64_t count, int64_t* out, const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    std::vector<int64_t> heap;  // the best so far, the worst of them in front
    for (int64_t v = 0; v < row.columns; ++v) {
      const int64_t place = place_of(row.z[v], row.start + v);
      if (static_cast<int64_t>(heap.size()) < count) {
        heap.push_back(place);
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
      } else if (count > 0 && place > heap.front()) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        heap.back() = place;
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
      }
    }
    std::sort(heap.begin(), heap.end(), std::greater<>());
    heap.resize(static_cast<size_t>(count), kKeepAll);
    std::copy(heap.begin(), heap.end(), out + n * count);
  });
}

void cpu_sampling_before(const SamplingBlock& block, const int64_t* place, int64_t* out, const CpuRun& run) {
  each_row(block, run, [&](const Row& row, int64_t n) {
    int64_t count = 0;
    for (int64_t v = 0; v < row.columns; ++v) count += place_of(row.z[v], row.start + v) > place[n];
    out[n] = count;
  });
}

void spec_clock(const uint32_t* x, const uint32_t* second, int64_t count, float* out) {
  const PlainFloat plain;
  for (int64_t i = 0; i < count; ++i) out[i] = clock_of(x[i], second[i]);
}

void spec_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const Philox words = philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1]);
  std::copy(words.word, words.word + 4, out);
}

}  // namespace vocabshard
