// Gradients of the hidden states, the weight shard and the bias, from logits recomputed block by block.
//
// Vocabulary super-blocks outside, blocks of rows inside; only rows with a gradient take part. Each pair first makes
// its gradients of the logits, then adds its products. Long sums are cut into fixed blocks: a block is one FMA chain
// from zero, blocks are added in ascending order. What the blocks of rows add to grad_weight is summed with its
// rounding errors beside it, so that many rows cost no more digits than a thousand. Where grad_hidden goes on from
// accumulators it is one chain instead, which no boundary between shards can cut. Nothing here depends on threads, on
// V_local, on a neighbour's values or on what the forward kept.
#include "cpu/problem.h"

namespace vocabshard {

using namespace cpu;

namespace {

constexpr int64_t kBytes = 12 << 20;         // packed hidden rows; fp32 weight gradients of a super-block
constexpr int64_t kGradientBytes = 4 << 20;  // gradients of the logits
constexpr int64_t kSumBlock = 64;            // short chains: less error than a library product
constexpr int64_t kRowsMax = 1024, kColumnsMax = 4096;
constexpr int64_t kChunkRows = 18 * kLanes, kOutRows = 256, kOutColumns = 12 * kLanes;

struct Sizes {
  int64_t sum_block;  // depends on D alone
  int64_t rows, columns, ld;
};

Sizes plan(int64_t active, int64_t steps, int64_t valid, bool sums) {
  Sizes s;
  const int64_t row_bytes = 4 * larger(steps, 1);
  s.sum_block = kSumBlock;
  while (s.sum_block > kLanes && s.sum_block * row_bytes > kBytes) s.sum_block /= 2;
  const auto whole = [&](int64_t most, int64_t wanted, int64_t unit) {
    return smaller(larger(s.sum_block, most / s.sum_block * s.sum_block), round_up(wanted, unit));
  };
  s.rows = whole(smaller(kRowsMax, kBytes / row_bytes), active, kLanes);
  s.ld = s.rows + kLanes;  // rows of a power of two would share cache sets
  int64_t columns = smaller(kColumnsMax, kGradientBytes / (4 * s.ld));
  if (sums || active > s.rows) columns = smaller(columns, kBytes / row_bytes);
  s.columns = whole(columns, valid, kLanes);
  return s;
}

struct Backward {
  const Kernels& kernels;
  const Matrix &hidden, &weight, &grad_hidden, &grad_weight, &grad_bias;
  const Sizes sizes;
  const Projection projection;
  Team& team;
  const RowInputs& rows;
  const Problem& problem;
  const RowGradients& gradients;
  const GradientPlan& how;
  const bool apart;   // grad_weight is summed in weight_sums first
  const bool pieces;  // its rows take several blocks

  Scratch<int64_t> index;  // rows of the block at hand
  Scratch<PanelRows> panel_rows;
  Scratch<float> packed;         // [panel][D][16]
  Scratch<float> dz;             // [column][ld]
  Scratch<float> weight_sums;    // fp32 [column][D], if apart
  Scratch<float> weight_errors;  // what those sums have lost to rounding, if in pieces
  Scratch<double> bias_sums;     // [column]
  Scratch<float> scratch;
  int64_t worker_size;
  int64_t kept_panels;  // leading panels of the block at hand whose logits were kept

