"""Adapters in PEFT's files (adapter_config.json, adapter_model.safetensors), both ways."""
