#include "isa.h"

#include <cstring>

namespace pagegraph {
namespace {

const char* const NAMES[] = {"plain", "avx2", "avx512"};

bool runs_here(int isa) {
  if (isa == PLAIN) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == AVX2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// The index of a name in NAMES if the machine can run it, else -1.
int find(const char* name) {
  for (int isa = PLAIN; isa <= AVX512; ++isa) {
    if (!std::strcmp(name, NAMES[isa]) && runs_here(isa)) return isa;
  }
  return -1;
}

int widest() {
  int isa = AVX512;
  while (!runs_here(isa)) --isa;
  return isa;
}

int current = widest();

}  // namespace

Isa isa() { return static_cast<Isa>(current); }

}  // namespace pagegraph

int pagegraph_has_isa(const char* name) { return pagegraph::find(name) >= 0; }

int pagegraph_use_isa(const char* name) {
  const int isa = pagegraph::find(name);
  if (isa >= 0) pagegraph::current = isa;
  return isa >= 0;
}

const char* pagegraph_isa() { return pagegraph::NAMES[pagegraph::current]; }
