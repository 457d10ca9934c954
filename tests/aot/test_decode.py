"""A step of decoding, compiled for an H200, reads weights and caches where they lie."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from mjax.infer.generate import DecodePrograms

from mjax.config import load
from mjax.infer.sample import Sampling, draws_of, settings_of
from mjax.models import definition_of
from mjax.plan.absent_devices import compiler_devices
from mjax.sharding.spec import is_spec
from tests.aot.common import H200, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

LAYERS, SLOTS = 2, 256
MADE = re.compile(r"(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(")
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional"}


def compiled_step(batch, sampling=Sampling()):  # noqa: B008 - frozen
    """The step of a batch of Llama-3-8B rows with two layers, in bf16, from lists of layers."""
    cfg = load("configs/models/llama3_8b.yaml", [f"model.num_hidden_layers={LAYERS}"]).model
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    def weight(spec):
        if spec.axes[:1] != ("layers",):
            return array(spec.shape)
        return [array(spec.shape[1:]) for _ in range(spec.shape[0])]

    def placed(tree):
        return jax.tree.map(lambda x: array(x.shape, x.dtype), tree)

    definition = definition_of(cfg)
    params = jax.tree.map(weight, definition.specs, is_leaf=is_spec)
    programs = DecodePrograms(definition, cfg, None, jnp.dtype("bfloat16"))
    ids, count = np.zeros((batch, 16), np.int32), np.full(batch, 16, np.int32)
    settings = settings_of([sampling] * batch)
    draws = dataclasses.replace(draws_of([sampling] * batch), penalties=True)  # as `Generator`
    prefill = functools.partial(programs.prefill, draws=draws, length=SLOTS)
    seed = np.uint32(0)
    state, _ = jax.eval_shape(prefill, params, ids, count, settings, seed=seed)
    step = jax.jit(programs.step, static_argnames="draws", donate_argnames="state")
    caches = jax.tree.leaves(state[0].layers)
    lowered = step.lower(params, placed(settings), draws, state=placed(state))
    return lowered.compile(), sum(2 * math.prod(c.shape) for c in caches), cfg


@pytest.mark.parametrize("batch", [1, 64])
def test_nothing_of_the_size_of_a_weight_or_cache_is_made_but_caches_in_place(batch):
    made, cache_bytes, cfg = compiled_step(batch)
    cache = batch * cfg.attention.num_key_value_heads * SLOTS * cfg.attention.head_dim
    smallest_weight = (
        2 * cfg.hidden_size * cfg.attention.num_key_value_heads * cfg.attention.head_dim
    )
    text = made.as_text()
    large = []
    for line in text[text.index("\nENTRY") :].splitlines():
        found = MADE.match(line.strip())
        if found is None or found[3] in FREE:
            continue
        shapes = re.findall(r"\w+\[([\d,]+)\]", found[2])
        size = max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0)
        if size >= min(cache, smallest_weight):
            large.append((found[1].rsplit(".", 1)[0], size))
    # One row's new token is a slice, those of many rows a scatter: each row has its own slot.
    kind = "dynamic_update_slice" if batch == 1 else "scatter"
    updates = [name for name, size in large if size == cache and kind in name]
    assert len(updates) == len(large) == 2 * LAYERS, large
    memory = made.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes, "caches must be donated"
    logits = 4 * batch * cfg.vocab_size
    assert memory.temp_size_in_bytes < 2 * logits + 8e6, "logits and activations; no more"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)])
def test_the_host_waits_for_nothing_within_a_step(sampling):
    made, _, _ = compiled_step(2, sampling)
    waits = re.findall(r" (conditional|while|infeed|recv)\(", made.as_text())
    assert not waits, "the host reads a predicate before it launches what follows"


@pytest.mark.parametrize("batch", [1, 64])
def test_queries_keys_and_values_are_one_matmul(batch):
    made, _, cfg = compiled_step(batch)
    text = made.as_text()
    width = (
        cfg.attention.num_attention_heads + 2 * cfg.attention.num_key_value_heads
    ) * cfg.attention.head_dim
    line = rf"= \w+\[(?:\d+,)*{width}\]\S* fusion\(.*__triton_nested_gemm_fusion"
    assert len(re.findall(line, text[text.index("\nENTRY") :])) == LAYERS
