#include "rope_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

template <class From, class To>
void rotate(const void* from, int64_t stride, const float* cos, const float* sin, int64_t half, void* out) {
  const From* first = static_cast<const From*>(from);
  const From* second = first + half * stride;
  To* to = static_cast<To*>(out);
  int64_t i = 0;
  if (stride == 1) {
    for (; i + LANES <= half; i += LANES) {
      const Vector x = load(first + i), y = load(second + i);
      store(to + i, x * load(cos + i) - y * load(sin + i));
      store(to + half + i, y * load(cos + half + i) + x * load(sin + half + i));
    }
  }
  for (; i < half; i += LANES) {
    const int64_t n = min(LANES, half - i);
    const Vector x = load_strided(first + i * stride, stride, n), y = load_strided(second + i * stride, stride, n);
    store_first(to + i, x * load_first(cos + i, n) - y * load_first(sin + i, n), n);
    store_first(to + half + i, y * load_first(cos + half + i, n) + x * load_first(sin + half + i, n), n);
  }
}

}  // namespace

extern const RopeKernels rope_kernels = {{
    {rotate<float, float>, rotate<float, bfloat16>, rotate<float, float16>},
    {rotate<bfloat16, float>, rotate<bfloat16, bfloat16>, rotate<bfloat16, float16>},
    {rotate<float16, float>, rotate<float16, bfloat16>, rotate<float16, float16>},
}};

}  // namespace pagegraph::PAGEGRAPH_ISA
