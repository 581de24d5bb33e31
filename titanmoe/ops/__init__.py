"""Kernels and fused chains, each with its plain formula; counted random numbers; names for a profiler."""
