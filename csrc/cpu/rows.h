// Between tensors of fp32, bf16 or fp16 with any strides and the fp32 panels of the kernels. Conversions are exact up,
// and round to nearest even down.
#pragma once

#include "cpu/lanes.h"

namespace vocabshard::cpu {
namespace {

VS_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // the exponent moves by a product that is exact, subnormals included
  return from_bits(sign | bits(from_bits(magnitude << 13) * 0x1p+112f));
}

VS_INLINE uint16_t float_to_half(float x) {
  const uint32_t b = bits(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // subnormal or zero: the sum leaves the rounded integer in the low bits
    return static_cast<uint16_t>(sign | (bits(from_bits(magnitude) + 0.5f) - bits(0.5f)));
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

VS_INLINE float bfloat_to_float(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

VS_INLINE uint16_t float_to_bfloat(float x) {
  const uint32_t b = bits(x);
  return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

static void load_halves(const uint16_t* source, int64_t count, float* out) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
#endif
  for (; i < count; ++i) out[i] = half_to_float(source[i]);
}

static void store_halves(const float* row, int64_t count, uint16_t* out) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(row + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) out[i] = float_to_half(row[i]);
}

// Elements first ... first + count of one row, as fp32.
VS_INLINE void load_row(const Matrix& m, int64_t row, int64_t first, int64_t count, float* out) {
  const int64_t at = row * m.row_stride + first * m.col_stride, step = m.col_stride;
  if (m.dtype == kF32) {
    const float* x = static_cast<const float*>(m.data) + at;
    if (step == 1)
      __builtin_memcpy(out, x, static_cast<size_t>(count) * 4);
    else
      for (int64_t i = 0; i < count; ++i) out[i] = x[i * step];
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(m.data) + at;
  if (m.dtype == kBF16) {
    if (step == 1)
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(x[i]);
    else
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(x[i * step]);
  } else if (step == 1) {
    load_halves(x, count, out);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(x[i * step]);
  }
}

static void store_row(const float* row, int64_t count, int dtype, void* out) {
  if (dtype == kF32) {
    __builtin_memcpy(out, row, static_cast<size_t>(count) * 4);
  } else if (dtype == kF16) {
    store_halves(row, count, static_cast<uint16_t*>(out));
  } else {
    uint16_t* x = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) x[i] = float_to_bfloat(row[i]);
  }
}

static void load_rows(const Matrix& m, int64_t row0, int64_t count, int64_t first, int64_t cols, float* out,
                      int64_t ld) {
  for (int64_t r = 0; r < count; ++r) load_row(m, row0 + r, first, cols, out + r * ld);
}

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadI __attribute__((vector_size(16)));

#if defined(__clang__)
#define VS_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define VS_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, QuadI{i, j, k, l})
#endif

// out[j * out_ld + i] = in[i * in_ld + j], 16 x 16.
VS_INLINE void transpose16(const float* in, int64_t in_ld, float* out, int64_t out_ld) {
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < kLanes; j += 4) {
      Quad x[4];
      for (int r = 0; r < 4; ++r) __builtin_memcpy(&x[r], in + (i + r) * in_ld + j, 16);
      const Quad a = VS_SHUFFLE(x[0], x[1], 0, 4, 1, 5), b = VS_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
      const Quad c = VS_SHUFFLE(x[2], x[3], 0, 4, 1, 5), d = VS_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
      const Quad y[4] = {VS_SHUFFLE(a, c, 0, 1, 4, 5), VS_SHUFFLE(a, c, 2, 3, 6, 7), VS_SHUFFLE(b, d, 0, 1, 4, 5),
                         VS_SHUFFLE(b, d, 2, 3, 6, 7)};
      for (int r = 0; r < 4; ++r) __builtin_memcpy(out + (j + r) * out_ld + i, &y[r], 16);
    }
}

constexpr int64_t kStrip = 128;  // columns that are turned at a time

static void pack_panel(const Matrix& m, const int64_t* rows, int64_t row0, int64_t count, int64_t first, int64_t cols,
                       float* out) {
  alignas(64) float strip[kLanes][kStrip + kLanes];
  for (int64_t done = 0; done < cols; done += kStrip) {
    const int64_t wide = cols - done < kStrip ? cols - done : kStrip;
    for (int64_t r = 0; r < kLanes; ++r)
      if (r < count)
        load_row(m, rows ? rows[r] : row0 + r, first + done, wide, strip[r]);
      else
        for (int64_t i = 0; i < wide; ++i) strip[r][i] = 0.0f;
    int64_t j = 0;
    for (; j + kLanes <= wide; j += kLanes)
      transpose16(&strip[0][j], kStrip + kLanes, out + (done + j) * kLanes, kLanes);
    for (; j < wide; ++j)
      for (int64_t r = 0; r < kLanes; ++r) out[(done + j) * kLanes + r] = strip[r][j];
  }
}

static void unpack_panel(const float* panel, int64_t ld, const Matrix& m, const int64_t* rows, int64_t row0,
                         int64_t count, int64_t first, int64_t cols) {
  alignas(64) float strip[kLanes][kStrip + kLanes];
  const int64_t size = m.dtype == kF32 ? 4 : 2;
  for (int64_t done = 0; done < cols; done += kStrip) {
    const int64_t wide = cols - done < kStrip ? cols - done : kStrip;
    int64_t j = 0;
    for (; j + kLanes <= wide; j += kLanes) transpose16(panel + (done + j) * ld, ld, &strip[0][j], kStrip + kLanes);
    for (; j < wide; ++j)
      for (int64_t r = 0; r < kLanes; ++r) strip[r][j] = panel[(done + j) * ld + r];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (rows ? rows[r] : row0 + r) * m.row_stride + first + done;
      store_row(strip[r], wide, m.dtype, static_cast<char*>(m.data) + at * size);
    }
  }
}

static void pack_columns(const Matrix& m, const int64_t* rows, int64_t row0, int64_t count, int64_t first, int64_t cols,
                         float* out) {
  alignas(64) float strip[kStrip];
  for (int64_t r = 0; r < count; ++r)
    for (int64_t done = 0; done < cols; done += kStrip) {
      const int64_t wide = cols - done < kStrip ? cols - done : kStrip;
      load_row(m, rows ? rows[r] : row0 + r, first + done, wide, strip);
      for (int64_t i = wide; i % kLanes != 0; ++i) strip[i] = 0.0f;
      for (int64_t i = 0; i < wide; i += kLanes)
        __builtin_memcpy(out + ((done + i) / kLanes * count + r) * kLanes, strip + i, kLanes * 4);
    }
}

}  // namespace
}  // namespace vocabshard::cpu