  void pack(int64_t count);
  void make_dz(int64_t v0, int64_t columns, int64_t count);
  void load_kept(int64_t first_column, int64_t columns, int64_t first, int64_t panels, int64_t count, float* strip,
                 float* z);
  void add_products(int64_t v0, int64_t columns, int64_t count, bool first);
  void add_hidden(int64_t v0, int64_t columns, int64_t row, int64_t rows_here, int64_t d, int64_t wide, float* panels);
  void add_weight(int64_t v0, int64_t v, int64_t columns, int64_t count, int64_t d, int64_t wide, bool first,
                  float* panels);
  float* sums(int64_t v0) {
    return apart ? weight_sums.get() : static_cast<float*>(grad_weight.data) + v0 * hidden.cols;
  }
  void add_bias(int64_t v, int64_t count, bool first);
  void finish_columns(int64_t v0, int64_t columns);
};

void Backward::pack(int64_t count) {
  const int64_t D = hidden.cols;
  team.run(ceil_div(count, kLanes), [&](int64_t p, int) {
    const int64_t first = p * kLanes, lanes = smaller(kLanes, count - first);
    if (p >= kept_panels) kernels.pack_panel(hidden, index.get() + first, 0, lanes, 0, D, packed.get() + first * D);
    fill_panel(rows, problem, &gradients, index.get() + first, 0, lanes, &panel_rows[p]);
  });
}

void Backward::make_dz(int64_t v0, int64_t columns, int64_t count) {
  const int64_t D = hidden.cols, panels = ceil_div(count, kLanes), step = projection.column_block();
  const int64_t chunk = kChunkRows / kLanes, chunks = ceil_div(panels, chunk);
  team.run(ceil_div(columns, step) * chunks, [&](int64_t task, int worker) {
    const int64_t v = task / chunks * step, p = task % chunks * chunk;
    float *z = dz.get() + v * sizes.ld + p * kLanes, *mine = scratch.get() + worker * worker_size;
    const int64_t wide = smaller(step, columns - v), high = smaller(chunk, panels - p);
    const int64_t kept = smaller(larger(kept_panels - p, 0), high);
    load_kept(v0 + v, wide, p, kept, count, mine, z);
    if (kept < high)
      projection.multiply(v0 + v, wide, packed.get() + (p + kept) * kLanes * D, high - kept, mine, z + kept * kLanes,
                          sizes.ld);
    kernels.gradients(projection.block(v0 + v, wide, high, mine, z, sizes.ld), panel_rows.get() + p);
  });
}

void Backward::load_kept(int64_t first_column, int64_t columns, int64_t first, int64_t panels, int64_t count,
                         float* strip, float* z) {
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t row = (first + p) * kLanes;
    kernels.pack_panel(how.kept, index.get() + row, 0, smaller(kLanes, count - row), first_column, columns, strip);
    for (int64_t v = 0; v < columns; ++v)
      std::memcpy(z + v * sizes.ld + p * kLanes, strip + v * kLanes, kLanes * sizeof(float));
  }
}

void Backward::add_hidden(int64_t v0, int64_t columns, int64_t row, int64_t rows_here, int64_t d, int64_t wide,
                          float* panels) {
  for (int64_t v = 0; v < columns; v += sizes.sum_block) {
    const int64_t deep = smaller(sizes.sum_block, columns - v);
    kernels.pack_columns(weight, nullptr, v0 + v, deep, d, wide, panels);
    kernels.multiply({rows_here, wide, deep, dz.get() + v * sizes.ld + row, 1, sizes.ld, panels, deep * kLanes,
                      static_cast<float*>(grad_hidden.data) + d, hidden.cols, index.get() + row,
                      how.continue_hidden ? kChain : kAdd});
  }
}

// to + error += x, the rounding of `to` going to `error` (Knuth's TwoSum); their rows are `ld` apart.
void add_exactly(int64_t rows, int64_t columns, const float* x, int64_t x_row, float* to, float* error, int64_t ld) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const float a = to[i * ld + j], b = x[i * x_row + j], sum = a + b, back = sum - a;
      to[i * ld + j] = sum;
      error[i * ld + j] += (a - (sum - back)) + (b - back);
    }
}

