#include "cpu/problem.h"

#include <stdexcept>

#include "sampling.h"

namespace vocabshard::cpu {

void check_gradients(const Problem& problem, const RowGradients& gradients, int64_t rows) {
  const bool given = gradients.entropy && gradients.row_entropy;
  if (rows > 0 && problem.entropy != given)  // empty tensors have no address
    throw std::invalid_argument("entropy gradients and saved entropies go with entropy, and only with it");
}

void fill_panel(const RowInputs& rows, const Problem& problem, const RowGradients* gradients, const int64_t* index,
                int64_t row0, int64_t count, PanelRows* out) {
  *out = PanelRows{};
  for (int64_t l = 0; l < kLanes; ++l) {
    out->target[l] = -1;
    out->inv_temperature[l] = 1.0f;
    out->cut_logit[l] = neg_inf();
    out->cut_column[l] = kEveryTie;
    if (l >= count) continue;
    const int64_t n = index ? index[l] : row0 + l, id = rows.target_ids[n];
    if (id >= problem.vocab_start && id - problem.vocab_start < problem.valid)
      out->target[l] = id - problem.vocab_start;
    out->inv_temperature[l] = rows.inv_temperature ? rows.inv_temperature[n] : rows.scalar_inv_temperature;
    if (rows.cut) {
      out->cut_logit[l] = cut_logit(rows.cut[n]);
      const int64_t column = cut_tie(rows.cut[n]) - problem.vocab_start;
      out->cut_column[l] = static_cast<int32_t>(larger(column, -1));
    }
    if (!gradients) continue;
    out->lse2_int[l] = static_cast<float>(gradients->lse2_int[n]);
    out->lse2_frac[l] = gradients->lse2_frac[n];
    out->grad_target[l] = gradients->target[n];
    out->grad_softmax[l] = gradients->softmax[n];
    if (!gradients->entropy) continue;
    out->entropy[l] = gradients->row_entropy[n];
    out->grad_entropy[l] = gradients->entropy[n];
  }
}

Projection::Projection(const Kernels& kernels, const Matrix& weight, const Vector& bias, const Problem& problem,
                       const RowInputs& inputs, int64_t rows)
    : kernels_(kernels), weight_(weight), problem_(problem), scaled_(is_scaled(inputs)), cut_(inputs.cut != nullptr) {
  const bool few = rows <= 3 * kLanes;
  column_block_ = few ? kColumnBlockFew : kColumnBlock;
  step_block_ = smaller(few ? kStepBlockFew : kStepBlock, round_up(larger(weight.cols, 1), kLanes));
  bias_.data = const_cast<void*>(bias.data);
  bias_.dtype = bias.dtype;
  bias_.col_stride = bias.stride;
}

void Projection::multiply(int64_t first_column, int64_t columns, const float* packed, int64_t panels, float* scratch,
                          float* z, int64_t ld) const {
  const int64_t steps = weight_.cols;
  float* block = scratch;
  for (int64_t k = 0; k < steps; k += step_block_) {
    const int64_t count = smaller(step_block_, steps - k);
    kernels_.load_rows(weight_, first_column, columns, k, count, block, row_size());
    kernels_.multiply({columns, panels * kLanes, count, block, row_size(), 1, packed + k * kLanes, steps * kLanes, z,
                       ld, nullptr, k == 0 ? kStore : kChain});
  }
  if (steps == 0)
    for (int64_t v = 0; v < columns; ++v)
      for (int64_t l = 0; l < panels * kLanes; ++l) z[v * ld + l] = 0.0f;
}

Block Projection::block(int64_t first_column, int64_t columns, int64_t panels, float* scratch, float* z,
                        int64_t ld) const {
  float* bias = nullptr;
  if (bias_.data) {
    bias = scratch + (column_block_ + kRowSlack) * row_size();
    kernels_.load_rows(bias_, 0, 1, first_column, columns, bias, 0);
  }
  return {z, ld, first_column, columns, panels, bias, problem_.softcap, scaled_, problem_.entropy, cut_};
}

void start_states(PanelState* states, int64_t panels) {
  for (int64_t p = 0; p < panels; ++p) {
    states[p] = PanelState{};
    for (int l = 0; l < kLanes; ++l) {
      states[p].y_max[l] = neg_inf();
      states[p].y_target[l] = quiet_nan();
      states[p].top[l] = limb_top(kEmptyK);
      states[p].top_entropy[l] = limb_top_entropy(kEmptyK);
    }
  }
}

void store_records(const PanelState* states, int64_t parts, int64_t stride, int64_t count, bool entropy,
                   int64_t* records, int64_t rows) {
  for (int64_t l = 0; l < count; ++l) {
    Partial merged = partial_identity();
    for (int64_t i = 0; i < parts; ++i) {
      const PanelState& s = states[i * stride];
      partial_merge(merged,
                    {s.y_max[l], s.y_target[l], {s.c[0][l], s.c[1][l], s.c[2][l]}, {s.u[0][l], s.u[1][l], s.u[2][l]}});
    }
    partial_finish(merged);
    if (entropy)
      record_store<true>(records + l, rows, merged);
    else
      record_store<false>(records + l, rows, merged);
  }
}

}  // namespace vocabshard::cpu
