"""Small languages within values: layer patterns, remat, pipeline layouts, paths."""
