"""A step of decoding, compiled for an H200, changes each recurrent state where it lies."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.config import load
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.programs import EnginePrograms
from mjax.models import definition_of
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, missing, weights_apart

pytestmark = pytest.mark.skipif(missing(triton=True) is not None, reason=missing(triton=True) or "")

ROWS = 64
MODELS = {  # two layers, and the state [H, P, N] of one
    "configs/models/nemotron_h_8b.yaml": ("megatron:M-", "128,64,128"),
    "configs/models/qwen3_5_9b.yaml": ("deltanet+mlp, full+mlp", "32,128,128"),
}


@pytest.mark.parametrize("launch", ["jax-triton", "xla"])
@pytest.mark.parametrize("path", MODELS)
def test_states_change_where_they_lie(path, launch, monkeypatch):
    monkeypatch.setenv("MJAX_TRITON_LAUNCH", launch)
    pattern, state = MODELS[path]
    keys = [f"model.layer_pattern={pattern}", "model.num_hidden_layers=2"]
    cfg = load(path, keys).model
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    definition = definition_of(cfg)

    def weight(spec):
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype(jnp.bfloat16), sharding=one)

    params = weights_apart(definition.specs, weight)
    sizes = PoolSizes(300, ROWS, 16)
    programs = EnginePrograms(definition, cfg, None, jnp.dtype("bfloat16"), sizes)
    with as_on(H200):
        text = programs.lowered(params, None, ROWS).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    made = re.compile(
        rf"= \(?.*f32\[\d+,{state}\]\S* (?!parameter|bitcast|get-tuple|tuple)[\w-]+\("
    )
    lines = [line for line in entry.splitlines() if made.search(line)]
    assert lines and all("token_step" in line for line in lines), lines
