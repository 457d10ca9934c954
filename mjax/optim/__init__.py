"""Optimizers by parameter role, and the schedules that drive them."""
