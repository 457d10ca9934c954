"""Post-training: what follows pretraining, over the same loop, meshes and checkpoints."""
