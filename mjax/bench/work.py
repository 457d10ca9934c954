"""A piece of work that the kernel benchmark times, and random inputs for it."""

import functools
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


def pulled(fn: Callable, inputs: tuple, name: str, flops: float = 0.0, moved: float = 0.0) -> Work:
    """The backward of `fn` alone: its residuals are made beforehand."""
    out, pull = jax.jit(functools.partial(jax.vjp, fn))(*inputs)
    grads = jax.tree.map(lambda o: draw(o.shape, 9, o.dtype), out)
    return Work(name, lambda pull, g: pull(g), (pull, grads), flops, moved)
