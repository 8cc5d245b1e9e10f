// First of two grids for a top_p of few rows whose logits a forward writes at the same time (sampling_stream.h). A
// small CTA fits beside each of the forward's. These count columns by depth, tile by tile, while the forward goes on.
// Behind it one of a row's CTAs knows the exact sum, and so at once in which window of y the last kept column lies.
// Of few rows it decides that itself whose window few columns reach; the next grid takes the others.
//
// For that it runs once on a made-up row at first, which fetches the code.
#include <algorithm>

#include "sm90/launch.h"
#include "sm90/sampling_depths.cuh"
#include "sm90/sampling_grids.h"
#include "sm90/sampling_maxima.cuh"
#include "sm90/sampling_noise.cuh"

namespace vocabshard::sm90::sampling {

namespace {

constexpr int kRecordsOfThread = 2;    // of the forward's CTAs
constexpr int kTilesAtOnce = 3;        // of a warp
constexpr int kAtOnceOfTile = 6;       // columns of a lane
constexpr int64_t kDecidedRows = 2;    // of so few some are decided here; the next grid would wait for them
constexpr int32_t kMostColumns = 144;  // of which the candidates of such a row are
constexpr int32_t kLeftOpen = 2;       // tiles of the forward's CTAs, whose last ones come late
constexpr int64_t kManyRows = 16;      // of which fewer tiles are counted
constexpr float kHeadroom = 8.0f;      // of y, above the largest column of the first tiles

__device__ __align__(16) float made_up[kMaximaColumns];  // columns, all equal, and the maximum of their group
__device__ int64_t made_up_record[1];                    // all words of it

// Until all of the forward's CTAs have stored a tile that is not their last. Where one of them set the words to 0 late,
// after others had told, they don't say so: then until the forward has ended.
VS_DEVICE void wait_for_tile(const int32_t* words, const Schedule& schedule, int32_t tile) {
  bool stored = true;
  if (threadIdx.x == 0) {
    const int32_t wanted = kTellingWarps * ctas_with_more(schedule, tile);
    for (int i = 0; !(stored = ptx::load_acquire(words + kTileWord + tile) >= wanted) && i < kMostLooks &&
                    ptx::load_acquire(words + kEndedWord) < 2 * schedule.clusters;
         ++i)
      ptx::pause(kRarely);
  }
  if (__syncthreads_or(!stored)) ptx::grid_wait();
}

// Of the forward: a CTA, or a cluster where its CTAs share columns.
struct Owners {
  const Schedule& schedule;

  VS_DEVICE int32_t count() const { return schedule.share_columns ? schedule.clusters : 2 * schedule.clusters; }
  VS_DEVICE Owned operator[](int32_t owner) const {
    return schedule.share_columns ? owned_by(schedule, owner, 0) : owned_by(schedule, owner / 2, owner % 2);
  }
  // The first column behind `tiles` of an owner's, its last one left out.
  VS_DEVICE int32_t column(const Owned& owned, int32_t tiles) const {
    return kGroupColumns * tile_begin(schedule, owned, min(tiles, owned.tiles - 1));
  }
};

// The largest y of a row's columns in the first tile of every owner; 0 where it is none that a usable row has.
VS_DEVICE float largest_of_first(const float* maxima, const Owners& owners, const Row& row, FewShared& s) {
  float best = neg_inf();
  for (int32_t owner = threadIdx.x; owner < owners.count(); owner += kFewThreads) {
    const Owned owned = owners[owner];
    const int32_t end = min(owners.column(owned, 1), row.columns.valid);
#pragma unroll 1
    for (int32_t column = owners.column(owned, 0); column < end; column += kMaximaColumns)
      best = fmaxf(best, mul(maxima[column / kMaximaColumns], row.scale));
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, by));
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.words[threadIdx.x / 32][0] = bits(best);
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) best = fmaxf(best, from_bits(static_cast<uint32_t>(s.words[w][0])));
  return in_range(best) ? best : 0.0f;
}

