// In the fused forward's epilogue: columns that may be among their row's best go into lists, and those that are better
// than the row's target are counted. Logits go nowhere.
//
// A row has a bound, the place of a column that at least n others are at least as good as. Each lane lists what is
// better of its own columns. Where a list grows long (rows of ascending logits, say), the n best of the quad's four are
// kept, and the bound is the n-th of them: no row has too many. The order in a list shows nowhere: places differ.
#pragma once

#include "sampling.h"
#include "sm90/epilogue.h"
#include "sm90/params.h"
#include "sm90/ptx.h"
#include "sm90/topk.h"

namespace vocabshard::sm90 {

// What a lane knows of a row: the bound, and the length of its list.
struct alignas(16) ListState {
  int64_t bound;
  int32_t count, unused;
};

constexpr int32_t kNanOrder = 0x7f800001;  // orders from here on are those of NaN

// z of columns that come before, or after, `column`: all that !(z <= threshold) says is a larger place. With nothing
// said of NaN, which is larger than all but itself.
struct Threshold {
  float before, after;
  int32_t column;  // relative to the tile's first
  bool some;       // after it: whether there may be any at all
};

VS_DEVICE Threshold threshold_of(int64_t place, int64_t first_id) {
  const auto order = static_cast<int32_t>(place >> 32);
  const int64_t column = kEveryTie - static_cast<int64_t>(static_cast<uint32_t>(place)) - first_id;
  Threshold t;
  t.column = static_cast<int32_t>(min(max(column, int64_t{-1}), int64_t{1} << 20));
  t.some = order < kNanOrder;
  t.after = t.some ? logit_of(order) : from_bits(0x7f800000u);
  // equals too: the next lower float, NaN below -inf and for kKeepAll
  t.before = t.some ? logit_of(order == 0 ? -2 : max(order, INT32_MIN + 1) - 1) : from_bits(0x7f800000u);
  return t;
}

VS_DEVICE int64_t entry_place(int2 entry, const RowWork& work) {
  return entry.y < work.valid ? place_of(__int_as_float(entry.x), work.vocab_start + entry.y) : kKeepAll;
}

VS_DEVICE int2 load_entry(const int2* at) {
  int2 x;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(at) : "memory");
  return x;
}

// Of the rows of a row group whose lists are long, the best alone. Rare: not made for speed.
VS_DEVICE void shorten_lists(const TopkLists& top, const RowWork& work, int2* lists, int2* scratch, ListState& state,
                             int lane) {
  unsigned rows = __ballot_sync(~0u, state.count > top.limit);
#pragma unroll 1
  while (rows != 0) {
    const int first = (__ffs(static_cast<int>(rows)) - 1) / 4 * 4;  // lane of the row
    rows &= ~(15u << first);
    int32_t most = __shfl_sync(~0u, state.count, first + lane % 4);
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    int32_t real = 0;
    int64_t bound = kKeepAll;
#pragma unroll 1
    for (int32_t base = 0; base < 4 * most; base += 32) {
      const int32_t i = base + lane;
      const int32_t held = __shfl_sync(~0u, state.count, first + lane % 4);
      int2 mine = make_int2(0, INT32_MAX);
      if (i / 4 < held) mine = load_entry(lists + i / 4 * 32 + first + i % 4);
      const int64_t place = entry_place(mine, work);
      int32_t larger = 0;
#pragma unroll 1
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t others = __shfl_sync(~0u, state.count, first + j);
#pragma unroll 1
        for (int32_t k = 0; k < others; ++k)
          larger += entry_place(load_entry(lists + k * 32 + first + j), work) > place;
      }
      if (place == kKeepAll) continue;
      ++real;
      if (larger < top.n) scratch[larger] = mine;
      if (larger == top.n - 1) bound = place;
    }
    __syncwarp();
    const int32_t kept = min(top.n, static_cast<int32_t>(__reduce_add_sync(~0u, real)));
#pragma unroll 1
    for (int32_t i = lane; i < kept; i += 32) lists[i / 4 * 32 + first + i % 4] = load_entry(scratch + i);
    const unsigned has = __ballot_sync(~0u, bound != kKeepAll);
    const int64_t found = __shfl_sync(~0u, bound, has == 0 ? 0 : __ffs(static_cast<int>(has)) - 1);
    if (lane / 4 * 4 == first) {
      state.count = (kept + 3 - lane % 4) / 4;
      if (has != 0) state.bound = found;
    }
    __syncwarp();
  }
}

// Where a row group's states and lists lie.
template <int kMBlocks>
VS_DEVICE int64_t list_group(const WgmmaParams& p, int place, int warp, int r) {
  return ((static_cast<int64_t>(blockIdx.x) * places(p.schedule) + place) * 4 + warp) * (2 * kMBlocks) + r;
}

// Of one place, by one warpgroup: empty lists, and the bounds as they are given.
template <int kMBlocks>
VS_DEVICE void start_lists(const WgmmaParams& p, int place, int32_t block) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll 1
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int32_t row = block * (64 * kMBlocks) + row_of(r, thread / 32, lane);
    ListState state = {INT64_MAX, 0, 0};  // no column is better
    if (row < p.work.rows) state.bound = p.top.best[static_cast<int64_t>(row) * p.top.n + p.top.n - 1];
    p.top.states[list_group<kMBlocks>(p, place, thread / 32, r) * 32 + lane] = state;
  }
}

