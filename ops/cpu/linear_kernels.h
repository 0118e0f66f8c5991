// What linear needs per instruction set: few rows of x, where reading the weight takes the time, and many rows, where
// the products do. No function here allocates, starts threads or throws.
//
// Legend: M rows of x, N rows of the weight, K columns of both.
#pragma once

#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

constexpr int64_t STREAM_ROWS = 8;        // rows of the weight that `stream` multiplies with all of x before the next
constexpr int64_t STREAM_COLUMNS = 1024;  // columns of a tile of `stream` where it has several
constexpr int64_t WEIGHT_TILE = 48;       // rows of the weight that `multiply` holds as floats
constexpr int64_t COLUMN_TILE = 256;      // columns of a tile of `multiply`

// One call, as all its shares see it. Elements of x and out are float32 or bfloat16, those of the weight are the
// kernel's own. bias is null or [N] float32.
struct Linear {
  const void* x;  // [M, K]
  int64_t x_row_stride, x_stride;
  Element x_element;
  const void* weight;  // [N, K], columns adjacent
  int64_t weight_stride;
  int64_t m, n, k;
  const float* bias;
  void* out;  // [M, N] contiguous, of x's element
};

// All scratch is aligned to cache lines.
struct LinearKernels {
  int64_t panel;  // rows of x that `multiply` takes side by side

  // x as `stream` reads it: floats [tiles, M, tile], zero behind column K; `tile` is a multiple of 32. Columns are in
  // the order in which the weight's vectors come out of memory. [weight's Element]
  void (*spread[2])(const Linear& a, int64_t tile, float* to);
  // Rows begin to end - 1 of the weight, each read once. Every output is added up in the same order, whatever M, N and
  // the tile are. `sums` is scratch for M * STREAM_ROWS * 16 floats. [weight's Element]
  void (*stream[2])(const Linear& a, int64_t begin, int64_t end, const float* x, int64_t tile, float* sums);

  // Panels begin to end - 1 of x, transposed: floats [tiles, panels, COLUMN_TILE, panel], zero behind row M.
  void (*pack)(const Linear& a, int64_t begin, int64_t end, float* to);
  // Rows begin to end - 1 of the weight, for all packed panels. `scratch` is for WEIGHT_TILE * (COLUMN_TILE + panels *
  // panel) floats. [weight's Element]
  void (*multiply[2])(const Linear& a, int64_t begin, int64_t end, const float* x, float* scratch);
};

PAGEGRAPH_DECLARE(LinearKernels, linear_kernels)

constexpr int64_t PACKED_COLUMNS = 32;  // packed rows have a multiple of it

static inline int64_t packed_columns(int64_t k) { return (k + PACKED_COLUMNS - 1) / PACKED_COLUMNS * PACKED_COLUMNS; }

// bfloat16 x by a bfloat16 weight where the machine has instructions for it. These add up pairs of products in float32,
// and take subnormal numbers for zero.
struct Bfloat16Kernels {
  int64_t panel;  // rows of x that are packed together

  // Panels begin to end - 1 of x, zero behind column K. `to` has room for M, rounded up to panels, packed rows.
  void (*pack)(const Linear& a, int64_t begin, int64_t end, uint16_t* to);
  // Rows begin to end - 1 of the weight, for all packed rows. Every output is added up in the same order, whatever M
  // and N are.
  void (*multiply)(const Linear& a, int64_t begin, int64_t end, const uint16_t* x);
};

#if defined(PAGEGRAPH_HAS_AVX512BF16)
namespace avx512bf16 {
extern const Bfloat16Kernels bfloat16_kernels;
}
#endif
#if defined(PAGEGRAPH_HAS_AMX)
namespace amx {
extern const Bfloat16Kernels bfloat16_kernels;
}
#endif

}  // namespace pagegraph
