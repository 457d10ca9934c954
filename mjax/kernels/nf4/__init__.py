"""Weights in 4 bits: how they are rounded, read and declared."""
