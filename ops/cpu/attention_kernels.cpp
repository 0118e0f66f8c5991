#include "attention_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

constexpr float LOWEST = -3.4028235e38f;         // finite, so that lowest - lowest is not NaN
constexpr int PANEL = 2 * LANES;                 // columns of the right-hand matrix in registers
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;  // rows of the product in registers, beside two vectors each

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

INLINE float read(const float* p) { return *p; }
INLINE float read(const bfloat16* p) { return bit_cast<float>(static_cast<uint32_t>(p->bits) << 16); }
INLINE float read(const float16* p) { return load_first(p, 1)[0]; }

template <class T>
INLINE void read_scaled(const T* x, int64_t stride, int64_t d, float scale, float* out, int64_t out_stride) {
  int64_t at = 0;
  if (stride == 1 && out_stride == 1) {
    for (; at + LANES <= d; at += LANES) store(out + at, load(x + at) * scale);
  }
  for (; at < d; ++at) out[at * out_stride] = read(x + at * stride) * scale;
}

// out[i * out_stride] = scale * q[at + i * dim_stride], i < d.
void read_query_part(const Attention& c, int64_t at, int64_t d, float* out, int64_t out_stride) {
  switch (c.q_element) {
    case FLOAT32:
      return read_scaled(static_cast<const float*>(c.q) + at, c.dim_stride, d, c.scale, out, out_stride);
    case BFLOAT16:
      return read_scaled(static_cast<const bfloat16*>(c.q) + at, c.dim_stride, d, c.scale, out, out_stride);
    case FLOAT16:
      return read_scaled(static_cast<const float16*>(c.q) + at, c.dim_stride, d, c.scale, out, out_stride);
  }
}

// out[i * out_stride] = scale * q[token][head][i].
void read_query(const Attention& c, int64_t token, int64_t head, float* out, int64_t out_stride) {
  read_query_part(c, token * c.token_stride + head * c.head_stride, c.dk, out, out_stride);
}

// Copies a row of d elements to floats, with zeros up to a multiple of two vectors.
template <class T>
INLINE void read_row(const T* row, int64_t d, float* out) {
  int64_t at = 0;
  for (; at + LANES <= d; at += LANES) store(out + at, load(row + at));
  if (at < d) store(out + at, load_first(row + at, d - at)), at += LANES;
  if (at % PANEL) store(out + at, Vector{});
}

// Two vectors of a row that is used in place. The elements of a bfloat16 row come as the even ones and the odd ones,
// which takes one instruction each.
struct Pair {
  Vector first, second;
};

INLINE Pair load_pair(const float* p) { return {load(p), load(p + LANES)}; }

INLINE Pair load_pair(const bfloat16* p) {
  Bits bits;
  memcpy(&bits, p, sizeof(bits));
  return {bit_cast<Vector>(bits << 16), bit_cast<Vector>(bits & 0xffff0000)};
}

// Where element i of a bfloat16 row lies when read by load_pair.
INLINE int64_t place(int64_t i) { return i / PANEL * PANEL + i % 2 * LANES + i % PANEL / 2; }

// As read_query, in the order of load_pair for bfloat16.
void read_query_pairs(const Attention& c, int64_t token, int64_t head, float* out) {
  const int64_t at = token * c.token_stride + head * c.head_stride;
  if (c.q_element == BFLOAT16 && c.dim_stride == 1) {
    for (int64_t i = 0; i < c.dk; i += PANEL) {
      const Pair pair = load_pair(static_cast<const bfloat16*>(c.q) + at + i);
      store(out + i, pair.first * c.scale);
      store(out + i + LANES, pair.second * c.scale);
    }
    return;
  }
  for (int64_t i = 0; i < c.dk; i += PANEL) {
    float ordered[PANEL];
    read_query_part(c, at + i * c.dim_stride, PANEL, ordered, 1);
    for (int64_t j = 0; j < PANEL; ++j) out[i + place(j)] = ordered[j];
  }
}

template <class T>
INLINE void prefetch(const T* row, int64_t begin, int64_t end) {
  const int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t at = begin; at < end; at += line) __builtin_prefetch(row + at);
}

