"""A piece of work that the kernel benchmark times, and random inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Work:
    """One thing to time: `run(*inputs)` under jit, and what it must compute and move.

    expected: what `run` computes, by other means; the record then has the relative error.
    kept: the last input is donated, and the output takes its place in the next run.
    """

    name: str
    run: Callable
    inputs: tuple
    flops: float = 0.0
    bytes: float = 0.0
    expected: Callable | None = None
    kept: bool = False


def draw(shape: tuple[int, ...], seed: int = 0, dtype: str = "bfloat16") -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(seed), shape, dtype)
