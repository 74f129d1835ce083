"""Compilation of Triton kernels before the steps that launch them: on threads, and in processes of their own."""
