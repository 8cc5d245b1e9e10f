// Which cluster computes which tile, and in what order. Plain integers: the same text runs in a host test.
//
// A tile is 64 * m_blocks rows of hidden by up to tile_groups groups of 64 columns. The two CTAs of a cluster share one
// operand: with an even number of blocks of rows they take neighbouring blocks and the same columns, else the same rows
// and neighbouring columns. A unit is what a cluster takes of the rows: two blocks, or one.
//
// A cluster stays at home in at most kPlaces units, so that its partials can wait in shared memory. All clusters move
// through the vocabulary together (its strip is read from L2 by every unit).
//
// One unit (the weights are streamed once): a cluster gets a contiguous range of groups.
// More: a round is one step through the vocabulary; the tile (unit, round) has position unit * rounds + phase, phase =
// round * step mod rounds, and the clusters own intervals of positions one behind the other. Their lengths differ by at
// most one tile, and at any time all clusters are within a few rounds of each other.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define VS_SCHEDULE __host__ __device__ __forceinline__
#else
#define VS_SCHEDULE inline
#endif

namespace vocabshard::sm90 {

constexpr int kGroupColumns = 64;
constexpr int kPlaces = 2;
constexpr int kLastGroups = 2;  // of a CTA's last tile, with one unit

struct Tile {
  int32_t m;       // block of rows
  int32_t group;   // first group of columns
  int32_t groups;  // how many of them there are; 0: nothing for this CTA
  int32_t place;   // of its unit among the cluster's
};

struct Schedule {
  int32_t units, clusters;
  int32_t groups;        // 64-column groups of the vocabulary, the last one maybe partial
  int32_t rounds, step;  // with more than one unit
  int32_t tile_groups;
  bool share_columns;  // the two CTAs of a cluster: the same columns, else the same rows
  // What a cluster owns, in tiles, or with one unit in groups: `each`, and the first `over` clusters one more.
  int32_t each, over;
  int32_t tiles, tiles_over;  // of a cluster's CTA, with `each` and with one more
};

VS_SCHEDULE int32_t greatest_common_divisor(int32_t a, int32_t b) {
  while (b != 0) {
    const int32_t r = a % b;
    a = b;
    b = r;
  }
  return a;
}

// m_tiles: blocks of rows. They must not be more than most_clusters, or there would be too few places.
VS_SCHEDULE Schedule make_schedule(int32_t m_tiles, int32_t groups, int32_t tile_groups, int32_t most_clusters) {
  const bool share_columns = m_tiles % 2 == 0;
  const int32_t units = share_columns ? m_tiles / 2 : m_tiles;
  const int32_t round_groups = share_columns ? tile_groups : 2 * tile_groups;
  const int32_t rounds = (groups + round_groups - 1) / round_groups;
  const int64_t tiles = units > 1 ? static_cast<int64_t>(units) * rounds : (share_columns ? groups : (groups + 1) / 2);
  const int32_t clusters = static_cast<int32_t>(tiles < most_clusters ? tiles : most_clusters);
  // A rotation by the length of a cluster's own interval visits it at the most even pace there is.
  const int32_t even = static_cast<int32_t>(static_cast<int64_t>(rounds) * (units % clusters) / clusters);
  int32_t step = even < 1 ? 1 : even;
  for (int32_t away = 0; greatest_common_divisor(rounds, step) != 1; ++away)
    step = (away % 2 == 0 ? even + away / 2 + 1 : (even > away / 2 ? even - away / 2 : 1));
  const int32_t owned = units > 1 ? static_cast<int32_t>(tiles) : groups, each = owned / clusters;
  const int32_t cta = share_columns ? 1 : 2;  // of how many the groups are
  const int32_t few = units > 1 ? each : ((each + cta - 1) / cta + tile_groups - 1) / tile_groups;
  const int32_t more = units > 1 ? each + 1 : ((each + cta) / cta + tile_groups - 1) / tile_groups;
  return {units, clusters, groups, rounds, step, tile_groups, share_columns, each, owned % clusters, few, more};
}

// No division: a kernel begins with this.
VS_SCHEDULE int32_t owned_before(const Schedule& s, int32_t cluster) {
  return s.each * cluster + (cluster < s.over ? cluster : s.over);
}

VS_SCHEDULE int32_t first_position(const Schedule& s, int32_t cluster) { return owned_before(s, cluster); }

VS_SCHEDULE int32_t cluster_at(const Schedule& s, int32_t position) {
  const int32_t longer = s.over * (s.each + 1);  // positions of those that own one more
  return position < longer ? position / (s.each + 1) : s.over + (position - longer) / s.each;
}

// The clusters that have tiles of a unit, first_cluster ... last_cluster.
VS_SCHEDULE int32_t first_cluster(const Schedule& s, int32_t unit) {
  return s.units == 1 ? 0 : cluster_at(s, unit * s.rounds);
}
VS_SCHEDULE int32_t last_cluster(const Schedule& s, int32_t unit) {
  return s.units == 1 ? s.clusters - 1 : cluster_at(s, (unit + 1) * s.rounds - 1);
}

// What a cluster keeps partials for, units first_unit ... last_unit.
VS_SCHEDULE int32_t places(const Schedule& s) { return s.units == 1 ? 1 : kPlaces; }
VS_SCHEDULE int32_t first_unit(const Schedule& s, int32_t cluster) {
  return s.units == 1 ? 0 : first_position(s, cluster) / s.rounds;
}
VS_SCHEDULE int32_t last_unit(const Schedule& s, int32_t cluster) {
  return s.units == 1 ? 0 : (first_position(s, cluster + 1) - 1) / s.rounds;
}

VS_SCHEDULE int32_t block_of_unit(const Schedule& s, int32_t unit, int32_t rank) {
  return s.share_columns ? 2 * unit + rank : unit;
}

// With one unit: the groups of a cluster, and of one of its CTAs.
VS_SCHEDULE int32_t range_begin(const Schedule& s, int32_t cluster) { return owned_before(s, cluster); }
VS_SCHEDULE int32_t most_groups(const Schedule& s, int32_t cluster) {
  const int32_t all = range_begin(s, cluster + 1) - range_begin(s, cluster);
  return s.share_columns ? all : (all + 1) / 2;
}

// Tiles of each CTA of a cluster.
VS_SCHEDULE int32_t tile_count(const Schedule& s, int32_t cluster) { return cluster < s.over ? s.tiles_over : s.tiles; }

// With one unit: the groups of a CTA, or where columns are shared of a cluster, and in how many tiles it takes them.
struct Owned {
  int32_t begin, end, tiles;
};
VS_SCHEDULE Owned owned_by(const Schedule& s, int32_t cluster, int32_t rank) {
  const int32_t end = range_begin(s, cluster + 1), most = most_groups(s, cluster);
  const int32_t from = range_begin(s, cluster) + (s.share_columns ? 0 : rank * most);
  return {from, end - from < most ? (end > from ? end : from) : from + most, tile_count(s, cluster)};
}
// The first group of one of its tiles: wide ones, which keep more loads in flight, and a narrow one at the end, as
// nothing hides its epilogue.
VS_SCHEDULE int32_t tile_begin(const Schedule& s, const Owned& owned, int32_t tile) {
  if (tile >= owned.tiles) return owned.end;
  const int32_t wide = tile * s.tile_groups, before_last = owned.end - owned.begin - kLastGroups;
  return owned.begin + (wide < before_last ? wide : tile > 0 ? before_last : 0);
}

// How many CTAs have more tiles behind this one.
VS_SCHEDULE int32_t ctas_with_more(const Schedule& s, int32_t tile) {
  return 2 * ((s.tiles_over > tile + 1 ? s.over : 0) + (s.tiles > tile + 1 ? s.clusters - s.over : 0));
}

// The tiles of one CTA, in order.
class Walk {
 public:
  VS_SCHEDULE Walk(const Schedule& s, int32_t cluster, int32_t rank) : schedule_(s), rank_(rank) {
    if (s.units == 1) {
      const Owned owned = owned_by(s, cluster, rank);
      from_ = owned.begin, end_ = owned.end, tiles_ = owned.tiles;
    } else {
      const int32_t low = first_position(s, cluster), high = first_position(s, cluster + 1);
      unit_low_ = low / s.rounds;
      phase_low_ = low % s.rounds;
      unit_high_ = high / s.rounds;
      phase_high_ = high % s.rounds;
      phase_ = round_ = 0;
      unit_ = phase_low_ == 0 ? unit_low_ : unit_low_ + 1;
    }
  }

