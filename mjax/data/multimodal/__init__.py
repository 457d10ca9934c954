"""Texts with images and sounds."""
