#include "write_kv_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

template <class From, class To>
void copy_row(const void* from, int64_t stride, void* to, int64_t n) {
  const From* x = static_cast<const From*>(from);
  To* y = static_cast<To*>(to);
  int64_t i = 0;
  if (stride == 1) {
    for (; i + LANES <= n; i += LANES) store(y + i, load(x + i));
  }
  for (; i < n; ++i) store_first(y + i, load_first(x + i * stride, 1), 1);
}

}  // namespace

extern const WriteKernels write_kernels = {{
    {copy_row<float, float>, copy_row<float, bfloat16>, copy_row<float, float16>},
    {copy_row<bfloat16, float>, copy_row<bfloat16, bfloat16>, copy_row<bfloat16, float16>},
    {copy_row<float16, float>, copy_row<float16, bfloat16>, copy_row<float16, float16>},
}};

}  // namespace pagegraph::PAGEGRAPH_ISA
