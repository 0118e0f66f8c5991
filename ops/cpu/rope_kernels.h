// What rope_write_kv needs per instruction set, besides the rows of write_kv.
#pragma once

#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

struct RopeKernels {
  // With i < half: to[i] = x[i] cos[i] - x[half + i] sin[i], and to[half + i] = x[half + i] cos[half + i] +
  // x[i] sin[half + i], rounded to the target's type. Elements of x are `stride` apart. [x's Element][target's Element].
  void (*rotate[3][3])(const void* x, int64_t stride, const float* cos, const float* sin, int64_t half, void* to);
};

PAGEGRAPH_DECLARE(RopeKernels, rope_kernels)

}  // namespace pagegraph
