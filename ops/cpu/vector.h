// Float vectors of the instruction set that a translation unit is compiled for: 16 lanes with AVX-512, 8 with AVX2, 4
// elsewhere (SSE2, NEON), in the vector extensions of GCC and Clang. Intrinsics brought nothing but a second to compile.
//
// Files that include this are compiled once per instruction set, with PAGEGRAPH_ISA as the namespace. They must not use
// the standard library's templates: the linker keeps one copy of an inline function, maybe the one with instructions
// that the machine lacks.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

namespace pagegraph::PAGEGRAPH_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// Storage of a bfloat16 and of an IEEE half.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

INLINE Vector broadcast(float x) { return x - Vector{}; }
INLINE Ints broadcast(int32_t x) { return x - Ints{}; }
INLINE Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }  // one instruction where there is one
// Of a NaN and a number the second argument: scores that are NaN do not hide in a maximum, they reach the sum.
INLINE Vector max(Vector a, Vector b) { return a > b ? a : b; }

// Halves of a vector added until four lanes are left.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInts __attribute__((vector_size(16)));

// Four lanes of two quads, which are counted from 0 to 7. GCC has clang's name for it from 12 on.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, QuadInts{__VA_ARGS__})
#endif

INLINE float reduce_add(Vector v) {
  Quad parts[LANES / 4];
  memcpy(parts, &v, sizeof(v));
  for (int n = LANES / 8; n; n /= 2) {
    for (int i = 0; i < n; ++i) parts[i] += parts[n + i];
  }
  const Quad quad = parts[0], pairs = quad + Quad{quad[2], quad[3], quad[2], quad[3]};
  return pairs[0] + pairs[1];
}

// totals[i] = the sum of the lanes of v[i] for N vectors; writes up to three floats more.
// Four at a time, in half the instructions of one by one.
template <int N>
INLINE void reduce_add(const Vector (&v)[N], float* totals) {
  for (int i = 0; i < N; i += 4) {
    Quad quads[4] = {};
    for (int j = 0; j < 4 && i + j < N; ++j) {
      Quad parts[LANES / 4];
      memcpy(parts, &v[i + j], sizeof(v[i + j]));
      for (int n = LANES / 8; n; n /= 2) {
        for (int k = 0; k < n; ++k) parts[k] += parts[n + k];
      }
      quads[j] = parts[0];
    }
    const Quad low = SHUFFLE(quads[0], quads[1], 0, 1, 4, 5) + SHUFFLE(quads[0], quads[1], 2, 3, 6, 7);
    const Quad high = SHUFFLE(quads[2], quads[3], 0, 1, 4, 5) + SHUFFLE(quads[2], quads[3], 2, 3, 6, 7);
    const Quad sums = SHUFFLE(low, high, 0, 2, 4, 6) + SHUFFLE(low, high, 1, 3, 5, 7);
    memcpy(totals + i, &sums, sizeof(sums));
  }
}

INLINE float reduce_max(Vector v) {
  float most = v[0];
  for (int i = 1; i < LANES; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

INLINE Vector load(const float* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

INLINE Vector load(const bfloat16* p) {
  Halves h;
  memcpy(&h, p, sizeof(h));
  return bit_cast<Vector>(__builtin_convertvector(h, Bits) << 16);
}

INLINE Vector load(const float16* p) {
  Halves h;
  memcpy(&h, p, sizeof(h));
  const Bits bits = __builtin_convertvector(h, Bits);
  // The exponent is 112 too small where it is shifted to; the product repairs that, and subnormal numbers too.
  const Bits magnitude = bit_cast<Bits>(bit_cast<Vector>((bits & 0x7fff) << 13) * 0x1p112f);
  const Bits special = (bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : magnitude;
  return bit_cast<Vector>(special | (bits & 0x8000) << 16);
}

INLINE void store(float* p, Vector v) { memcpy(p, &v, sizeof(v)); }

// Rounds to the nearest, ties to even.
INLINE void store(bfloat16* p, Vector v) {
  const Bits bits = bit_cast<Bits>(v);
  const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves h = __builtin_convertvector(v == v ? rounded : (bits >> 16 | 0x40), Halves);
  memcpy(p, &h, sizeof(h));
}

INLINE void store(float16* p, Vector v) {
  const Bits bits = bit_cast<Bits>(v), sign = bits & 0x80000000, magnitude = bits ^ sign;
  const Bits normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Adding 0.5 rounds a number below 2^-14 to a multiple of 2^-24, the spacing of subnormal halves.
  const Bits subnormal = bit_cast<Bits>(bit_cast<Vector>(magnitude) + 0.5f) - 0x3f000000;
  Bits half = magnitude < (113 << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? Bits{} + 0x7c00 : half;  // 65520 and above round to infinity
  half = magnitude > 0x7f800000 ? Bits{} + 0x7e00 : half;
  const Halves h = __builtin_convertvector(half | sign >> 16, Halves);
  memcpy(p, &h, sizeof(h));
}

// Loads or stores the first n < LANES elements; the others are zero, and neither read nor written.
// Calls, since only odd sizes need them and they would double the code.
template <class T>
__attribute__((noinline)) Vector load_first(const T* p, int64_t n) {
  T buffer[LANES] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}

template <class T>
__attribute__((noinline)) void store_first(T* p, Vector v, int64_t n) {
  T buffer[LANES];
  store(buffer, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// The same where elements are `stride` apart; n may be LANES.
template <class T>
__attribute__((noinline)) Vector load_strided(const T* p, int64_t stride, int64_t n) {
  T buffer[LANES] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  return load(buffer);
}

// e^x to about 1 ulp; 0 below -87.3, where results would be subnormal. x <= 88 is assumed, NaN stays NaN.
// Range reduction and polynomial of Cephes' expf (Moshier).
INLINE Vector exp(Vector x) {
  const Vector shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vector lowest = broadcast(-87.3f);
  const Vector clamped = x < lowest ? lowest : x;
  const Vector shifted = fma(clamped, broadcast(1.44269504f), shift), n = shifted - shift;
  Vector r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vector p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  const Vector fraction = fma(p, r * r, r + 1.0f);
  const Vector power = bit_cast<Vector>((bit_cast<Ints>(shifted) - bit_cast<Ints>(shift) + 127) << 23);
  return x < lowest ? Vector{} : fraction * power;
}

// Polynomial of Cephes' tanhf for small x, where 1 - 2 / (e^2x + 1) would cancel.
INLINE Vector tanh(Vector x) {
  const Vector square = x * x, absolute = x < 0.0f ? -x : x;
  Vector p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vector bounded = absolute > 20.0f ? broadcast(20.0f) : absolute;
  const Vector large = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  return absolute < 0.625f ? fma(p * square, x, x) : (x < 0.0f ? -large : large);
}

}  // namespace pagegraph::PAGEGRAPH_ISA
