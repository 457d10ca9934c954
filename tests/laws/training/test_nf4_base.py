"""Laws of a base in NF4 and of PiSSA: a run is that on the dequantized weights, its numbers do not
depend on the mesh, its codes stay, and a resumed run finds the same base."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.errors import UserError
from mjax.interop import base_of_adapters
from mjax.kernels.nf4.parameters import codes_of, is_magnitude, value_of_base
from mjax.models import definition_of
from mjax.models.base.adapted import is_of_adapter
from mjax.pipeline.storage import canonical_abstract, from_canonical
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.run.dry_run import plan_lines
from mjax.run.loop import run_summary
from mjax.sharding.spec import count_parameters
from mjax.train import Trainer
from tests.laws.training.test_lora import PLAIN, RANK, ROWS, UNROLLED, moments
from tests.marks import exhaustive, quick, slow

NF4 = "lora.base=nf4"
# Blocks of 64 inputs, on two devices of tp, too.
WIDE = "model.hidden_size=64", "model.intermediate_size=128", "model.attention.head_dim=16"
TWO_LAYERS = ("model.num_hidden_layers=2",)
KV_HEADS = "model.attention.num_key_value_heads=4"
OF_EXPERTS = "model.moe.moe_intermediate_size=128"


def keys_of(feature: str) -> tuple[str, ...]:
    return (*WIDE, OF_EXPERTS) if feature == "experts" else WIDE


def begin_at(trainer: Trainer, params: dict) -> None:
    stored = trainer.abstract_state()["params"]
    wanted = canonical_abstract(trainer.storage, stored)
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, wanted)
    trainer.start(from_canonical(trainer.storage, placed, stored))


def dequantized(params: dict, specs: dict) -> dict:
    """Canonical parameters with the values of weights in NF4 in the place of their codes."""
    flat, codes = flatten_dict(params), codes_of(specs)
    values = {p: x for p, x in flat.items() if not is_magnitude(p)}
    for path, spec in codes.items():
        values[path] = value_of_base(flat, path, spec)
    return unflatten_dict(values)


@functools.cache
def on_one_device(feature: str, *keys: str) -> tuple[float, dict, dict]:
    """(loss, moments, codes) of a step."""
    trainer = make_trainer(feature, Cell(), *PLAIN, *keys_of(feature), RANK, NF4, *keys)
    begun = jax.device_get(trainer.params())
    found = moments(trainer)
    return trainer.loss, found, base_of_run(begun)


def base_of_run(params: dict) -> dict:
    return {path: x for path, x in flatten_dict(params).items() if not is_of_adapter(path)}


@pytest.mark.parametrize(
    "feature, keys",
    quick(
        [
            ("dense", ()),
            ("dense", (UNROLLED, "train.remat=none", "lora.dora=true")),
            ("experts", ("train.experts=xla",)),
            ("experts", ("train.experts=loop", UNROLLED)),
            ("experts", ("train.experts=xla", "lora.dora=true")),
        ]
    ),
)
def test_a_step_is_that_on_the_dequantized_weights(feature, keys):
    trainer = make_trainer(feature, Cell(), *PLAIN, *keys_of(feature), RANK, NF4, *keys)
    begun = jax.device_get(trainer.params())
    found = moments(trainer)
    whole = make_trainer(feature, Cell(), *PLAIN, *keys_of(feature), RANK, *keys)
    begin_at(whole, dequantized(begun, trainer.specs))
    expected = moments(whole)
    assert trainer.loss == pytest.approx(whole.loss, rel=1e-6)
    assert deviation(found, expected) <= 2e-6
    codes = [x for x in base_of_run(begun).values() if x.dtype == np.uint8]
    assert len(codes) >= 10 and all(np.unique(c).size > 30 for c in codes)


@exhaustive
@slow
@pytest.mark.parametrize(
    "feature, cell, keys",
    quick(
        [
            ("dense", Cell({"dp": 2, "tp": 2}, 3, 2), ()),
            ("dense", Cell({"pp": 2, "tp": 2, "cp": 2}, 0, 3), (UNROLLED,)),
            ("dense", Cell({"dp": 4, "tp": 2}, 1, 1), (UNROLLED, "train.remat=none")),
            ("dense", Cell({"pp": 2}, 0, 2), ("mesh.pipeline_layout='Et|tttL'",)),
            ("dense", Cell({"dp": 2, "tp": 2}, 3, 2), ("lora.dora=true",)),
            ("experts", Cell({"dp": 2, "ep": 2, "tp": 2}, 3, 3), ()),
            ("experts", Cell({"pp": 2, "ep": 4}, 1, 1), ()),
            ("experts", Cell({"dp": 2, "ep": 2, "tp": 2}, 1, 3), ("mesh.expert_tp=1",)),
        ],
        0,
    ),
)
def test_numbers_do_not_depend_on_the_mesh(feature, cell, keys):
    own = [key for key in keys if not key.startswith(("train.", "mesh."))]
    loss, expected, base = on_one_device(feature, *own)
    trainer = make_trainer(feature, cell, *PLAIN, *keys_of(feature), RANK, NF4, *keys)
    jax.tree.map(np.testing.assert_array_equal, base_of_run(jax.device_get(trainer.params())), base)
    found = moments(trainer)
    assert trainer.loss == pytest.approx(loss, rel=2e-6)
    assert deviation(found, expected) <= 1e-5


def written_weights(folder, *keys: str) -> str:
    """A run without adapters, whose weights others start from."""
    run = make_trainer("dense", Cell(), *WIDE, *TWO_LAYERS, f"run.dir={folder}", *keys)
    run.save()
    run.store.wait()
    return f"checkpoint.init_from={folder}"


@exhaustive
def test_counts_are_of_weights():
    """Codes hold two weights each, and magnitudes are none."""
    trainer = make_trainer("dense", Cell(), *WIDE, RANK, NF4)
    base = count_parameters(definition_of(trainer.cfg.model).specs)
    assert f" ({base:,} frozen)" in run_summary(trainer)
    assert f"frozen      {base:,} of them, by lora" in plan_lines(trainer)


PISSA = "lora.init=pissa"


@exhaustive
@pytest.mark.parametrize("keys", quick([((NF4, PISSA),), ((NF4,),), ((PISSA,),)]))
def test_a_run_starts_and_resumes_at_other_meshes_with_one_base(tmp_path, keys, monkeypatch):
    keys = (
        *WIDE,
        *TWO_LAYERS,
        RANK,
        *keys,
        written_weights(tmp_path / "base"),
        f"run.dir={tmp_path / 'run'}",
    )
    cells = Cell(), Cell({"dp": 2, "tp": 2}, 3, 2)
    resumed, cut = (make_trainer("dense", cell, *keys) for cell in cells)
    for trainer in (resumed, cut):
        trainer.start(trainer.checkpoints.start_params()[0])
    begun = jax.device_get(resumed.params())
    jax.tree.map(np.testing.assert_array_equal, begun, jax.device_get(cut.params()))
    for _ in range(20):
        cut.step(make_batch(ROWS))
    cut.save()
    cut.store.wait()
    with monkeypatch.context() as patches:
        patches.setattr(base_of_adapters, "start_adapters", None)  # a resumed run reads its own
        assert resumed.restore() == 20
    same = jax.device_get((cut.params(), resumed.params()))
    jax.tree.map(np.testing.assert_array_equal, *same)
    jax.tree.map(np.testing.assert_array_equal, base_of_run(begun), base_of_run(same[0]))


@exhaustive
def test_principal_parts_add_up_to_the_weights(tmp_path):
    """The first step of PiSSA is that of the weights, and of their adapters each takes a part."""
    given = written_weights(tmp_path)
    plain, pissa = (
        make_trainer("dense", Cell(), *PLAIN, *WIDE, *TWO_LAYERS, RANK, given, f"lora.init={init}")
        for init in ("zero", "pissa")
    )
    for trainer in (plain, pissa):
        trainer.start(trainer.checkpoints.start_params()[0])
    base, begun = (base_of_run(t.params()) for t in (plain, pissa))
    name = ("dense", "mlp", "up")
    for layer in range(len(base[name])):
        for half in range(2):
            values = np.linalg.svd(base[name][layer, :, half])[1]
            rest = np.linalg.svd(begun[name][layer, :, half])[1]
            np.testing.assert_allclose(rest[:-3], values[3:], rtol=1e-4)
            np.testing.assert_allclose(rest[-3:], 0, atol=1e-5)
    losses = [float(t.step(make_batch(ROWS))["loss"]) for t in (plain, pissa)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "keys, match",
    [
        ((NF4,), "dense.attention.kv has 32 inputs, which blocks of 64 do not divide"),
        ((NF4, *WIDE, "mesh.tp=4"), "mesh.tp=4 does not divide the heads of dense.attention.kv"),
        ((NF4, *WIDE, "mesh.tp=4", KV_HEADS), "out has 32 inputs on each of mesh.tp=4 devices"),
        ((NF4, *WIDE, "precision.fp8=current"), "`?lora.base"),
        (("lora.init=pissa",), "lora.init='pissa'.*set checkpoint.init_from"),
        (("lora.init=pissa", "lora.dora=true", "checkpoint.init_from=x"), "choose one of them"),
    ],
)
def test_mistakes_are_said_in_one_line(keys, match):
    cell = Cell({"tp": 4}) if "mesh.tp=4" in keys else Cell()
    keys = [key for key in keys if not key.startswith("mesh.")]
    with pytest.raises(UserError, match=match) as raised:
        make_trainer("dense", cell, RANK, *keys)
    assert "\n" not in str(raised.value)
