"""A step through layers in stages, compiled for two H200s, copies neither caches nor weights."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from mjax.config import load
from mjax.config.schema.run import MeshConfig
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.programs import EnginePrograms
from mjax.infer.stages.layers_in_stages import stages_for
from mjax.infer.weights import partitions_apart
from mjax.models import definition_of
from mjax.plan.absent_devices import as_on, compiler_devices
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import is_spec
from tests.aot.common import H200, missing
from tests.marks import quick

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
# The second slot of the stages of the first pattern has layers of two kinds.
CASES = [(["model.layer_pattern=LGLL", "model.attention.sliding_window=128"], None), ([], 2048)]


@pytest.mark.parametrize("keys, tokens", quick(CASES))
def test_caches_stay_where_they_lie(keys, tokens):
    given = ["model.num_hidden_layers=4", *keys]
    cfg = load("configs/models/llama3_8b.yaml", given).model
    mesh = make_mesh(MeshConfig(dp=1, pp=2), compiler_devices(H200, 2))
    definition, layout, sizes = definition_of(cfg), stages_for(cfg, 2), PoolSizes(2000, 256, 4)
    of_model = definition, cfg, mesh, jnp.dtype("bfloat16")
    programs = EnginePrograms(*of_model, sizes, None, layout)
    partitions = partitions_apart(definition.specs, programs.parallel, None, layout)

    def weight(spec, cut):
        if isinstance(cut, list):
            return [array((2, *spec.shape[1:]), each) for each in cut]
        return array(spec.shape, cut)

    def array(shape, cut):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, cut))

    params = jax.tree.map(weight, definition.specs, partitions, is_leaf=is_spec)
    with as_on(H200):
        made = programs.lowered(params, tokens, 256 if tokens is None else 16).compile()
    memory, caches = made.memory_analysis(), programs.bytes_of_caches()
    assert memory.alias_size_in_bytes == caches > 1e9
    assert memory.temp_size_in_bytes < caches / 4  # one layer's keys
