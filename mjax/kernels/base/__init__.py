"""Foundations of kernels: the choice of one, calls of Triton and of attention."""
