// paged_attention: checks, and the schedule of kernels over threads.
//
// A sequence with one query is decoded: its context is cut into splits, and (split, kv head) are dealt out to threads in
// equal shares of keys, in the order in which they lie in memory. One with more queries is prefilled: (kv head, tile of
// queries) are dealt out in equal shares of products. Both happen in one parallel region, and a second one adds up the
// splits. Neither the cuts nor the order of additions depend on the batch or on the number of threads, so a row's
// result does not either.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_kernels.h"
#include "tensors.h"

namespace pagegraph {
namespace {

constexpr int64_t ATTENTION_PER_THREAD = 1 << 18;  // multiply-adds; below, waking a thread costs more than it saves

// The queries of a sequence, and the first key that they see.
struct Row {
  int64_t row, token, queries, length, first_key;
};

// Pieces of work, `start` is the work before them: keys of a decoded row for all kv heads, and queries of a prefilled
// row for one.
struct Split {
  const Row* row;
  int64_t begin, end, start;
};
struct Tile {
  const Row* row;
  int64_t head, first, queries, start, work;
};

struct Table {
  const void* data;
  int64_t row_stride, stride, block_size;
  bool wide;  // int64

  const void* row(int64_t i) const { return static_cast<const char*>(data) + i * row_stride * (wide ? 8 : 4); }

  int64_t block(int64_t i, int64_t column) const {
    const int64_t at = column * stride;
    return wide ? static_cast<const int64_t*>(row(i))[at] : static_cast<const int32_t*>(row(i))[at];
  }

  void slots(int64_t i, int64_t begin, int64_t end, int64_t* out) const {
    if (wide) {
      read_slots(static_cast<const int64_t*>(row(i)), stride, block_size, begin, end, out);
    } else {
      read_slots(static_cast<const int32_t*>(row(i)), stride, block_size, begin, end, out);
    }
  }
};

struct Work {
  std::vector<Split> splits;
  std::vector<Tile> tiles;
  std::vector<int64_t> first_split;           // of each row, and the end
  int64_t decode_total = 0, prefill_total = 0;  // keys * kv heads, and keys * query rows
};

// What the kernels leave of every split: [splits, q heads, dv_padded], and [splits, q heads] twice.
struct Parts {
  float *out, *max, *sum;
};

struct Call {
  Attention attention;
  Table table;
  Element cache_element;
  const float* sinks;  // [q heads], or null
  int64_t sinks_stride;
  char* out;  // [T, q heads, dv] of q's element
  std::vector<Row> rows;
  Work work;
  Parts parts;