// scores[g][i] = q[g] . rows[i] for G rows of q and KEYS rows of K of d elements, a multiple of two vectors.
template <int G, int KEYS, class T>
INLINE void dot(const float* q, int64_t q_stride, const T* const* rows, int64_t d, float* scores) {
  Vector sums[G * KEYS] = {};
  for (int64_t at = 0; at < d; at += PANEL) {
    Pair keys[KEYS];
    for (int i = 0; i < KEYS; ++i) keys[i] = load_pair(rows[i] + at);
    for (int g = 0; g < G; ++g) {
      const Pair query = load_pair(q + g * q_stride + at);
      for (int i = 0; i < KEYS; ++i) {
        sums[g * KEYS + i] = fma(query.first, keys[i].first, sums[g * KEYS + i]);
        sums[g * KEYS + i] = fma(query.second, keys[i].second, sums[g * KEYS + i]);
      }
    }
  }
  float totals[G * KEYS + 3];
  reduce_add<G * KEYS>(sums, totals);
  for (int g = 0; g < G; ++g) {
    for (int i = 0; i < KEYS; ++i) scores[g * SPLIT + i] = totals[g * KEYS + i];
  }
}

// The same for all n rows. Asks for the rows `later` meanwhile.
template <int G, int KEYS, class T>
INLINE void dots(const float* q, int64_t q_stride, const T* const* rows, const T* const* later, int64_t n, int64_t d,
                 float* scores) {
  int64_t i = 0;
  for (; i + KEYS <= n; i += KEYS) {
    for (int j = 0; j < KEYS; ++j) prefetch(later[i + j], 0, d);
    dot<G, KEYS>(q, q_stride, rows + i, d, scores + i);
  }
  for (; i < n; ++i) dot<G, 1>(q, q_stride, rows + i, d, scores + i);
}

// The scores of all heads of a group for n rows of K.
template <class T>
void score(const float* q, int64_t q_stride, const T* const* rows, const T* const* later, int64_t n, int64_t d,
           int64_t group, float* scores) {
  for (; group >= 4; group -= 4, q += 4 * q_stride, scores += 4 * SPLIT, later = rows) {
    dots<4, 2>(q, q_stride, rows, later, n, d, scores);
  }
  if (group == 3) dots<3, 2>(q, q_stride, rows, later, n, d, scores);
  if (group == 2) dots<2, 4>(q, q_stride, rows, later, n, d, scores);
  if (group == 1) dots<1, 8>(q, q_stride, rows, later, n, d, scores);
}

// out[g] += sum over i of weights[g][i] * rows[i], for N pairs of vectors from `at` on.
template <int G, int N, class T>
INLINE void add_columns(
    const float* weights, const T* const* rows, int64_t n, int64_t at, float* out, int64_t out_stride) {
  Vector sums[G][2 * N];
  for (int g = 0; g < G; ++g) {
    for (int j = 0; j < 2 * N; ++j) sums[g][j] = load(out + g * out_stride + at + j * LANES);
  }
  for (int64_t i = 0; i < n; ++i) {
    const T* row = rows[i] + at;
    for (int j = 0; j < N; ++j) {
      const Pair value = load_pair(row + j * PANEL);
      for (int g = 0; g < G; ++g) {
        const Vector weight = broadcast(weights[g * SPLIT + i]);
        sums[g][2 * j] = fma(weight, value.first, sums[g][2 * j]);
        sums[g][2 * j + 1] = fma(weight, value.second, sums[g][2 * j + 1]);
      }
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int j = 0; j < 2 * N; ++j) store(out + g * out_stride + at + j * LANES, sums[g][j]);
  }
}

// The same for whole rows. Asks for the rows `later` meanwhile.
template <int G, int N, class T>
INLINE void add(const float* weights, const T* const* rows, const T* const* later, int64_t n, int64_t d, float* out,
                int64_t out_stride) {
  int64_t at = 0;
  for (; at + N * PANEL <= d; at += N * PANEL) {
    if (at * sizeof(T) % 64 == 0) {
      for (int64_t i = 0; i < n; ++i) prefetch(later[i], at, at + N * PANEL);
    }
    add_columns<G, N>(weights, rows, n, at, out, out_stride);
  }
  for (; at < d; at += PANEL) add_columns<G, 1>(weights, rows, n, at, out, out_stride);
}

