"""Prompts and rewards of reinforcement learning."""
