// How rows are dealt in lots: first one lot a worker, most of the work, then smaller and smaller ones that whoever is
// free takes, so that all end together. A lot is some whole rows, or a part of one row.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__CUDACC__)
#define VS_BOTH __host__ __device__ __forceinline__
#else
#define VS_BOTH inline
#endif

namespace vocabshard::sm90::logits {

constexpr int kLotLevels = 7;
constexpr uint32_t kLeastLot = 8, kLastLot = 4;  // steps; the latter: the last ones

struct Lot {
  uint32_t row, rows;     // 1 row where it is a part
  uint32_t first, steps;  // in each row
};

struct Lots {
  uint32_t count, levels;
  uint32_t split;                                     // the first lot that may be a part; all of them are behind it
  uint32_t lot[kLotLevels + 1], row[kLotLevels + 1];  // first of the level; behind the last level: the ends
  uint32_t rows[kLotLevels];                          // of a lot
  uint32_t parts[kLotLevels];                         // lots of a row, where rows is 1
  uint32_t size[kLotLevels];                          // steps of a part

  VS_BOTH Lot at(uint32_t index, uint32_t steps) const {
    uint32_t v = 0;
    while (v + 1 < levels && index >= lot[v + 1]) ++v;
    const uint32_t i = index - lot[v];
    if (parts[v] == 1) {
      const uint32_t first = row[v] + i * rows[v];
      const uint32_t left = row[v + 1] - first;
      return {first, left < rows[v] ? left : rows[v], 0, steps};
    }
    const uint32_t in_level = i / parts[v], first = (i - in_level * parts[v]) * size[v];
    return {row[v] + in_level, 1, first, size[v] < steps - first ? size[v] : steps - first};
  }

  // The lots of a row: [first, first + count).
  VS_BOTH uint32_t of_row(uint32_t m, uint32_t* lots) const {
    uint32_t v = 0;
    while (v + 1 < levels && m >= row[v + 1]) ++v;
    *lots = parts[v];
    return parts[v] == 1 ? 0 : lot[v] + (m - row[v]) * parts[v];
  }
};

// `outputs` rows of `steps` steps; at most `most` lots are parts of rows.
inline Lots deal_lots(uint32_t outputs, uint32_t steps, uint32_t workers, uint32_t most) {
  Lots lots = {};
  uint64_t row = 0, lot = 0;
  for (uint32_t v = 0; row < outputs; ++v) {
    const uint64_t rest = outputs - row, work = rest * steps;
    const uint64_t wished = work * (v == 0 ? 4 : 3) / (5 * static_cast<uint64_t>(workers));
    const uint64_t room = most - (lot - lots.split);
    const bool last = wished < kLastLot || v + 1 == kLotLevels || room < 2 * static_cast<uint64_t>(workers);
    uint64_t rows = 1, parts = 1, size = steps, taken;
    if (wished + wished / 8 >= steps) {  // whole rows, where they are not too much of a worker's part of the rest
      rows = std::max<uint64_t>(wished / steps, 1);
      taken = last ? rest : std::min(rest, rows * workers);
    } else {
      const uint64_t allowed = last ? std::max<uint64_t>(room / rest, 1) : steps;
      size = std::max({wished, static_cast<uint64_t>(last ? kLastLot : kLeastLot), (steps + allowed - 1) / allowed});
      parts = size >= steps ? 1 : (steps + size - 1) / size;
      size = (steps + parts - 1) / parts;
      parts = (steps + size - 1) / size;
      taken = last ? rest : std::min<uint64_t>(rest, std::max<uint64_t>(1, workers / parts));
    }
    if (parts == 1) lots.split = static_cast<uint32_t>(lot + (taken + rows - 1) / rows);
    lots.lot[v] = static_cast<uint32_t>(lot);
    lots.row[v] = static_cast<uint32_t>(row);
    lots.rows[v] = static_cast<uint32_t>(rows);
    lots.parts[v] = static_cast<uint32_t>(parts);
    lots.size[v] = static_cast<uint32_t>(size);
    lots.levels = v + 1;
    row += taken;
    lot += (taken + rows - 1) / rows * parts;
    lots.lot[v + 1] = static_cast<uint32_t>(lot);
    lots.row[v + 1] = static_cast<uint32_t>(row);
  }
  lots.count = static_cast<uint32_t>(lot);
  return lots;
}

}  // namespace vocabshard::sm90::logits
