"""Heads besides the vocabulary's: encoders' and multi-token prediction."""
