// What ops read from tensors of torch's stable ABI. Included only by files that are compiled once.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>

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