  int64_t q_heads() const { return attention.heads * attention.group; }
};

const AttentionKernels& attention_table() {
  static const AttentionKernels* const table[] = PAGEGRAPH_TABLE(attention_kernels);
  return *table[isa()];
}

// Everything that the batch says is checked before memory is read through it. Returns the number of tokens with a row.
int64_t read_rows(Call& call, int64_t tokens, const Tensor& block_table, const Tensor& seq_lens,
                  const Tensor& query_start_loc, int64_t num_blocks) {
  const int64_t batch = block_table.size(0), capacity = block_table.size(1) * call.table.block_size;
  STD_TORCH_CHECK(seq_lens.size(0) == batch && query_start_loc.size(0) == batch + 1,
                  "block_table, seq_lens and query_start_loc are not of one batch size");
  const Integers lengths(seq_lens, "seq_lens"), starts(query_start_loc, "query_start_loc");
  const bool decode = tokens == batch;
  int64_t token = 0;
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t queries = decode ? 1 : starts[row + 1] - starts[row], length = lengths[row];
    STD_TORCH_CHECK(queries >= 0 && token + queries <= tokens && (decode || starts[row] == token),
                    "query_start_loc must rise from 0 to at most T = ", tokens);
    if (!queries) continue;
    STD_TORCH_CHECK(length >= queries && length <= capacity, "row ", row, " has seq_len ", length, ", ", queries,
                    " queries and room for ", capacity, " tokens in its blocks");
    const int64_t window = call.attention.window;
    const int64_t first_key = window ? std::max<int64_t>(0, length - queries - window + 1) : 0;
    for (int64_t column = first_key / call.table.block_size; column * call.table.block_size < length; ++column) {
      const int64_t id = call.table.block(row, column);
      STD_TORCH_CHECK(id >= 0 && id < num_blocks, "row ", row, " has block ", id, ", but there are ", num_blocks);
    }
    call.rows.push_back({row, token, queries, length, first_key});
    token += queries;
  }
  return token;
}

void plan(Call& call) {
  const Attention& a = call.attention;
  Work& work = call.work;
  const int64_t tile_queries = std::max<int64_t>(1, QUERY_ROWS / a.group);
  for (const Row& row : call.rows) {
    work.first_split.push_back(work.splits.size());
    if (row.queries == 1) {
      for (int64_t begin = row.first_key, end; begin < row.length; begin = end) {
        end = std::min(row.length, (begin / SPLIT + 1) * SPLIT);
        work.splits.push_back({&row, begin, end, work.decode_total});
        work.decode_total += (end - begin) * a.heads;
      }
      continue;
    }
    for (int64_t head = 0; head < a.heads; ++head) {
      for (int64_t first = 0; first < row.queries; first += tile_queries) {
        const int64_t queries = std::min(tile_queries, row.queries - first);
        const int64_t end = row.length - row.queries + first + queries;  // of the keys that the tile sees
        const int64_t begin = a.window ? std::max<int64_t>(0, end - queries - a.window + 1) : 0;
        const int64_t products = (end - begin) * round_up(queries * a.group, ROW_PADDING);
        work.tiles.push_back({&row, head, first, queries, work.prefill_total, products});
        work.prefill_total += products;
      }
    }
  }
  work.first_split.push_back(work.splits.size());
}

// out = sum over n of e^(max[n] - most) * parts[n] / (sum over n of e^(max[n] - most) * sum[n] + e^(sink - most)), with
// `most` the largest exponent. Strides between the n parts: of the vectors, and of max and sum.
void finish(const Call& call, int64_t token, int64_t head, const Parts& parts, int64_t count, int64_t stride,
            int64_t scalar_stride) {
  thread_local std::vector<float> weights;
  const float sink = call.sinks ? call.sinks[head * call.sinks_stride] : -INFINITY;
  float most = sink;
  for (int64_t n = 0; n < count; ++n) most = std::max(most, parts.max[n * scalar_stride]);
  float denominator = std::exp(sink - most);
  weights.resize(count);
  for (int64_t n = 0; n < count; ++n) {
    weights[n] = std::exp(parts.max[n * scalar_stride] - most);
    denominator += weights[n] * parts.sum[n * scalar_stride];
  }
  for (float& weight : weights) weight /= denominator;
  const Attention& a = call.attention;
  char* out = call.out + (token * call.q_heads() + head) * a.dv * element_size(a.q_element);
  attention_table().combine(parts.out, stride, weights.data(), count, a.dv, out, a.q_element);
}

// The share `from` to `to` of the decode work. A (split, head) belongs to the share in which it begins.
void decode(const Call& call, int64_t from, int64_t to) {
  const Attention& a = call.attention;
  const std::vector<Split>& splits = call.work.splits;
  thread_local Scratch scratch;
  float* q = scratch.floats(call.q_heads() * (a.dk_padded + SPLIT) + DECODE_KEYS * std::max(a.dk_padded, a.dv_padded));
  float* scores = q + call.q_heads() * a.dk_padded;
  float* tile = scores + call.q_heads() * SPLIT;
  auto split = std::upper_bound(splits.begin(), splits.end(), from,
                                [](int64_t work, const Split& split) { return work < split.start; });
  for (split -= split != splits.begin(); split != splits.end() && split->start < to; ++split) {
    const int64_t count = split->end - split->begin;
    const auto head_at = [&](int64_t work) {
      return std::clamp<int64_t>((work - split->start + count - 1) / count, 0, a.heads);
    };
    const int64_t first = head_at(from), heads = head_at(to) - first;
    if (heads <= 0) continue;
    int64_t slots[SPLIT];
    call.table.slots(split->row->row, split->begin, split->end, slots);
    const int64_t part = (split - splits.begin()) * call.q_heads() + first * a.group;
    attention_table().decode[call.cache_element](
        a, {split->row->token, first, heads, slots, count, q, scores, tile, call.parts.out + part * a.dv_padded,
            call.parts.max + part, call.parts.sum + part});
  }
}

// The share `from` to `to` of the prefill work. A tile belongs to the share in which its middle lies.
void prefill(const Call& call, int64_t from, int64_t to) {
  const Attention& a = call.attention;
  const int64_t rows = round_up(std::max(QUERY_ROWS, a.group), ROW_PADDING), columns = round_up(a.dv, ROW_PADDING);
  thread_local Scratch scratch;
  float* q = scratch.floats(rows * (a.dk + KEY_TILE + columns + 3) + KEY_TILE * (a.dk_padded + columns));
  float* k_tile = q + rows * a.dk;
  float* v_tile = k_tile + KEY_TILE * a.dk_padded;
  float* scores = v_tile + KEY_TILE * columns;
  float* out = scores + KEY_TILE * rows;
  const Parts parts{out, out + rows * columns, out + rows * (columns + 1)};
  float* rescale = parts.sum + rows;
  for (const Tile& tile : call.work.tiles) {
    const int64_t middle = tile.start + tile.work / 2;
    if (middle < from || middle >= to) continue;
    const Row& row = *tile.row;
    const int64_t token = row.token + tile.first;
    attention_table().prefill[call.cache_element](
        a, {token, row.length - row.queries + tile.first, tile.queries, tile.head, call.table.row(row.row),
            call.table.stride, call.table.block_size, call.table.wide, q, k_tile, v_tile, scores, rescale, parts.out,
            parts.max, parts.sum});
    for (int64_t i = 0; i < tile.queries * a.group; ++i) {
      const Parts part{parts.out + i * columns, parts.max + i, parts.sum + i};
      finish(call, token + i / a.group, tile.head * a.group + i % a.group, part, 1, 0, 0);
    }
  }
}

void run(Call& call) {
  const Attention& a = call.attention;
  const Work& work = call.work;
  const int64_t products = (work.decode_total * a.group + work.prefill_total) * (a.dk + a.dv);
  const int64_t threads =
      std::min<int64_t>(torch::stable::get_num_threads(), products / ATTENTION_PER_THREAD + 1);
  const int64_t heads = work.splits.size() * call.q_heads();
  thread_local Scratch scratch;
  float* memory = scratch.floats(heads * (a.dv_padded + 2));
  call.parts = {memory, memory + heads * a.dv_padded, memory + heads * (a.dv_padded + 1)};
  // One index a thread: torch hands out ranges of equal length, and the shares are ours.
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      const auto share = [&](int64_t total, int64_t i) { return total * i / threads; };
      decode(call, share(work.decode_total, thread), share(work.decode_total, thread + 1));
      prefill(call, share(work.prefill_total, thread), share(work.prefill_total, thread + 1));
    }
  });
  if (work.splits.empty()) return;
  const int64_t row_heads = call.rows.size() * call.q_heads();
  torch::stable::parallel_for(0, row_heads, (row_heads + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / call.q_heads(), head = i % call.q_heads(), split = work.first_split[row];
      if (call.rows[row].queries != 1) continue;
      const int64_t at = split * call.q_heads() + head;
      const Parts parts{call.parts.out + at * a.dv_padded, call.parts.max + at, call.parts.sum + at};
      finish(call, call.rows[row].token, head, parts, work.first_split[row + 1] - split,
             call.q_heads() * a.dv_padded, call.q_heads());
    }
  });
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start_loc, double scale, int64_t window,
                       double softcap, std::optional<Tensor> sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && k_cache.dim() == 4 && v_cache.dim() == 4 && block_table.dim() == 2,
                  "paged_attention takes q [T, Hq, Dk], caches [N, bs, Hk, D] and a block_table [B, W]");
  const int64_t tokens = q.size(0), q_heads = q.size(1), dk = q.size(2);
  const int64_t blocks = k_cache.size(0), block_size = k_cache.size(1), heads = k_cache.size(2), dv = v_cache.size(3);
  STD_TORCH_CHECK(block_size > 0 && heads > 0, "the caches have empty blocks");
  STD_TORCH_CHECK(k_cache.size(3) == dk && q_heads % heads == 0, "q of ", q_heads, " heads of ", dk,
                  " does not fit a cache of ", heads, " heads of ", k_cache.size(3));
  STD_TORCH_CHECK(v_cache.size(0) == blocks && v_cache.size(1) == block_size && v_cache.size(2) == heads,
                  "k_cache and v_cache differ in more than the head dim");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "the caches must be contiguous");
  const Element element = element_of(k_cache, "k_cache");
  STD_TORCH_CHECK(element_of(v_cache, "v_cache") == element, "k_cache and v_cache must be of one dtype");
  STD_TORCH_CHECK(window >= 0, "window must be 0 (all) or more, not ", window);

  Tensor out = make_output(q, {tokens, q_heads, dv});
  Call call{};
  call.attention = {q.const_data_ptr(), q.stride(0), q.stride(1), q.stride(2), element_of(q, "q"),
                    k_cache.const_data_ptr(), v_cache.const_data_ptr(), heads, q_heads / heads, dk, dv,
                    round_up(dk, PADDING), round_up(dv, PADDING), window, static_cast<float>(scale),
                    static_cast<float>(softcap)};
  call.table = {block_table.const_data_ptr(), block_table.stride(0), block_table.stride(1), block_size,
                Integers::is_wide(block_table, "block_table")};
  call.cache_element = element;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  if (sinks) {
    if (sinks->scalar_type() != ScalarType::Float) sinks = torch::stable::to(*sinks, ScalarType::Float);
    STD_TORCH_CHECK(sinks->dim() == 1 && sinks->size(0) == q_heads, "sinks must be [", q_heads, "]");
    call.sinks = static_cast<const float*>(sinks->const_data_ptr());
    call.sinks_stride = sinks->stride(0);
  }
  const int64_t used = read_rows(call, tokens, block_table, seq_lens, query_start_loc, blocks);
  const int64_t token_bytes = q_heads * dv * element_size(call.attention.q_element);
  std::memset(call.out + used * token_bytes, 0, (tokens - used) * token_bytes);
  plan(call);
  run(call);
  return out;
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("paged_attention.cpu", TORCH_BOX(&pagegraph::paged_attention));
}
