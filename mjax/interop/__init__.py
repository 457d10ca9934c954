"""Weights and configs of others, both ways."""
