// The gradient of the logits on tensor cores: the tiles of mainloop.cuh, and from a consumer's registers dz, rounded
// once and stored row by row.
//
// dz is a pure function of z and of the row's terms, the same in every launch, tile and shard. The exponential is the
// hardware's: its error, 2^-22, is far below the rounding of dz to 16 bits.
#pragma once

#include "sm90/check.h"
#include "sm90/dlogit.h"
#include "sm90/dlogits_params.h"
#include "sm90/epilogue.h"
#include "sm90/lane_cut.h"
#include "sm90/mainloop.cuh"
#include "sm90/pack.h"

namespace vocabshard::sm90 {

// Of a consumer's warp: 8 rows of 64 columns, as fp32 to be summed, or as the lines of the output.
constexpr int kScratchRow = kGroupColumns + 1, kScratchBytes = 8 * kScratchRow * 4;

template <int kMBlocks, int kGroups>
struct DlogitsLayout {
  static constexpr int kBias = Ring<kMBlocks, kGroups>::kEnd;               // fp32, one tile's columns a consumer
  static constexpr int kScratch = kBias + 2 * kGroups * kGroupColumns * 4;  // a consumer's warp each
  static constexpr int kSums = kScratch + 2 * 4 * kScratchBytes;            // fp32, a tile's columns a consumer's warp
  static constexpr int kBytes = kSums + 2 * 4 * kGroups * kGroupColumns * 4;
  static_assert(kBytes <= 227 * 1024, "more shared memory than a CTA can have");
};

constexpr uint32_t kConsumerBarrier = kFirstFreeBarrier;  // one a consumer

// Tiles of a block, bands of rows one after the other, and in a band rows fastest: hidden stays in L2 while the block's
// weights pass. The CTAs of a cluster take the same columns of neighbouring rows, or the other way round.
class BlockWalk {
 public:
  VS_DEVICE BlockWalk(const DlogitsParams& p, int32_t cluster, int32_t clusters, int32_t rank)
      : p_(p), position_(cluster), clusters_(clusters), rank_(rank) {}

  static VS_DEVICE int32_t count(const DlogitsParams& p, uint32_t cluster, uint32_t clusters) {
    return (static_cast<uint32_t>(p.units * p.rounds) - cluster + clusters - 1) / clusters;
  }

  VS_DEVICE Tile next() {
    const bool share = p_.operands.share_columns;
    const int32_t per_band = p_.band * p_.rounds, band = position_ / per_band, within = position_ - band * per_band;
    const int32_t width = min(p_.band, p_.units - band * p_.band), round = within / width;
    const int32_t unit = band * p_.band + within - round * width;
    position_ += clusters_;
    const int32_t group = (share ? round : 2 * round + rank_) * p_.tile_groups;
    const int32_t left = p_.groups - group;
    return {share ? 2 * unit + rank_ : unit, group, max(min(left, p_.tile_groups), 0), 0};
  }

 private:
  const DlogitsParams& p_;
  int32_t position_, clusters_, rank_;
};

// One block of rows: the weights are all there is to read, and each CTA has a range of groups, in tiles as even as they
// can be.
class RangeWalk {
 public:
  VS_DEVICE RangeWalk(const DlogitsParams& p, int32_t cluster, int32_t clusters, int32_t rank)
      : tiles_(count(p, cluster, clusters)) {
    const int32_t most = most_groups(p, cluster, clusters);
    from_ = begin(p, cluster, clusters) + rank * most;
    end_ = min(from_ + most, begin(p, cluster + 1, clusters));
  }

  static VS_DEVICE int32_t count(const DlogitsParams& p, int32_t cluster, int32_t clusters) {
    return (most_groups(p, cluster, clusters) + p.tile_groups - 1) / p.tile_groups;
  }

  VS_DEVICE Tile next() {
    const int32_t groups = (max(end_ - from_, 0) + tiles_ - 1) / tiles_, group = from_;
    from_ += groups, --tiles_;
    return {0, group, groups, 0};
  }

 private:
  static VS_DEVICE int32_t begin(const DlogitsParams& p, int32_t cluster, int32_t clusters) {
    return static_cast<int32_t>(static_cast<int64_t>(p.groups) * cluster / clusters);
  }
  static VS_DEVICE int32_t most_groups(const DlogitsParams& p, int32_t cluster, int32_t clusters) {
    return (begin(p, cluster + 1, clusters) - begin(p, cluster, clusters) + 1) / 2;
  }

