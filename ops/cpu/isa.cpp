#include "isa.h"

#include <cstring>

#if defined(PAGEGRAPH_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagegraph {
namespace {

const char* const NAMES[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};

// Each is there only if the library was built with it, which it is for some of those of x86-64.
#if defined(PAGEGRAPH_HAS_AVX2)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#if defined(PAGEGRAPH_HAS_AVX512)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

#if defined(PAGEGRAPH_HAS_AVX512BF16)
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Tiles are so large that Linux gives them only to processes that ask: "Using XSTATE features in user space
// applications" in its documentation. The answer holds for all threads, and for children.
#if defined(PAGEGRAPH_HAS_AMX) && defined(__linux__)
bool has_amx() {
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;  // of CPUID leaf 7, EDX
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  unsigned eax, ebx, ecx, edx;
  return has_avx512bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & AMX_BF16) && (edx & AMX_TILE) &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

bool runs_here(int isa) {
  switch (isa) {
#if defined(PAGEGRAPH_HAS_AVX2)
    case AVX2:
      return has_avx2();
#endif
#if defined(PAGEGRAPH_HAS_AVX512)
    case AVX512:
      return has_avx512();
#endif
#if defined(PAGEGRAPH_HAS_AVX512BF16)
    case AVX512BF16:
      return has_avx512bf16();
#endif
#if defined(PAGEGRAPH_HAS_AMX) && defined(__linux__)
    case AMX:
      return has_amx();
#endif
    default:
      return isa == PLAIN;
  }
}

// The index of a name in NAMES if the machine can run it, else -1.
int find(const char* name) {
  for (int isa = PLAIN; isa <= AMX; ++isa) {
    if (!std::strcmp(name, NAMES[isa]) && runs_here(isa)) return isa;
  }
  return -1;
}

int widest() {
  int isa = AMX;
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
