"""Training: `Trainer` on a mesh, and the loop that `python -m mjax.train` runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mjax.train.trainer import Trainer as Trainer


def __getattr__(name: str) -> object:
    if name == "Trainer":  # on use: a supervisor imports this package and must not start jax
        from mjax.train.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
