"""Faults that a run survives: signals, suspect steps, replicas, full disks, lost nodes."""
