// Host side of the dlogits kernel, and the two small kernels around it: the terms of the rows, the sums for grad_bias.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>

#include "contract.h"
#include "sm90/check.h"
#include "sm90/dlogits.h"
#include "sm90/dlogits_params.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"

namespace vocabshard::sm90 {

namespace {

constexpr int kThreads = 256;
constexpr int kMaskRows = 64;        // of a word of the mask of broken rows
constexpr int32_t kBandRows = 4096;  // of hidden, that stay in L2 while the block's weights pass

unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

struct Coefficients {
  float target, softmax, entropy;
};

__device__ Coefficients coefficients(const RowGradsCall& p, int64_t n) {
  const int64_t id = p.target_ids[n];
  const bool scored = id != p.ignore_index && id >= 0 && id < p.real_vocab_size;
  const float target = p.logp != nullptr && scored ? p.logp[n * p.logp_stride] : 0.0f;
  return {target, p.lse == nullptr ? -target : add(p.lse[n * p.lse_stride], -target),
          p.entropy == nullptr ? 0.0f : p.entropy[n * p.entropy_stride]};
}

__global__ void __launch_bounds__(kThreads) row_grads(const RowGradsCall p) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.rows) return;
  const Coefficients of_row = coefficients(p, n);
  p.grad_target[n] = of_row.target;
  p.grad_softmax[n] = of_row.softmax;
  if (p.entropy != nullptr) p.grad_entropy[n] = of_row.entropy;
}

// One thread a row.
__device__ bool write_terms(const DlogitsRowsCall& p, int64_t n) {
  const bool of_entropy = (p.from_upstream ? p.upstream.entropy : p.grad_entropy) != nullptr;
  const auto [target, softmax, entropy] =
      p.from_upstream ? coefficients(p.upstream, n)
                      : Coefficients{p.grad_target[n], p.grad_softmax[n], of_entropy ? p.grad_entropy[n] : 0.0f};
  const float frac = p.lse2_frac[n];
  const float scale = p.row_inv_temperature == nullptr ? p.inv_temperature : p.row_inv_temperature[n];
  const bool active = target != 0.0f || softmax != 0.0f || entropy != 0.0f;
  // softmax - entropy * (log p + H), as a function of log2 p
  float factor = softmax, slope = 0.0f;
  if (of_entropy) {
    factor = fma(-entropy, p.entropy[n], softmax);
    slope = mul(-entropy, static_cast<float>(kLn2));
  }
  const int64_t column = p.target_ids[n] - p.vocab_start;
  DlogitsRow row;
  row.minus_int = -static_cast<float>(p.lse2_int[n]);
  row.frac = frac;
  row.factor = is_nan(frac) ? quiet_nan() : mul(factor, scale);
  row.slope = mul(slope, scale);
  row.scale = scale;
  row.target_grad = mul(target, scale);
  row.target = column >= 0 && column < p.valid ? static_cast<int32_t>(column) : -1;
  row.keep = active ? ~0u : 0u;
  p.terms[n] = row;
  p.active[n] = active ? 1 : 0;
  return active;
}

// One warp a row: whether anything in it is infinite or NaN.
__device__ bool is_broken(const DlogitsRowsCall& p, int64_t n) {
  const uint32_t exponent = p.element == kHalf ? 0x7c00u : 0x7f80u;
  const uint16_t* row = static_cast<const uint16_t*>(p.hidden) + n * p.hidden_row;
  bool broken = false;
  for (int64_t k = threadIdx.x % 32 * 8; k < p.depth; k += 256) {
    if (k + 8 <= p.depth) {
      const uint4 x = *reinterpret_cast<const uint4*>(row + k);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        broken = broken || (pairs[i] & exponent) == exponent || (pairs[i] >> 16 & exponent) == exponent;
    } else {
      for (int64_t i = k; i < p.depth; ++i) broken = broken || (row[i] & exponent) == exponent;
    }
  }
  return __any_sync(~0u, broken);
}

__global__ void __launch_bounds__(kThreads) dlogits_rows(const DlogitsRowsCall p) {
  __shared__ uint8_t suspect[kMaskRows];
  __shared__ uint32_t words[2];
  ptx::grid_launch_next();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kMaskRows;
  if (threadIdx.x < 2) words[threadIdx.x] = 0;
  if (threadIdx.x < kMaskRows) {
    const int64_t n = first + threadIdx.x;
    suspect[threadIdx.x] = n < p.rows && !write_terms(p, n) && p.hidden != nullptr;
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < kMaskRows; i += kThreads / 32)
    if (suspect[i] && is_broken(p, first + i) && threadIdx.x % 32 == 0) atomicOr(&words[i / 32], 1u << (i % 32));
  __syncthreads();
  if (threadIdx.x == 0 && p.hidden != nullptr) p.broken[blockIdx.x] = static_cast<uint64_t>(words[1]) << 32 | words[0];
}

