#include "norm_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

template <class X, class Y>
void add(const void* from, const void* other, int64_t n, void* out) {
  const X* x = static_cast<const X*>(from);
  const Y* y = static_cast<const Y*>(other);
  X* to = static_cast<X*>(out);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(x + i) + load(y + i));
  if (i < n) store_first(to + i, load_first(x + i, n - i) + load_first(y + i, n - i), n - i);
}

template <class T>
INLINE float sum_of_squares(const T* x, int64_t n) {
  constexpr int CHAINS = 4;  // an addition takes as many cycles
  Vector sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= n; i += CHAINS * LANES) {
    for (int chain = 0; chain < CHAINS; ++chain) {
      const Vector v = load(x + i + chain * LANES);
      sums[chain] = fma(v, v, sums[chain]);
    }
  }
  for (; i + LANES <= n; i += LANES) {
    const Vector v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  if (i < n) {
    const Vector v = load_first(x + i, n - i);
    sums[1] = fma(v, v, sums[1]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class X, class W>
void rms_norm(const void* from, const void* factors, int64_t n, float eps, float offset, void* out) {
  const X* x = static_cast<const X*>(from);
  const W* weight = static_cast<const W*>(factors);
  X* to = static_cast<X*>(out);
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / n + eps);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(x + i) * scale * (load(weight + i) + offset));
  if (i < n) {
    store_first(to + i, load_first(x + i, n - i) * scale * (load_first(weight + i, n - i) + offset), n - i);
  }
}

}  // namespace

extern const NormKernels norm_kernels = {
    {
        {add<float, float>, add<float, bfloat16>, add<float, float16>},
        {add<bfloat16, float>, add<bfloat16, bfloat16>, add<bfloat16, float16>},
        {add<float16, float>, add<float16, bfloat16>, add<float16, float16>},
    },
    {
        {rms_norm<float, float>, rms_norm<float, bfloat16>, rms_norm<float, float16>},
        {rms_norm<bfloat16, float>, rms_norm<bfloat16, bfloat16>, rms_norm<bfloat16, float16>},
        {rms_norm<float16, float>, rms_norm<float16, bfloat16>, rms_norm<float16, float16>},
    },
};

}  // namespace pagegraph::PAGEGRAPH_ISA