  // Call at most tile_count times.
  VS_SCHEDULE Tile next() {
    const Schedule& s = schedule_;
    if (s.units == 1) {
      const int32_t from = from_, left = end_ - from, before_last = left - kLastGroups;
      from_ += --tiles_ == 0 ? left : (before_last < s.tile_groups ? before_last : s.tile_groups);
      return {block_of_unit(s, 0, rank_), from, from_ - from, 0};
    }
    while (!(unit_ < unit_high_ || (unit_ == unit_high_ && phase_ < phase_high_))) {
      ++round_;
      phase_ += s.step;
      if (phase_ >= s.rounds) phase_ -= s.rounds;
      unit_ = phase_ >= phase_low_ ? unit_low_ : unit_low_ + 1;
    }
    const int32_t group = (s.share_columns ? round_ : 2 * round_ + rank_) * s.tile_groups, left = s.groups - group;
    const int32_t groups = left < 0 ? 0 : (left < s.tile_groups ? left : s.tile_groups);
    const Tile tile = {block_of_unit(s, unit_, rank_), group, groups, unit_ - unit_low_};
    ++unit_;
    return tile;
  }

 private:
  const Schedule& schedule_;
  int32_t rank_;
  // With more units, and with one: there are few registers where this is used.
  union {
    int32_t unit_low_, from_;
  };
  union {
    int32_t phase_low_, end_;
  };
  union {
    int32_t unit_high_, tiles_;
  };
  int32_t phase_high_, unit_, round_, phase_;
};

}  // namespace vocabshard::sm90
