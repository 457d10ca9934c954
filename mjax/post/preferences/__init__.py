"""Losses of preferences and rewards, and their objectives."""