// Counts `tiles` tiles of every owner from `first` to `end`.
VS_DEVICE void count_columns(const SamplingStream& call, const Row& row, int64_t n, int32_t first, int32_t end,
                             int32_t tiles, FewShared& s) {
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  const Owners owners = {call.unmerged.schedule};
  const Columns& columns = row.columns;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  Counted& counted = work.counted_of(n);
  uint32_t* const bins = counts_of(s);
  wait_for_tile(work.words, owners.schedule, 0);
  const float top = largest_of_first(work.maxima + n * kRowMaxima, owners, row, s) + kHeadroom;
  if (threadIdx.x == 0) counted.top = top;  // for all CTAs the same
  const Depths depths(bins, top, row.scale);
  for (int i = threadIdx.x; i < kDepths; i += kFewThreads) bins[i] = 0;
  __syncthreads();
  float best = neg_inf();
  int32_t best_at = 0;
#pragma unroll 1
  for (int32_t tile = 0; tile < tiles; ++tile) {
    if (tile > 0) wait_for_tile(work.words, owners.schedule, tile);
#pragma unroll 1
    for (int32_t some = first + kTilesAtOnce * warp; some < end; some += kTilesAtOnce * kFewWarps) {
      float z[kTilesAtOnce][kAtOnceOfTile];
      int32_t at[kTilesAtOnce];
#pragma unroll
      for (int t = 0; t < kTilesAtOnce; ++t) {
        const Owned owned = owners[min(some + t, end - 1)];
        const int32_t valid = some + t < end ? min(owners.column(owned, tile + 1), columns.valid) : 0;
        at[t] = owners.column(owned, tile) + lane;
#pragma unroll
        for (int i = 0; i < kAtOnceOfTile; ++i)
          z[t][i] = at[t] + 32 * i < valid ? columns.row[at[t] + 32 * i] : neg_inf();
      }
#pragma unroll
      for (int t = 0; t < kTilesAtOnce; ++t)
#pragma unroll
        for (int i = 0; i < kAtOnceOfTile; ++i) {
          depths.count(z[t][i]);
          if (z[t][i] > best) best = z[t][i], best_at = at[t] + 32 * i;
        }
    }
  }
  __syncthreads();
  for (uint32_t depth = threadIdx.x; depth < kDepths; depth += kFewThreads) {
    const uint32_t mine = bins[Depths::slot(depth)];
    if (mine != 0) atomicAdd(work.depths + n * kDepths + depth, mine);
  }
  // its best column's clock bounds those of others
  const float y = mul(best, row.scale);
  const uint32_t key = is_neg_inf(best) ? 0 : radix_key(y);
  const auto most = static_cast<uint32_t>(__reduce_max_sync(kAllLanes, static_cast<int32_t>(key ^ 0x80000000u)));
  if (p.draw && key != 0 && key == (most ^ 0x80000000u)) {
    const Look look = look_at(clamp_logit(y), columns.vocab_start + best_at, p.seed, row.key);
    atomicMax(&counted.best, (static_cast<unsigned long long>(key) << 32) | bits(look.clock));
  }
}

// What is known of a row before its forward has ended.
struct Prepared {
  DeeperSums deeper;
  float top;
  float many_below;   // y from which on down there are too many columns to be looked at here
  float best, clock;  // of the best column that was counted, where `draws`: its y, its clock
  bool draws;
  int32_t record[kRecordsOfThread];  // where the forward leaves them, or -1
};

// Once all CTAs of the row have counted.
VS_DEVICE Prepared prepare(const SamplingStream& call, int64_t n, float each, FewShared& s) {
  const Workspace work(call.workspace, call.rows.rows);
  const uint32_t* const depths = work.depths + n * kDepths;
  const Counted& counted = work.counted_of(n);
  const float top = __ldcg(&counted.top);
  const unsigned long long best = __ldcg(&counted.best);
  const DeeperSums deeper = deeper_sums(depths, s);
  // from the least deep down
  constexpr int32_t kOfThread = kDepths / kFewThreads;
  const uint32_t* const counts = counts_of(s) + kOfThread * threadIdx.x;
  int32_t mine = 0;
#pragma unroll 4
  for (int i = 0; i < kOfThread; ++i) mine += static_cast<int32_t>(counts[i]);
  const auto up_to = static_cast<float>(up_to_thread<kFewWarps>(s.words, mine));
  const int32_t few = __syncthreads_count(up_to * each <= static_cast<float>(kMostColumns));  // threads
  const UnmergedRows& from = call.unmerged;
  const auto block = static_cast<int32_t>(n) / from.block_rows, of_block = static_cast<int32_t>(n) % from.block_rows;
  const RowPartials there(from.schedule, block);
  Prepared prepared = {deeper,
                       top,
                       top - static_cast<float>(kOfThread * few) / kDepthsPerY,
                       logit_of(static_cast<int32_t>((best >> 32) ^ 0x80000000u)),
                       from_bits(static_cast<uint32_t>(best)),
                       best != 0,
                       {}};
#pragma unroll
  for (int i = 0; i < kRecordsOfThread; ++i) {
    const int64_t place = there.place(static_cast<int32_t>(threadIdx.x) + kFewThreads * i);
    prepared.record[i] = place < 0 ? -1 : static_cast<int32_t>(place) * (kRecordWords * from.block_rows) + of_block;
  }
  return prepared;
}

