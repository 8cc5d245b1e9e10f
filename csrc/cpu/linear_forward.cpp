#include "cpu/problem.h"

namespace vocabshard {

using namespace cpu;

namespace {

constexpr int64_t kPackedBytes = 16 << 20;  // packed hidden rows
constexpr int64_t kStateBytes = 8 << 20;
constexpr int64_t kRowBlockMax = 4096;
constexpr int64_t kTasksPerThread = 8;

// Rows that are packed together: equal blocks, whole register tiles.
int64_t row_block(int64_t rows, int64_t steps) {
  const int64_t tile = 3 * kLanes;
  const int64_t most = larger(tile, smaller(kRowBlockMax, kPackedBytes / (4 * larger(steps, 1))) / tile * tile);
  return smaller(round_up(rows, kLanes), round_up(ceil_div(rows, ceil_div(rows, most)), tile));
}

}  // namespace

void cpu_linear_forward(const Matrix& hidden, const Matrix& weight, const Vector& bias, const RowInputs& rows,
                        const Problem& problem, int64_t* records, const Matrix& logits, const Matrix& kept,
                        const CpuRun& run) {
  const Kernels& kernels = cpu::kernels(run.isa);
  const int64_t N = hidden.rows, D = hidden.cols;
  if (N == 0) return;
  Team team(run.threads);

  const int64_t block_rows = row_block(N, D), block_panels = ceil_div(block_rows, kLanes);
  const int64_t chunks = ceil_div(block_panels, kChunkPanels);
  const int64_t chunk_panels = smaller(block_panels, round_up(ceil_div(block_panels, chunks), 3));
  const int64_t ld = chunk_panels * kLanes;
  const Projection projection(kernels, weight, bias, problem, rows, block_rows);
  const int64_t step = projection.column_block(), column_blocks = ceil_div(problem.valid, step);
  // Contiguous ranges of columns with states of their own, merged in ascending order.
  const int64_t affordable = larger(1, kStateBytes / (block_panels * static_cast<int64_t>(sizeof(PanelState))));
  const int64_t parts =
      smaller(smaller(larger(column_blocks, 1), affordable), team.size() > 1 ? team.size() * kTasksPerThread : 1);

  Scratch<float> packed(block_panels * kLanes * D);
  Scratch<PanelRows> panel_rows(block_panels);
  Scratch<PanelState> states(parts * block_panels);
  const int64_t z_size = step * ld, worker_size = round_up(z_size + projection.scratch(), kLanes);
  Scratch<float> scratch(team.size() * worker_size);

  for (int64_t row0 = 0; row0 < N; row0 += block_rows) {
    const int64_t count = smaller(block_rows, N - row0), panels = ceil_div(count, kLanes);
    team.run(panels, [&](int64_t p, int) {
      const int64_t first = row0 + p * kLanes, lanes = smaller(kLanes, N - first);
      kernels.pack_panel(hidden, nullptr, first, lanes, 0, D, packed.get() + p * kLanes * D);
      fill_panel(rows, problem, nullptr, nullptr, first, lanes, &panel_rows[p]);
    });
    team.run(parts, [&](int64_t part, int worker) {
      PanelState* mine = states.get() + part * block_panels;
      start_states(mine, panels);
      float* z = scratch.get() + worker * worker_size;
      for (int64_t b = column_blocks * part / parts; b < column_blocks * (part + 1) / parts; ++b) {
        const int64_t v = b * step, columns = smaller(step, problem.valid - v);
        for (int64_t p = 0; p < panels; p += chunk_panels) {
          Block block = projection.run(v, columns, packed.get() + p * kLanes * D, smaller(chunk_panels, panels - p),
                                       z + z_size, z, ld);
          for (int64_t q = 0; q < block.panels && kept.data; ++q) {
            const int64_t first = row0 + (p + q) * kLanes, lanes = smaller(kLanes, kept.rows - first);
            if (lanes > 0) kernels.unpack_panel(z + q * kLanes, ld, kept, nullptr, first, lanes, v, columns);
          }
          if (logits.data) {
            kernels.finish_logits(block);
            block.bias = nullptr;
            block.softcap = 0.0f;
            for (int64_t q = 0; q < block.panels; ++q) {
              const int64_t first = row0 + (p + q) * kLanes;
              kernels.unpack_panel(z + q * kLanes, ld, logits, nullptr, first, smaller(kLanes, N - first), v, columns);
            }
          }
          kernels.softmax(block, panel_rows.get() + p, mine + p);
        }
      }
    });
    team.run(panels, [&](int64_t p, int) {
      const int64_t first = row0 + p * kLanes;
      store_records(states.get() + p, parts, block_panels, smaller(kLanes, N - first), problem.entropy, records + first,
                    N);
    });
  }
  if (logits.data)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t v = problem.valid; v < logits.cols; ++v)
        static_cast<float*>(logits.data)[n * logits.row_stride + v] = neg_inf();
}

}  // namespace vocabshard
