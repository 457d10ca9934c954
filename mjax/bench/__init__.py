"""Measurements that print JSON lines: `python -m mjax.bench NAME [options]`."""
