// The instruction sets that kernels are compiled for, and which of them is in use.
#pragma once

namespace pagegraph {

// From narrow to wide: each includes those before it.
enum Isa { PLAIN, AVX2, AVX512, AVX512BF16, AMX };

// The widest that this machine has, unless pagegraph_use_isa chose another. One for the whole process.
Isa isa();

}  // namespace pagegraph

// A table's entry per instruction set: PAGEGRAPH_TABLE(name) gives {&plain::name, ...} in the order of Isa, as far as
// the library has them: the build defines PAGEGRAPH_HAS_<ISA> for all but plain. Those for products of bfloat16 share
// the kernels of AVX-512 where they have none of their own.
#if defined(PAGEGRAPH_HAS_AVX512)
#define PAGEGRAPH_TABLE(name) {&plain::name, &avx2::name, &avx512::name, &avx512::name, &avx512::name}
#elif defined(PAGEGRAPH_HAS_AVX2)
#define PAGEGRAPH_TABLE(name) {&plain::name, &avx2::name}
#else
#define PAGEGRAPH_TABLE(name) {&plain::name}
#endif

#define PAGEGRAPH_DECLARE(type, name) \
  namespace plain {                   \
  extern const type name;             \
  }                                   \
  namespace avx2 {                    \
  extern const type name;             \
  }                                   \
  namespace avx512 {                  \
  extern const type name;             \
  }

#define PAGEGRAPH_EXPORT extern "C" __attribute__((visibility("default")))

// Whether the machine can run that one of "plain", "avx2", "avx512", "avx512bf16", "amx", and the library has it.
PAGEGRAPH_EXPORT int pagegraph_has_isa(const char* name);
// Uses it from the next op call on. Returns 0 if it is not there. Not while an op runs.
PAGEGRAPH_EXPORT int pagegraph_use_isa(const char* name);
// The name of the one in use.
PAGEGRAPH_EXPORT const char* pagegraph_isa();
