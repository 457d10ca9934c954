"""What the store stands on: files, digests, steps, sources of weights."""
