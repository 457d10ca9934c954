"""Towers of images and sounds, and what joins them to a text model."""
