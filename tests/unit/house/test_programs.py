"""Law: a test process compiles a program once, and never takes one for another."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.programs import KEPT, kept


def test_a_program_is_made_once(monkeypatch):
    made = []
    real = compiler.backend_compile_and_load.__wrapped__  # without the memory of conftest.py

    def count(*arguments):
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(compiler, "backend_compile_and_load", kept(count))
    two = np.array(jax.devices()[:2])
    x, fewer = jnp.arange(6.0), jnp.arange(4.0)

    def times(factor):
        return lambda x: x * factor + 3.25

    np.testing.assert_array_equal(jax.jit(times(2))(x), 2 * np.arange(6) + 3.25)
    first = len(made)
    np.testing.assert_array_equal(jax.jit(times(2))(x), 2 * np.arange(6) + 3.25)
    assert len(made) == first > 0  # another function, the same program
    np.testing.assert_array_equal(jax.jit(times(4))(x), 4 * np.arange(6) + 3.25)
    assert len(made) == first + 1
    jax.jit(times(2))(fewer)
    assert len(made) == first + 2
    other = {"xla_cpu_enable_fast_math": True}
    jax.jit(times(2)).lower(x).compile(compiler_options=other)
    assert len(made) == first + 3
    for order in (two, two[::-1]):  # the same text, other devices
        before = len(made)
        cut = NamedSharding(Mesh(order, "a"), PartitionSpec("a"))
        out = jax.jit(times(2), out_shardings=cut)(jax.device_put(x, cut))
        assert out.sharding == cut and len(made) > before
        np.testing.assert_array_equal(out, 2 * np.arange(6) + 3.25)


def test_what_calls_python_is_made_anew():
    seen = []

    def call(number):
        def run(x):
            jax.debug.callback(lambda: seen.append(number))
            return x + 7.5

        return run

    for number in range(3):
        jax.jit(call(number))(jnp.arange(3.0)).block_until_ready()
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_the_program_used_longest_ago_is_forgotten():
    made = []

    def make(backend, module, *rest):
        made.append(module.operation.get_asm())
        return object()

    def program(number):
        operation = SimpleNamespace(get_asm=lambda enable_debug_info=False: str(number))
        options = SimpleNamespace(SerializeAsString=bytes)
        cpu = SimpleNamespace(platform="cpu")
        return cpu, SimpleNamespace(operation=operation), (), options, ()

    take = kept(make)
    for number in (*range(KEPT), 0, KEPT, 0, 1):
        take(*program(number))
    assert made == [*map(str, range(KEPT + 1)), "1"]
