"""Log-probabilities compiled for H200: at 16k tokens of 152k words, at most 3 GB of temporaries."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.kernels.loss.cross_entropy import token_sums
from mjax.kernels.loss.log_probs import token_scores
from mjax.kernels.loss.rows import Terms
from mjax.plan.absent_devices import compiler_devices, compiler_told
from mjax.sharding.collectives import LOCAL
from tests.aot.common import H200, missing
from tests.clipped_ratio import ClippedRatio
from tests.devices import GPU, choose_for

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TOKENS, WORDS, WIDTH = 16384, 151936, 4096


def compiled(function, *more: str):
    """`function` of x, w, labels and fp32 [TOKENS] arrays for the names in `more`."""
    where = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    shapes = (TOKENS, WIDTH), (WORDS, WIDTH)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
    for dtype in (jnp.int32, *[jnp.float32] * len(more)):
        inputs.append(jax.ShapeDtypeStruct((TOKENS,), dtype, sharding=where))
    return jax.jit(function).lower(*inputs).compile()


def temporaries(made) -> int:
    return made.memory_analysis().temp_size_in_bytes


def scores(x, w, labels):
    return token_scores(x, w, labels, terms=Terms(WORDS), parallel=LOCAL, entropy=True)


def loss(x, w, labels):
    found = scores(x, w, labels)
    return jnp.sum(jnp.sin(found.log_p) + jnp.sin(found.entropy))


def test_a_forward_pass_holds_one_chunk_of_logits():
    assert temporaries(compiled(scores)) < 1.4e9


def test_gradients_add_the_fp32_gradient_of_the_head():
    """Which alone is 2.5 GB."""
    assert temporaries(compiled(jax.value_and_grad(loss, (0, 1)))) < 3.0e9


@pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))
def test_a_token_function_costs_what_next_token_training_costs(monkeypatch):
    """Our kernel, the same three matmuls in a loop, the same memory but for fields and slopes."""
    choose_for(monkeypatch, GPU, "loss_rows")

    def loss_by(function, x, w, labels, mask, old, advantage):
        fields = {"old_log_prob": old, "advantage": advantage}
        more = {"terms": Terms(WORDS), "parallel": LOCAL}
        return token_sums(x, w, labels, mask, function, fields, **more)["loss"]

    made = []
    for function in (None, ClippedRatio()):
        gradient = jax.value_and_grad(functools.partial(loss_by, function), (0, 1))
        with compiler_told(H200.details.capability):
            made.append(compiled(gradient, "mask", "old", "advantage"))
    plain, clipped = (m.as_text() for m in made)
    for pattern in (r"custom-call\(.*loss_rows", r" dot\(|__cublas"):
        counts = [len(re.findall(pattern, text)) for text in (plain, clipped)]
        assert counts[0] == counts[1] > 0, pattern
    sizes = [temporaries(m) for m in made]
    assert sizes[1] < sizes[0] + 3e8 and sizes[1] < 3.0e9, sizes
