"""Fused Triton kernels for CUDA, each with the plain torch that says what it computes.

Knows tensors. Does not know models, requests, or who calls. A module holds one kernel: its program, a typed entry
point, and a `..._reference` with the same arguments, which tests compare it with, or the name of what does the same
elsewhere. Every entry point may be
captured in a CUDA graph: it waits for nothing, and what it allocates depends on shapes alone. On a CPU they run in
Triton's interpreter only (TRITON_INTERPRET=1, float32), for tests. Importing a module imports Triton, so that callers
do it late, where a GPU is.
"""
