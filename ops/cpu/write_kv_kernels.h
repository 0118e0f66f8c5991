// What write_kv needs per instruction set.
#pragma once

#include <stdint.h>

#include "element.h"
#include "isa.h"

namespace pagegraph {

struct WriteKernels {
  // to[i] = from[i * stride] for i < n, rounded to the target's type. [source's Element][target's Element].
  void (*copy_row[3][3])(const void* from, int64_t stride, void* to, int64_t n);
};

PAGEGRAPH_DECLARE(WriteKernels, write_kernels)

}  // namespace pagegraph