__global__ void __launch_bounds__(kThreads)
    bias_sums(const float* sums, int64_t blocks, int64_t stride, int64_t columns, void* grad_bias, int32_t element) {
  const int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (v >= columns) return;
  double sum = 0.0;
  for (int64_t i = 0; i < blocks; ++i) sum = add(sum, static_cast<double>(sums[i * stride + v]));
  const float rounded = static_cast<float>(sum);
  if (element == kBfloat16)
    static_cast<__nv_bfloat16*>(grad_bias)[v] = __float2bfloat16_rn(rounded);
  else if (element == kHalf)
    static_cast<__half*>(grad_bias)[v] = __float2half_rn(rounded);
  else
    static_cast<float*>(grad_bias)[v] = rounded;
}

}  // namespace

void launch_row_grads(const RowGradsCall& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  row_grads<<<blocks_of(call.rows), kThreads, 0, stream>>>(call);
  check_launch("upstream gradients");
}

void launch_dlogits_rows(const DlogitsRowsCall& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const auto blocks = static_cast<unsigned>((call.rows + kMaskRows - 1) / kMaskRows);
  dlogits_rows<<<blocks, kThreads, 0, stream>>>(call);
  check_launch("rows of the gradient");
}

void launch_dlogits(const DlogitsCall& call, cudaStream_t stream) {
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
  };
  require(call.element == kBfloat16 || call.element == kHalf, "dlogits takes bf16 and fp16");
  require(tma_can_read(call.hidden, call.hidden_row, 1) && tma_can_read(call.weight, call.weight_row, 1),
          "TMA needs a base on 16 bytes and row strides of multiples of 8 elements");
  require(call.columns < (int64_t{1} << 31) - 1024 && call.depth < (int64_t{1} << 31) - 1024 && call.depth > 0 &&
              call.rows < (int64_t{1} << 31) - 1024,
          "N, D and the block's columns must be below 2^31 - 1024, and D positive");
  const int64_t groups = (call.columns + kGroupColumns - 1) / kGroupColumns;
  require(call.out_row % 8 == 0 && call.out_row >= groups * kGroupColumns &&
              reinterpret_cast<uintptr_t>(call.out) % 16 == 0,
          "out must begin on 16 bytes and hold whole groups of 64 columns, rows at multiples of 8 elements");
  require(!call.plain || call.cut == nullptr, "the plain kernel takes no cut");
  if (call.rows == 0 || call.columns == 0) return;
  const bool few = call.rows <= kDlogitsFewRows;
  const WgmmaShape shape = few ? kDlogitsFewShape : kDlogitsShape;
  const bool half_precision = call.element == kHalf;
  DlogitsParams p = {};
  const int64_t m_tiles = (call.rows + 64 * shape.m_blocks - 1) / (64 * shape.m_blocks);
  const bool share_columns = m_tiles % 2 == 0;
  p.operands = map_operands({call.hidden, call.rows, call.hidden_row}, {call.weight, call.columns, call.weight_row},
                            call.depth, half_precision, shape, share_columns);
  p.bias = call.bias;
  p.bias_type = bias_type(call.bias, call.bias_element);
  p.rows = static_cast<int32_t>(call.rows), p.columns = static_cast<int32_t>(call.columns);
  p.first_column = static_cast<int32_t>(call.first_column), p.groups = static_cast<int32_t>(groups);
  const int64_t round_groups = share_columns ? shape.groups : 2 * shape.groups;
  p.units = static_cast<int32_t>(share_columns ? m_tiles / 2 : m_tiles);
  p.rounds = static_cast<int32_t>((groups + round_groups - 1) / round_groups);
  p.tile_groups = shape.groups;
  p.band = std::min(p.units, kBandRows / (64 * shape.m_blocks * (share_columns ? 2 : 1)));
  p.cap = call.softcap;
  p.row_terms = call.row_terms;
  p.out = call.out, p.out_row = call.out_row;
  p.bias_sums = call.bias_sums;
  p.cut = call.cut, p.vocab_start = call.first_id;
  const int64_t tiles = few ? (groups + 1) / 2 : static_cast<int64_t>(p.units) * p.rounds;
  require(tiles < (int64_t{1} << 31), "too many tiles in a block");
  const int32_t clusters = static_cast<int32_t>(std::min<int64_t>(tiles, std::max(multiprocessor_count() / 2, 1)));
  const DlogitsKind kind = call.plain ? kPlainDlogits : call.softcap == 0.0f ? kScaledDlogits : kCappedDlogits;
  const DlogitsLaunch launch = {clusters, few, call.behind_terms};
  half_precision ? launch_dlogits_fp16(p, kind, launch, stream) : launch_dlogits_bf16(p, kind, launch, stream);
  check_launch("dlogits");
}

void launch_bias_sums(const float* sums, int64_t blocks, int64_t stride, int64_t columns, void* grad_bias,
                      int32_t bias_element, cudaStream_t stream) {
  if (columns == 0) return;
  bias_sums<<<blocks_of(columns), kThreads, 0, stream>>>(sums, blocks, stride, columns, grad_bias, bias_element);
  check_launch("sums of the bias");
}

}  // namespace vocabshard::sm90
