// What silu_and_mul and gelu_and_mul need per instruction set.
#pragma once

#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

// to[i] = activation(gate[i]) * up[i] for i < n, rounded to their type. [Element].
struct ActivationKernels {
  void (*silu_and_mul[3])(const void* gate, const void* up, int64_t n, void* to);
  void (*gelu_and_mul[3])(const void* gate, const void* up, int64_t n, void* to);
  void (*gelu_tanh_and_mul[3])(const void* gate, const void* up, int64_t n, void* to);
};

PAGEGRAPH_DECLARE(ActivationKernels, activation_kernels)

}  // namespace pagegraph
