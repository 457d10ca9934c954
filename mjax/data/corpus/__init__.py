"""Corpora of tokens: Megatron's index, GPT samples, raw text, preprocessing, neighbors."""
