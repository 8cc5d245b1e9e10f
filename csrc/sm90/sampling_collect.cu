// Last of the grids for a top_p (sampling_stream.h): one read of every row lists the candidates for its last kept
// column, sums masses exactly, and races and sums what is better. One CTA of a row, once all have come, finds the cut
// and does the rest.
#include "sm90/launch.h"
#include "sm90/sampling_columns.cuh"
#include "sm90/sampling_grids.h"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kThreads = 512;
// A CTA fits beside one of launch_count, which stays until the forward has ended: 512 * 104 + 128 * 80 <= 65536.
#define VS_COLLECT_REGISTERS 104
constexpr int kCollectBytes = sizeof(Candidate) * kListed;
constexpr int64_t kRehearsedRows = 32;  // of more the forward, which goes on meanwhile, loses more than is gained

// How CTAs share a row that each of them has a part of.
struct Share {
  int64_t row;  // -1: there is none left for this CTA
  int32_t part, parts, columns;

  VS_DEVICE int32_t begin() const { return part * columns; }
  VS_DEVICE int32_t end(const Row& row) const { return min(begin() + columns, row.columns.valid); }
};

// As launch_bracket leaves rows: all of them.
VS_DEVICE Share share_of_all(int32_t parts, int32_t columns) {
  return {blockIdx.x / parts, static_cast<int32_t>(blockIdx.x % parts), parts, columns};
}

// Until all rows are decided or left. Returns the state of the thread's one.
VS_DEVICE int32_t wait_for_states(const Workspace& work, int32_t rows, int32_t ctas) {
  const auto n = static_cast<int32_t>(threadIdx.x);
  int32_t state = n < rows ? kUndecided : kDone;
  if (n == 0) wait_for_word(work.words + kEndedWord, ctas, true);
  __syncthreads();
  for (int i = 0; state == kUndecided && i < kMostLooks; ++i) {
    state = ptx::load_acquire(work.states + n);
    if (state == kUndecided) ptx::pause(kOften);
  }
  if (__syncthreads_or(state == kUndecided)) {
    ptx::grid_wait();
    if (n < rows) state = __ldcg(work.states + n);
  }
  return state;
}

// As launch_count does: those that it has not decided, by all CTAs.
VS_DEVICE Share share_of_left(int32_t state, int32_t valid, CrossingShared<kThreads>& s) {
  static_assert(kThreads >= kMostStates);
  auto* const of_warp = reinterpret_cast<uint32_t*>(s.few);  // which of its rows
  const auto n = static_cast<int32_t>(threadIdx.x), warp = n / 32, lane = n % 32;
  const uint32_t mine = __ballot_sync(kAllLanes, state == kLeft);
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  uint32_t left = 0, before = __popc(mine & ((1u << lane) - 1));
#pragma unroll
  for (int w = 0; w < kMostStates / 32; ++w) {
    left += __popc(of_warp[w]);
    before += w < warp ? __popc(of_warp[w]) : 0;
  }
  const uint32_t parts = left == 0 ? 1 : min(gridDim.x / left, static_cast<uint32_t>(kMostParts));
  if (blockIdx.x >= left * parts) return {-1, 0, 0, 0};
  if ((mine >> lane & 1) != 0 && before == blockIdx.x % left) s.bin = n;
  __syncthreads();
  const auto each = static_cast<int32_t>((static_cast<uint32_t>(valid) + kTile * parts - 1) / (kTile * parts)) * kTile;
  return {s.bin, static_cast<int32_t>(blockIdx.x / left), static_cast<int32_t>(parts), each};
}

// A made-up row of a tile, the first column of which is its only candidate.
__device__ __align__(16) float made_up[kTile];
__device__ Candidate made_up_listed[kThreads] = {{0, -1.0f, 0.0f}};
__device__ const uint32_t made_up_count = 1, made_up_noise = 0;
__device__ const PartOfRow made_up_part = {kNoArrival, kNobody, {1, 0, 0}, int64_t{1} << kMassBits, 0};

