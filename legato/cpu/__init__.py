"""CPU inference: a C library with kernels for packed weights, and its threads. See docs/cpu.md."""
