"""How Megatron-LM's checkpoint files hold tensors and objects."""
