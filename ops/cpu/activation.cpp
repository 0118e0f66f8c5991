// silu_and_mul and gelu_and_mul: checks, and rows dealt out to threads.
#include "activation_kernels.h"
#include "tensors.h"

namespace pagegraph {
namespace {

constexpr int64_t ACTIVATIONS_PER_THREAD = 1 << 14;  // of the output; below, waking a thread costs more than it saves

using Kernel = void (*)(const void* gate, const void* up, int64_t n, void* to);

const ActivationKernels& activation_table() {
  static const ActivationKernels* const table[] = PAGEGRAPH_TABLE(activation_kernels);
  return *table[isa()];
}

Tensor run(const Tensor& gate_up, const Kernel (&by_element)[3]) {
  STD_TORCH_CHECK(gate_up.dim() >= 1 && gate_up.size(-1) % 2 == 0, "gate_up must be [..., 2 N]");
  const Element element = element_of(gate_up, "gate_up");
  const Kernel apply_and_mul = by_element[element];
  std::vector<int64_t> sizes = sizes_of(gate_up);
  const int64_t n = sizes.back() /= 2, size = element_size(element);
  Tensor out = make_output(gate_up, sizes);
  if (out.numel() == 0) return out;
  const Tensor source = with_adjacent_columns(gate_up);
  const Rows rows(source);
  const char* data = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, out.numel() / n, ACTIVATIONS_PER_THREAD / n + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const char* gate = data + rows[row] * size;
      apply_and_mul(gate, gate + n * size, n, to + row * n * size);
    }
  });
  return out;
}

Tensor silu_and_mul(const Tensor& gate_up) { return run(gate_up, activation_table().silu_and_mul); }

Tensor gelu_and_mul(const Tensor& gate_up, bool tanh) {
  return run(gate_up, tanh ? activation_table().gelu_tanh_and_mul : activation_table().gelu_and_mul);
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("silu_and_mul.cpu", TORCH_BOX(&pagegraph::silu_and_mul));
  library.impl("gelu_and_mul.cpu", TORCH_BOX(&pagegraph::gelu_and_mul));
}
