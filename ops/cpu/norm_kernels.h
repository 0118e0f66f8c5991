// What rms_norm and add_rms_norm need per instruction set.
#pragma once

#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

// Rows of `n` adjacent elements.
struct NormKernels {
  // to[i] = x[i] + y[i], rounded to x's type. [x's Element][y's Element].
  void (*add[3][3])(const void* x, const void* y, int64_t n, void* to);
  // to[i] = x[i] / sqrt(mean(x^2) + eps) * (offset + weight[i]), rounded to x's type, n > 0.
  // [x's Element][weight's Element].
  void (*rms_norm[3][3])(const void* x, const void* weight, int64_t n, float eps, float offset, void* to);
};

PAGEGRAPH_DECLARE(NormKernels, norm_kernels)

}  // namespace pagegraph
