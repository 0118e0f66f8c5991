// What paged_attention needs per instruction set: a split of a decode query, a tile of prefill queries, and the rows of
// the output from them. No function here allocates, starts threads or throws.
//
// Legend: Hk kv heads, G query heads per kv head, Dk and Dv head dims. A slot is block * block_size + offset; the
// row of (slot, kv head) begins slot * Hk + head rows into a cache.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

// Rows of scratch are padded to two of the widest vectors.
constexpr int64_t PADDING = 32;
// Keys of one decode split. Splits begin at multiples of it, so that a row's result does not depend on its neighbours.
constexpr int64_t SPLIT = 256;
// Keys that decode reads for all heads before it goes on: few enough that their rows, whose distance is often a power of
// two, stay together in the first cache.
constexpr int64_t DECODE_KEYS = 8;
// Keys that a prefill tile takes at a time, from multiples of it on, for the same reason.
constexpr int64_t KEY_TILE = 64;
// Prefill pads query rows (query, head of the group) and columns of V to two vectors of any width.
constexpr int64_t ROW_PADDING = 32;
// Enough rows that converting a tile of K and V is cheap beside the products with it.
constexpr int64_t QUERY_ROWS = 96;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What is the same for all rows of a call.
struct Attention {
  const void* q;               // [tokens, Hk * G, Dk]
  int64_t token_stride, head_stride, dim_stride;  // of q, in elements
  Element q_element;
  const void *k, *v;           // [slots, Hk, Dk] and [slots, Hk, Dv]
  int64_t heads, group, dk, dv;  // Hk, G, Dk, Dv
  int64_t dk_padded, dv_padded;  // to multiples of PADDING
  int64_t window;              // 0: all
  float scale, softcap;        // softcap 0: none
};

// The query of one token for `heads` kv heads from `first_head` on, over `count` keys, at most SPLIT.
struct Decode {
  int64_t token, first_head, heads;
  const int64_t* slots;        // [count]
  int64_t count;
  float *q, *scores;           // [heads * G, dk_padded] and [heads * G, SPLIT] scratch
  float* tile;                 // [DECODE_KEYS, the larger of dk_padded and dv_padded] scratch
  float *out, *max, *sum;      // [heads * G, dv_padded] sum of e^(score - max) V; [heads * G] of scores and e^(...)
};

// Queries of one sequence for one kv head: tokens from `token` on, at positions from `first_query` on.
// Row r is query r / G, head r % G. ROWS = round_up(queries * G, ROW_PADDING), COLUMNS = round_up(Dv, ROW_PADDING).
struct Prefill {
  int64_t token, first_query, queries, head;
  const void* block_table;     // the sequence's row, int32 or int64
  int64_t block_table_stride, block_size;
  bool wide_table;             // int64
  float *q, *k_tile, *v_tile;  // [Dk, ROWS], [KEY_TILE, dk_padded] and [KEY_TILE, COLUMNS] scratch
  float *scores, *rescale;     // [KEY_TILE, ROWS] and [ROWS] scratch
  float *out, *max, *sum;      // [ROWS, COLUMNS], [ROWS], [ROWS], as for Decode
};

struct AttentionKernels {
  void (*decode[3])(const Attention&, const Decode&);    // by the caches' Element
  void (*prefill[3])(const Attention&, const Prefill&);  // by the caches' Element
  // out[i] = sum over n of weights[n] * parts[n * stride + i], i < d, rounded to `element`.
  void (*combine)(const float* parts, int64_t stride, const float* weights, int64_t n, int64_t d, void* out, Element);
};

PAGEGRAPH_DECLARE(AttentionKernels, attention_kernels)

// The slots of positions begin to end - 1 by a row of a block table.
template <class Id>
static inline void read_slots(
    const Id* blocks, int64_t stride, int64_t block_size, int64_t begin, int64_t end, int64_t* slots) {
  int64_t column = begin / block_size, offset = begin % block_size;
  for (int64_t position = begin; position < end; ++column, offset = 0) {
    const int64_t first = static_cast<int64_t>(blocks[column * stride]) * block_size;
    for (; offset < block_size && position < end; ++offset, ++position) *slots++ = first + offset;
  }
}

}  // namespace pagegraph
