"""The engine with weights in 8 bits: how far logits move, memory, meshes, other weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.run import MeshConfig
from mjax.errors import UserError
from mjax.infer import weights
from mjax.infer.caches.contiguous import empty_cache, extend
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.weights import form_of, take_apart
from mjax.interop.pretrained import from_pretrained
from mjax.kernels.fp8.channels import Channels8
from mjax.models.base.adapted import specs_of_run
from mjax.sharding.collectives import LOCAL
from mjax.sharding.mesh import make_mesh, on_shards, parallel_of
from mjax.sharding.rules import partition
from mjax.sharding.spec import ParamSpec, is_spec
from tests.marks import quick, slow
from tests.unit.infer.test_generate import PROMPTS, VARIANTS, made

F32 = jnp.dtype("float32")
SPREAD = 0.18  # of weights: activations keep their size from layer to layer, as after training
# The root mean square by which logits move, of theirs: two roundings of 1/28 a product, some
# products one after the other.
MOVED = 0.25


def model(**variant):
    definition, params, cfg = made(initializer_range=SPREAD, **variant)
    return cfg, definition, params


def engine(cfg, definition, params, **settings):
    limits = Limits(rows=1, chunk=16, length=64)
    sizes = {"limits": limits, "pages": 12, "dtype": "float32", "weight_dtype": "fp8"}
    return Engine(definition, params, cfg, **sizes | settings)


def completed(engine, new=4):
    requests = [engine.add(p, SamplingParams(max_tokens=new)) for p in PROMPTS]
    while engine.has_work:
        engine.step()
    return [request.output.outputs[0] for request in requests]


def logits_of(cfg, definition, params):
    ids = jnp.asarray([PROMPTS[1], [*range(100, 116)]])

    def run(params):
        model = definition.bind(params)
        x, _ = extend(model, empty_cache(cfg, 2, 16, F32, LOCAL, 16), ids)
        return model.logits(x, LOCAL)

    return jax.jit(run)(params)


KINDS = [{}, *(VARIANTS[name] for name in ("experts", "latent", "states", "deltas"))]


@pytest.mark.parametrize("variant", quick([(kind,) for kind in KINDS], 0))
def test_logits_move_by_a_bounded_part(variant):
    cfg, definition, params = model(**variant)
    plain = logits_of(cfg, definition, take_apart(definition.specs, params, F32))
    rounded = take_apart(definition.specs, params, F32, form=Channels8)
    moved = logits_of(cfg, definition, rounded) - plain
    part = float(jnp.sqrt(jnp.mean(moved**2) / jnp.mean(plain**2)))
    assert 0.01 < part < MOVED


def test_memory_of_matmuls_halves_and_the_rest_stays():
    _, definition, params = model(**VARIANTS["experts"])
    wide = take_apart(definition.specs, params, jnp.dtype("bfloat16"))
    small = take_apart(definition.specs, params, jnp.dtype("bfloat16"), form=Channels8)

    def check(spec, wide, small):
        before, after = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (wide, small))
        if spec.takes_fp8:
            outputs = spec.size // np.prod(spec.shape[spec.lead :][: spec.inputs])
            assert after == before // 2 + 4 * outputs
        else:
            assert jax.tree.map(lambda x: x.dtype, small) == jax.tree.map(lambda x: x.dtype, wide)

    jax.tree.map(check, definition.specs, wide, small, is_leaf=is_spec)


def test_parameters_are_freed_as_they_are_rounded():
    _, definition, params = model()
    take_apart(definition.specs, params, jnp.dtype("bfloat16"), donate=True, form=Channels8)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("form", quick([Channels8, None], 0))
def test_layers_take_one_program_and_the_memory_of_one_layer_more(form, monkeypatch):
    _, definition, params = model(**VARIANTS["experts"])
    apart = take_apart(definition.specs, params, F32)
    wanted = take_apart(definition.specs, params, jnp.dtype("bfloat16"), form=form)
    traced, held = [], []
    convert, wait = weights._converted, jax.block_until_ready
    others = sum(x.nbytes for x in jax.live_arrays()) - nbytes(apart)

    def waiting(made):
        held.append(sum(x.nbytes for x in jax.live_arrays()) - others)
        return wait(made)

    monkeypatch.setattr(weights, "_converted", lambda *a: traced.append(1) or convert(*a))
    monkeypatch.setattr(jax, "block_until_ready", waiting)
    before, largest = nbytes(apart), max(map(nbytes, jax.tree.leaves(apart)))
    taken = take_apart(definition.specs, apart, jnp.dtype("bfloat16"), donate=True, form=form)
    jax.tree.map(np.testing.assert_array_equal, taken, wanted)
    assert max(held) <= before + largest and len(held) > len(traced)
    assert len(traced) <= len(jax.tree.leaves(definition.specs, is_leaf=is_spec))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_read_by_layers_is_the_one_read_by_stacks(tp, tmp_path):
    cfg, definition, params = model(num_hidden_layers=3)
    write_weights(tmp_path / "ckpt", array_source(cfg, params), definition.specs)
    mesh = make_mesh(MeshConfig(dp=1, tp=tp), jax.devices()[:tp])
    stacks = from_pretrained(tmp_path / "ckpt", mesh).params
    layers = from_pretrained(tmp_path / "ckpt", mesh, apart=True).params
    wanted = take_apart(definition.specs, stacks, F32)
    jax.tree.map(np.testing.assert_array_equal, layers, wanted)
    assert jax.tree.map(lambda x: x.sharding, layers) == jax.tree.map(lambda x: x.sharding, wanted)
    taken = take_apart(definition.specs, layers, F32, donate=True)
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(layers), strict=True)
    assert all(new is old for new, old in pairs), "nothing is copied"


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@slow
@pytest.mark.parametrize("cut", quick(["inputs", "outputs"], 0))
def test_products_on_a_mesh_are_those_of_one_device(cut):
    mesh = make_mesh(MeshConfig(dp=1, tp=2), jax.devices()[:2])
    parallel, rng = parallel_of(mesh), np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), F32) for s in [(4, 64), (64, 32)])
    held = Channels8.rounded(w, 1)
    axes = ("mlp", None) if cut == "inputs" else (None, "mlp")
    spec = ParamSpec(w.shape, axes, "matrix")
    places = Channels8.partition(partition(axes, parallel), spec)
    of_x, of_y = partition((None, axes[0]), parallel), partition((None, axes[1]), parallel)

    def product(x, held):
        y = held.product(x)
        return parallel.psum(y, "tp") if cut == "inputs" else y

    y = on_shards(product, mesh, (of_x, places), of_y)(x, held)
    bound = 1e-6 * (jnp.abs(x) @ jnp.abs(w))
    assert jnp.all(jnp.abs(y - held.product(x)) <= bound)


@pytest.fixture(scope="module")
def served():
    return engine(*model())


@pytest.fixture(scope="module")
def alone(served):
    return completed(served)


@pytest.mark.parametrize("tp", quick([2, 4]))
def test_the_engine_on_a_mesh_says_what_one_device_says(tp, alone):
    mesh = make_mesh(MeshConfig(dp=1, tp=tp), jax.devices()[:tp])
    definition, params, cfg = made(mesh, initializer_range=SPREAD)
    there = completed(engine(cfg, definition, params))
    for row, one in zip(there, alone, strict=True):
        assert row.token_ids == one.token_ids
        np.testing.assert_allclose(row.logprobs, one.logprobs, atol=1e-5)


@slow
def test_other_weights_are_rounded_too_and_nothing_is_compiled(served, alone):
    _, definition, params = model()
    count = len(served.runner.compiled)
    other = jax.tree.map(lambda x: jnp.flip(x, -1), params)
    served.update_weights(other)
    wanted = take_apart(definition.specs, other, F32, form=Channels8)
    jax.tree.map(np.testing.assert_array_equal, served.runner.params, wanted)
    changed = [row.token_ids for row in completed(served)]
    served.update_weights(params)
    again = [row.token_ids for row in completed(served)]
    assert again == [row.token_ids for row in alone] != changed
    assert len(served.runner.compiled) == count


def test_what_has_no_8_bit_form_is_refused_in_one_line():
    cfg, definition, params = model()
    with pytest.raises(UserError, match="weight_dtype=int3 .*: give fp8"):
        engine(cfg, definition, params, weight_dtype="int3")
    definition, _, _ = made(hidden_size=64, intermediate_size=128)
    lora = LoraConfig(rank=2, base="nf4", targets=["up"])
    specs = specs_of_run(definition.specs, lora, "bfloat16")
    with pytest.raises(UserError, match="the weights are in NF4"):
        form_of("fp8", specs)
