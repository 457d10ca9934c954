"""Cross-entropy over a sharded vocabulary, in chunks."""