  int32_t from_, end_, tiles_;
};

// A consumer warp's own part of what holds kBytes for each.
template <int kBytes>
VS_DEVICE char* warp_part(char* parts) {
  return parts + (ptx::thread() / 32 - kWarpgroup / 32) * kBytes;
}

// 16 columns a lane, 8 rows by 64 columns a warp: turned in shared memory, so that each store writes whole lines.
constexpr int kLinePitch = kGroupColumns * 2 + 16;  // bytes; 8 lanes reach all banks
static_assert(8 * kLinePitch <= kScratchBytes, "the lines need more than the sums");

// `at`: first column of the group in row `row` of the output, `rows` of it exist.
VS_DEVICE void store_lines(char* scratch, const uint32_t (&x)[8], uint16_t* out, int64_t stride, int32_t rows,
                           int lane) {
  uint4* mine = reinterpret_cast<uint4*>(scratch + lane / 4 * kLinePitch + lane % 4 * 32);
  mine[0] = make_uint4(x[0], x[1], x[2], x[3]);
  mine[1] = make_uint4(x[4], x[5], x[6], x[7]);
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 4 * half + lane / 8;
    const uint4 v = *reinterpret_cast<const uint4*>(scratch + row * kLinePitch + lane % 8 * 16);
    if (row < rows) *reinterpret_cast<uint4*>(out + row * stride + lane % 8 * 8) = v;
  }
  __syncwarp();
}

// Adds up 8 rows of 64 columns, and sets or raises the warp's own sums of them.
VS_DEVICE void sum_rows(float* scratch, const float (&d)[16], float* sums, bool first, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) scratch[lane / 4 * kScratchRow + lane % 4 * 16 + j] = d[j];
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kGroupColumns; i += 32) {
    float sum = first ? 0.0f : sums[i];
#pragma unroll
    for (int row = 0; row < 8; ++row) sum = add(sum, scratch[row * kScratchRow + i]);
    sums[i] = sum;
  }
  __syncwarp();
}

template <class Element, DlogitsKind kKind, int kMBlocks, int kGroups>
VS_DEVICE void finish_dlogits(Accumulator<kMBlocks, kGroups>& acc, const DlogitsParams& p, const int4& tile,
                              char* base) {
  using Layout = DlogitsLayout<kMBlocks, kGroups>;
  constexpr int kColumns = kGroups * kGroupColumns;
  const int32_t first_row = tile.x * (64 * kMBlocks), first_column = tile.y * kGroupColumns;
  const int32_t valid = min(p.columns - first_column, kColumns);
  const uint32_t barrier = kConsumerBarrier + ptx::thread() / kWarpgroup - 1;

  if (tile.y + tile.z > p.operands.whole_groups) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
      if (tile.y + a == p.operands.whole_groups) exchange_tail(acc, a, ptx::thread() % 32);
  }
  if (p.bias_type != kBiasNone) {
    const int thread = ptx::thread();
    float* bias = reinterpret_cast<float*>(base + Layout::kBias) + (thread / kWarpgroup - 1) * kColumns;
    for (int32_t i = thread % kWarpgroup; i < kColumns; i += kWarpgroup)
      bias[i] = i < valid ? load_bias(p.bias, p.bias_type, first_column + i) : 0.0f;
    ptx::barrier_sync(barrier, kWarpgroup);
    add_bias(acc, bias, thread % 32);
    ptx::barrier_sync(barrier, kWarpgroup);  // nobody reads any more when the next tile's bias is written
  }
  float inverse_cap = 0.0f;
  if constexpr (kKind == kCappedDlogits) {
    softcap_all(acc, p.cap);
    inverse_cap = div(1.0f, p.cap);
  }

