// The softmax layer on logits that are there already, and its gradient.
#include <algorithm>
#include <vector>

#include "cpu/problem.h"

namespace vocabshard {

using namespace cpu;

namespace {

constexpr int64_t kColumnStrip = 512;  // columns of 16 rows that are worked on at a time
constexpr int64_t kRangeMin = 4 * kColumnStrip;
constexpr int64_t kStateBytes = 8 << 20;

// Column ranges per panel of rows, so that few rows keep all threads busy.
int64_t ranges(int64_t panels, int64_t columns, int threads) {
  const int64_t wanted = threads > 1 ? ceil_div(4 * threads, panels) : 1;
  return larger(1, smaller(wanted, columns / kRangeMin));
}

int64_t range_start(int64_t part, int64_t parts, int64_t columns) {
  return part == parts ? columns : ceil_div(columns, kTile) * part / parts * kTile;
}

Block strip(const Problem& problem, const RowInputs& rows, float* z, int64_t v, int64_t columns) {
  return {z, kLanes, v, columns, 1, nullptr, problem.softcap, is_scaled(rows), problem.entropy, rows.cut != nullptr};
}

void clear_columns(const Matrix& m, int64_t row, int64_t first) {
  const int64_t size = m.dtype == kF32 ? 4 : 2;
  if (first < m.cols)
    std::memset(static_cast<char*>(m.data) + (row * m.row_stride + first) * size, 0,
                static_cast<size_t>((m.cols - first) * size));
}

// Output rows by the row of logits that they read: readers[starts[i]] ... are those of row used[i], ascending.
struct Readers {
  std::vector<int64_t> used, starts, readers;
};

Readers sort_readers(const int64_t* source, int64_t outputs) {
  Readers r;
  r.readers.resize(static_cast<size_t>(outputs));
  for (int64_t m = 0; m < outputs; ++m) r.readers[static_cast<size_t>(m)] = m;
  if (source)
    std::stable_sort(r.readers.begin(), r.readers.end(), [&](int64_t a, int64_t b) { return source[a] < source[b]; });
  for (int64_t i = 0; i < outputs; ++i) {
    const int64_t m = r.readers[static_cast<size_t>(i)], row = source ? source[m] : m;
    if (r.used.empty() || r.used.back() != row) {
      r.used.push_back(row);
      r.starts.push_back(i);
    }
  }
  r.starts.push_back(outputs);
  return r;
}

}  // namespace

void cpu_logits_forward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                        const Problem& problem, int64_t* records, const CpuRun& run) {
  const Kernels& kernels = cpu::kernels(run.isa);
  if (outputs == 0) return;
  const int64_t all_panels = ceil_div(outputs, kLanes);
  Team team(run.threads);
  const int64_t parts = ranges(all_panels, problem.valid, team.size());
  // a bounded number of panels at a time: their states are kept until they are merged
  const int64_t batch =
      smaller(all_panels, larger(1, kStateBytes / (parts * static_cast<int64_t>(sizeof(PanelState)))));
  Scratch<PanelState> states(parts * batch);
  Scratch<PanelRows> panel_rows(batch);
  Scratch<float> scratch(team.size() * kColumnStrip * kLanes);

  for (int64_t done = 0; done < all_panels; done += batch) {
    const int64_t panels = smaller(batch, all_panels - done);
    team.run(panels, [&](int64_t p, int) {
      const int64_t first = (done + p) * kLanes;
      fill_panel(rows, problem, nullptr, nullptr, first, smaller(kLanes, outputs - first), &panel_rows[p]);
    });
    team.run(panels * parts, [&](int64_t task, int worker) {
      const int64_t p = task / parts, part = task % parts, first = (done + p) * kLanes;
      const int64_t count = smaller(kLanes, outputs - first), end = range_start(part + 1, parts, problem.valid);
      float* z = scratch.get() + worker * kColumnStrip * kLanes;
      start_states(&states[part * batch + p], 1);
      for (int64_t v = range_start(part, parts, problem.valid); v < end; v += kColumnStrip) {
        const int64_t columns = smaller(kColumnStrip, end - v);
        kernels.pack_panel(logits, source ? source + first : nullptr, first, count, v, columns, z);
        kernels.softmax(strip(problem, rows, z, v, columns), &panel_rows[p], &states[part * batch + p]);
      }
    });
    team.run(panels, [&](int64_t p, int) {
      const int64_t first = (done + p) * kLanes;
      store_records(&states[p], parts, batch, smaller(kLanes, outputs - first), problem.entropy, records + first,
                    outputs);
    });
  }
}