// z of a tile before any cut and temperature, -inf from its column `valid` on, where there is no column or another
// tile's. Returns whether a list of the warp is long now.
template <int kMBlocks, int kGroups>
VS_DEVICE bool collect(Accumulator<kMBlocks, kGroups>& acc, const WgmmaParams& p, int place, int32_t first_row,
                       int32_t first_column, int32_t valid, int warp, int lane) {
  const int64_t first_id = p.work.vocab_start + first_column;
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    asm volatile("" ::: "memory");  // one row group after the other: registers are scarce
    float z_max = acc.at(r, 0, 0);
#pragma unroll
    for (int a = 0; a < kGroups; ++a)
#pragma unroll
      for (int j = 0; j < 16; ++j) z_max = ptx::max_nan(z_max, acc.at(r, a, j));

    const int64_t group = list_group<kMBlocks>(p, place, warp, r);
    ListState* const kept = p.top.states + group * 32 + lane;
    {
      const ListState state = *kept;
      const Threshold bound = threshold_of(state.bound, first_id);
      // equals of the bound where they may be better: what is listed too much does no harm
      const float above = bound.column < 0 ? bound.after : bound.before;
      const bool any = (bound.some || bound.column >= 0) && !(z_max <= above);
      if (__any_sync(~0u, any)) {
        int2* const lists = p.top.lists + group * (32 * int64_t{p.top.capacity});
        int2* to = lists + state.count * 32 + lane;
#pragma unroll
        for (int a = 0; a < kGroups; ++a)
#pragma unroll
          for (int j = 0; j < 16; ++j)
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nsetp.gtu.and.f32 p, %1, %3, p;\n"
                "@p st.global.b32 [%0], %1;\n@p st.global.b32 [%0 + 4], %4;\n@p add.s64 %0, %0, 256;\n}"
                : "+l"(to)
                : "f"(acc.at(r, a, j)), "r"(static_cast<int>(any)), "f"(above),
                  "r"(first_column + lane % 4 * 16 + kGroupColumns * a + j)
                : "memory");
        const auto count = static_cast<int32_t>((to - (lists + lane)) / 32);
        if (count != state.count) kept->count = count;
        grown |= count > p.top.limit;
      }
    }
    const int32_t row = first_row + row_of(r, warp, lane);
    const int64_t target = row < p.work.rows ? p.top.place[row] : kKeepAll;
    const Threshold of_target = threshold_of(target, first_id);
    const bool counts = target != kKeepAll && !(z_max <= of_target.before);
    if (!__any_sync(~0u, counts)) continue;
    const int32_t column = of_target.column - lane % 4 * 16;
    int32_t larger = 0;
    bool own = false;
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      const bool before = column >= kGroupColumns * a + 16;  // the whole tile of 16
      const float above = before ? of_target.before : of_target.after;
      const int32_t one = before || of_target.some ? 1 : 0;
      own |= !before && column > kGroupColumns * a;
#pragma unroll
      for (int j = 0; j < 16; ++j) larger += acc.at(r, a, j) <= above ? 0 : one;
    }
    if (__any_sync(~0u, own)) {  // equals before the target, in its own tile of 16
#pragma unroll
      for (int a = 0; a < kGroups; ++a)
#pragma unroll
        for (int j = 0; j < 16; ++j)
          if (own && column > kGroupColumns * a + j && column < kGroupColumns * a + 16)
            larger += static_cast<int32_t>(target >> 32) == order_of(acc.at(r, a, j));
    }
    if (__any_sync(~0u, counts && is_nan(of_target.before))) {  // a target of -inf: what stands for no column counted
#pragma unroll 1
      for (int32_t a = 0; a < kGroups; ++a) {
        const int32_t first = kGroupColumns * a;
        larger -= max(min(column - first, 16) - max(valid - lane % 4 * 16 - first, 0), 0);
      }
    }
    larger = counts ? larger : 0;
    larger += __shfl_xor_sync(~0u, larger, 1);
    larger += __shfl_xor_sync(~0u, larger, 2);
    if (lane % 4 == 0 && larger != 0) atomicAdd(p.top.before + row, static_cast<unsigned long long>(larger));
  }
  return __any_sync(~0u, grown);
}

// Where collect says so, once the accumulators are done with.
template <int kMBlocks>
VS_DEVICE void shorten_tile(const WgmmaParams& p, int place, int warp, int lane) {
#pragma unroll 1
  for (int r = 0; r < 2 * kMBlocks; ++r) {
    const int64_t group = list_group<kMBlocks>(p, place, warp, r);
    ListState* const kept = p.top.states + group * 32 + lane;
    ListState state = *kept;
    shorten_lists(p.top, p.work, p.top.lists + group * (32 * int64_t{p.top.capacity}),
                  p.top.scratch + (static_cast<int64_t>(blockIdx.x) * 4 + warp) * kMostTop, state, lane);
    *kept = state;
  }
}

}  // namespace vocabshard::sm90
