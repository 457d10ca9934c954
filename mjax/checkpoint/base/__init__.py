"""Foundations of the store: files, digests, steps, sources of weights."""
