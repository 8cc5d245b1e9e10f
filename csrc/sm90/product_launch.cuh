// Which kernel computes a product: a pure function of the shape and the number of multiprocessors. No choice changes a
// byte.
#pragma once

#include <algorithm>

#include "sm90/check.h"
#include "sm90/product_wgmma.h"
#include "sm90/product_wide.cuh"
#include "sm90/tensor_map.h"

namespace vocabshard::sm90 {

inline int64_t quotient_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// So that reading and writing a tile takes about as long as multiplying the next; what is short has no time to lose.
inline uint32_t product_pause(const ProductCall& call) {
  const bool both = call.init != nullptr || call.output == kProductAdd;
  return both && call.depth >= 1536 ? static_cast<uint32_t>(std::min<int64_t>(call.depth / 10, 400)) : 0;
}

template <class Kernel>
void launch_kernel(void (*kernel)(ProductParams), const ProductCall& call, int64_t most_clusters, cudaStream_t stream) {
  constexpr bool kHalfPrecision = std::is_same_v<typename Kernel::Element, __half>;
  ProductParams p = {};
  p.a = Kernel::kTransposedA ? map_rows(call.a, kHalfPrecision, call.depth, call.rows, call.a_row, Kernel::kLinesA)
                             : map_rows(call.a, kHalfPrecision, call.rows, call.depth, call.a_row, Kernel::kLinesA);
  p.b = map_rows(call.b, kHalfPrecision, call.depth, call.columns, call.b_row, Kernel::kLinesB);
  p.init = call.init, p.init_row = call.init_row;
  p.out = call.out, p.out_row = call.out_row, p.output = call.output;
  p.row_active = call.row_active, p.row_mask = call.row_mask;
  p.pause = product_pause(call);
  p.turn = call.turn;
  p.rows = static_cast<int32_t>(call.rows), p.columns = static_cast<int32_t>(call.columns);
  p.k_steps = static_cast<int32_t>(quotient_up(call.depth, 16));
  p.m_tiles = static_cast<int32_t>(quotient_up(call.rows, Kernel::kClusterRows));
  p.n_tiles = static_cast<int32_t>(quotient_up(call.columns, Kernel::kClusterColumns));
  const int64_t tiles = static_cast<int64_t>(p.m_tiles) * p.n_tiles;
  if (tiles >= (int64_t{1} << 30)) throw std::invalid_argument("a gradient of 2^45 elements or more");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes),
        "shared memory");
  const int64_t clusters = std::min(tiles, most_clusters);
  kernel<<<static_cast<unsigned>(2 * clusters), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(p);
}

// Rows that a cluster's share of the gradient comes to, 256 columns wide, with so many rows at a time.
inline int64_t rows_of_cluster(const ProductCall& call, int64_t rows, int64_t most_clusters) {
  return rows * quotient_up(quotient_up(call.rows, rows) * quotient_up(call.columns, 256), most_clusters);
}

template <class Element>
void launch_product_element(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream) {
  const int64_t most_clusters = std::max(multiprocessors / 2, 1);
  const auto launch = [&](auto kernel) {
    using Kernel = decltype(kernel);
    launch_kernel<Kernel>(product_wgmma<Kernel>, call, most_clusters, stream);
  };
  // As little as there is to do for the busiest cluster; where it's about the same, the taller tile reads less. What
  // goes on from memory costs the wide tile as much as so many columns, as nothing hides it there.
  constexpr int64_t kColumnsOfInit = 800;
  const int64_t low = rows_of_cluster(call, 128, most_clusters);
  const int64_t exposed = call.transposed || call.init == nullptr ? 0 : 100 * kColumnsOfInit / call.depth;
  const bool rounded = !call.transposed && call.output == kProductElement;
  const bool tall = !rounded && 100 * rows_of_cluster(call, 192, most_clusters) <= (101 + exposed) * low;
  const bool wide = !tall && rows_of_cluster(call, 256, most_clusters) <= low;
  // Where few rows leave most of the chip idle, narrow tiles: each multiprocessor gets 64 bytes a cycle at most.
  const int64_t clusters = quotient_up(call.rows, 128) * quotient_up(call.columns, 256);
  if (!call.transposed && 2 * clusters <= most_clusters)
    call.rows <= 64 ? launch(ProductKernel<Element, false, true, 1, 64>())
                    : launch(ProductKernel<Element, false, true, 2, 64>());
  else if (!call.transposed && wide)
    launch_kernel<WideKernel<Element>>(product_wide<WideKernel<Element>>, call, most_clusters, stream);
  else if (!call.transposed)
    tall ? launch(ProductKernel<Element, false, true, 3>()) : launch(ProductKernel<Element, false, true, 2>());
  else if (call.init != nullptr)
    launch(ProductKernel<Element, true, true, 2>());
  else if (tall && call.output != kProductAdd)
    launch(ProductKernel<Element, true, false, 3>());
  else
    launch(ProductKernel<Element, true, false, 2>());
}

}  // namespace vocabshard::sm90