// Adds n weighted rows of V to the output of all heads of a group.
template <class T>
void add_values(const float* weights, const T* const* rows, const T* const* later, int64_t n, int64_t d, int64_t group,
                float* out, int64_t out_stride) {
  for (; group >= 4; group -= 4, weights += 4 * SPLIT, out += 4 * out_stride, later = rows) {
    add<4, 1>(weights, rows, later, n, d, out, out_stride);
  }
  if (group == 3) add<3, 1>(weights, rows, later, n, d, out, out_stride);
  if (group == 2) add<2, 2>(weights, rows, later, n, d, out, out_stride);
  if (group == 1) add<1, 4>(weights, rows, later, n, d, out, out_stride);
}

INLINE Vector cap(Vector scores, float softcap) {
  return softcap == 0.0f ? scores : tanh(scores / broadcast(softcap)) * broadcast(softcap);
}

// Replaces `count` scores by e^(score - max).
INLINE void exponentiate(float* scores, int64_t count, float softcap, float* max_out, float* sum_out) {
  const int64_t padded = round_up(count, LANES);  // SPLIT is a multiple of LANES
  if (softcap != 0.0f) {
    for (int64_t i = 0; i < padded; i += LANES) store(scores + i, cap(load(scores + i), softcap));
  }
  for (int64_t i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  Vector most = broadcast(LOWEST);
  for (int64_t i = 0; i < padded; i += LANES) most = max(load(scores + i), most);
  *max_out = reduce_max(most);
  Vector sum = {};
  for (int64_t i = 0; i < padded; i += LANES) {
    const Vector e = exp(load(scores + i) - broadcast(*max_out));
    store(scores + i, e);
    sum += e;
  }
  *sum_out = reduce_add(sum);
}

// The rows of a split in a cache, in the order in which decode takes them: DECODE_KEYS slots for one head after the
// other, since the heads of a slot lie in one piece, and then the next slots.
template <class T>
struct Rows {
  const T* data;  // of the first head
  int64_t heads, head_stride, slot_stride;
  const int64_t* slots;
  int64_t count;

  // Finds row `head` of the slots from `begin` on, and of as many slots after them.
  __attribute__((always_inline)) void find(int64_t begin, int64_t head, const T** rows, const T** later) const {
    const int64_t n = min(DECODE_KEYS, count - begin);
    const T* here = data + head * head_stride;
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = here + slots[begin + i] * slot_stride;
      later[i] = here + slots[min(begin + i + DECODE_KEYS, count - 1)] * slot_stride;
    }
  }
};

// Whether rows of d elements are used where they lie. Others are copied as floats first.
template <class T>
INLINE bool in_place(int64_t d) {
  return !is_same<T, float16> && d % PANEL == 0;
}