void cpu_logits_backward(const Matrix& logits, const int64_t* source, int64_t outputs, const RowInputs& rows,
                         const Problem& problem, const RowGradients& gradients, const Matrix& grad_logits,
                         const CpuRun& run) {
  const Kernels& kernels = cpu::kernels(run.isa);
  check_gradients(problem, gradients, outputs);
  const Readers readers = sort_readers(source, outputs);
  const int64_t used = static_cast<int64_t>(readers.used.size()), panels = ceil_div(used, kLanes);
  Team team(run.threads);

  for (int64_t row = 0, i = 0; row < grad_logits.rows; ++row) {
    if (i < used && readers.used[static_cast<size_t>(i)] == row)
      ++i;
    else  // nobody read it
      clear_columns(grad_logits, row, 0);
  }
  if (used == 0) return;

  const int64_t parts = ranges(panels, problem.valid, team.size());
  constexpr int64_t kSize = kColumnStrip * kLanes;
  Scratch<float> scratch(team.size() * 3 * kSize);
  team.run(panels * parts, [&](int64_t task, int worker) {
    const int64_t p = task / parts, part = task % parts, first = p * kLanes, count = smaller(kLanes, used - first);
    const int64_t* use = readers.used.data() + first;
    const int64_t* starts = readers.starts.data() + first;
    float *z = scratch.get() + worker * 3 * kSize, *dz = z + kSize, *sum = dz + kSize;
    int64_t rounds = 1;
    for (int64_t l = 0; l < count; ++l) rounds = larger(rounds, starts[l + 1] - starts[l]);
    if (part == parts - 1)
      for (int64_t l = 0; l < count; ++l) clear_columns(grad_logits, use[l], problem.valid);

    const int64_t end = range_start(part + 1, parts, problem.valid);
    for (int64_t v = range_start(part, parts, problem.valid); v < end; v += kColumnStrip) {
      const int64_t columns = smaller(kColumnStrip, end - v);
      kernels.pack_panel(logits, use, 0, count, v, columns, z);
      for (int64_t round = 0; round < rounds; ++round) {  // one reader of each row at a time
        PanelRows panel;
        int64_t index[kLanes];
        bool reads[kLanes];
        for (int64_t l = 0; l < kLanes; ++l) {
          reads[l] = l < count && starts[l] + round < starts[l + 1];
          index[l] = reads[l] ? readers.readers[static_cast<size_t>(starts[l] + round)] : readers.readers[0];
        }
        fill_panel(rows, problem, &gradients, index, 0, kLanes, &panel);
        for (int64_t l = 0; l < kLanes; ++l)
          if (!reads[l]) panel.grad_target[l] = panel.grad_softmax[l] = panel.grad_entropy[l] = 0.0f;
        std::memcpy(dz, z, static_cast<size_t>(columns * kLanes) * sizeof(float));
        kernels.gradients(strip(problem, rows, dz, v, columns), &panel);
        for (int64_t i = 0; i < columns * kLanes; ++i)
          sum[i] = round == 0 ? dz[i] : (reads[i % kLanes] ? sum[i] + dz[i] : sum[i]);
      }
      kernels.unpack_panel(sum, kLanes, grad_logits, use, 0, count, v, columns);
    }
  });
}

}  // namespace vocabshard
