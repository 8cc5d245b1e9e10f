// What the drivers share: row panels from the caller's arrays, column blocks projected, states to records.
#pragma once

#include "api.h"
#include "contract.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace vocabshard::cpu {

constexpr int64_t kColumnBlock = 96;     // columns projected at a time: whole tiles and register tiles
constexpr int64_t kStepBlock = 256;      // steps of the chain between two visits of the accumulators
constexpr int64_t kStepBlockFew = 2048;  // the same for one register tile of rows: long runs of weight
constexpr int64_t kColumnBlockFew = 16;
constexpr int64_t kChunkPanels = 24;  // panels that a column block meets at a time

inline bool is_scaled(const RowInputs& rows) { return rows.inv_temperature || rows.scalar_inv_temperature != 1.0f; }

// std::invalid_argument when there are entropy gradients without entropy, or the other way round.
void check_gradients(const Problem& problem, const RowGradients& gradients, int64_t rows);

// Fills the inputs of `count` <= 16 rows (index[i], or from row0 on); the other lanes are empty.
void fill_panel(const RowInputs& rows, const Problem& problem, const RowGradients* gradients, const int64_t* index,
                int64_t row0, int64_t count, PanelRows* out);

// Logits of a column block against packed rows, up to the end of the chain.
class Projection {
 public:
  // rows: how many the blocks are to meet.
  Projection(const Kernels& kernels, const Matrix& weight, const Vector& bias, const Problem& problem,
             const RowInputs& inputs, int64_t rows);

  int64_t column_block() const { return column_block_; }
  // floats a worker needs; a column block of a panel fits too
  int64_t scratch() const { return (column_block_ + kRowSlack) * row_size() + column_block_; }

  // packed: panels of D * 16; z[column * ld + lane]. The block's bias lies in scratch.
  Block run(int64_t first_column, int64_t columns, const float* packed, int64_t panels, float* scratch, float* z,
            int64_t ld) const {
    multiply(first_column, columns, packed, panels, scratch, z, ld);
    return block(first_column, columns, panels, scratch, z, ld);
  }

  // Its two halves: the chains, and what belongs to them.
  void multiply(int64_t first_column, int64_t columns, const float* packed, int64_t panels, float* scratch, float* z,
                int64_t ld) const;
  Block block(int64_t first_column, int64_t columns, int64_t panels, float* scratch, float* z, int64_t ld) const;

 private:
  int64_t row_size() const { return step_block_ + kLanes; }  // odd multiples of a cache line

  const Kernels& kernels_;
  Matrix weight_, bias_;
  Problem problem_;
  bool scaled_, cut_;
  int64_t column_block_, step_block_;
};

void start_states(PanelState* states, int64_t panels);

// Merges the states of a panel's `parts` column ranges (ascending, `stride` panels apart) into `count` records.
void store_records(const PanelState* states, int64_t parts, int64_t stride, int64_t count, bool entropy,
                   int64_t* records, int64_t rows);

}  // namespace vocabshard::cpu
