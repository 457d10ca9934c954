"""Laws of several adapters at once: each row has the numbers of its own adapter alone."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from mjax.checkpoint.merged import Adapters
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.run import MeshConfig
from mjax.errors import UserError
from mjax.infer.caches.contiguous import empty_cache, extend
from mjax.interop.adapter_stack import stack_of_adapters
from mjax.interop.adapters_of_run import joined_trees
from mjax.models.base.adapted import adapted_specs
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.params import with_specs
from mjax.prove import Cell, make_trainer
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import make_mesh, on_shards, parallel_of
from mjax.sharding.rules import param_partitions
from mjax.sharding.spec import ParamSpec
from tests.adapters import drawn_adapters
from tests.marks import quick, slow

IDS = np.random.default_rng(0).integers(1, 250, (4, 8), np.int32)
ROWS = np.array([1, 0, 2, 1], np.int32)
WHOLE = PartitionSpec()
# Ranks and alphas of the adapters in slots 1 and 2.
SETTINGS = (LoraConfig(rank=2, alpha=3.0), LoraConfig(rank=4, alpha=6.0, rslora=True))


@functools.cache
def base(feature: str) -> tuple:
    """(config, definition, parameters) of a small model."""
    trainer = make_trainer(feature, Cell())
    return trainer.cfg.model, trainer.definition, jax.device_get(trainer.params())


def adapters_of(feature: str) -> list[Adapters]:
    """Two adapters; the second is not on all weights."""
    specs, found = base(feature)[1].specs, []
    for number, lora in enumerate(SETTINGS):
        scale = lora.alpha / lora.rank ** (0.5 if lora.rslora else 1)
        picks = is_in_second if number else is_dense
        drawn = drawn_adapters(specs, picks, lora.rank, scale)
        arrays = {path: (1 - 0.4 * number) * array for path, array in drawn.arrays.items()}
        found.append(replace(drawn, arrays=arrays))
    return found


def is_dense(spec: ParamSpec) -> bool:
    return spec.matmul is not None and not spec.is_of_experts


def is_in_second(spec: ParamSpec) -> bool:
    return is_dense(spec) and spec.matmul != "down"


def hidden(definition, params: dict, slots=None, parallel: Parallel = LOCAL) -> jax.Array:
    """Final activations [B, S, D], computed by the devices of `parallel`."""
    info = replace(tokens_of(IDS.shape), adapters=slots)
    return definition.bind(params, parallel).hidden(jnp.asarray(IDS), info, Context(parallel))[0]


@functools.cache
def alone(feature: str, slot: int) -> np.ndarray:
    """Final activations of the model with one adapter, or none."""
    _, definition, params = base(feature)
    if slot:
        lora = SETTINGS[slot - 1]
        given = adapters_of(feature)[slot - 1]
        targets = [".".join(path) for path in given.scales]
        lora = lora.model_copy(update={"targets": targets})
        specs = adapted_specs(definition.specs, lora, "float32")
        definition = with_specs(definition, specs)
        params = joined_trees(params, unflatten_dict(given.arrays))
    return np.asarray(jax.jit(functools.partial(hidden, definition))(params))


def together(feature: str) -> tuple:
    """(definition, parameters) of the model with both adapters in slots."""
    _, definition, params = base(feature)
    names = dict(zip(("one", "two"), adapters_of(feature), strict=True))
    specs, arrays = stack_of_adapters(names, definition.specs)
    return with_specs(definition, specs), joined_trees(params, arrays)


def require_rows(found: jax.Array, feature: str, bound: float = 1e-6) -> None:
    """Each row is that of its adapter alone, and the adapters change it."""
    for row, slot in enumerate(ROWS):
        wanted = alone(feature, int(slot))
        np.testing.assert_allclose(found[row], wanted[row], rtol=bound, atol=bound * wanted.max())
    others = [row for row in range(4) if ROWS[row]]
    change = np.abs(found - alone(feature, 0))[np.array(others)]
    assert change.max(axis=(1, 2)).min() > 0.05


FEATURES = "dense", "latent attention", "hybrid", "gated deltanet"


@slow
@pytest.mark.parametrize("feature", quick(FEATURES, 0, 1))
def test_rows_have_the_numbers_of_their_adapters(feature):
    definition, params = together(feature)
    run = jax.jit(functools.partial(hidden, definition))
    found = np.asarray(run(params, ROWS))
    require_rows(found, feature)
    np.testing.assert_array_equal(found[1], alone(feature, 0)[1])
    of_tokens = np.repeat(ROWS[:, None], IDS.shape[1], 1)
    np.testing.assert_array_equal(run(params, of_tokens), found)


@pytest.mark.parametrize(
    "feature, cuts_sequence",
    quick([("dense", True), ("latent attention", False), ("dense", False), ("hybrid", True)], 0),
)
def test_devices_of_tp_give_the_same_rows(feature, cuts_sequence):
    definition, params = together(feature)
    mesh = make_mesh(MeshConfig(**dict.fromkeys(AXES, 1) | {"tp": 2}), jax.devices()[:2])
    parallel = replace(parallel_of(mesh), cuts_sequence=cuts_sequence)
    partitions = param_partitions(definition.specs, parallel)
    placed = jax.tree.map(
        lambda cut, a: jax.device_put(a, NamedSharding(mesh, cut)), partitions, params
    )
    local = functools.partial(hidden, definition, parallel=parallel)
    for slots in (ROWS, np.repeat(ROWS[:, None], IDS.shape[1], 1)):
        run = on_shards(in_program_order(local), mesh, (partitions, WHOLE), WHOLE)
        bound = 5e-6 if feature == "hybrid" else 1e-6  # scans sum in another order
        require_rows(np.asarray(jax.jit(run)(placed, slots)), feature, bound)


@pytest.mark.parametrize("feature", quick(["dense", "latent attention"], 1))
def test_rows_go_on_from_caches_with_their_adapters(feature):
    """Keys and values in caches are those of the adapter of their row."""
    cfg = base(feature)[0]
    definition, params = together(feature)
    run = jax.jit(lambda p, *args: extend(definition.bind(p), *args, adapters=jnp.asarray(ROWS)))
    cache = empty_cache(cfg, len(ROWS), IDS.shape[1], jnp.float32)
    found = []
    for ids in (IDS[:, :6], IDS[:, 6:7], IDS[:, 7:]):
        x, cache = run(params, cache, ids)
        found.append(x)
    found = np.concatenate(found, 1)
    for row, slot in enumerate(ROWS):
        wanted = alone(feature, int(slot))[row]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-5, atol=1e-5 * wanted.max())


def test_what_cannot_differ_by_token_is_one_line():
    specs = base("dense")[1].specs
    q = functools.partial(drawn_adapters, specs, lambda spec: spec.matmul == "q")
    norm = {("final_norm", "gain"): np.ones(32, np.float32)}
    cases = {
        "final_norm.gain was trained whole": (replace(q(), arrays=q().arrays | norm), specs),
        "dense.attention.q has DoRA": (q(dora=True), specs),
        "embedding is a table": (drawn_adapters(specs, lambda s: s.role == "embedding"), specs),
    }
    of_experts = base("experts")[1].specs
    cases["is of experts"] = drawn_adapters(of_experts), of_experts
    cases["is it of another model"] = drawn_adapters(of_experts), specs
    for message, (adapters, declared) in cases.items():
        with pytest.raises(UserError, match=message) as raised:
            stack_of_adapters({"adapter (slot 1)": adapters}, declared)
        assert "\n" not in str(raised.value)
