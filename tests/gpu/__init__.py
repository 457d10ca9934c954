"""Tests that need a GPU. They skip where there is none."""

import glob
import os


def count_gpus() -> int:
    """The number of GPUs that processes started here will see; JAX is not started for it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return len([name for name in visible.split(",") if name.strip()])
