// rope_write_kv: checks, and tokens dealt out to threads.
#include "rope_kernels.h"
#include "tensors.h"
#include "write_kv_kernels.h"

namespace pagegraph {
namespace {

constexpr int64_t ROTATED_PER_THREAD = 1 << 15;  // below, waking a thread costs more than it saves

// Rows of a tensor [T, H, D] with any strides, or of one [T, R], which has one head.
struct Source {
  const char* data;
  Element element;
  int64_t token_stride, head_stride, stride;

  Source(const Tensor& x, const char* name)
      : data(static_cast<const char*>(x.const_data_ptr())),
        element(element_of(x, name)),
        token_stride(x.stride(0)),
        head_stride(x.dim() == 3 ? x.stride(1) : 0),
        stride(x.stride(-1)) {}

  const char* row(int64_t token, int64_t head) const {
    return data + (token * token_stride + head * head_stride) * element_size(element);
  }
};

// Rows of a contiguous tensor [..., H, D].
struct Target {
  char* data;
  Element element;
  int64_t heads, d;

  Target(const Tensor& y, const char* name)
      : data(static_cast<char*>(y.mutable_data_ptr())),
        element(element_of(y, name)),
        heads(y.size(-2)),
        d(y.size(-1)) {}

  char* row(int64_t i, int64_t head) const { return data + (i * heads + head) * d * element_size(element); }
};

const RopeKernels& rope() {
  static const RopeKernels* const table[] = PAGEGRAPH_TABLE(rope_kernels);
  return *table[isa()];
}

const WriteKernels& writes() {
  static const WriteKernels* const table[] = PAGEGRAPH_TABLE(write_kernels);
  return *table[isa()];
}

// Heads of one token to row `to` of the target, their first r dimensions rotated.
void rotate(const Source& x, int64_t token, const float* cos, const float* sin, int64_t r, const Target& y,
            int64_t to) {
  const auto rotate_row = rope().rotate[x.element][y.element];
  const auto copy_row = writes().copy_row[x.element][y.element];
  for (int64_t head = 0; head < y.heads; ++head) {
    const char* from = x.row(token, head);
    char* out = y.row(to, head);
    rotate_row(from, x.stride, cos, sin, r / 2, out);
    if (r == y.d) continue;
    copy_row(from + r * x.stride * element_size(x.element), x.stride, out + r * element_size(y.element), y.d - r);
  }
}

void copy(const Source& x, int64_t token, const Target& y, int64_t to) {
  const auto copy_row = writes().copy_row[x.element][y.element];
  for (int64_t head = 0; head < y.heads; ++head) copy_row(x.row(token, head), x.stride, y.row(to, head), y.d);
}

Tensor rope_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                     const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping) {
  const int64_t tokens = slot_mapping.size(0);
  check_cache_write(k, k_cache, tokens);
  check_cache_write(v, v_cache, tokens);
  const int64_t slots = k_cache.size(0) * k_cache.size(1), d = k.size(2);
  STD_TORCH_CHECK(v_cache.size(0) * v_cache.size(1) == slots, "k_cache and v_cache must have as many slots");
  STD_TORCH_CHECK(q.dim() == 3 && q.size(0) == tokens && q.size(2) == d,
                  "q must have as many tokens as slot_mapping has slots, and k's head dim");
  const int64_t r = cos.size(-1);
  STD_TORCH_CHECK(cos.dim() == 2 && cos.size(0) == tokens && sizes_of(sin) == sizes_of(cos),
                  "cos and sin must be [T, R]");
  STD_TORCH_CHECK(r % 2 == 0 && r <= d, "cos and sin have ", r, " columns, which must be even and at most ", d);
  const Integers mapping(slot_mapping, "slot_mapping");
  for (int64_t token = 0; token < tokens; ++token) {
    STD_TORCH_CHECK(mapping[token] >= 0 && mapping[token] < slots, "slot ", mapping[token], " of token ", token,
                    " is out of range: the caches have ", slots, " slots");
  }
  const Source queries(q, "q"), keys(k, "k"), values(v, "v"), cosines(cos, "cos"), sines(sin, "sin");
  const Target key_cache(k_cache, "k_cache"), value_cache(v_cache, "v_cache");
  Tensor out = make_output(q, sizes_of(q));
  const Target rotated(out, "q");
  const int64_t elements = (q.size(1) + k.size(1)) * d + v.size(1) * v.size(2);  // of a token
  torch::stable::parallel_for(0, tokens, ROTATED_PER_THREAD / (elements + 1) + 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    float* token_cos = scratch.floats(2 * r);
    float* token_sin = token_cos + r;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = mapping[token];
      writes().copy_row[cosines.element][FLOAT32](cosines.row(token, 0), cosines.stride, token_cos, r);
      writes().copy_row[sines.element][FLOAT32](sines.row(token, 0), sines.stride, token_sin, r);
      rotate(queries, token, token_cos, token_sin, r, rotated, token);
      rotate(keys, token, token_cos, token_sin, r, key_cache, slot);
      copy(values, token, value_cache, slot);
    }
  });
  return out;
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("rope_write_kv.cpu", TORCH_BOX(&pagegraph::rope_write_kv));
}
