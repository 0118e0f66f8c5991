// Products of bfloat16 by AMX: an instruction multiplies 16 rows of the weight, 32 columns of each as they lie in
// memory, with 16 rows of x whose columns are packed in pairs, and adds them up in 16 x 16 float32.
//
// Nothing has been timed: this was written without such a machine, and checked in an emulator (Bochs 3.0).
#include <immintrin.h>

#include "linear_kernels.h"
#include "vector.h"

// Compiled for one instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

constexpr int64_t ROWS = 16;    // of the weight in a tile
constexpr int64_t PANEL = 16;   // rows of x in a tile
constexpr int64_t PANELS = 4;   // at once, so that a tile of the weight is loaded once for 64 rows of x
constexpr int64_t STEP = PACKED_COLUMNS;  // columns in a tile

static_assert(ROWS == LANES && PANEL == LANES);

// Fewer rows of x than PANEL lie in narrower tiles, since every token that is decoded packs them anew.
INLINE int64_t panel_width(const Linear& a) { return min(PANEL, a.m); }

// What one panel takes when packed.
INLINE int64_t panel_size(const Linear& a) { return packed_columns(a.k) * panel_width(a); }

// Panels of x: [panels, K / 2, panel_width, 2]. Column i of a row lies at [i / 2] and [i % 2].
void pack(const Linear& a, int64_t begin, int64_t end, uint16_t* to) {
  const int64_t width = panel_width(a), padded = packed_columns(a.k);
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t lane = 0; lane < width; ++lane) {
      const int64_t row = panel * PANEL + lane, count = row < a.m ? a.k : 0;
      const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_row_stride;
      uint16_t* column = to + panel * panel_size(a) + lane * 2;
      for (int64_t i = 0; i < padded; ++i) column[i / 2 * width * 2 + i % 2] = i < count ? x[i * a.x_stride] : 0;
    }
  }
}

// Compilers do not know that tile instructions read memory: what was stored before must not be left in registers.
INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are sums [rows, width], 4 is of the weight [rows, STEP], 5 of x [STEP / 2, width, 2].
// The operand of LDTILECFG: Intel's manual, volume 1, "Programming with Intel AMX".
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

void configure(int64_t rows, int64_t width) {
  TileConfig config = {1, 0, {}, {}, {}};
  for (int tile = 0; tile < 6; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(tile == 5 ? STEP / 2 : rows);
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 ? STEP * 2 : width * 4);
  }
  finish_stores();
  _tile_loadconfig(&config);
}

// ROWS rows of the weight, of which only those that exist are read: where they lie, and copies of their last columns,
// zero from column K on, if K is no multiple of STEP.
struct WeightRows {
  const uint16_t* rows;
  int64_t stride, whole;  // elements between rows; columns before the copied ones
  alignas(64) uint16_t last[ROWS][STEP];
};

