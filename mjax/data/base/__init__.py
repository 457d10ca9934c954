"""Foundations of datasets: tokenizers, chat templates, caches, sentences."""
