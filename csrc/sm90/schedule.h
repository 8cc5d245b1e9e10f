// Which cluster computes which tile, and in what order. Plain integers: the same text runs in a host test.
//
// A tile is kMBlocks * 64 rows of hidden by kGroups groups of 64 columns; the two CTAs of a cluster take the same rows
// and neighbouring columns. A cluster stays at home in few blocks of rows, so that its partials can wait in a private
// place, written by plain stores, and are merged once at the end. All clusters move through the vocabulary together
// (its strip is read from L2 by every block of rows).
//
// One block of rows (the weights are streamed once): a cluster gets a contiguous range of groups.
// More: a round is the pair of tiles at one place of the vocabulary; the tile (m, round) has position m * rounds +
// phase, phase = round * step mod rounds, and cluster c owns the positions [c T / clusters, (c + 1) T / clusters), T
// all tiles. Loads differ by at most one tile, and at any time all clusters are within a few rounds of each other.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define VS_SCHEDULE __host__ __device__ __forceinline__
#else
#define VS_SCHEDULE inline
#endif

namespace vocabshard::sm90 {

constexpr int kGroupColumns = 64;

struct Tile {
  int32_t m;       // block of rows
  int32_t group;   // first group of columns
  int32_t groups;  // how many of them there are; 0: nothing for this CTA
};

struct Schedule {
  int32_t m_tiles, clusters;
  int32_t groups;        // 64-column groups of the vocabulary, the last one maybe partial
  int32_t rounds, step;  // with more than one block of rows
};

VS_SCHEDULE int32_t greatest_common_divisor(int32_t a, int32_t b) {
  while (b != 0) {
    const int32_t r = a % b;
    a = b;
    b = r;
  }
  return a;
}

VS_SCHEDULE Schedule make_schedule(int32_t m_tiles, int32_t groups, int32_t tile_groups, int32_t most_clusters) {
  const int32_t rounds = (groups + 2 * tile_groups - 1) / (2 * tile_groups);
  const int64_t tiles = m_tiles == 1 ? (groups + 1) / 2 : static_cast<int64_t>(m_tiles) * rounds;
  const int32_t clusters = static_cast<int32_t>(tiles < most_clusters ? tiles : most_clusters);
  // A rotation by the length of a cluster's own interval visits it at the most even pace there is.
  const int32_t even = static_cast<int32_t>(static_cast<int64_t>(rounds) * (m_tiles % clusters) / clusters);
  int32_t step = even < 1 ? 1 : even;
  for (int32_t away = 0; greatest_common_divisor(rounds, step) != 1; ++away)
    step = (away % 2 == 0 ? even + away / 2 + 1 : (even > away / 2 ? even - away / 2 : 1));
  return {m_tiles, clusters, groups, rounds, step};
}

VS_SCHEDULE int64_t first_position(const Schedule& s, int32_t cluster) {
  return static_cast<int64_t>(s.m_tiles) * s.rounds * cluster / s.clusters;
}

// The blocks of rows a cluster may touch are m_first ... m_first + m_count - 1.
VS_SCHEDULE int32_t m_first(const Schedule& s, int32_t cluster) {
  return s.m_tiles == 1 ? 0 : static_cast<int32_t>(first_position(s, cluster) / s.rounds);
}
VS_SCHEDULE int32_t m_last(const Schedule& s, int32_t cluster) {
  return s.m_tiles == 1 ? 0 : static_cast<int32_t>((first_position(s, cluster + 1) - 1) / s.rounds);
}
VS_SCHEDULE int32_t most_m(const Schedule& s) {  // places a cluster needs
  return s.m_tiles == 1 ? 1 : s.m_tiles / s.clusters + 2;
}

// Tiles of each CTA of a cluster.
VS_SCHEDULE int32_t tile_count(const Schedule& s, int32_t cluster, int32_t tile_groups) {
  if (s.m_tiles > 1) return static_cast<int32_t>(first_position(s, cluster + 1) - first_position(s, cluster));
  const int64_t begin = static_cast<int64_t>(s.groups) * cluster / s.clusters;
  const int64_t end = static_cast<int64_t>(s.groups) * (cluster + 1) / s.clusters;
  return static_cast<int32_t>(((end - begin + 1) / 2 + tile_groups - 1) / tile_groups);
}

// The tiles of one CTA, in order.
class Walk {
 public:
  VS_SCHEDULE Walk(const Schedule& s, int32_t cluster, int32_t rank, int32_t tile_groups)
      : schedule_(s), tile_groups_(tile_groups), rank_(rank) {
    if (s.m_tiles == 1) {
      const int32_t begin = static_cast<int32_t>(static_cast<int64_t>(s.groups) * cluster / s.clusters);
      const int32_t end = static_cast<int32_t>(static_cast<int64_t>(s.groups) * (cluster + 1) / s.clusters);
      const int32_t half = (end - begin + 1) / 2;
      group_ = begin + rank * half;
      end_ = group_ + half < end ? group_ + half : end;
    } else {
      const int64_t low = first_position(s, cluster), high = first_position(s, cluster + 1);
      m_low_ = static_cast<int32_t>(low / s.rounds);
      phase_low_ = static_cast<int32_t>(low % s.rounds);
      m_high_ = static_cast<int32_t>(high / s.rounds);
      phase_high_ = static_cast<int32_t>(high % s.rounds);
      m_ = phase_ >= phase_low_ ? m_low_ : m_low_ + 1;
    }
  }

  // Call at most tile_count times.
  VS_SCHEDULE Tile next() {
    Tile tile;
    if (schedule_.m_tiles == 1) {
      tile = {0, group_, clamp(end_ - group_)};
      group_ += tile_groups_;
      return tile;
    }
    while (!(m_ < m_high_ || (m_ == m_high_ && phase_ < phase_high_))) {
      ++round_;
      phase_ += schedule_.step;
      if (phase_ >= schedule_.rounds) phase_ -= schedule_.rounds;
      m_ = phase_ >= phase_low_ ? m_low_ : m_low_ + 1;
    }
    const int32_t group = (2 * round_ + rank_) * tile_groups_;
    tile = {m_, group, clamp(schedule_.groups - group)};
    ++m_;
    return tile;
  }

 private:
  VS_SCHEDULE int32_t clamp(int32_t groups) const {
    return groups < 0 ? 0 : (groups < tile_groups_ ? groups : tile_groups_);
  }

  const Schedule& schedule_;
  int32_t tile_groups_, rank_;
  int32_t group_ = 0, end_ = 0;
  int32_t m_low_ = 0, phase_low_ = 0, m_high_ = 0, phase_high_ = 0, m_ = 0, round_ = 0, phase_ = 0;
};

}  // namespace vocabshard::sm90