// What the forward's CTAs have of a row, as far as a window wants it.
struct Sum {
  float y_max;   // NaN: the row is poisoned
  double terms;  // in units of 2^k, k that of y_max
};

VS_DEVICE Sum sum_of_partials(const UnmergedRows& from, const Row& row, const Prepared& prepared, FewShared& s) {
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  Partial mine[kRecordsOfThread];
#pragma unroll
  for (int i = 0; i < kRecordsOfThread; ++i)
    mine[i] = prepared.record[i] < 0 ? partial_identity()
              : row.real             ? record_load<false>(from.partials + prepared.record[i], from.block_rows)
                                     : record_load<false>(made_up_record, 0);
  int32_t order = INT32_MIN;
#pragma unroll
  for (int i = 0; i < kRecordsOfThread; ++i)
    order = max(order, is_nan(mine[i].y_max) ? INT32_MAX : order_of(mine[i].y_max));
  order = __reduce_max_sync(kAllLanes, order);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.words[warp][0] = order;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) order = max(order, static_cast<int32_t>(s.words[w][0]));
  const float y_max = order == INT32_MAX ? quiet_nan() : logit_of(order);
  const int32_t k_max = k_of_max(y_max);
  double terms = 0.0;
#pragma unroll
  for (int i = 0; i < kRecordsOfThread; ++i) {
    const int32_t n = 32 * (limb_top(k_of_max(mine[i].y_max)) - 1) - k_max;
    if (n > -1022 && !poisons(y_max))  // else next to nothing
      terms += mul(counters_value(mine[i].c), from_bits(static_cast<uint64_t>(1023 + n) << 52));
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) terms += __shfl_xor_sync(kAllLanes, terms, by);
  if (threadIdx.x % 32 == 0) s.words[warp][1] = static_cast<int64_t>(bits(terms));
  __syncthreads();
  terms = 0.0;
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) terms += from_bits(static_cast<uint64_t>(s.words[w][1]));
  return {y_max, terms};
}

// The row's end, or its Head. `each`: columns for each that is counted.
VS_DEVICE RowState decide(const SamplingStream& call, const Row& row, int64_t n, const Prepared& prepared, float each,
                          FewShared& s) {
  const SamplingRows& p = call.rows;
  const Workspace work(call.workspace, p.rows);
  const int32_t groups = (row.columns.valid + kMaximaColumns - 1) / kMaximaColumns;
  Maxima maxima(row.real ? work.maxima + n * kRowMaxima : row.columns.row, groups);
  const Sum sum = sum_of_partials(call.unmerged, row, prepared, s);
  const float y_max = sum.y_max;
  if (!usable(row, y_max)) {
    const Partial uncut = uncut_of<kFewThreads>(call, n, s.of_warp);
    if (threadIdx.x < 32)
      put_row(call, row, target_of(row, target_id_of(p, row.n)), kKeepAll, {{kNoArrival, kNobody}}, uncut);
    return kDone;
  }
  const Exp largest = exp_split(clamp_logit(y_max));
  const float left_out = static_cast<float>((1 << 30) - p.step[0].number) * 0x1p-30f;
  const float rest = left_out * __fdividef(static_cast<float>(sum.terms), largest.p) *
                     ptx::exp2(mul(y_max - prepared.top, kLog2e));  // in units of e^top
  Window window = window_of(prepared.deeper, prepared.top, each, rest, s);
  if (!row.real) window = {-1.0f, 1.0f};
  const bool careful = y_max < -kLogitLimit + 256.0f;  // logits are clamped
  if (!row.real || (p.rows <= kDecidedRows && !careful && window.low > prepared.many_below)) {
    // What all columns' masses come to, of which the record knows but roundings: a tile's four, a mass's one, and those
    // made here. That tells nearly always where few columns are kept.
    Total total = {static_cast<int64_t>(sum.terms * (0x1p+40 - 0x1p+20)),
                   static_cast<int64_t>(sum.terms * (0x1p+40 + 0x1p+20))};
    if (!row.real) total = {int64_t{1} << kMassBits, int64_t{1} << kMassBits};
    int64_t* const list = work.candidates + n * kCandidateWords;
    const uint32_t found = list_groups(maxima, row.scale, window.low, s);
    const uint32_t count = list_columns(row, found, window.low, list, s);
    if (count <= kFewPlaces && finish_few(call, row, y_max, static_cast<int32_t>(count), total, s)) return kDone;
  }
  if (row.real && threadIdx.x == 0) {
    const Terms term(y_max, row.scale);
    const float bound =
        prepared.draws && prepared.best > window.high
            ? bound_of(prepared.clock, logits::scaled_exp(fmaxf(prepared.best, term.lowest_kept), term.magic))
            : from_bits(0x7f800000u);
    work.heads[n] = {y_max, window, careful ? kListed + 1u : 0u, 0, bound, true};
  }
  return kLeft;
}