#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int lane = ptx::thread() % 32, q = lane % 4;
    char* scratch = warp_part<kScratchBytes>(base + Layout::kScratch);
    const int32_t warp_row = first_row + row_of(r, ptx::thread() / 32 % 4, 0), n = warp_row + lane / 4;
    const DlogitsRow* at = p.row_terms + min(n, p.rows - 1);
    const DlogitsRow row = load_row(at);
    // as the forward did; of -inf the gradient is 0
    if (kKind != kPlainDlogits && p.cut != nullptr)
      leave_out<kGroups>(lane_cut(p.cut[min(n, p.rows - 1)], p.vocab_start + first_column + 16 * q),
                         [&](int a, int j) -> float& { return acc.at(r, a, j); });
    const uint32_t keep = n < p.rows ? row.keep : 0;
    const int32_t target = row.target < 0 ? -1 : row.target - p.first_column - first_column - 16 * q;
    uint16_t* out = static_cast<uint16_t*>(p.out) + warp_row * p.out_row + first_column;
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      const int32_t mine = target - kGroupColumns * a;
      const bool here = mine >= 0 && mine < 16;
      float of_target = 0.0f;
      if (here) {
#pragma unroll
        for (int j = 0; j < 16; ++j) of_target = mine == j ? acc.at(r, a, j) : of_target;
        of_target = dlogit_target<kKind>(of_target, row, ptx::load_float(&at->target_grad), inverse_cap);
      }
      float d[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) d[j] = dlogit<kKind>(acc.at(r, a, j), row, inverse_cap);
      if (here) {
#pragma unroll
        for (int j = 0; j < 16; ++j) d[j] = mine == j ? of_target : d[j];
      }
      if (valid < kColumns) {
#pragma unroll
        for (int j = 0; j < 16; ++j) d[j] = kGroupColumns * a + 16 * q + j < valid ? d[j] : 0.0f;
      }
      uint32_t x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = pack<Element>(d[2 * j], d[2 * j + 1]) & keep;
      if (a < tile.z) store_lines(scratch, x, out + kGroupColumns * a, p.out_row, p.rows - warp_row, lane);
      if (p.bias_sums != nullptr) {
#pragma unroll
        for (int j = 0; j < 16; ++j) d[j] = from_bits(bits(d[j]) & keep);
        sum_rows(reinterpret_cast<float*>(scratch), d,
                 reinterpret_cast<float*>(warp_part<4 * kColumns>(base + Layout::kSums)) + kGroupColumns * a, r == 0,
                 lane);
      }
    }
  }

  if (p.bias_sums == nullptr) return;
  ptx::barrier_sync(barrier, kWarpgroup);
  const int thread = ptx::thread();
  const float* sums = reinterpret_cast<const float*>(base + Layout::kSums) + (thread / kWarpgroup - 1) * 4 * kColumns;
  for (int32_t i = thread % kWarpgroup; i < tile.z * kGroupColumns; i += kWarpgroup)
    p.bias_sums[tile.x * p.out_row + first_column + i] =
        add(add(sums[i], sums[kColumns + i]), add(sums[2 * kColumns + i], sums[3 * kColumns + i]));
  ptx::barrier_sync(barrier, kWarpgroup);  // read before the next tile's sums are written
}

template <class Element, DlogitsKind kKind, int kMBlocks, int kGroups>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kMainloopThreads, 1)
    dlogits_wgmma(const __grid_constant__ DlogitsParams p) {
  extern __shared__ __align__(1024) char base[];
  const uint32_t shared = ptx::uniform(ptx::shared_address(base)), warp = ptx::uniform(threadIdx.x / 32);
  using Walk = std::conditional_t<kMBlocks == kDlogitsFewShape.m_blocks, RangeWalk, BlockWalk>;
  const int32_t cluster = blockIdx.x / 2, clusters = gridDim.x / 2, count = Walk::count(p, cluster, clusters);
  start_ring<kMBlocks, kGroups>(p.operands, base, shared);
  if (warp < kWarpgroup / 32) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x % 32 == 0) {
      Walk walk(p, cluster, clusters, ptx::cluster_rank());
      produce<kMBlocks, kGroups>(p.operands, base, shared, count, walk, warp);
    }
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    ptx::grid_wait();  // the rows' terms; operands were there before the grid that makes them
    take_turns<Element, kMBlocks, kGroups, kStages, true>(
        p.operands, base, shared, count, [&p](Accumulator<kMBlocks, kGroups>& acc, const int4& tile, bool) {
          if (tile.z > 0) finish_dlogits<Element, kKind>(acc, p, tile, base);
        });
  }
  finish_ring();
}

template <class Element, DlogitsKind kKind, int kMBlocks, int kGroups>
void launch_dlogits_shape(const DlogitsParams& p, const DlogitsLaunch& launch, cudaStream_t stream) {
  const auto kernel = dlogits_wgmma<Element, kKind, kMBlocks, kGroups>;
  constexpr int kBytes = DlogitsLayout<kMBlocks, kGroups>::kBytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "shared memory");
  if (launch.behind)
    launch_behind_shared(kernel, 2 * launch.clusters, kMainloopThreads, kBytes, stream, p);
  else
    kernel<<<2 * launch.clusters, kMainloopThreads, kBytes, stream>>>(p);
}

template <class Element, DlogitsKind kKind>
void launch_dlogits_one(const DlogitsParams& p, const DlogitsLaunch& launch, cudaStream_t stream) {
  if (launch.few)
    launch_dlogits_shape<Element, kKind, kDlogitsFewShape.m_blocks, kDlogitsFewShape.groups>(p, launch, stream);
  else
    launch_dlogits_shape<Element, kKind, kDlogitsShape.m_blocks, kDlogitsShape.groups>(p, launch, stream);
}

}  // namespace vocabshard::sm90