void Backward::add_weight(int64_t v0, int64_t v, int64_t columns, int64_t count, int64_t d, int64_t wide, bool first,
                          float* panels) {
  const int64_t D = hidden.cols, at = v * D + d;
  const bool add = pieces && !first;
  float* block = add ? panels + sizes.sum_block * kOutColumns : sums(v0) + at;
  const int64_t block_row = add ? kOutColumns : D;
  for (int64_t n = 0; n < count; n += sizes.sum_block) {
    const int64_t deep = smaller(sizes.sum_block, count - n);
    kernels.pack_columns(hidden, index.get() + n, 0, deep, d, wide, panels);
    kernels.multiply({columns, wide, deep, dz.get() + v * sizes.ld + n, sizes.ld, 1, panels, deep * kLanes, block,
                      block_row, nullptr, n == 0 ? kStore : kAdd});
  }
  if (!pieces) return;
  if (add) return add_exactly(columns, wide, block, block_row, sums(v0) + at, weight_errors.get() + at, D);
  for (int64_t i = 0; i < columns; ++i)
    std::memset(weight_errors.get() + at + i * D, 0, static_cast<size_t>(wide) * sizeof(float));
}

void Backward::add_bias(int64_t v, int64_t count, bool first) {
  constexpr int kWays = 8;
  double sum[kWays] = {};
  const float* row = dz.get() + v * sizes.ld;
  for (int64_t n = 0; n < round_up(count, kLanes); n += kWays)  // lanes without a row are zero
    for (int i = 0; i < kWays; ++i) sum[i] += static_cast<double>(row[n + i]);
  const double all = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  bias_sums[v] = first ? all : bias_sums[v] + all;
}

void Backward::add_products(int64_t v0, int64_t columns, int64_t count, bool first) {
  const int64_t wide_tasks = ceil_div(hidden.cols, kOutColumns);
  const int64_t hidden_tasks = grad_hidden.data ? ceil_div(count, kOutRows) * wide_tasks : 0;
  const int64_t weight_tasks = grad_weight.data ? ceil_div(columns, kOutRows) * wide_tasks : 0;
  const int64_t bias_tasks = grad_bias.data ? ceil_div(columns, kOutRows) : 0;
  team.run(hidden_tasks + weight_tasks + bias_tasks, [&](int64_t task, int worker) {
    float* panels = scratch.get() + worker * worker_size;
    const bool is_hidden = task < hidden_tasks;
    if (!is_hidden) task -= hidden_tasks;
    const int64_t d = task % larger(wide_tasks, 1) * kOutColumns, wide = smaller(kOutColumns, hidden.cols - d);
    const int64_t at = task / larger(wide_tasks, 1) * kOutRows;
    if (is_hidden) return add_hidden(v0, columns, at, smaller(kOutRows, count - at), d, wide, panels);
    if (task < weight_tasks) return add_weight(v0, at, smaller(kOutRows, columns - at), count, d, wide, first, panels);
    const int64_t v = (task - weight_tasks) * kOutRows;
    for (int64_t i = v; i < smaller(v + kOutRows, columns); ++i) add_bias(i, count, first);
  });
}

// Sums that were kept apart, added to what is there or rounded once into the parameter's dtype.
void Backward::finish_columns(int64_t v0, int64_t columns) {
  const int64_t D = hidden.cols;
  if (apart || pieces)
    team.run(ceil_div(columns, kLanes), [&](int64_t task, int) {
      const int64_t v = task * kLanes, count = smaller(kLanes, columns - v) * D;
      if (pieces) {
        float *sum = sums(v0) + v * D, *error = weight_errors.get() + v * D;
        for (int64_t i = 0; i < count; ++i)
          if (error[i] == error[i]) sum[i] += error[i];  // else the sum has overflowed, and stays as it is
      }
      if (!apart) return;
      if (how.add_weight) {
        float* to = static_cast<float*>(grad_weight.data) + (v0 + v) * D;
        for (int64_t i = 0; i < count; ++i) to[i] += weight_sums[v * D + i];
        return;
      }
      kernels.store_row(weight_sums.get() + v * D, count, grad_weight.dtype,
                        static_cast<uint16_t*>(grad_weight.data) + (v0 + v) * D);
    });
  if (!grad_bias.data) return;
  const int64_t size = grad_bias.dtype == kF32 ? 4 : 2;
  for (int64_t v = 0; v < columns; ++v) {
    const float sum = static_cast<float>(bias_sums[v]);
    kernels.store_row(&sum, 1, grad_bias.dtype, static_cast<char*>(grad_bias.data) + (v0 + v) * size);
  }
}

