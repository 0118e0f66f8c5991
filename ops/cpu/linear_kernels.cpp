#include "linear_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

constexpr int PAIR = 2 * LANES;  // columns that are loaded at once
constexpr int PANEL = 2 * LANES;
// Sums at once, rows of the weight by rows of x: with 3 vectors of x and one of the weight they fill 16 registers.
constexpr int TILE_ROWS = 4, X_ROWS = 3;
#if defined(__AVX512F__)
constexpr int WEIGHT_ROWS = 12;  // 12 x 2 sums of 32 registers
#else
constexpr int WEIGHT_ROWS = 6;
#endif

// PAIR columns as two vectors. Two adjacent bfloat16 are the halves of a word: those in even places are the first
// vector, those in odd places the second, at one instruction each.
INLINE Vector load_first_half(const float* p) { return load(p); }
INLINE Vector load_second_half(const float* p) { return load(p + LANES); }

INLINE Bits load_words(const bfloat16* p) {
  Bits words;
  memcpy(&words, p, sizeof(words));
  return words;
}
INLINE Vector load_first_half(const bfloat16* p) { return bit_cast<Vector>(load_words(p) << 16); }
INLINE Vector load_second_half(const bfloat16* p) { return bit_cast<Vector>(load_words(p) & 0xffff0000); }

// Where column i < PAIR of a pair ends up.
INLINE int64_t place(const float*, int64_t i) { return i; }
INLINE int64_t place(const bfloat16*, int64_t i) { return i % 2 * LANES + i / 2; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bfloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <class X, class T>
INLINE void spread_as(const Linear& a, int64_t tile, float* to) {
  for (int64_t begin = 0; begin < a.k; begin += tile) {
    const int64_t count = min(tile, a.k - begin), padded = (count + PAIR - 1) / PAIR * PAIR;
    for (int64_t row = 0; row < a.m; ++row, to += tile) {
      const X* x = static_cast<const X*>(a.x) + row * a.x_row_stride + begin * a.x_stride;
      for (int64_t i = 0; i < padded; ++i) {
        const int64_t at = i / PAIR * PAIR + place(static_cast<const T*>(nullptr), i % PAIR);
        to[at] = i < count ? to_float(x[i * a.x_stride]) : 0;
      }
    }
  }
}

template <class T>
void spread(const Linear& a, int64_t tile, float* to) {
  if (a.x_element == FLOAT32) spread_as<float, T>(a, tile, to);
  if (a.x_element == BFLOAT16) spread_as<bfloat16, T>(a, tile, to);
}

// What to ask memory for while a tile is multiplied: for row r of the weight the line at next + r * stride, and after
// every PAIR columns the one `step` bytes on. Row r + 1 of the tiles to come begins `row` bytes after row r.
struct Ahead {
  const char* next;
  int64_t stride, step, row;
};

// sums[m][r] += rows[r] . x[m] over `count` columns, for R rows of the weight and C of x.
template <int R, int C, bool AHEAD, class T>
INLINE void dot(const T* const* rows, int64_t count, const float* x, int64_t x_stride, Ahead ahead, float* sums) {
  Vector s[C][R];
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) s[c][r] = load(sums + (c * STREAM_ROWS + r) * LANES);
  }
  const auto step = [&](const T* const(&w)[R], const float* xs) __attribute__((always_inline)) {
    Vector v[C];
    for (int c = 0; c < C; ++c) v[c] = load(xs + c * x_stride);
    for (int r = 0; r < R; ++r) {
      const Vector weight = load_first_half(w[r]);
      for (int c = 0; c < C; ++c) s[c][r] = fma(v[c], weight, s[c][r]);
    }
    for (int c = 0; c < C; ++c) v[c] = load(xs + c * x_stride + LANES);
    for (int r = 0; r < R; ++r) {
      const Vector weight = load_second_half(w[r]);
      for (int c = 0; c < C; ++c) s[c][r] = fma(v[c], weight, s[c][r]);
    }
  };
  int64_t i = 0;
  for (; i + PAIR <= count; i += PAIR) {
    const T* w[R];
    for (int r = 0; r < R; ++r) w[r] = rows[r] + i;
    if (AHEAD) {
      for (int r = 0; r < R; ++r) __builtin_prefetch(ahead.next + r * ahead.stride);
      ahead.next += ahead.step;
    }
    step(w, x + i);
  }
  if (i < count) {
    T last[R][PAIR] = {};
    const T* w[R];
    for (int r = 0; r < R; ++r) {
      w[r] = last[r];
      for (int64_t j = i; j < count; ++j) last[r][j - i] = rows[r][j];
    }
    step(w, x + i);
  }
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < R; ++r) store(sums + (c * STREAM_ROWS + r) * LANES, s[c][r]);
  }
}

