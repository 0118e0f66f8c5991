"""The ops as Triton kernels for NVIDIA GPUs: one kernel family a file, none imported before its first call."""
