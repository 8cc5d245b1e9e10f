// The last column of a row, best first, at which a count or a mass is reached: a histogram by y, finer ones by the bits
// of z, and a sort of the few that are left.
#pragma once

#include "sm90/sampling_cluster.cuh"

namespace vocabshard::sm90::sampling {

constexpr int kCoarse = 128, kReplicas = 8;  // by y, so that columns do not crowd in few bins
constexpr float kCoarsePerY = 8.0f;
constexpr int kFineBits = 8;
static_assert(kCoarse * kReplicas <= kEntries && (1 << kFineBits) <= kBins && kCoarse <= kBins);

struct Selection {
  bool by_mass;
  bool split_equals;  // lower ids first; else all equals of the last are taken
  int64_t wanted;     // a count, or P of top_p
  int64_t cut;        // columns before it alone count
  float scale, y_max;
  bool by_y;  // y can be trusted
};

VS_DEVICE int32_t coarse_bin(float z, const Selection& s) {
  const float depth = mul(add(s.y_max, -mul(z, s.scale)), kCoarsePerY);  // not decreasing as z falls
  return static_cast<int32_t>(fminf(depth, static_cast<float>(kCoarse - 1)));
}

// The keys that lie in coarse bins `best` ... `last`, by two threads.
VS_DEVICE void key_range(Shared& s, const Selection& selection, int32_t best, int32_t last) {
  if (threadIdx.x == 0 || threadIdx.x == 32) {
    const bool upper = threadIdx.x == 32;
    const int32_t bin = upper ? best : last;
    // the lowest key whose bin is at most `bin`, or the highest whose bin is at least that
    uint32_t low = radix_key(neg_inf()), high = radix_key(from_bits(0x7f800000u));
    while (low < high) {
      const uint32_t middle = low + (high - low + upper) / 2;
      const int32_t at = coarse_bin(logit_of(static_cast<int32_t>(middle ^ 0x80000000u)), selection);
      if (upper ? at >= bin : at > bin)
        low = upper ? middle : middle + 1;
      else
        high = upper ? middle - 1 : middle;
    }
    s.range[upper] = low;
  }
  __syncthreads();
}

// The bin in which what is wanted is reached, among the sums of the cluster's bins. `share`: P / 2^30 of the total.
VS_DEVICE void find_bin(const Slice& slice, const Bin* bins, int32_t count_of_bins, bool by_mass, bool share,
                        int64_t& wanted) {
  Shared& s = *slice.shared;
  const int32_t bin = threadIdx.x % kBins, half = threadIdx.x / kBins;
  static_assert(kThreads == 2 * kBins);
  Totals mine = {0, 0};
  if (bin < count_of_bins) {
#pragma unroll
    for (uint32_t i = 0; i < kMostCluster / 2; ++i) {
      const uint32_t rank = 2 * i + half;
      if (rank < slice.ranks) {
        const uint4 words = *reinterpret_cast<const uint4*>(of_rank(bins + bin, rank));
        mine.count += words.x;
        mine.mass += whole_mass({words.x, {words.y, words.z, words.w}});
      }
    }
  }
  if (half == 1) s.halves[bin] = mine;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (half == 0) {
    mine.count += s.halves[bin].count;
    mine.mass += s.halves[bin].mass;
  }
  const int64_t weight = half == 1 ? 0 : by_mass ? mine.mass : mine.count;
  int64_t up_to = weight;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) s.of_warp[warp][0] = up_to;
  __syncthreads();
  int64_t total = 0;
#pragma unroll
  for (int w = 0; w < kBins / 32; ++w) {
    const int64_t of_warp = s.of_warp[w][0];
    up_to += w < warp ? of_warp : 0;
    total += of_warp;
  }
  if (share) wanted = share_of(wanted, total);
  if (half == 0 && up_to - weight < wanted && wanted <= up_to) s.found = {bin, up_to - weight, mine.count, mine.mass};
  __syncthreads();
}

