"""Where prompts and rewards of reinforcement learning come from."""
