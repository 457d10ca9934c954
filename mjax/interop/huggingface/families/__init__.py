"""Hugging Face model types, as parts of a config.json and names of tensors."""