// Columns that count and whose keys lie in [low, high], of every kSkip-th chunk: take(z, key, id).
template <int kSkip, class Take>
VS_DEVICE void candidates(const Slice& slice, const Selection& selection, uint32_t low, uint32_t high,
                          const Take& take) {
  const int32_t cut_order = static_cast<int32_t>(selection.cut >> 32);
  for (int32_t i = kSkip * threadIdx.x; i < slice.chunks; i += kSkip * kThreads) {
    const float4 v = slice.z[i];
    const float z[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t order = order_of(z[j]);
      const uint32_t key = static_cast<uint32_t>(order) ^ 0x80000000u;
      if (key < low || key > high || order < cut_order || 4 * i + j >= slice.columns) continue;
      const int64_t id = slice.first_id + 4 * i + j;
      if (order == cut_order && place_of(z[j], id) < selection.cut) continue;
      take(z[j], key, id);
    }
  }
}

// The cut at the id of the nth column, ascending, whose key is this one; bins[bin] holds each CTA's count of them.
VS_DEVICE int64_t nth_equal(const Slice& slice, const Bin* bin, uint32_t key, int64_t nth) {
  Shared& s = *slice.shared;
  if (threadIdx.x < 32) {
    const uint32_t lane = threadIdx.x;
    int64_t before = lane < slice.rank ? of_rank(bin, lane)->count : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(kAllLanes, before, step);
    int64_t left = nth - before;
    if (left >= 1 && left <= bin->count) {
      for (int32_t i = lane; left > 0; i += 32) {
        const bool equal = i < slice.columns && radix_key(slice.column(i)) == key;
        const unsigned ballot = __ballot_sync(kAllLanes, equal);
        if (equal && __popc(ballot & ((2u << lane) - 1)) == left)
          for (uint32_t to = 0; to < slice.ranks; ++to) *of_rank(&s.answer, to) = slice.first_id + i;
        left -= __popc(ballot);
      }
    }
  }
  cluster_sync();
  const int64_t id = s.answer;
  __syncthreads();  // read by all before it is written again
  return id;
}

// The same by sorting, where few columns are left in [low, high].
VS_DEVICE int64_t select_of_few(const Slice& slice, const Selection& selection, uint32_t low, uint32_t high,
                                int64_t wanted) {
  Shared& s = *slice.shared;
  const int32_t k_max = exp_k(clamp_logit(selection.y_max));
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  candidates<1>(slice, selection, low, high,
                [&](float z, uint32_t, int64_t id) { s.few[atomicAdd(&s.few_count, 1u)] = place_of(z, id); });
  if (threadIdx.x == 0) s.all_count = 0;
  cluster_sync();
  if (warp < slice.ranks) {
    const uint32_t count = *of_rank(&s.few_count, warp);
    for (uint32_t i = lane; i < count; i += 32) s.all[atomicAdd(&s.all_count, 1u)] = of_rank(s.few, warp)[i];
  }
  __syncthreads();
  const uint32_t count = s.all_count;
  int64_t mine = 0;
  if (threadIdx.x < count) {
    mine = s.all[threadIdx.x];
    const float y = mul(logit_of(static_cast<int32_t>(mine >> 32)), selection.scale);
    s.all_mass[threadIdx.x] = selection.by_mass ? mass_fast(y, k_max) : 1;
  }
  __syncthreads();
  if (threadIdx.x < count) {
    int64_t above = 0;
    bool equals_after = false;
    for (uint32_t i = 0; i < count; ++i) {
      const int64_t other = s.all[i];
      above += other > mine ? s.all_mass[i] : 0;
      equals_after |= other < mine && other >> 32 == mine >> 32;
    }
    if (above < wanted && wanted <= above + s.all_mass[threadIdx.x]) {
      const bool split = equals_after && (selection.by_mass || selection.split_equals);
      s.answer = split ? mine : mine & ~int64_t{0xffffffff};
    }
  }
  __syncthreads();
  return s.answer;
}

// Replicas of `bins` bins together, into what other CTAs read.
VS_DEVICE void fold_replicas(const Shared& s, Bin* to, int32_t bins, int32_t replicas) {
  __syncthreads();
  if (threadIdx.x < bins) {
    Bin all = {};
    for (int32_t i = 0; i < replicas; ++i) {
      const Bin& bin = s.replicas[replicas * threadIdx.x + i];
      all.count += bin.count;
      for (int j = 0; j < 3; ++j) all.mass[j] += bin.mass[j];
    }
    to[threadIdx.x] = all;
  }
}

