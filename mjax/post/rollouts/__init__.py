"""Rollouts of a policy: collected by the engine, packed for the trainer, kept in checkpoints."""
