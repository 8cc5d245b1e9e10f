// The grids of csrc/sm90/sampling_stream.h over rows on the host, for tests/test_sampling_emulated.py.
#include <algorithm>
#include <vector>

#include "sm90/sampling_grids.h"
#include "sm90/sampling_stream.cuh"
#include "sm90/sampling_stream.h"

namespace vocabshard::sm90 {

int32_t multiprocessor_count() { return 132; }

namespace {

constexpr int64_t kUnwritten = 0x7f7f7f7f7f7f7f7f;

// As test_sampling_emulated.py has it, in 8 bytes each.
struct Call {
  const float* logits;  // [rows, row_stride]
  int64_t rows, row_stride, valid, vocab_start;
  const float* scales;  // [rows] or null
  double scale;
  int64_t steps;
  const int64_t *kinds, *numbers;
  const double* lns;
  int64_t seed;
  const int64_t *row_keys, *target_ids;  // a token is drawn where there is no target
  const float* maxima;                   // [rows, groups], or null: a launch makes them
  int64_t partials;                      // whether rows are left unmerged
  int64_t rehearse;                      // the forward before has not ended when blocks begin,
  int64_t hide;                          // nor written anything that counts
  int64_t lost;                          // and what it told was set to 0
  int64_t fold;
  emulated::Order order;
  int64_t *uncut, *cut, *drawn, *records;
  float *logp, *lse;
  int64_t *decided_by, *listed;  // [rows]: a Source; candidates that the grid had which collects
  uint32_t* noise;               // [rows, kNoiseWords] of a top_p's, or null
};

// Which candidates decided: few, those listed from groups, those of the grid that collects, or all columns.
enum Source : int64_t { kFew = 0, kSomeListed = 1, kListedAll = 2, kCollected = 3, kCollectedAll = 4 };

// What a forward writes: of every block of the first grid other bytes until it waits.
class Hidden {
 public:
  void add(void* at, size_t size) {
    auto* const bytes = static_cast<char*>(at);
    parts_.push_back({bytes, {bytes, bytes + size}});
  }
  void hide() {
    if (hidden_ || emulated::run.launches > 0) return;
    for (const Part& part : parts_) std::memset(part.at, 0xff, part.bytes.size());
    hidden_ = true;
  }
  void show() {
    if (!hidden_) return;
    for (const Part& part : parts_) std::memcpy(part.at, part.bytes.data(), part.bytes.size());
    hidden_ = false;
  }

