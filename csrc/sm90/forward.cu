// Chooses a forward kernel by shape, and launches it with the merge behind it.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "contract.h"
#include "sm90/check.h"
#include "sm90/draw.h"
#include "sm90/forward_plain.h"
#include "sm90/forward_wgmma.h"
#include "sm90/launch.h"
#include "sm90/merge.h"
#include "sm90/plain.cuh"
#include "sm90/tensor_map.h"
#include "sm90/topk_gather.h"

namespace vocabshard::sm90 {

namespace {

// Rows of hidden that stay in L2 while the vocabulary passes, 4 to 32 MiB of them. More rows take several launches,
// each of which reads `weight` again: little beside the work.
constexpr int64_t kChunkRows = 4096;
constexpr int64_t kAlign = 256;
// Bytes of logits written beside a weight that need not stay in L2: more of them would have to leave before it.
constexpr int64_t kLogitsInL2 = 24 << 20;
// Up to here the time is that to read `weight`. Where columns are ranked there is no kernel of 64 rows; below, logits
// are.
constexpr int64_t kFewRows = 128, kFewRanked = 64;

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t words(bool entropy) { return entropy ? kRecordWordsEntropy : kRecordWords; }

// Rows a launch: the fewest launches of at most `most` blocks, of equal size, even if there are several blocks.
int64_t chunk_rows(int64_t rows, int64_t block, int64_t most) {
  const int64_t blocks = up(rows, block) / block, launches = (blocks + most - 1) / most;
  const int64_t each = (blocks + launches - 1) / launches;
  return std::min(launches > 1 ? up(each, 2) : each, most) * block;
}

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

template <class T>
T* from(T* rows, int64_t first) {
  return rows == nullptr ? nullptr : rows + first;
}

RowWork row_work(const ForwardCall& call, int64_t first, int64_t rows) {
  RowWork work = {};
  work.bias = call.bias;
  work.bias_type = bias_type(call.bias, call.bias_element);
  work.rows = static_cast<int32_t>(rows);
  work.columns = static_cast<int32_t>(call.columns);
  work.valid = static_cast<int32_t>(call.valid);
  work.vocab_start = call.vocab_start;
  work.target_ids = from(call.target_ids, first);
  work.row_inv_temperature = from(call.row_inv_temperature, first);
  work.inv_temperature = call.inv_temperature;
  work.scaled = call.row_inv_temperature != nullptr || call.inv_temperature != 1.0f;  // true for NaN
  work.cap = call.softcap;
  work.cut = call.cut == nullptr ? nullptr : call.cut + first;
  work.logits = call.logits == nullptr ? nullptr : call.logits + first * call.logits_row;
  work.logits_stride = call.logits_row;
  work.maxima = call.maxima;
  work.maxima.at = from(call.maxima.at, first * call.maxima.row_stride);
  work.kept = call.kept;
  work.kept.rows = static_cast<int32_t>(std::max<int64_t>(0, std::min<int64_t>(call.kept.rows - first, rows)));
  if (work.kept.rows == 0) {
    work.kept = {};
  } else {
    work.kept.codes += first * call.kept.codes_row;
    work.kept.references += first;
  }
  return work;
}

const char* row_pointer(const void* base, int64_t row, int64_t stride, int element_bytes) {
  return static_cast<const char*>(base) + row * stride * element_bytes;
}

Merged merged(const ForwardCall& call, int64_t first) {
  FoldRows fold = call.fold;
  fold.logp = from(fold.logp, first), fold.lse = from(fold.lse, first), fold.entropy = from(fold.entropy, first);
  fold.lse2_int = from(fold.lse2_int, first), fold.lse2_frac = from(fold.lse2_frac, first);
  fold.maximum = from(fold.maximum, first);
  return {from(call.target_ids, first), from(call.records, first), call.rows, fold, call.drawn};
}

int32_t most_clusters(int32_t multiprocessors) { return std::max(multiprocessors / 2, 1); }

Schedule wgmma_schedule(const ForwardCall& call, const WgmmaShape& shape, int64_t rows, int32_t multiprocessors) {
  return make_schedule(static_cast<int32_t>(up(rows, 64 * shape.m_blocks) / (64 * shape.m_blocks)),
                       static_cast<int32_t>(up(call.columns, kGroupColumns) / kGroupColumns), shape.groups,
                       most_clusters(multiprocessors));
}

void launch_wgmma_chunk(const ForwardCall& call, const ForwardPlan& plan, int64_t first, int64_t rows,
                        int32_t multiprocessors, cudaStream_t stream, UnmergedRows* left) {
  const WgmmaShape shape = wgmma_shape(plan.path);
  const bool half_precision = call.element == kHalf;
  WgmmaParams p = {};
  p.schedule = wgmma_schedule(call, shape, rows, multiprocessors);
  p.operands = map_operands({row_pointer(call.hidden, first, call.hidden_row, 2), rows, call.hidden_row},
                            {call.weight, call.columns, call.weight_row}, call.depth, half_precision, shape,
                            p.schedule.share_columns);
  p.operands.read_once = p.schedule.units == 1 && !p.schedule.share_columns &&
                         (call.logits == nullptr || 4 * rows * call.columns <= kLogitsInL2);
  p.work = row_work(call, first, rows);
  p.target_y = static_cast<float*>(call.workspace);
  p.partials = reinterpret_cast<int64_t*>(static_cast<char*>(call.workspace) + up(plan.chunk_rows * 4, kAlign));
  if (call.draw.wanted) {
    const int64_t words = partials_bytes(p.schedule, shape.m_blocks, kRecordWords) / 8;
    p.draw = {call.draw.seed, call.draw.row_keys, p.partials + words};
    half_precision ? launch_draw_fp16(p, stream) : launch_draw_bf16(p, stream);
    return launch_merge_drawn(p, merged(call, first), stream);
  }
  if (call.top.n > 0) {
    const int64_t partials = up(partials_bytes(p.schedule, shape.m_blocks, kRecordWords), kAlign);
    p.top = topk_lists(p.schedule, call.top, reinterpret_cast<char*>(p.partials) + partials);
    half_precision ? launch_topk_fp16(p, stream) : launch_topk_bf16(p, stream);
  } else {
    launch_wgmma(p, plan.path, half_precision, call.entropy, stream);
  }
  if (left != nullptr) {
    *left = {p.partials, p.schedule, 64 * shape.m_blocks};
    return;
  }
  launch_merge_clusters(p, shape.m_blocks, call.entropy, merged(call, first), stream);
  if (call.top.n > 0) launch_topk_gather(p, call.top.best, stream);
}

void launch_plain_chunk(const ForwardCall& call, const ForwardPlan& plan, int64_t first, int64_t rows,
                        cudaStream_t stream) {
  const int bytes = call.element == kFloat ? 4 : 2;
  PlainParams p = {row_pointer(call.hidden, first, call.hidden_row, bytes),
                   call.weight,
                   call.hidden_row,
                   call.hidden_column,
                   call.weight_row,
                   call.weight_column,
                   call.depth,
                   row_work(call, first, rows),
                   static_cast<int64_t*>(call.workspace)};
  if (call.element == kFloat)
    launch_fma(p, plan.splits, call.entropy, stream);
  else
    launch_mma(p, call.element == kHalf, plan.splits, call.entropy, stream);
  launch_merge_splits(p.splits, kPlainSplitsPerCta * plan.splits, static_cast<int32_t>(rows), call.entropy,
                      merged(call, first), stream);
}

}  // namespace

int32_t multiprocessor_count() {
  static std::atomic<int> counts[64];
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < 64 && (count = counts[device].load(std::memory_order_relaxed)) != 0) return count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (device < 64) counts[device].store(count, std::memory_order_relaxed);
  return count;
}

