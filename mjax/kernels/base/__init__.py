"""What kernels stand on: the choice of one, calls of Triton and of attention."""