 private:
  struct Part {
    char* at;
    std::vector<char> bytes;
  };
  std::vector<Part> parts_;
  bool hidden_ = false;
};

SamplingRows rows_of(const Call& c, float* logits) {
  SamplingRows rows = {};
  rows.logits = logits, rows.rows = c.rows, rows.row_stride = c.row_stride, rows.valid = c.valid;
  rows.vocab_start = c.vocab_start, rows.scales = c.scales, rows.scale = static_cast<float>(c.scale);
  rows.whole = true, rows.steps = static_cast<int32_t>(c.steps), rows.cut = c.cut;
  for (int k = 0; k < rows.steps; ++k) rows.step[k] = {static_cast<int32_t>(c.kinds[k]), true, c.numbers[k], c.lns[k]};
  rows.draw = c.target_ids == nullptr, rows.seed = c.seed, rows.row_keys = c.row_keys, rows.drawn = c.drawn;
  rows.target_ids = c.target_ids, rows.records = c.records;
  return rows;
}

float scale_of(const Call& c, int64_t n) { return c.scales ? c.scales[n] : static_cast<float>(c.scale); }

// As a forward leaves them, but that each has any of the tiles: merging does not see which.
std::vector<int64_t> make_partials(const Call& c, const Schedule& schedule, int64_t block_rows) {
  const int64_t blocks = int64_t{2} * schedule.clusters * places(schedule);
  std::vector<int64_t> all(blocks * kRecordWords * block_rows, kUnwritten);
  for (int64_t n = 0; n < c.rows; ++n) {
    const RowPartials there(schedule, static_cast<int32_t>(n / block_rows));
    for (int32_t i = 0; i < there.count; ++i) {
      Partial partial = partial_identity();
      for (int64_t first = kTile * i; first < c.valid; first += kTile * there.count) {
        float y[kTile];
        for (int j = 0; j < kTile; ++j) {
          const float z = first + j < c.valid ? c.logits[n * c.row_stride + first + j] : neg_inf();
          y[j] = first + j < c.valid ? mul(z, scale_of(c, n)) : z;
        }
        partial_add_tile<false>(partial, y);
      }
      int64_t* const at = all.data() + there.place(i) * kRecordWords * block_rows + n % block_rows;
      record_store<false>(at, block_rows, partial);
    }
  }
  return all;
}

// As the workspace shows it, of a row that is usable.
Source decided_by(const Call& c, const sampling::Workspace& work, int64_t n) {
  const sampling::Head& head = work.heads[n];
  if (c.steps == 1 && c.kinds[0] == kTopP) {
    if (!c.partials || work.states[n] == sampling::kLeft)
      return head.listed > sampling::kListed ? kCollectedAll : kCollected;
  }
  const int64_t* const list = work.candidates + n * sampling::kCandidateWords;
  const int64_t listed = std::find(list, list + sampling::kListed, kUnwritten) - list;
  return listed <= 128 ? kFew : listed < sampling::kListed ? kSomeListed : kListedAll;
}

}  // namespace

// Returns what went wrong, if anything.
extern "C" __attribute__((visibility("default"))) const char* emulate_sampling(const Call* given) {
  const Call& c = *given;
  const size_t logits_bytes = 4 * ((c.rows - 1) * c.row_stride + c.valid);
  const emulated::Guarded logits(logits_bytes, 16), memory(c.rows * sampling_stream_row_bytes(), 128);
  std::memcpy(logits.at(), c.logits, logits.bytes());
  std::memset(memory.at(), kUnwritten & 0xff, memory.bytes());
  const sampling::Workspace work(memory.at(), c.rows);
  const int64_t groups = (c.valid + sampling::kMaximaColumns - 1) / sampling::kMaximaColumns;

  SamplingStream call = {};
  call.rows = rows_of(c, reinterpret_cast<float*>(logits.at()));
  call.uncut = c.uncut, call.workspace = memory.at(), call.maxima_there = c.maxima != nullptr, call.folds = c.fold;
  call.fold.real_vocab_size = c.vocab_start + c.valid, call.fold.invalid_is_nan = true;
  call.fold.logp = c.logp, call.fold.lse = c.lse;
  std::vector<int64_t> partials;
  if (c.partials) {
    const auto blocks = c.order == emulated::Order::kShuffled ? 2 : 1, rows = static_cast<int32_t>(c.rows / blocks);
    const auto clusters = static_cast<int32_t>(std::clamp<int64_t>(groups / 24, 1, multiprocessor_count() / 2));
    const Schedule schedule = make_schedule(blocks, static_cast<int32_t>(groups), 3, clusters);
    partials = make_partials(c, schedule, rows);
    call.unmerged = {partials.data(), schedule, rows};
    std::memset(c.uncut, 0xff, 32 * c.rows);
  }
  if (c.maxima) {
    for (int64_t n = 0; n < c.rows; ++n)
      std::copy_n(c.maxima + n * groups, groups, work.maxima + n * sampling::kRowMaxima);
    std::memset(work.words, 0, sizeof(int32_t) * work.word_count(c.rows));
    work.words[kEndedWord] = c.rehearse ? 0 : 1 << 20;
  }

  const Schedule& schedule = call.unmerged.schedule;
  const bool tells = c.partials && c.rehearse && !c.lost;
  for (int32_t tile = 0; tells && tile < kToldTiles; ++tile)
    work.words[kTileWord + tile] = kTellingWarps * ctas_with_more(schedule, tile);
  Hidden hidden;
  if (c.hide) {
    c.partials ? hidden.add(partials.data(), 8 * partials.size()) : hidden.add(c.uncut, 32 * c.rows);
    // what the forward's CTAs do last, or all that they do
    for (int32_t cta = 0; cta < (tells ? 2 * schedule.clusters : 1); ++cta) {
      const Owned owned = tells ? owned_by(schedule, cta / 2, cta % 2) : Owned{0, static_cast<int32_t>(groups), 1};
      const int64_t first = tile_begin(schedule, owned, owned.tiles - 1), column = kGroupColumns * first;
      const int64_t columns = std::min<int64_t>(kGroupColumns * owned.end, c.valid) - column;
      for (int64_t n = 0; columns > 0 && n < c.rows; ++n) {
        hidden.add(logits.at() + 4 * (n * c.row_stride + column), 4 * columns);
        if (c.maxima) hidden.add(work.maxima + n * sampling::kRowMaxima + first, 4 * (owned.end - first));
      }
    }
  }
  emulated::run.order = c.order, emulated::run.launches = 0, emulated::run.failure.clear();
  // the forward ends while a block waits for it, by either way
  int polls = 0;
  emulated::run.block_starts = [&] {
    if (c.maxima) work.words[kEndedWord] = c.rehearse ? polls = 0 : 1 << 20;
    hidden.hide();
  };
  emulated::run.grid_waits = [&] { hidden.show(); };
  emulated::run.acquires = [&](const int32_t* at) {
    if (at != work.words + kEndedWord || c.lost || ++polls < 3) return;
    work.words[kEndedWord] = 2 * schedule.clusters;
    hidden.show();
  };
  emulated::seed_random(c.seed);
  if (streams_rows(call.rows))
    launch_sampling_stream(call, nullptr);
  else
    emulated::fail("such rows are not streamed");
  hidden.show();
  for (int64_t n = 0; n < c.rows; ++n) {
    c.decided_by[n] = decided_by(c, work, n);
    c.listed[n] = c.decided_by[n] == kCollected || c.decided_by[n] == kCollectedAll ? work.heads[n].listed : 0;
  }
  if (c.noise) std::copy_n(work.noise, c.rows * sampling::kNoiseWords, c.noise);
  return emulated::run.failure.c_str();
}

}  // namespace vocabshard::sm90