// Calls f(first slot, head, slots, rows, later rows) for all rows.
template <class T, class F>
INLINE void for_all(const Rows<T>& all, int64_t d, int64_t d_padded, float* tile, const F& f) {
  const T *rows[DECODE_KEYS], *later[DECODE_KEYS];
  const float* copies[DECODE_KEYS];
  for (int64_t i = 0; i < DECODE_KEYS; ++i) copies[i] = tile + i * d_padded;
  for (int64_t begin = 0; begin < all.count; begin += DECODE_KEYS) {
    const int64_t n = min(DECODE_KEYS, all.count - begin);
    for (int64_t head = 0; head < all.heads; ++head) {
      all.find(begin, head, rows, later);
      if constexpr (!is_same<T, float16>) {
        if (in_place<T>(d)) {
          f(begin, head, n, rows, later);
          continue;
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        prefetch(later[i], 0, d);
        read_row(rows[i], d, tile + i * d_padded);
      }
      f(begin, head, n, copies, copies);
    }
  }
}

// Puts elements that load_pair brought in order.
void restore_order(float* row, int64_t d) {
  for (int64_t at = 0; at < d; at += PANEL) {
    float even_odd[PANEL];
    memcpy(even_odd, row + at, sizeof(even_odd));
    for (int64_t i = 0; i < PANEL; ++i) row[at + i] = even_odd[place(i)];
  }
}

template <class T>
void decode(const Attention& c, const Decode& a) {
  const int64_t rows = a.heads * c.group, first_row = a.first_head * c.group;
  const int64_t dk = round_up(c.dk, PANEL), dv = round_up(c.dv, PANEL);
  const bool pairs = is_same<T, bfloat16>;
  for (int64_t row = 0; row < rows; ++row) {
    float* q = a.q + row * c.dk_padded;
    if (pairs && in_place<T>(c.dk)) {
      read_query_pairs(c, a.token, first_row + row, q);
    } else {
      read_query(c, a.token, first_row + row, q, 1);
      for (int64_t i = c.dk; i < dk; ++i) q[i] = 0;
    }
  }
  const T* k = static_cast<const T*>(c.k) + a.first_head * c.dk;
  const Rows<T> keys{k, a.heads, c.dk, c.heads * c.dk, a.slots, a.count};
  for_all(keys, c.dk, c.dk_padded, a.tile,
          [&](int64_t begin, int64_t head, int64_t n, const auto* const* rows, const auto* const* later) {
            score(a.q + head * c.group * c.dk_padded, c.dk_padded, rows, later, n, dk, c.group,
                  a.scores + head * c.group * SPLIT + begin);
          });
  for (int64_t row = 0; row < rows; ++row) {
    exponentiate(a.scores + row * SPLIT, a.count, c.softcap, a.max + row, a.sum + row);
  }
  memset(a.out, 0, sizeof(float) * rows * c.dv_padded);
  const T* v = static_cast<const T*>(c.v) + a.first_head * c.dv;
  const Rows<T> values{v, a.heads, c.dv, c.heads * c.dv, a.slots, a.count};
  for_all(values, c.dv, c.dv_padded, a.tile,
          [&](int64_t begin, int64_t head, int64_t n, const auto* const* rows, const auto* const* later) {
            add_values(a.scores + head * c.group * SPLIT + begin, rows, later, n, dv, c.group,
                       a.out + head * c.group * c.dv_padded, c.dv_padded);
          });
  if (pairs && in_place<T>(c.dv)) {
    for (int64_t row = 0; row < rows; ++row) restore_order(a.out + row * c.dv_padded, c.dv);
  }
}

// sums[r][n] = sum over i of a(r, i) * b[i][n] for ROWS rows and one panel of columns. A is [rows, depth] with
// `a_stride` between rows, or with TRANSPOSED [depth, rows].
template <int ROWS, bool TRANSPOSED>
INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth, Vector (&sums)[ROWS][2]) {
  for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = Vector{};
  for (int64_t i = 0; i < depth; ++i, b += PANEL) {
    const Vector left = load(b), right = load(b + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vector x = broadcast(TRANSPOSED ? a[i * a_stride + r] : a[r * a_stride + i]);
      sums[r][0] = fma(x, left, sums[r][0]);
      sums[r][1] = fma(x, right, sums[r][1]);
    }
  }
}

// Calls f.run<n>(row) for runs of n rows, n known to the compiler.
template <int ROWS, class F>
INLINE void for_rows(int64_t begin, int64_t end, const F& f) {
  for (; begin + ROWS <= end; begin += ROWS) f.template run<ROWS>(begin);
  if constexpr (ROWS > 1) {
    if (begin < end) for_rows<ROWS / 2>(begin, end, f);
  }
}

// A panel of scores: keys on the left, query rows (in lanes) on the right.
struct Scores {
  const float *k_tile, *q;
  int64_t dk, dk_padded, rows;
  float* scores;

