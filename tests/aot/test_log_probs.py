"""Log-probabilities compiled for H200: at 16k tokens of 152k words, at most 3 GB of temporaries."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.loss.log_probs import token_scores
from mjax.kernels.loss.rows import Terms
from mjax.plan.absent_devices import compiler_devices
from mjax.sharding.collectives import LOCAL
from tests.aot.common import H200, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TOKENS, WORDS, WIDTH = 16384, 151936, 4096


def temporaries(function) -> int:
    where = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    shapes = (TOKENS, WIDTH), (WORDS, WIDTH)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
    labels = jax.ShapeDtypeStruct((TOKENS,), jnp.int32, sharding=where)
    compiled = jax.jit(function).lower(*inputs, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def scores(x, w, labels):
    return token_scores(x, w, labels, terms=Terms(WORDS), parallel=LOCAL, entropy=True)


def loss(x, w, labels):
    found = scores(x, w, labels)
    return jnp.sum(jnp.sin(found.log_p) + jnp.sin(found.entropy))


def test_a_forward_pass_holds_one_chunk_of_logits():
    assert temporaries(scores) < 1.4e9


def test_gradients_add_the_fp32_gradient_of_the_head():
    """Which alone is 2.5 GB."""
    assert temporaries(jax.value_and_grad(loss, (0, 1))) < 3.0e9
