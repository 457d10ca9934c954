"""Losses and advantages of policy gradients."""
