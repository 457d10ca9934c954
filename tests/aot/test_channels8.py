"""A step of the engine with weights in 8 bits, compiled for an H200, reads them where they lie."""

import re
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mjax.config import load
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.programs import EnginePrograms
from mjax.kernels.fp8.channels import Channels8
from mjax.models import definition_of
from mjax.plan.absent_devices import as_on, compiler_devices
from tests.aot.common import H200, missing, weights_apart
from tests.aot.test_decode import FREE, MADE
from tests.marks import quick

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

LAYERS = 2
MODELS = {
    "dense": "configs/models/llama3_8b.yaml",
    "experts": "configs/models/qwen3_30b_a3b.yaml",
}


def compiled_step(path, rows):
    """A step of decoding of `rows` rows, and the shapes of weights in 8 bits."""
    cfg = load(path, [f"model.num_hidden_layers={LAYERS}"]).model
    one = SingleDeviceSharding(compiler_devices(H200, 1)[0])
    definition, rounded = definition_of(cfg), []

    def layer(spec):
        value = jax.ShapeDtypeStruct(spec.shape, spec.dtype(jnp.bfloat16))
        if Channels8.takes(spec):
            value = jax.eval_shape(lambda v: Channels8.rounded(v, spec.inputs, spec.lead), value)
            rounded.append(value)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), value)

    params = weights_apart(definition.specs, layer)
    sizes = PoolSizes(300, 256, 16)
    programs = EnginePrograms(definition, cfg, None, jnp.dtype("bfloat16"), sizes, Channels8)
    with as_on(H200):
        return programs.lowered(params, None, rows).compile().as_text(), rounded


CASES = [("dense", 1), ("dense", 16), ("dense", 256), ("experts", 64)]


@pytest.mark.parametrize("model, rows", quick(CASES, 1))
def test_no_weight_is_made_wide_or_copied(model, rows):
    text, rounded = compiled_step(MODELS[model], rows)
    weights = set()
    for w in rounded:
        outputs = w.scales.shape[w.lead :]
        inputs = w.values.shape[w.scales.ndim :]
        weights.add(tuple(sorted((*w.scales.shape[: w.lead], prod(outputs), prod(inputs)))))
    made, read = [], 0
    for line in text[text.index("\nENTRY") :].splitlines():
        found = MADE.match(line.strip())
        if found is None:
            continue
        read += found[3] == "parameter" and "f8e4m3fn" in found[2]
        if found[3] in FREE:
            continue
        for shape in re.findall(r"\w+\[([\d,]+)\]", found[2]):
            sizes = sorted(int(n) for n in shape.split(",") if n != "1")
            if tuple(sizes) in weights:
                made.append(line.strip()[:200])
    assert read == LAYERS * len(rounded) and not made