  template <int KEYS>
  __attribute__((always_inline)) void run(int64_t key) const {
    Vector sums[KEYS][2];
    multiply<KEYS, false>(k_tile + key * dk_padded, dk_padded, q, dk, sums);
    for (int i = 0; i < KEYS; ++i) {
      store(scores + (key + i) * rows, sums[i][0]);
      store(scores + (key + i) * rows + LANES, sums[i][1]);
    }
  }
};

// A panel of the output: query rows on the left, columns of V on the right. out = out * rescale + scores^T V.
struct Values {
  const float *scores, *v_tile, *rescale;
  int64_t rows, keys, out_stride;
  float* out;

  template <int ROWS>
  __attribute__((always_inline)) void run(int64_t row) const {
    Vector sums[ROWS][2];
    multiply<ROWS, true>(scores + row, rows, v_tile, keys, sums);
    for (int r = 0; r < ROWS; ++r) {
      float* to = out + (row + r) * out_stride;
      const Vector factor = broadcast(rescale[row + r]);
      store(to, fma(load(to), factor, sums[r][0]));
      store(to + LANES, fma(load(to + LANES), factor, sums[r][1]));
    }
  }
};

// Online softmax of one vector of query rows over the keys begin to end - 1 of a tile: scores become e^(score - max).
struct Softmax {
  float* scores;
  int64_t rows, begin, end;
  float softcap;
  bool masked;
  Ints newest, oldest;  // key of the tile that each row may see at most and at least

  __attribute__((always_inline)) void run(float* max_io, float* sum_io, float* rescale) const {
    const Vector before = load(max_io);
    Vector most = before;
    for (int64_t key = begin; key < end; ++key) {
      float* at = scores + key * rows;
      Vector s = load(at);
      if (softcap != 0.0f) s = cap(s, softcap);
      if (masked) {
        const Ints index = broadcast(static_cast<int32_t>(key));
        s = (index <= newest) & (index >= oldest) ? s : broadcast(-__builtin_inff());
      }
      if (softcap != 0.0f || masked) store(at, s);
      most = max(s, most);
    }
    Vector sum = {};
    for (int64_t key = begin; key < end; ++key) {
      float* at = scores + key * rows;
      const Vector e = exp(load(at) - most);
      store(at, e);
      sum += e;
    }
    const Vector factor = exp(before - most);
    store(rescale, factor);
    store(sum_io, fma(load(sum_io), factor, sum));
    store(max_io, most);
  }
};

// Copies rows of V to panels of floats: [d / PANEL, KEY_TILE, PANEL], columns from d on zero.
template <class T>
INLINE void read_panels(
    const T* v, int64_t stride, const int64_t* slots, int64_t begin, int64_t end, int64_t d, float* tile) {
  for (int64_t key = begin; key < end; ++key) {
    const T* row = v + *slots++ * stride;
    float* to = tile + key * PANEL;
    for (int64_t at = 0; at < d; at += PANEL, to += KEY_TILE * PANEL) {
      for (int64_t half = 0; half < PANEL; half += LANES) {
        const int64_t left = d - at - half;
        const Vector x = left >= LANES ? load(row + at + half) : left > 0 ? load_first(row + at + half, left) : Vector{};
        store(to + half, x);
      }
    }
  }
}

// The keys begin to end - 1 of the tile at position `base`, which k_tile and v_tile hold.
void attend_tile(const Attention& c, const Prefill& a, int64_t base, int64_t begin, int64_t end) {
  const int64_t rows = a.queries * c.group, padded_rows = round_up(rows, ROW_PADDING);
  const int64_t columns = round_up(c.dv, ROW_PADDING), last = a.first_query + a.queries - 1;
  for (int64_t at = 0; at < rows; at += PANEL) {
    for_rows<TILE_ROWS>(begin, end, Scores{a.k_tile, a.q + at * c.dk, c.dk, c.dk_padded, padded_rows, a.scores + at});
  }
  // Either every row sees every key, or the rows' own limits decide.
  const bool masked = base + end - 1 > a.first_query || (c.window && base + begin <= last - c.window);
  for (int64_t at = 0; at < rows; at += LANES) {
    Softmax softmax{a.scores + at, padded_rows, begin, end, c.softcap, masked, {}, {}};
    for (int lane = 0; masked && lane < LANES; ++lane) {
      const int64_t position = a.first_query + min(at + lane, rows - 1) / c.group - base;
      softmax.newest[lane] = static_cast<int32_t>(position);
      softmax.oldest[lane] = static_cast<int32_t>(c.window ? max(position - c.window + 1, 0) : 0);
    }
    softmax.run(a.max + at, a.sum + at, a.rescale + at);
  }
  for (int64_t at = 0; at < c.dv; at += PANEL) {
    const float* panel = a.v_tile + at * KEY_TILE + begin * PANEL;
    for_rows<TILE_ROWS>(0, rows, Values{a.scores + begin * padded_rows, panel, a.rescale, padded_rows, end - begin,
                                        columns, a.out + at});
  }
}

