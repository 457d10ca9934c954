"""Grouped matmuls of experts, and matmuls with an activation function within."""