bool tma_can_read(const void* base, int64_t row_stride, int64_t column_stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && column_stride == 1 && row_stride > 0 && row_stride % 8 == 0 &&
         row_stride < (int64_t{1} << 33);  // 64 rows of it below 2^40 bytes
}

ForwardPlan plan_forward(const ForwardCall& call, int32_t multiprocessors) {
  ForwardPlan plan = {call.path, 0, 0, 0};
  const bool by_tma = call.element != kFloat && tma_can_read(call.hidden, call.hidden_row, call.hidden_column) &&
                      tma_can_read(call.weight, call.weight_row, call.weight_column);
  const int64_t few = call.top.n > 0 ? kFewRanked : kFewRows;
  if (plan.path == kAuto)
    plan.path = call.element == kFloat ? kFma : !by_tma ? kMma : call.rows <= few ? kRows64 : kRows128;
  require(plan.path != kFma || call.element == kFloat, "the FMA path takes fp32 only");
  require(plan.path == kFma || call.element != kFloat, "fp32 takes the FMA path only");
  require((plan.path != kRows128 && plan.path != kRows64) || by_tma,
          "TMA needs a base on 16 bytes, a column stride of 1 and row strides of multiples of 8 elements");
  if (call.rows == 0 || call.columns == 0) return plan;
  if (plan.path == kRows128 || plan.path == kRows64) {
    const WgmmaShape shape = wgmma_shape(plan.path);
    const int64_t block = 64 * shape.m_blocks;
    plan.chunk_rows =
        chunk_rows(call.rows, block, std::min<int64_t>(kChunkRows / block, most_clusters(multiprocessors)));
    // the last launch may have fewer blocks of rows, and then needs other partials
    int64_t partials = 0;
    for (int64_t rows : {std::min(plan.chunk_rows, call.rows), call.rows % plan.chunk_rows})
      if (rows > 0)
        partials = std::max(partials, partials_bytes(wgmma_schedule(call, shape, rows, multiprocessors), shape.m_blocks,
                                                     words(call.entropy)));
    plan.workspace = up(plan.chunk_rows * 4, kAlign) + partials;
    if (call.top.n > 0)
      plan.workspace = up(plan.workspace, kAlign) +
                       topk_lists_bytes(wgmma_schedule(call, shape, call.rows, multiprocessors), call.top.n);
    if (call.draw.wanted) plan.workspace += most_clusters(multiprocessors) * 2 * kWinnerWords * 64 * 8;
  } else {
    const PlainShape shape = plan.path == kFma ? fma_shape() : mma_shape();
    plan.chunk_rows = chunk_rows(call.rows, shape.rows, kChunkRows / shape.rows);
    const int64_t blocks = up(call.columns, shape.columns) / shape.columns;
    plan.splits = static_cast<int32_t>(
        std::max<int64_t>(1, std::min(blocks, 8 * multiprocessors / (plan.chunk_rows / shape.rows))));
    plan.workspace = kPlainSplitsPerCta * plan.splits * words(call.entropy) * plan.chunk_rows * 8;
  }
  return plan;
}

