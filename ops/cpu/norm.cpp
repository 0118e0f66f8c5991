// rms_norm and add_rms_norm: checks, and rows dealt out to threads.
#include <tuple>

#include "norm_kernels.h"
#include "tensors.h"

namespace pagegraph {
namespace {

constexpr int64_t NORMED_PER_THREAD = 1 << 15;  // below, waking a thread costs more than it saves

const NormKernels& norm_table() {
  static const NormKernels* const table[] = PAGEGRAPH_TABLE(norm_kernels);
  return *table[isa()];
}

// Calls f(row) for all rows of `n` elements.
template <class F>
void for_rows(int64_t elements, int64_t n, const F& f) {
  torch::stable::parallel_for(0, elements / n, NORMED_PER_THREAD / n + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

void check(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0),
                  "the norm takes x [..., D] and a weight [D]");
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  check(x, weight);
  const Element from = element_of(x, "x");
  const auto norm = norm_table().rms_norm[from][element_of(weight, "weight")];
  Tensor out = make_output(x, sizes_of(x));
  if (out.numel() == 0) return out;
  const Tensor source = with_adjacent_columns(x), factors = with_adjacent_columns(weight);
  const Rows rows(source);
  const int64_t n = weight.size(0), size = element_size(from);
  const char* data = static_cast<const char*>(source.const_data_ptr());
  const void* w = factors.const_data_ptr();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_rows(out.numel(), n,
           [&](int64_t row) { norm(data + rows[row] * size, w, n, eps, offset, to + row * n * size); });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double offset) {
  check(x, weight);
  const std::vector<int64_t> sizes = sizes_of(x);
  STD_TORCH_CHECK(sizes == sizes_of(residual), "x and residual must be of one shape");
  const Element from = element_of(x, "x"), other = element_of(residual, "residual");
  const auto add = norm_table().add[from][other];
  const auto norm = norm_table().rms_norm[from][element_of(weight, "weight")];
  Tensor normed = make_output(x, sizes), sum = make_output(x, sizes);
  if (sum.numel() == 0) return {normed, sum};
  const Tensor left = with_adjacent_columns(x), right = with_adjacent_columns(residual);
  const Tensor factors = with_adjacent_columns(weight);
  const Rows left_rows(left), right_rows(right);
  const int64_t n = weight.size(0), size = element_size(from), other_size = element_size(other);
  const char* a = static_cast<const char*>(left.const_data_ptr());
  const char* b = static_cast<const char*>(right.const_data_ptr());
  const void* w = factors.const_data_ptr();
  char* sums = static_cast<char*>(sum.mutable_data_ptr());
  char* to = static_cast<char*>(normed.mutable_data_ptr());
  for_rows(sum.numel(), n, [&](int64_t row) {
    const int64_t at = row * n * size;
    add(a + left_rows[row] * size, b + right_rows[row] * other_size, n, sums + at);
    norm(sums + at, w, n, eps, offset, to + at);
  });
  return {normed, sum};
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("rms_norm.cpu", TORCH_BOX(&pagegraph::rms_norm));
  library.impl("add_rms_norm.cpu", TORCH_BOX(&pagegraph::add_rms_norm));
}
