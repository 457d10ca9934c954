"""Drawings for docs, outside the package."""
