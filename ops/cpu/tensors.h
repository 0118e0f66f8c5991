// What ops read from tensors of torch's stable ABI. Included only by the files that are compiled once, as one.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "element.h"

namespace pagegraph {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Element element_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return FLOAT32;
    case ScalarType::BFloat16:
      return BFLOAT16;
    case ScalarType::Half:
      return FLOAT16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

inline int64_t element_size(Element element) { return element == FLOAT32 ? 4 : 2; }

// A tensor [n] of int32 or int64, any stride.
class Integers {
 public:
  Integers(const Tensor& tensor, const char* name)
      : data_(tensor.const_data_ptr()), stride_(tensor.stride(0)), wide_(is_wide(tensor, name)) {}

  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i * stride_] : static_cast<const int32_t*>(data_)[i * stride_];
  }

  static bool is_wide(const Tensor& tensor, const char* name) {
    const ScalarType type = tensor.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name, " must be int32 or int64");
    return type == ScalarType::Long;
  }

 private:
  const void* data_;
  int64_t stride_;
  bool wide_;
};

// The rows of a tensor [..., D] with any strides. Must not outlive the tensor.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : sizes_(tensor.sizes()), strides_(tensor.strides()) {}

  // Where row i begins, in elements, counted in the order of a contiguous tensor.
  int64_t operator[](int64_t i) const {
    int64_t offset = 0;
    int64_t dim = static_cast<int64_t>(sizes_.size()) - 2;
    for (; dim > 0; --dim) {
      offset += i % sizes_[dim] * strides_[dim];
      i /= sizes_[dim];
    }
    return dim < 0 ? 0 : offset + i * strides_[0];
  }

 private:
  torch::headeronly::IntHeaderOnlyArrayRef sizes_, strides_;
};

// The tensor, or a contiguous copy if the elements of its last dimension are not adjacent.
inline Tensor with_adjacent_columns(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : torch::stable::contiguous(tensor);
}

// A contiguous tensor of x's dtype. Through the C interface: the dispatcher would take as long as a small call.
inline Tensor make_output(const Tensor& x, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim] ? sizes[dim] : 1) strides[dim] = stride;
  int32_t dtype = 0;
  AtenTensorHandle out = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

// Checks k or v, [T, Hk, D] with T = tokens, and the cache [N, block_size, Hk, D] that it is to be written to.
inline void check_cache_write(const Tensor& source, const Tensor& cache, int64_t tokens) {
  STD_TORCH_CHECK(source.dim() == 3 && cache.dim() == 4, "k and v must be [T, Hk, D], the caches [N, bs, Hk, D]");
  STD_TORCH_CHECK(source.size(0) == tokens, "k and v must have as many tokens as slot_mapping has slots");
  STD_TORCH_CHECK(source.size(1) == cache.size(2) && source.size(2) == cache.size(3),
                  "k and v must have the heads and head dims of the caches");
  STD_TORCH_CHECK(cache.is_contiguous(), "the caches must be contiguous");
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// Memory that a thread keeps between calls, since fresh pages would cost more than what is computed in them.
class Scratch {
 public:
  // Returns `n` floats, aligned to cache lines, with any content; what was returned before is gone.
  float* floats(int64_t n) {
    if (n > size_) {
      data_.reset();
      data_.reset(static_cast<float*>(std::aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64)));
      if (!data_) throw std::bad_alloc();
      size_ = n;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

}  // namespace pagegraph
