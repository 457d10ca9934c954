"""Several processes: how they start, agree, and pretend to be devices."""
