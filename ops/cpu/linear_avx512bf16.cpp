// Products of bfloat16 by AVX512-BF16: an instruction multiplies 32 pairs of numbers and adds them up in 16 float32.
//
// Nothing has been timed: this was written without such a machine, and checked in an emulator (Bochs 3.0).
#include <immintrin.h>

#include "linear_kernels.h"
#include "vector.h"

// Compiled for one instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

constexpr int ROWS = 8;    // of the weight at once
constexpr int X_ROWS = 3;  // of x at once: with 3 vectors of x and one of the weight the sums take 28 of 32 registers

// Rows begin to end - 1 of x, one after the other, with adjacent columns.
void pack(const Linear& a, int64_t begin, int64_t end, uint16_t* to) {
  const int64_t padded = packed_columns(a.k);
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_row_stride;
    for (int64_t i = 0; i < padded; ++i) to[row * padded + i] = i < a.k ? x[i * a.x_stride] : 0;
  }
}

INLINE __m512bh load_pairs(const uint16_t* p) {
  __m512bh pairs;
  memcpy(&pairs, p, sizeof(pairs));
  return pairs;
}

// A run of ROWS rows of the weight: where they lie, and copies of their last columns, zero from column K on, if K is no
// multiple of PACKED_COLUMNS.
struct WeightRows {
  const uint16_t* rows[ROWS];
  int64_t whole;  // columns before the copied ones
  alignas(64) uint16_t last[ROWS][PACKED_COLUMNS];
};

// sums[c][r] = row r of the weight . row c of x, for C rows of x of `padded` columns.
template <int C>
INLINE void dot(const WeightRows& weight, const uint16_t* x, int64_t padded, float (*sums)[ROWS]) {
  __m512 s[C][ROWS] = {};
  const auto step = [&](int64_t at, const auto& rows, int64_t offset) __attribute__((always_inline)) {
    __m512bh xs[C];
    for (int c = 0; c < C; ++c) xs[c] = load_pairs(x + c * padded + at);
    for (int r = 0; r < ROWS; ++r) {
      const __m512bh pairs = load_pairs(rows[r] + offset);
      for (int c = 0; c < C; ++c) s[c][r] = _mm512_dpbf16_ps(s[c][r], pairs, xs[c]);
    }
  };
  for (int64_t at = 0; at < weight.whole; at += PACKED_COLUMNS) step(at, weight.rows, at);
  if (weight.whole < padded) step(weight.whole, weight.last, 0);
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < ROWS; ++r) sums[c][r] = reduce_add(bit_cast<Vector>(s[c][r]));
  }
}

void multiply(const Linear& a, int64_t begin, int64_t end, const uint16_t* x) {
  const int64_t padded = packed_columns(a.k);
  WeightRows weight = {{}, a.k / PACKED_COLUMNS * PACKED_COLUMNS, {}};
  for (int64_t n = begin; n < end; n += ROWS) {
    const int64_t count = min(ROWS, end - n);
    for (int64_t r = 0; r < ROWS; ++r) {
      // Where rows are missing, the last one is multiplied again.
      weight.rows[r] = static_cast<const uint16_t*>(a.weight) + (n + min(r, count - 1)) * a.weight_stride;
      memcpy(weight.last[r], weight.rows[r] + weight.whole, (a.k - weight.whole) * sizeof(uint16_t));
    }
    const Vector bias = a.bias ? load_first(a.bias + n, count) : Vector{};
    bfloat16* out = static_cast<bfloat16*>(a.out) + n;
    for (int64_t m = 0; m < a.m; m += X_ROWS) {
      float sums[X_ROWS][ROWS];
      const int64_t rows = min(X_ROWS, a.m - m);
      if (rows == 3) dot<3>(weight, x + m * padded, padded, sums);
      if (rows == 2) dot<2>(weight, x + m * padded, padded, sums);
      if (rows == 1) dot<1>(weight, x + m * padded, padded, sums);
      for (int64_t c = 0; c < rows; ++c) store_first(out + (m + c) * a.n, load_first(sums[c], ROWS) + bias, count);
    }
  }
}

}  // namespace

extern const Bfloat16Kernels bfloat16_kernels = {1, pack, multiply};

}  // namespace pagegraph::PAGEGRAPH_ISA
