"""`ProgramKind`: what a trainer can compile and run, as one value.

A kind is a function of local shards with the partitions of what it takes and returns. A trainer's
own are TRAIN, APPLY, GRADIENTS and LOSSES (`step.py`), NORMS (`norms.py`), LAYER_STATISTICS
(`layer_statistics.py`) and SCORES (`token_scores.py`). A room above adds one by making a value.
`Trainer.run_program` runs it; nothing is registered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProgramPartitions:
    """The partitions of what programs take and return, trees of `PartitionSpec`.

    state: all of the state.
    batch: the fields of a placed batch.
    gradients: the gradients of the trained parameters.
    """

    state: dict
    batch: dict
    gradients: dict

    @property
    def weights(self) -> dict:
        """The state without the moments of the optimizer."""
        return without_moments(self.state)


def weights_and_batch(on: ProgramPartitions) -> tuple:
    """The partitions of most programs' inputs."""
    return on.weights, on.batch


@dataclass(frozen=True)
class ProgramKind:
    """A program that a trainer compiles once for each shape of a batch.

    function: computes outputs from (`step.Program`, *inputs), all local shards.
    outputs: returns the partitions of the outputs, a tree or the prefix of one.
    inputs: returns the partition of each input.
    donated: positions of inputs whose memory the program takes over.

    Define a kind once, in a module: two that are built alike are compiled twice.
    """

    function: Callable[..., Any]
    outputs: Callable[[ProgramPartitions], Any]
    inputs: Callable[[ProgramPartitions], tuple] = weights_and_batch
    donated: tuple[int, ...] = ()


def without_moments(state: dict) -> dict:
    """A state, or its partitions, without the moments of the optimizer."""
    return {name: part for name, part in state.items() if name != "opt"}
