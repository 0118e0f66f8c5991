// Affinity of the threads that ops run on.
#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "isa.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Keeps worker i of PyTorch's n threads on CPU cpus[i]. The calling thread, worker 0, stays free: what it starts later,
// processes included, would inherit its affinity. Returns how many were pinned.
PAGEGRAPH_EXPORT int pagegraph_pin_workers(const int* cpus, int n);

int pagegraph_pin_workers(const int* cpus, int n) {
  int pinned = 0;
#if defined(__linux__)
  const long caller = syscall(SYS_gettid);
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    if (end - begin != 1 || syscall(SYS_gettid) == caller) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[begin], &set);
    if (!sched_setaffinity(0, sizeof(set), &set)) __atomic_fetch_add(&pinned, 1, __ATOMIC_RELAXED);
  });
#endif
  return pinned;
}
