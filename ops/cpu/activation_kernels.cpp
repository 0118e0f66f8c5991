#include "activation_kernels.h"

#include "vector.h"

// Compiled once per instruction set: see vector.h about what may be used here.
namespace pagegraph::PAGEGRAPH_ISA {
namespace {

INLINE Vector absolute(Vector x) { return x < 0.0f ? -x : x; }

// 1 / (1 + e^-x), with an exponent that is never positive: nothing overflows, and small results keep their digits.
INLINE Vector sigmoid(Vector x) {
  const Vector power = exp(-absolute(x));
  return (x < 0.0f ? power : broadcast(1.0f)) / (1.0f + power);
}

struct Silu {
  INLINE Vector apply(Vector x) { return x * sigmoid(x); }
};

// (1 + tanh(y)) / 2 is sigmoid(2 y).
struct GeluTanh {
  INLINE Vector apply(Vector x) {
    const Vector cubic = fma(x * x, x * 0.044715f, x);
    return x * sigmoid(cubic * 1.5957691216f);  // 2 sqrt(2 / pi)
  }
};

// x P(X <= x) for a normal X. Its tail above |x|, erfc(|x| / sqrt(2)) / 2, is formula 7.1.26 of Abramowitz and Stegun,
// Handbook of Mathematical Functions: off by at most 0.75e-7, and with the roundings here by less than 1e-6. The tail
// is not taken from 1, so it keeps its digits below zero.
struct Gelu {
  INLINE Vector apply(Vector x) {
    const Vector t = 1.0f / fma(absolute(x), broadcast(0.3275911f * 0.70710678f), broadcast(1.0f));
    Vector p = broadcast(0.5f * 1.061405429f);
    p = fma(p, t, broadcast(0.5f * -1.453152027f));
    p = fma(p, t, broadcast(0.5f * 1.421413741f));
    p = fma(p, t, broadcast(0.5f * -0.284496736f));
    p = fma(p, t, broadcast(0.5f * 0.254829592f));
    const Vector tail = p * t * exp(x * x * -0.5f);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

template <class Activation, class T>
void apply_and_mul(const void* left, const void* right, int64_t n, void* out) {
  const T* gate = static_cast<const T*>(left);
  const T* up = static_cast<const T*>(right);
  T* to = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, Activation::apply(load(gate + i)) * load(up + i));
  if (i < n) {
    store_first(to + i, Activation::apply(load_first(gate + i, n - i)) * load_first(up + i, n - i), n - i);
  }
}

}  // namespace

extern const ActivationKernels activation_kernels = {
    {apply_and_mul<Silu, float>, apply_and_mul<Silu, bfloat16>, apply_and_mul<Silu, float16>},
    {apply_and_mul<Gelu, float>, apply_and_mul<Gelu, bfloat16>, apply_and_mul<Gelu, float16>},
    {apply_and_mul<GeluTanh, float>, apply_and_mul<GeluTanh, bfloat16>, apply_and_mul<GeluTanh, float16>},
};

}  // namespace pagegraph::PAGEGRAPH_ISA