bool gives_maxima(const ForwardCall& call, int32_t multiprocessors) {
  if (call.rows == 0 || call.rows > kFewRows || call.columns == 0 || call.entropy) return false;
  const ForwardPlan plan = plan_forward(call, multiprocessors);
  return plan.path == kRows64 && call.rows <= plan.chunk_rows;
}

Schedule schedule_of_few(const ForwardCall& call, int32_t multiprocessors) {
  return wgmma_schedule(call, wgmma_shape(kRows64), call.rows, multiprocessors);
}

bool draws_beside(const ForwardCall& call, int32_t multiprocessors) {
  const bool some = call.rows > 0 && call.rows <= 64 && call.columns > 0 && !call.entropy;
  return some && call.vocab_start % 4 == 0 && plan_forward(call, multiprocessors).path == kRows64;
}

void launch_forward(const ForwardCall& call, cudaStream_t stream, UnmergedRows* left) {
  require(call.columns < (int64_t{1} << 31) - 1024 && call.depth < (int64_t{1} << 31) - 1024,
          "V_local and D must be below 2^31 - 1024");
  require(call.depth > 0, "D must be positive");
  require(call.valid >= 0 && call.valid <= call.columns, "valid must be within 0 ... V_local");
  if (call.rows == 0) return;
  const int32_t multiprocessors = multiprocessor_count();
  require(!call.draw.wanted || (draws_beside(call, multiprocessors) && call.cut == nullptr && call.kept.rows == 0),
          "tokens are drawn beside a forward of 1 to 64 rows by TMA, of columns from a multiple of 4 on, with no cut");
  if (call.columns == 0) {
    require(call.rows < (int64_t{1} << 31), "N must be below 2^31");
    launch_merge_splits(nullptr, 0, static_cast<int32_t>(call.rows), call.entropy, merged(call, 0), stream);
    check_launch("merge of nothing");
    return;
  }
  const ForwardPlan plan = plan_forward(call, multiprocessors);
  require(call.kept.rows == 0 || plan.path == kRows128 || plan.path == kRows64,
          "logits are kept by the tensor-core kernels that read by TMA alone");
  require(call.maxima.at == nullptr || (call.logits != nullptr && plan.path == kRows64),
          "maxima of groups come beside the logits of few rows, read by TMA");
  require(left == nullptr || (plan.path == kRows64 && call.rows <= plan.chunk_rows && !call.entropy),
          "rows are left unmerged by a launch of few, read by TMA, without entropy");
  require(call.kept.rows == 0 || (call.kept.codes_row % 8 == 0 && call.kept.codes_row >= call.kept.groups * 64 &&
                                  reinterpret_cast<uintptr_t>(call.kept.codes) % 16 == 0),
          "what is kept must begin on 16 bytes and hold whole groups of 64 columns, rows at multiples of 8 elements");
  require(
      call.top.n == 0 || (plan.path == kRows128 && call.rows <= plan.chunk_rows && !call.entropy &&
                          call.logits == nullptr && call.kept.rows == 0),
      "columns are ranked by the kernels of 128 rows alone, in one launch, with no entropy, logits or what is kept");
  for (int64_t first = 0; first < call.rows; first += plan.chunk_rows) {
    const int64_t rows = std::min(plan.chunk_rows, call.rows - first);
    if (plan.path == kRows128 || plan.path == kRows64)
      launch_wgmma_chunk(call, plan, first, rows, multiprocessors, stream, left);
    else
      launch_plain_chunk(call, plan, first, rows, stream);
    check_launch("forward");
  }
}

}  // namespace vocabshard::sm90
