"""Norms, gates and AdamW in one pass."""