// The same for STREAM_ROWS rows of the weight.
template <int C, class T>
INLINE void dots(const T* const* rows, int64_t count, const float* x, int64_t x_stride, Ahead ahead, float* sums) {
  for (int r = 0; r < STREAM_ROWS; r += TILE_ROWS) {
    if (ahead.next) {
      dot<TILE_ROWS, C, true>(rows + r, count, x, x_stride, ahead, sums + r * LANES);
      ahead.next += TILE_ROWS * ahead.row;
    } else {
      dot<TILE_ROWS, C, false>(rows + r, count, x, x_stride, ahead, sums + r * LANES);
    }
  }
}

INLINE void write(void* out, Element element, int64_t at, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (element == FLOAT32) {
      static_cast<float*>(out)[at + i] = values[i];
    } else {
      bfloat16* to = static_cast<bfloat16*>(out) + at + i;
      const uint32_t bits = bit_cast<uint32_t>(values[i]);
      to->bits = values[i] == values[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
    }
  }
}

template <class T>
void stream(const Linear& a, int64_t begin, int64_t end, const float* x, int64_t tile, float* sums) {
  const T* weight = static_cast<const T*>(a.weight);
  const int64_t row_bytes = a.weight_stride * sizeof(T);
  // The next rows are asked for in the course of several groups of rows of x, so that memory is busy all the time.
  const int64_t groups = (a.m + X_ROWS - 1) / X_ROWS;
  const int64_t busy = groups >= 8 ? 8 : groups >= 4 ? 4 : groups >= 2 ? 2 : 1;  // divides a piece
  for (int64_t n = begin; n < end; n += STREAM_ROWS) {
    const int64_t count = min(STREAM_ROWS, end - n);
    memset(sums, 0, sizeof(float) * a.m * STREAM_ROWS * LANES);
    for (int64_t at = 0; at < a.k; at += tile) {
      const T* rows[STREAM_ROWS];
      // Where rows are missing, the last one is multiplied again.
      for (int64_t r = 0; r < STREAM_ROWS; ++r) rows[r] = weight + (n + min(r, count - 1)) * a.weight_stride + at;
      const int64_t columns = min(tile, a.k - at);
      const int64_t piece = PAIR * sizeof(T), offset = at * sizeof(T), width = columns * sizeof(T);
      const char* next = reinterpret_cast<const char*>(weight + (n + STREAM_ROWS) * a.weight_stride);
      // Prefetchers of the hardware follow one stream a page: rows that are shorter than that are asked for in one
      // stream, longer ones side by side. Measured on Zen 3 at M = 1, as a share of a plain sum: 0.75 against 0.6 for
      // rows of 1152 bytes, and 0.95 against 0.83 for rows of 4096.
      const Ahead start = row_bytes < 4096 ? Ahead{next + offset * STREAM_ROWS, piece, piece * TILE_ROWS / busy, width}
                                           : Ahead{next + offset, row_bytes, piece / busy, row_bytes};
      for (int64_t m = 0, group = 0; m < a.m; m += X_ROWS, ++group) {
        Ahead ahead = start;
        ahead.next = group < busy ? start.next + group * (columns / PAIR) * start.step : nullptr;
        const float* xs = x + at * a.m + m * tile;
        float* to = sums + m * STREAM_ROWS * LANES;
        if (a.m - m >= X_ROWS) {
          dots<X_ROWS>(rows, columns, xs, tile, ahead, to);
        } else if (a.m - m == 2) {
          dots<2>(rows, columns, xs, tile, ahead, to);
        } else {
          dots<1>(rows, columns, xs, tile, ahead, to);
        }
      }
    }
    for (int64_t m = 0; m < a.m; ++m) {
      float values[STREAM_ROWS];
      for (int64_t r = 0; r < count; ++r) {
        values[r] = reduce_add(load(sums + (m * STREAM_ROWS + r) * LANES));
        if (a.bias) values[r] += a.bias[n + r];
      }
      write(a.out, a.x_element, m * a.n + n, values, count);
    }
  }
}

