"""Rounding to 8 bits and matmuls of 8 bits."""
