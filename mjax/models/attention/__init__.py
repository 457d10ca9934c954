"""Attention branches: self, latent, cross; context parallelism; positions."""
