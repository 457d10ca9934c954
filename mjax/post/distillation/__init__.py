"""Losses of a student and stored teachers; `mjax distill` is `post/distill.py`."""
