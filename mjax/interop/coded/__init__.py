"""Weights that a checkpoint holds in few bits, with scales, read as floating-point numbers."""