// `parts` CTAs of a row count; the last of them to have done so decides.
__global__ void __launch_bounds__(kFewThreads, 6)
    count_kernel(const __grid_constant__ SamplingStream call, int32_t parts, int32_t tiles, float each) {
  __shared__ FewShared s;
  const Workspace work(call.workspace, call.rows.rows);
  const int64_t n = blockIdx.x / parts;
  const auto part = static_cast<int32_t>(blockIdx.x % parts);
  const int32_t owners = Owners{call.unmerged.schedule}.count();
  ptx::grid_launch_next();
#pragma unroll 1
  for (int pass = __syncthreads_or(work.early(call.unmerged.schedule.clusters / 2)) ? 0 : 1; pass < 2; ++pass) {
    const bool real = pass == 1;
    Row row = {n, {made_up, kMaximaColumns, 0}, 1.0f, 0, false};
    bool last = true;
    if (real) {
      row = row_of(call.rows, n);
      make_noise_of_part<kFewThreads>(call.rows, work, row, part, parts);
      count_columns(call, row, n, owners * part / parts, owners * (part + 1) / parts, tiles, s);
      __syncthreads();
      if (threadIdx.x == 0)
        s.last = ptx::add_in_turn(&work.counted_of(n).collected, 1) + 1 == static_cast<uint32_t>(parts);
      __syncthreads();
      last = s.last;
    }
    if (last) {
      const Prepared prepared = prepare(call, n, each, s);
      if (real) wait_for_forward(work.words, 2 * call.unmerged.schedule.clusters);
      const RowState state = decide(call, row, n, prepared, each, s);
      if (real && threadIdx.x == 0) ptx::store_release(work.states + n, state);
    }
    __syncthreads();
  }
  ptx::grid_wait();  // all CTAs: who waits for this grid waits for the forward too
}

}  // namespace

bool has_time(const Schedule& s) {
  return s.units == 1 && (s.over > 0 ? s.tiles_over : s.tiles) > 1 && s.tiles_over <= kToldTiles &&
         2 * s.clusters <= kRecordsOfThread * kFewThreads;
}

void launch_count(const SamplingStream& call, cudaStream_t stream) {
  const Schedule& s = call.unmerged.schedule;
  const int32_t ctas = s.share_columns ? 1 : 2, owners = ctas * s.clusters;
  const auto slots = static_cast<int32_t>(multiprocessor_count() / call.rows.rows);
  const int32_t parts = std::min(slots, owners);
  // of more rows fewer: they are beside the forward, which pays for it
  const int32_t most = (s.over > 0 ? s.tiles_over : s.tiles) - kLeftOpen;
  const int32_t tiles = std::max(call.rows.rows > kManyRows ? most / 2 : most, 1);
  int32_t groups = 0;
  for (int32_t owner = 0; owner < owners; ++owner) {
    const Owned owned = owned_by(s, owner / ctas, owner % ctas);
    groups += tile_begin(s, owned, std::min(tiles, owned.tiles - 1)) - owned.begin;
  }
  static OncePerDevice once;
  once([] {  // as the forward has it: an SM that is to be set otherwise must run empty first
    check(cudaFuncSetAttribute(count_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "shared memory of the sampling kernel");
  });
  launch_behind(count_kernel, call.rows.rows * parts, kFewThreads, stream, call, parts, tiles,
                static_cast<float>(s.groups) / static_cast<float>(groups));
}

}  // namespace vocabshard::sm90::sampling
