"""Comparisons with others and the tables of docs; a git checkout runs them, the wheel has none."""
