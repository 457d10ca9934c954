"""RETRO's mixers."""
