// linear and grouped_linear: checks, the choice of an algorithm, and its schedule over threads.
//
// Up to 64 rows of x the weight is streamed through dot products, in one order of additions whatever the batch. Above,
// tiles of the weight become floats once for 512 rows of x and are multiplied with panels of these, or torch does it.
// Where there are instructions for products of bfloat16, both x and weight stay in it.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "linear_kernels.h"
#include "tensors.h"

namespace pagegraph {
namespace {

constexpr int64_t STREAM_MAX_ROWS = 64;           // of x
constexpr int64_t PACKED_ROWS = 512;              // of x, at once: bounds the scratch
constexpr int64_t PACKED_BFLOAT16 = 1 << 19;      // elements of x, at once: half of a level 2 cache of 2 MB
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 16;  // below, waking a thread costs more than it saves

const LinearKernels& linear_table() {
  static const LinearKernels* const table[] = PAGEGRAPH_TABLE(linear_kernels);
  return *table[isa()];
}

// Null where there are no instructions for it.
const Bfloat16Kernels* bfloat16_kernels() {
#if defined(PAGEGRAPH_HAS_AMX)
  if (isa() == AMX) return &amx::bfloat16_kernels;
#endif
#if defined(PAGEGRAPH_HAS_AVX512BF16)
  if (isa() == AVX512BF16) return &avx512bf16::bfloat16_kernels;
#endif
  return nullptr;
}

int64_t divide_up(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Calls f(begin, end) for a contiguous share of 0 to n - 1 per thread, in multiples of `unit`.
template <class F>
void share(int64_t n, int64_t unit, int64_t products, const F& f) {
  const int64_t units = divide_up(n, unit);
  const int64_t useful = std::min(units, products / PRODUCTS_PER_THREAD + 1);
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), useful);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      f(units * thread / threads * unit, std::min(n, units * (thread + 1) / threads * unit));
    }
  });
}

void stream(const Linear& a, Element element) {
  // Up to 3 rows of x are multiplied at once, and need no tiles to stay near.
  const int64_t tile = a.m <= 3 ? divide_up(a.k, 32) * 32 : STREAM_COLUMNS;
  thread_local Scratch scratch;
  float* x = scratch.floats(a.m * divide_up(a.k, tile) * tile);
  linear_table().spread[element](a, tile, x);
  share(a.n, STREAM_ROWS, a.m * a.n * a.k, [&](int64_t begin, int64_t end) {
    thread_local Scratch sums;
    linear_table().stream[element](a, begin, end, x, tile, sums.floats(a.m * STREAM_ROWS * 16));
  });
}

// Calls f with `piece` rows of x after the other.
template <class F>
void for_pieces(Linear a, int64_t piece, const F& f) {
  for (int64_t left = a.m; left > 0; left -= a.m) {
    a.m = std::min(piece, left);
    f(a);
    a.x = static_cast<const char*>(a.x) + a.m * a.x_row_stride * element_size(a.x_element);
    a.out = static_cast<char*>(a.out) + a.m * a.n * element_size(a.x_element);
  }
}

void multiply(const Linear& whole, Element element) {
  const int64_t panel = linear_table().panel;
  thread_local Scratch scratch;
  for_pieces(whole, PACKED_ROWS, [&](const Linear& a) {
    const int64_t panels = divide_up(a.m, panel), products = a.m * a.n * a.k;
    float* x = scratch.floats(panels * panel * divide_up(a.k, COLUMN_TILE) * COLUMN_TILE);
    share(panels, 1, products, [&](int64_t begin, int64_t end) { linear_table().pack(a, begin, end, x); });
    share(a.n, 12, products, [&](int64_t begin, int64_t end) {
      thread_local Scratch own;
      linear_table().multiply[element](a, begin, end, x, own.floats(WEIGHT_TILE * (COLUMN_TILE + panels * panel)));
    });
  });
}

// The same for any number of rows of x.
void multiply_bfloat16(const Linear& whole, const Bfloat16Kernels& kernels) {
  const int64_t columns = packed_columns(whole.k);
  const int64_t piece = std::max(STREAM_MAX_ROWS, PACKED_BFLOAT16 / columns / STREAM_MAX_ROWS * STREAM_MAX_ROWS);
  thread_local Scratch scratch;
  for_pieces(whole, piece, [&](const Linear& a) {
    const int64_t panels = divide_up(a.m, kernels.panel);
    const int64_t floats = panels * kernels.panel * columns / 2;  // two elements each
    uint16_t* x = reinterpret_cast<uint16_t*>(scratch.floats(floats));
    share(panels, 1, a.m * a.k, [&](int64_t begin, int64_t end) { kernels.pack(a, begin, end, x); });
    share(a.n, 16, a.m * a.n * a.k, [&](int64_t begin, int64_t end) { kernels.multiply(a, begin, end, x); });
  });
}

bool has_bfloat16_products() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return true;  // of ARM's, torch knows more than we do
#endif
}

