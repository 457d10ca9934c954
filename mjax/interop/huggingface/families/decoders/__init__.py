"""Rows of the table of families: decoders of texts."""
