"""Speeds and faults of a machine, measured in seconds before a job begins."""