// Whether to leave more than STREAM_MAX_ROWS rows to torch. GFLOP/s of one thread of a busy AMD Zen 3 (peak 75 at that
// time), ours beside torch 2.13, at 65, 128 and 512 rows; `python -m bench.linear` repeats it:
//   bfloat16  1536 x 576: 36, 54, 55 beside 8, 9, 8     8192 x 2048: 50, 52, 57 beside 10, 10, 9
//   float32   1536 x 576: 36, 46, 52 beside 40, 54, 55  3072 x 1024: 44, 49, 57 beside 33, 38, 55
//             8192 x 2048: 47, 65, 57 beside 32, 43, 49
// With the plain kernels, with AVX-512 and with all that is wider nothing was measured: there torch's float32 is taken
// to be good, and its bfloat16 where the machine has instructions for it. With AMX ours is kept all the same: it leaves
// the weight where it is, and adds up a row in one order, however many there are.
bool torch_wins(Element x, Element weight, int64_t weight_size) {
  if (x != weight) return false;  // torch multiplies no two dtypes
  if (weight == BFLOAT16) return isa() != AVX2 && isa() != AMX && has_bfloat16_products();
  return isa() != AVX2 || weight_size < 1 << 21;
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  if (bias && bias->scalar_type() != weight.scalar_type()) bias = torch::stable::to(*bias, weight.scalar_type());
  StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

bool is_served(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::BFloat16;
}

void compute(const Linear& call, Element element) {
  const Bfloat16Kernels* products =
      call.x_element == BFLOAT16 && element == BFLOAT16 ? bfloat16_kernels() : nullptr;
  if (products) {
    multiply_bfloat16(call, *products);
  } else if (call.m <= STREAM_MAX_ROWS) {
    stream(call, element);
  } else {
    multiply(call, element);
  }
}

Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1),
                  "linear takes x [..., K] and a weight [N, K]");
  const int64_t n = weight.size(0), k = weight.size(1);
  const bool served = is_served(x) && is_served(weight) && k > 0 && (weight.stride(1) == 1 || k == 1);
  if (!served) return torch_linear(x, weight, bias);
  const Element x_element = element_of(x, "x"), element = element_of(weight, "weight");
  const int64_t m = x.numel() / k;
  if (m > STREAM_MAX_ROWS && torch_wins(x_element, element, n * k)) return torch_linear(x, weight, bias);
  std::vector<int64_t> shape = sizes_of(x);
  shape.back() = n;
  Tensor out = make_output(x, shape);
  if (out.numel() == 0) return out;
  // Through the dispatcher, a view would take as long as a small product: only what needs one gets it.
  const bool contiguous = x.is_contiguous();
  const Tensor rows = contiguous ? x : torch::stable::reshape(x, {m, k});
  Linear call{rows.const_data_ptr(), contiguous ? k : rows.stride(0), contiguous ? 1 : rows.stride(1), x_element, weight.const_data_ptr(),
              weight.stride(0), m, n, k, nullptr, out.mutable_data_ptr()};
  if (bias) {
    if (bias->scalar_type() != ScalarType::Float) bias = torch::stable::to(*bias, ScalarType::Float);
    bias = torch::stable::contiguous(*bias);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias must be [", n, "]");
    call.bias = static_cast<const float*>(bias->const_data_ptr());
  }
  compute(call, element);
  return out;
}

// Experts without rows are not read.
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2) && offsets.dim() == 1 &&
                      offsets.size(0) == weight.size(0),
                  "grouped_linear takes x [S, K], a weight [E, N, K] and offsets [E]");
  STD_TORCH_CHECK(is_served(x) && is_served(weight), "grouped_linear takes float32 and bfloat16");
  const int64_t rows = x.size(0), n = weight.size(1), k = weight.size(2);
  const Tensor source = with_adjacent_columns(x), matrices = with_adjacent_columns(weight);
  const Element x_element = element_of(x, "x"), element = element_of(weight, "weight");
  const Integers ends(offsets, "offsets");
  Tensor out = make_output(x, {rows, n});
  const char* from = static_cast<const char*>(source.const_data_ptr());
  const char* data = static_cast<const char*>(matrices.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t x_size = element_size(x_element);
  int64_t start = 0;
  for (int64_t expert = 0; expert < weight.size(0); ++expert) {
    const int64_t end = ends[expert];
    STD_TORCH_CHECK(end >= start && end <= rows, "offsets must rise to at most S = ", rows);
    if (end > start && n > 0) {
      compute({from + start * source.stride(0) * x_size, source.stride(0), 1, x_element,
               data + expert * matrices.stride(0) * element_size(element), matrices.stride(1), end - start, n, k,
               nullptr, to + start * n * x_size},
              element);
    }
    start = end;
  }
  std::memset(to + start * n * x_size, 0, (rows - start) * n * x_size);
  return out;
}

}  // namespace
}  // namespace pagegraph

STABLE_TORCH_LIBRARY_IMPL(pagegraph, CPU, library) {
  library.impl("linear.cpu", TORCH_BOX(&pagegraph::linear));
  library.impl("grouped_linear.cpu", TORCH_BOX(&pagegraph::grouped_linear));
}