// sums[p] = rows of the weight . panel p of x, for N panels that lie `size` elements apart. Each is [rows, width] with
// PANEL floats between rows.
template <int N>
INLINE void dot(const WeightRows& weight, const uint16_t* x, int64_t size, int64_t width, float (*sums)[ROWS * PANEL]) {
  const int64_t x_stride = width * 4;  // bytes
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (N > 2) _tile_zero(2);
  if (N > 3) _tile_zero(3);
  const auto step = [&](const uint16_t* rows, int64_t stride, const uint16_t* xs) __attribute__((always_inline)) {
    _tile_loadd(4, rows, stride * 2);
    _tile_loadd(5, xs, x_stride);
    _tile_dpbf16ps(0, 4, 5);
    if (N > 1) {
      _tile_loadd(5, xs + size, x_stride);
      _tile_dpbf16ps(1, 4, 5);
    }
    if (N > 2) {
      _tile_loadd(5, xs + 2 * size, x_stride);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (N > 3) {
      _tile_loadd(5, xs + 3 * size, x_stride);
      _tile_dpbf16ps(3, 4, 5);
    }
  };
  for (int64_t at = 0; at < weight.whole; at += STEP) step(weight.rows + at, weight.stride, x + at * width);
  if (weight.whole * width < size) step(weight.last[0], STEP, x + weight.whole * width);
  _tile_stored(0, sums[0], PANEL * 4);
  if (N > 1) _tile_stored(1, sums[1], PANEL * 4);
  if (N > 2) _tile_stored(2, sums[2], PANEL * 4);
  if (N > 3) _tile_stored(3, sums[3], PANEL * 4);
}

// Swaps the off-diagonal halves of ever smaller squares.
template <int SIZE>
INLINE void transpose(__m512 (&rows)[16]) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Ints upper = (lane & SIZE) == 0 ? lane : (lane ^ SIZE) + 16;  // from 16 on: lanes of the second operand
  const Ints lower = (lane & SIZE) == 0 ? lane ^ SIZE : lane + 16;
  for (int i = 0; i < 16; ++i) {
    if (i & SIZE) continue;
    const __m512 first = rows[i], second = rows[i + SIZE];
    rows[i] = _mm512_permutex2var_ps(first, bit_cast<__m512i>(upper), second);
    rows[i + SIZE] = _mm512_permutex2var_ps(first, bit_cast<__m512i>(lower), second);
  }
  if constexpr (SIZE > 1) transpose<SIZE / 2>(rows);
}

// Writes out[m][n], m < columns and n < rows, from sums [rows, PANEL], with `stride` between rows of `out`.
void write(const float* sums, Vector bias, int64_t rows, int64_t columns, bfloat16* out, int64_t stride) {
  __m512 lines[16];
  for (int i = 0; i < 16; ++i) lines[i] = bit_cast<__m512>(load(sums + i * PANEL));
  transpose<8>(lines);
  for (int64_t m = 0; m < columns; ++m) {
    const Vector line = bit_cast<Vector>(lines[m]) + bias;
    if (rows == ROWS) {
      store(out + m * stride, line);
    } else {
      store_first(out + m * stride, line, rows);
    }
  }
}

void multiply(const Linear& a, int64_t begin, int64_t end, const uint16_t* x) {
  const int64_t width = panel_width(a), size = panel_size(a), whole = a.k / STEP * STEP;
  WeightRows weight = {nullptr, a.weight_stride, whole, {}};
  alignas(64) float sums[PANELS][ROWS * PANEL] = {};
  int64_t configured = 0;
  for (int64_t n = begin; n < end; n += ROWS) {
    const int64_t rows = min(ROWS, end - n);
    weight.rows = static_cast<const uint16_t*>(a.weight) + n * a.weight_stride;
    for (int64_t r = 0; r < rows && whole < a.k; ++r) {
      memcpy(weight.last[r], weight.rows + r * a.weight_stride + whole, (a.k - whole) * sizeof(uint16_t));
    }
    finish_stores();
    if (rows != configured) configure(configured = rows, width);
    const Vector bias = a.bias ? load_first(a.bias + n, rows) : Vector{};
    for (int64_t m = 0; m < a.m; m += PANELS * PANEL) {
      const int64_t panels = min(PANELS, (a.m - m + PANEL - 1) / PANEL);
      const uint16_t* xs = x + m / PANEL * size;
      if (panels == 4) dot<4>(weight, xs, size, width, sums);
      if (panels == 3) dot<3>(weight, xs, size, width, sums);
      if (panels == 2) dot<2>(weight, xs, size, width, sums);
      if (panels == 1) dot<1>(weight, xs, size, width, sums);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t row = m + panel * PANEL;
        write(sums[panel], bias, rows, min(PANEL, a.m - row), static_cast<bfloat16*>(a.out) + row * a.n + n, a.n);
      }
    }
  }
  _tile_release();
}

}  // namespace

extern const Bfloat16Kernels bfloat16_kernels = {PANEL, pack, multiply};

}  // namespace pagegraph::PAGEGRAPH_ISA
