"""Mamba-2's scan, the gated delta rule, and the convolution before them."""