// Rows `first` ... of a contiguous gradient become zero.
void clear_rows(Team& team, const Matrix& gradient, int64_t first) {
  if (!gradient.data || gradient.rows <= first) return;
  const int64_t bytes = (gradient.dtype == kF32 ? 4 : 2) * gradient.cols,
                strip = larger(1, (1 << 20) / larger(bytes, 1));
  team.run(ceil_div(gradient.rows - first, strip), [&](int64_t task, int) {
    const int64_t row = first + task * strip;
    std::memset(static_cast<char*>(gradient.data) + row * bytes, 0,
                static_cast<size_t>(smaller(strip, gradient.rows - row) * bytes));
  });
}

bool is_active(const RowGradients& g, int64_t n) {
  return g.target[n] != 0.0f || g.softmax[n] != 0.0f || (g.entropy && g.entropy[n] != 0.0f);
}

}  // namespace

void cpu_linear_backward(const Matrix& hidden, const Matrix& weight, const Vector& bias, const RowInputs& rows,
                         const Problem& problem, const RowGradients& gradients, const Matrix& grad_hidden,
                         const Matrix& grad_weight, const Matrix& grad_bias, const GradientPlan& how,
                         const CpuRun& run) {
  const Kernels& kernels = cpu::kernels(run.isa);
  const int64_t N = hidden.rows, D = hidden.cols, V = problem.valid;
  if (!grad_hidden.data && !grad_weight.data && !grad_bias.data) return;
  check_gradients(problem, gradients, N);
  Team team(run.threads);

  int64_t active = 0;
  for (int64_t n = 0; n < N; ++n) active += is_active(gradients, n);
  if (!how.continue_hidden) clear_rows(team, grad_hidden, 0);
  if (!how.add_weight) clear_rows(team, grad_weight, active ? V : 0);
  clear_rows(team, grad_bias, active ? V : 0);
  if (active == 0 || V == 0) return;

  const bool apart = grad_weight.data && (how.add_weight || grad_weight.dtype != kF32);
  const Sizes sizes = plan(active, D, V, apart);
  const bool pieces = grad_weight.data && active > sizes.rows;
  Backward work{kernels,
                hidden,
                weight,
                grad_hidden,
                grad_weight,
                grad_bias,
                sizes,
                Projection(kernels, weight, bias, problem, rows, sizes.rows),
                team,
                rows,
                problem,
                gradients,
                how,
                apart,
                pieces,
                Scratch<int64_t>(sizes.rows),
                Scratch<PanelRows>(ceil_div(sizes.rows, kLanes)),
                Scratch<float>(sizes.rows * D),
                Scratch<float>((sizes.columns + kRowSlack) * sizes.ld),
                Scratch<float>(apart ? sizes.columns * D : 0),
                Scratch<float>(pieces ? sizes.columns * D : 0),
                Scratch<double>(sizes.columns),
                Scratch<float>(),
                0,
                0};
  const int64_t panels = sizes.sum_block * kOutColumns, block = pieces ? kOutRows * kOutColumns : 0;
  work.worker_size = round_up(larger(work.projection.scratch(), panels + block), kLanes);
  work.scratch = Scratch<float>(team.size() * work.worker_size);

  for (int64_t v0 = 0; v0 < V; v0 += sizes.columns) {
    const int64_t columns = smaller(sizes.columns, V - v0);
    for (int64_t n = 0, done = 0; done < active;) {
      int64_t count = 0;
      for (; n < N && count < sizes.rows; ++n)
        if (is_active(gradients, n)) work.index[count++] = n;
      work.kept_panels = 0;
      while (work.kept_panels * kLanes < count &&
             work.index[smaller(count, (work.kept_panels + 1) * kLanes) - 1] < how.kept.rows)
        ++work.kept_panels;
      if (v0 == 0 || count < active) work.pack(count);  // a single block stays packed
      work.make_dz(v0, columns, count);
      work.add_products(v0, columns, count, done == 0);
      done += count;
    }
    work.finish_columns(v0, columns);
  }
}

}  // namespace vocabshard
