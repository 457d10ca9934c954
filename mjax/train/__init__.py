"""Training: `Trainer` on a mesh, and the loop that `python -m mjax.train` runs."""

from mjax.train.trainer import Trainer as Trainer
