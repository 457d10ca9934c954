"""Weights of a trained model rounded to 8 and 4 bits, in compressed-tensors' layouts."""
