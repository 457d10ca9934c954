"""Attention: the public function, cuDNN, our Hopper kernels, short rows, decoding."""
