"""Roles and what they compute, which all ways to train after pretraining stand on."""