VS_DEVICE void clear(Bin* bins, int32_t count) {
  for (int i = threadIdx.x; i < count; i += kThreads) *reinterpret_cast<uint4*>(&bins[i]) = make_uint4(0, 0, 0, 0);
  __syncthreads();
}

// Counts, and masses, by y of every kSkip-th chunk. Returns the columns of this thread that are not deep down.
template <int kSkip>
VS_DEVICE uint32_t coarse_histogram(const Slice& slice, const Selection& selection, uint32_t low, Bin* bins) {
  Shared& s = *slice.shared;
  const int32_t k_max = exp_k(clamp_logit(selection.y_max));
  clear(s.replicas, kEntries);
  const uint32_t replica = threadIdx.x % kReplicas;
  uint32_t deep = 0, others = 0;
  int64_t deep_mass = 0;
  candidates<kSkip>(slice, selection, low, ~0u, [&](float z, uint32_t, int64_t) {
    const int32_t bin = coarse_bin(z, selection);
    const int64_t mass = selection.by_mass ? mass_fast(mul(z, selection.scale), k_max) : 0;
    if (bin == kCoarse - 1) {  // most columns of most models
      ++deep;
      deep_mass += mass;
    } else {
      ++others;
      add_to(s.replicas[bin * kReplicas + replica], 1, selection.by_mass, mass);
    }
  });
  if (deep != 0) add_to(s.replicas[(kCoarse - 1) * kReplicas + replica], deep, selection.by_mass, deep_mass);
  fold_replicas(s, bins, kCoarse, kReplicas);
  return others;
}