template <class T>
void prefill(const Attention& c, const Prefill& a) {
  const int64_t rows = a.queries * c.group, padded_rows = round_up(rows, ROW_PADDING);
  const int64_t first = c.window ? max(0, a.first_query - c.window + 1) : 0, last = a.first_query + a.queries - 1;
  // Q goes into panels [rows / PANEL, dk, PANEL], padding rows zero.
  memset(a.q, 0, sizeof(float) * c.dk * padded_rows);
  for (int64_t row = 0; row < rows; ++row) {
    float* column = a.q + row / PANEL * PANEL * c.dk + row % PANEL;
    read_query(c, a.token + row / c.group, a.head * c.group + row % c.group, column, PANEL);
  }
  memset(a.out, 0, sizeof(float) * padded_rows * round_up(c.dv, ROW_PADDING));
  memset(a.sum, 0, sizeof(float) * padded_rows);
  for (int64_t row = 0; row < padded_rows; ++row) a.max[row] = LOWEST;

  for (int64_t base = first / KEY_TILE * KEY_TILE; base <= last; base += KEY_TILE) {
    const int64_t begin = max(first - base, 0), end = min(last + 1 - base, KEY_TILE);
    int64_t slots[KEY_TILE];
    if (a.wide_table) {
      read_slots(static_cast<const int64_t*>(a.block_table), a.block_table_stride, a.block_size, base + begin,
                 base + end, slots);
    } else {
      read_slots(static_cast<const int32_t*>(a.block_table), a.block_table_stride, a.block_size, base + begin,
                 base + end, slots);
    }
    const T* k = static_cast<const T*>(c.k) + a.head * c.dk;
    const T* v = static_cast<const T*>(c.v) + a.head * c.dv;
    for (int64_t key = begin; key < end; ++key) {
      read_row(k + slots[key - begin] * c.heads * c.dk, c.dk, a.k_tile + key * c.dk_padded);
    }
    read_panels(v, c.heads * c.dv, slots, begin, end, c.dv, a.v_tile);
    attend_tile(c, a, base, begin, end);
  }
}

template <class T>
INLINE void combine_as(
    const float* parts, int64_t stride, const float* weights, int64_t n, int64_t d, T* out) {
  for (int64_t at = 0; at < d; at += LANES) {
    Vector sum = {};
    for (int64_t i = 0; i < n; ++i) sum = fma(broadcast(weights[i]), load(parts + i * stride + at), sum);
    if (d - at >= LANES) {
      store(out + at, sum);
    } else {
      store_first(out + at, sum, d - at);
    }
  }
}

void combine(
    const float* parts, int64_t stride, const float* weights, int64_t n, int64_t d, void* out, Element element) {
  if (element == FLOAT32) combine_as(parts, stride, weights, n, d, static_cast<float*>(out));
  if (element == BFLOAT16) combine_as(parts, stride, weights, n, d, static_cast<bfloat16*>(out));
  if (element == FLOAT16) combine_as(parts, stride, weights, n, d, static_cast<float16*>(out));
}

}  // namespace

extern const AttentionKernels attention_kernels = {
    {decode<float>, decode<bfloat16>, decode<float16>},
    {prefill<float>, prefill<bfloat16>, prefill<float16>},
    combine,
};

}  // namespace pagegraph::PAGEGRAPH_ISA
