"""Megatron-LM's checkpoints and arguments."""
