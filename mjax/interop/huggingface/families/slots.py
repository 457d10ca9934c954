"""`Slot`: where a piece of a parameter lies among the tensors of a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Where one matrix or vector of a parameter lies in a Hugging Face checkpoint.

    `batch`: its index along the parameter's batch axes (`params.BATCH_AXES`), in their order.
    `dims`: for each dimension of the tensor after `lead`, the parameter's axes flattened into it.
    It begins at `start` along dimension `axis` of a tensor that fuses several, and takes every
    `step`-th place there; `lead` is the leading index in a tensor that stacks several, or in the
    dimensions of size 1 that it begins with. `number`: it lacks the dimension of size 1 of the
    parameter.
    """

    tensor: str
    batch: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    start: int = 0
    axis: int = 0
    step: int = 1
    lead: tuple[int, ...] = ()
    number: bool = False

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """`dims` of the same bytes as a matrix or vector: all dimensions but the first are one."""
        rest = tuple(axis for axes in self.dims[1:] for axis in axes)
        return (self.dims[0], rest) if rest else self.dims[:1]


Slots = Mapping[tuple[str, ...], tuple[Slot, ...]]  # of each parameter, by its path


def changed(slots: Slots, change: Callable[[Slot], Slot]) -> Slots:
    """The slots, each as `change` makes it."""
    return {path: tuple(map(change, places)) for path, places in slots.items()}
