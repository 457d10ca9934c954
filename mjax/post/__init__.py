"""Post-training: what follows pretraining, over the same loop, meshes and checkpoints."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mjax.post.training_client import TrainingClient as TrainingClient


def __getattr__(name: str) -> object:
    if name == "TrainingClient":  # on use: commands import this package and must not start jax
        from mjax.post.training_client import TrainingClient

        return TrainingClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
