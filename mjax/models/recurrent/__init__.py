"""Mamba-2 and Gated DeltaNet branches."""
