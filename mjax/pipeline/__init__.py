"""Pipeline parallelism: which layers live where, when each runs, and the scans that run them."""