template <class X>
INLINE void pack_as(const Linear& a, int64_t begin, int64_t end, float* to) {
  const int64_t panels = (a.m + PANEL - 1) / PANEL;
  for (int64_t at = 0; at < a.k; at += COLUMN_TILE) {
    const int64_t columns = min(COLUMN_TILE, a.k - at);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* tile = to + at * panels * PANEL + panel * COLUMN_TILE * PANEL;
      for (int64_t lane = 0; lane < PANEL; ++lane) {
        const int64_t row = panel * PANEL + lane;
        const X* x = static_cast<const X*>(a.x) + row * a.x_row_stride + at * a.x_stride;
        for (int64_t i = 0; i < columns; ++i) tile[i * PANEL + lane] = row < a.m ? to_float(x[i * a.x_stride]) : 0;
      }
    }
  }
}

void pack(const Linear& a, int64_t begin, int64_t end, float* to) {
  if (a.x_element == FLOAT32) pack_as<float>(a, begin, end, to);
  if (a.x_element == BFLOAT16) pack_as<bfloat16>(a, begin, end, to);
}

// sums[r][lane] += sum over i of w[r][i] * x[i][lane] for WEIGHT_ROWS rows of the weight and a panel of x.
INLINE void multiply_tile(const float* w, const float* x, int64_t columns, float* sums) {
  Vector s[WEIGHT_ROWS][2];
  for (int r = 0; r < WEIGHT_ROWS; ++r) {
    s[r][0] = load(sums + r * PANEL);
    s[r][1] = load(sums + r * PANEL + LANES);
  }
  for (int64_t i = 0; i < columns; ++i, x += PANEL) {
    const Vector left = load(x), right = load(x + LANES);
    for (int r = 0; r < WEIGHT_ROWS; ++r) {
      const Vector weight = broadcast(w[r * COLUMN_TILE + i]);
      s[r][0] = fma(weight, left, s[r][0]);
      s[r][1] = fma(weight, right, s[r][1]);
    }
  }
  for (int r = 0; r < WEIGHT_ROWS; ++r) {
    store(sums + r * PANEL, s[r][0]);
    store(sums + r * PANEL + LANES, s[r][1]);
  }
}

template <class T>
void multiply(const Linear& a, int64_t begin, int64_t end, const float* x, float* scratch) {
  const int64_t panels = (a.m + PANEL - 1) / PANEL;
  float* sums = scratch + WEIGHT_TILE * COLUMN_TILE;  // [panels, WEIGHT_TILE, PANEL]
  for (int64_t n = begin; n < end; n += WEIGHT_TILE) {
    const int64_t rows = min(WEIGHT_TILE, end - n);
    memset(sums, 0, sizeof(float) * WEIGHT_TILE * panels * PANEL);
    for (int64_t at = 0; at < a.k; at += COLUMN_TILE) {
      const int64_t columns = min(COLUMN_TILE, a.k - at);
      for (int64_t r = 0; r < rows; ++r) {
        const T* row = static_cast<const T*>(a.weight) + (n + r) * a.weight_stride + at;
        float* to = scratch + r * COLUMN_TILE;
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES) store(to + i, load(row + i));
        for (; i < columns; ++i) to[i] = to_float(row[i]);
      }
      const float* tile = x + at * panels * PANEL;
      for (int64_t panel = 0; panel < panels; ++panel) {
        for (int64_t r = 0; r < rows; r += WEIGHT_ROWS) {
          multiply_tile(scratch + r * COLUMN_TILE, tile + panel * COLUMN_TILE * PANEL, columns,
                        sums + (panel * WEIGHT_TILE + r) * PANEL);
        }
      }
    }
    for (int64_t m = 0; m < a.m; ++m) {
      const float* column = sums + m / PANEL * WEIGHT_TILE * PANEL + m % PANEL;
      float values[WEIGHT_TILE];
      for (int64_t r = 0; r < rows; ++r) values[r] = column[r * PANEL] + (a.bias ? a.bias[n + r] : 0.0f);
      write(a.out, a.x_element, m * a.n + n, values, rows);
    }
  }
}

}  // namespace

extern const LinearKernels linear_kernels = {
    PANEL, {spread<float>, spread<bfloat16>}, {stream<float>, stream<bfloat16>},
    pack,  {multiply<float>, multiply<bfloat16>},
};

}  // namespace pagegraph::PAGEGRAPH_ISA
