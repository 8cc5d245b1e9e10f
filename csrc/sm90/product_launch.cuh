// Which kernel computes a product: a pure function of the shape and the number of multiprocessors. No choice changes a
// byte.
#pragma once

#include <algorithm>

#include "sm90/check.h"
#include "sm90/product_wgmma.cuh"
#include "sm90/product_wgmma.h"
#include "sm90/tensor_map.h"

namespace vocabshard::sm90 {

inline int64_t quotient_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

template <class Kernel>
void launch_kernel(const ProductCall& call, int64_t most_clusters, cudaStream_t stream) {
  constexpr bool kHalfPrecision = std::is_same_v<typename Kernel::Element, __half>;
  ProductParams p = {};
  p.a = Kernel::kTransposedA ? map_rows(call.a, kHalfPrecision, call.depth, call.rows, call.a_row, Kernel::kLinesA)
                             : map_rows(call.a, kHalfPrecision, call.rows, call.depth, call.a_row, Kernel::kLinesA);
  p.b = map_rows(call.b, kHalfPrecision, call.depth, call.columns, call.b_row, Kernel::kLinesB);
  p.init = call.init, p.init_row = call.init_row;
  p.out = call.out, p.out_row = call.out_row, p.output = call.output;
  p.row_active = call.row_active, p.row_mask = call.row_mask;
  p.rows = static_cast<int32_t>(call.rows), p.columns = static_cast<int32_t>(call.columns);
  p.k_steps = static_cast<int32_t>(quotient_up(call.depth, 16));
  p.m_tiles = static_cast<int32_t>(quotient_up(call.rows, Kernel::kRows));
  p.n_tiles = static_cast<int32_t>(quotient_up(call.columns, 2 * Kernel::kColumns));
  const int64_t tiles = static_cast<int64_t>(p.m_tiles) * p.n_tiles;
  if (tiles >= (int64_t{1} << 30)) throw std::invalid_argument("a gradient of 2^45 elements or more");
  const auto kernel = product_wgmma<Kernel>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes),
        "shared memory");
  const int64_t clusters = std::min(tiles, most_clusters);
  kernel<<<static_cast<unsigned>(2 * clusters), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(p);
}

// Tiles of 192 rows or of 128: what takes the fewer rows a cluster. Where it's about the same the taller one is faster
// by a hundredth, its operands are read less often.
inline bool tall_tiles(const ProductCall& call, int64_t most_clusters) {
  const auto cost = [&](int64_t rows) {
    const int64_t tiles = quotient_up(call.rows, rows) * quotient_up(call.columns, 2 * kProductColumns);
    return rows * quotient_up(tiles, most_clusters);
  };
  return 100 * cost(192) <= 101 * cost(128);
}

template <class Element>
void launch_product_element(const ProductCall& call, int32_t multiprocessors, cudaStream_t stream) {
  const int64_t most_clusters = std::max(multiprocessors / 2, 1);
  const bool tall = tall_tiles(call, most_clusters);
  if (!call.transposed && tall)
    launch_kernel<ProductKernel<Element, false, true, 3>>(call, most_clusters, stream);
  else if (!call.transposed)
    launch_kernel<ProductKernel<Element, false, true, 2>>(call, most_clusters, stream);
  else if (call.init != nullptr)
    launch_kernel<ProductKernel<Element, true, true, 2>>(call, most_clusters, stream);
  else if (tall && call.output != kProductAdd)
    launch_kernel<ProductKernel<Element, true, false, 3>>(call, most_clusters, stream);
  else
    launch_kernel<ProductKernel<Element, true, false, 2>>(call, most_clusters, stream);
}

}  // namespace vocabshard::sm90
