// The inner kernels: one text (lanes.h, gemm.h, rows.h, softmax.h) compiled once an instruction set. Lanes are rows.
//
// A panel is 16 rows: element k of its rows lies at [k][16]. Files compiled for an instruction set hold internal
// functions only, so that the linker cannot hand their code to another file.
#pragma once

#include "api.h"

namespace vocabshard::cpu {

constexpr int kLanes = 16;
constexpr int kRowSlack = 8;  // register tiles read past the last row of their left factor

// What the pass over the columns knows of 16 rows: contract.h's Partial, lane by lane.
struct alignas(64) PanelState {
  float y_max[kLanes], y_target[kLanes];
  int32_t top[kLanes], top_entropy[kLanes];  // J and J_U of y_max
  int64_t c[3][kLanes], u[3][kLanes];
};

// What belongs to 16 rows from outside; lanes without a row are zero and `target` is -1.
struct alignas(64) PanelRows {
  int64_t target[kLanes];  // local column, or outside [0, valid)
  float inv_temperature[kLanes];
  float cut_logit[kLanes];  // left out is z < cut_logit, and z == cut_logit in local columns above cut_column
  int32_t cut_column[kLanes];
  // backward only
  float lse2_int[kLanes], lse2_frac[kLanes], entropy[kLanes];
  float grad_target[kLanes], grad_softmax[kLanes], grad_entropy[kLanes];
};

// A block of logits: z[column * ld + panel * 16 + lane], columns first_column ... of this shard.
struct Block {
  float* z;
  int64_t ld;
  int64_t first_column, columns, panels;
  const float* bias;  // fp32 of these columns, or nullptr
  float softcap;      // 0: none
  bool scaled;        // PanelRows::inv_temperature counts
  bool entropy;
  bool cut;  // PanelRows::cut_logit counts
};

// How a matrix product starts and ends. A chain goes on from what is there, a sum is made apart and then added.
enum Mode : int { kChain, kStore, kAdd };

// c[i][j] <- sum over k of a(i, k) * b[j / 16][k][j % 16], k ascending, one FMA each.
struct Product {
  int64_t m, n, k;
  const float* a;  // a(i, k) = a[i * a_row + k * a_step]; readable for kRowSlack rows more
  int64_t a_row, a_step;
  const float* b;  // panels at b + panel * b_panel
  int64_t b_panel;
  float* c;
  int64_t c_row;
  const int64_t* c_index;  // nullptr, or row i of c is row c_index[i]
  int mode;
};

struct Kernels {
  const char* name;
  // Columns first ... first + cols of `count` <= 16 rows of m (rows[i], or from row0 on) as one panel [cols][16].
  void (*pack_panel)(const Matrix& m, const int64_t* rows, int64_t row0, int64_t count, int64_t first, int64_t cols,
                     float* out);
  // The inverse: a panel of `cols` columns to fp32, bf16 or fp16 rows of m.
  void (*unpack_panel)(const float* panel, int64_t ld, const Matrix& m, const int64_t* rows, int64_t row0,
                       int64_t count, int64_t first, int64_t cols);
  // Rows (rows[i], or from row0 on) as panels of their columns: out[col / 16][row][col % 16], missing columns zero.
  void (*pack_columns)(const Matrix& m, const int64_t* rows, int64_t row0, int64_t count, int64_t first, int64_t cols,
                       float* out);
  // Rows row0 ... as fp32 out[row * ld + col].
  void (*load_rows)(const Matrix& m, int64_t row0, int64_t count, int64_t first, int64_t cols, float* out, int64_t ld);
  void (*store_row)(const float* row, int64_t count, int dtype, void* out);
  void (*multiply)(const Product& product);
  // From the chain to y, in place, then into the states.
  void (*softmax)(const Block& block, const PanelRows* rows, PanelState* states);
  // Before temperature: bias and soft-cap only, in place (the wanted logits).
  void (*finish_logits)(const Block& block);
  // From the chain to the gradient of the logits before bias, in place.
  void (*gradients)(const Block& block, const PanelRows* rows);
  // Of a fingerprint: `bytes` of one row, the key of the row and those of the columns' 8-byte words.
  uint64_t (*row_hash)(const unsigned char* row, int64_t bytes, uint64_t key, const uint64_t* columns);
  bool (*contracts)();
};

const Kernels& base_kernels();
#if defined(VOCABSHARD_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// The variant to run: ValueError-like std::invalid_argument when this machine cannot.
const Kernels& kernels(int isa);

}  // namespace vocabshard::cpu