// part_columns = 0: of rows that are left.
__global__ void __maxnreg__(VS_COLLECT_REGISTERS)
    collect_kernel(const __grid_constant__ SamplingStream call, int32_t part_columns, int32_t parts_of_all) {
  extern __shared__ __align__(128) Candidate list[];
  __shared__ CrossingShared<kThreads> s;
  __shared__ EarlyShared<kThreads> early;
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  Share share = {0, 0, 1, kTile};
  Row row = {0, {made_up, kTile, 0}, 1.0f, 0, false};
  Head head = {0.0f, {-1.0f, 1.0f}, 0, 0, 1.0f, true};
  const uint32_t *noise = &made_up_noise, *candidates = &made_up_count;
  const Candidate* listed = made_up_listed;
  const PartOfRow* all = &made_up_part;
  // so early that it is done in time: it takes some 25 us
  const bool rehearses = part_columns == 0 && p.rows <= kRehearsedRows &&
                         __syncthreads_or(work.early(call.unmerged.schedule.clusters * 3 / 4));
#pragma unroll 1
  for (int pass = rehearses ? 0 : 1;; ++pass) {
    if (threadIdx.x == 0) s.count = 0, early.bound = 0x7f800000;
    if (pass > 0) {
      if (part_columns > 0) {
        share = share_of_all(parts_of_all, part_columns);
        row = row_of(p, share.row);
        if (p.draw)  // nobody has made it
          make_noise<kThreads>(work.noise + share.row * kNoiseWords, row, p.seed, share.begin(), share.end(row));
        ptx::grid_wait();
        __syncthreads();
      } else {
        const int32_t state = wait_for_states(work, static_cast<int32_t>(p.rows), 2 * call.unmerged.schedule.clusters);
        share = share_of_left(state, static_cast<int32_t>(p.valid), s);
      }
      ptx::grid_launch_next();
      if (share.row < 0) break;
      head = work.heads[share.row];
      row = row_of(p, share.row);
      if (!head.usable) {
        if (share.part == 0 && threadIdx.x < 32)
          put_row(call, row, target_of(row, target_id_of(p, row.n)), kKeepAll, {{kNoArrival, kNobody}},
                  record_load<false>(call.uncut + row.n, p.rows));
        break;
      }
      noise = work.noise + share.row * kNoiseWords;
    } else {
      __syncthreads();
    }
    Collected collected(head.bound);
    collect_columns(p, row, head.window, Scales(head.y_max, row.scale), noise, share.begin(), share.end(row), list,
                    kListed, collected, s, early);
    __syncthreads();
    if (pass > 0) {
      auto* const together = reinterpret_cast<Candidate*>(work.candidates + row.n * kCandidateWords);
      PartOfRow* const parts = work.parts + row.n * kMostParts;
      Head& of_row = work.heads[row.n];
      if (!come_together(of_row, parts + share.part, collected, share.part == 0, share.parts, list, kListed, together,
                         s))
        break;
      candidates = &of_row.listed, listed = together, all = parts;
    }
    finish_window(call, row, head.y_max, head.bound, candidates, listed, reinterpret_cast<Waiting*>(list), all,
                  share.parts, s);
    if (pass > 0) break;
    __syncthreads();
  }
  ptx::grid_wait();  // who waits for this grid waits for those before it
}

}  // namespace

void launch_collect(const SamplingStream& call, cudaStream_t stream) {
  const SamplingRows& p = call.rows;
  static OncePerDevice allowed;
  allowed([] {
    check(cudaFuncSetAttribute(collect_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCollectBytes),
          "shared memory of the sampling kernel");
  });
  const auto launch = [&](int64_t blocks, const Parts& parts) {
    launch_behind_shared(collect_kernel, blocks, kThreads, kCollectBytes, stream, call, parts.columns, parts.count);
  };
  if (call.unmerged.partials != nullptr) return launch(multiprocessor_count(), {0, 0});
  const Parts parts = parts_of(p.rows, p.valid, 4 * kThreads, multiprocessor_count());
  launch(p.rows * parts.count, parts);
}

}  // namespace vocabshard::sm90::sampling