// A key that as many columns reach as are wanted: the bin in which the threads' own best columns are so many.
VS_DEVICE uint32_t lower_bound(Slice& slice, const Selection& selection) {
  Shared& s = *slice.shared;
  Bin* const bins = s.bins[slice.levels++ % 2];
  clear(bins, kBins);
  float best = neg_inf();
  for (int32_t i = threadIdx.x; i < slice.chunks; i += kThreads) {
    const float4 v = slice.z[i];
    best = fmaxf(best, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
  }
  atomicAdd(&bins[coarse_bin(best, selection)].count, 1u);
  cluster_sync();
  int64_t wanted = selection.wanted;
  find_bin(slice, bins, kCoarse, false, false, wanted);
  const int32_t bin = s.found.bin;
  if (bin == kCoarse - 1) return 0;
  key_range(s, selection, bin, bin);
  return s.range[0];
}

// Where many columns are near the maximum: an eighth of them tells where the crossing is likely to be, and the rest
// need no histogram. False: it is elsewhere. `wanted` becomes what is left to be reached in [low, high].
VS_DEVICE bool bracket(Slice& slice, const Selection& selection, uint32_t& low, uint32_t& high, int64_t& wanted) {
  constexpr int kAround = 3, kInside = 2 * kAround + 1, kInsideReplicas = 128, kMany = 4096;
  static_assert(kInside * kInsideReplicas <= kEntries);
  Shared& s = *slice.shared;
  const int32_t k_max = exp_k(clamp_logit(selection.y_max));
  Bin* bins = s.bins[slice.levels++ % 2];
  Words<1> others = {{coarse_histogram<8>(slice, selection, 0, bins)}};
  others = over_cluster(slice, others, {{0}}, Sum());
  if (others.x[0] < kMany) return false;
  int64_t likely = selection.wanted;
  find_bin(slice, bins, kCoarse, true, true, likely);
  const int32_t middle = s.found.bin, best = middle > kAround ? middle - kAround : 0, last = best + kInside - 1;
  if (last >= kCoarse - 1) return false;
  key_range(s, selection, best, last);
  const uint32_t inside_low = s.range[0], inside_high = s.range[1];
  bins = s.bins[slice.levels++ % 2];
  clear(s.replicas, kEntries);
  Words<2> masses = {{0, 0}};  // above, and of all
  candidates<1>(slice, selection, 0, ~0u, [&](float z, uint32_t key, int64_t) {
    const int64_t mass = mass_fast(mul(z, selection.scale), k_max);
    masses.x[1] += mass;
    if (key > inside_high)
      masses.x[0] += mass;
    else if (key >= inside_low)
      add_to(s.replicas[(coarse_bin(z, selection) - best) * kInsideReplicas + threadIdx.x % kInsideReplicas], 1, true,
             mass);
  });
  fold_replicas(s, bins, kInside, kInsideReplicas);
  masses = over_cluster(slice, masses, {{0, 0}}, Sum());
  const int64_t goal = share_of(selection.wanted, masses.x[1]) - masses.x[0];
  if (goal < 1) return false;
  if (threadIdx.x == 0) s.found.bin = -1;
  __syncthreads();
  int64_t left = goal;
  find_bin(slice, bins, kInside, true, false, left);
  const Found found = s.found;
  if (found.bin < 0) return false;
  key_range(s, selection, best + found.bin, best + found.bin);
  low = s.range[0], high = s.range[1];
  wanted = goal - found.above;
  return true;
}

// The place of the last column that is selected.
__device__ __noinline__ int64_t select(Slice& slice, const Selection selection) {
  Shared& s = *slice.shared;
  const int32_t k_max = exp_k(clamp_logit(selection.y_max));
  uint32_t low = 0, high = ~0u;
  int64_t wanted = selection.wanted;
  bool share = selection.by_mass;  // of a total that is not known yet
  if (selection.by_y) {
    const bool long_slices = slice.chunks >= 4 * kThreads;
    if (long_slices && selection.by_mass && bracket(slice, selection, low, high, wanted)) {
      share = false;
    } else {
      const bool few_wanted = !selection.by_mass && wanted <= int64_t{kThreads} / 2 * slice.ranks;
      if (long_slices && few_wanted) low = lower_bound(slice, selection);
      Bin* const bins = s.bins[slice.levels++ % 2];
      coarse_histogram<1>(slice, selection, low, bins);
      cluster_sync();
      if (threadIdx.x == 0) s.few_count = 0;  // nobody reads the last one's any longer
      find_bin(slice, bins, kCoarse, selection.by_mass, share, wanted);
      share = false;
      const Found found = s.found;
      wanted -= found.above;
      key_range(s, selection, found.bin, found.bin);
      low = s.range[0], high = s.range[1];
      if (found.count <= kFew) return select_of_few(slice, selection, low, high, wanted);
    }
  }
  while (true) {
    Bin* const bins = s.bins[slice.levels++ % 2];
    clear(bins, kBins);
    const int bits_of_range = 32 - __clz(static_cast<int>(high - low));
    const int shift = bits_of_range > kFineBits ? bits_of_range - kFineBits : 0;
    candidates<1>(slice, selection, low, high, [&](float z, uint32_t key, int64_t) {
      add_to(bins[(high - key) >> shift], 1, selection.by_mass,
             selection.by_mass ? mass_fast(mul(z, selection.scale), k_max) : 0);
    });
    cluster_sync();
    if (threadIdx.x == 0) s.few_count = 0;
    find_bin(slice, bins, 1 << kFineBits, selection.by_mass, share, wanted);
    share = false;
    const Found found = s.found;
    wanted -= found.above;
    high -= static_cast<uint32_t>(found.bin) << shift;
    low = high - low < (1u << shift) ? low : high - ((1u << shift) - 1);
    if (found.count <= kFew) return select_of_few(slice, selection, low, high, wanted);
    if (shift == 0) {  // many of one key
      int64_t equals = found.count;
      if (selection.by_mass) {
        const int64_t each = found.mass / found.count;
        equals = (wanted + each - 1) / each;
      } else if (selection.split_equals) {
        equals = wanted;
      }
      const int64_t place = place_of(logit_of(static_cast<int32_t>(high ^ 0x80000000u)), kEveryTie);
      return equals < found.count ? place + (kEveryTie - nth_equal(slice, &bins[found.bin], high, equals)) : place;
    }
  }
}

}  // namespace vocabshard::sm90::sampling
