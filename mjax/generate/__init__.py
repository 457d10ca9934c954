"""`python -m mjax.generate`: text from a model."""
