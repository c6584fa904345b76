"""The project's own Triton kernels, compiled on a GPU and interpreted without one."""
