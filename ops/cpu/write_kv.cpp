#include <vector>

#include "tensors.h"
#include "write_kv_kernels.h"

namespace pagegraph {
namespace {

constexpr int64_t BYTES_PER_THREAD = 1 << 17;  // below, waking a thread costs more than it saves

// Copies source [T, Hk, D], any strides, to the rows of cache [N, block_size, Hk, D] that `slots` names.
void write(const Tensor& source, const Tensor& cache, const std::vector<int64_t>& slots) {
  const int64_t tokens = slots.size(), heads = cache.size(2), d = cache.size(3);
  const Element from = element_of(source, "k and v"), to = element_of(cache, "the caches");
  static const WriteKernels* const kernels[] = PAGEGRAPH_TABLE(write_kernels);
  const auto copy_row = kernels[isa()]->copy_row[from][to];
  const char* x = static_cast<const char*>(source.const_data_ptr());
  char* y = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t token_stride = source.stride(0), head_stride = source.stride(1), stride = source.stride(2);
  const bool joined = stride == 1 && head_stride == d;  // all heads are one row
  const int64_t rows = joined ? 1 : heads, row = joined ? heads * d : d;
  const int64_t grain = BYTES_PER_THREAD / (heads * d * element_size(to) + 1) + 1;
  torch::stable::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < rows; ++head) {
        copy_row(x + (token * token_stride + head * head_stride) * element_size(from), stride,
                 y + (slots[token] * heads + head) * d * element_size(to), row);
      }
    }
  });
}

void write_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slot_mapping) {
  const int64_t tokens = slot_mapping.size(0), end = k_cache.size(0) * k_cache.size(1);
  check_cache_write(k, k_cache, tokens);
  check_cache_write(v, v_cache, tokens);
  STD_TORCH_CHECK(v_cache.size(0) * v_cache.size(1) == end, "k_cache and v_cache must have as many slots");
  const Integers mapping(slot_mapping, "slot_mapping");
  std::vector<int64_t> slots(tokens);
  for (int64_t token = 0; token < tokens; ++token) {
    slots[token] = mapping[token];
    STD_TORCH_CHECK(slots[token] >= 0 && slots[token] < end, "slot ", slots[token], " of token ", token,
                    " is out of range: the caches have ", end, " slots");
  }
  write(k, k_cache, slots);
  write(v, v_cache, slots);
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("write_kv.cpu", TORCH_BOX(&pagegraph::write_kv));
}
