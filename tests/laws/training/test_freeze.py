"""Laws of frozen parameters: they stay bit for bit, the others train as without them, and the
program holds no gradient, moment or exchange of theirs."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mjax.errors import UserError
from mjax.pipeline.storage import canonical
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.train import Trainer
from mjax.train.step import TRAIN, Gate
from tests.marks import exhaustive, quick, slow

ROWS = 24
FREEZE = "train.freeze=[embedding,norm,'*.mlp.up','*.attention.kv']"
FROZEN = {
    "embedding",
    "final_norm.gain",
    "dense.attention_norm.gain",
    "dense.mlp_norm.gain",
    "dense.mlp.up",
    "dense.attention.kv",
}
UNROLLED, BF16, DELAYED = "train.unroll=0", "precision.compute=bfloat16", "precision.fp8=delayed"
PLAIN = "optimizer.clip_grad_norm=0.0", "schedule.warmup_steps=0"


def names(tree: dict) -> set[str]:
    return set(flatten_dict(tree, sep="."))


@functools.cache
def of_all() -> tuple[dict, dict]:
    """(parameters at first, first moments of all after a step) on one device."""
    trainer = make_trainer("dense", Cell(), *PLAIN)
    params = jax.device_get(trainer.params())
    return params, first_moments(trainer)


def first_moments(trainer: Trainer) -> dict:
    """A tenth of the gradients, by name, after a step."""
    trainer.norm = float(trainer.step(make_batch(ROWS))["grad_norm"])
    return flatten_dict(canonical(trainer.storage, trainer.state["opt"]["mu"]), sep=".")


@exhaustive
@pytest.mark.parametrize(
    "cell, more",
    [
        (Cell({"dp": 4}, 3, 2), ()),
        (Cell(), ()),
        (Cell({"dp": 2, "tp": 2}, 1, 1), (UNROLLED, "train.remat=none")),  # exchanges overlap
        (Cell({"dp": 4}, 2, 2), (UNROLLED,)),
        (Cell({"pp": 2, "dp": 2}, 1, 3), ()),
        (
            Cell({"pp": 2}, 0, 2),
            (UNROLLED, "mesh.pipeline_layout='Et|tttL'"),
        ),  # slots that choose
    ],
)
def test_frozen_ones_stay_and_the_others_train_as_before(cell, more):
    before, moments = of_all()
    trainer = make_trainer("dense", cell, FREEZE, *PLAIN, *more)
    initial = jax.device_get(trainer.params())
    assert deviation(initial, before) <= 1e-6
    found = first_moments(trainer)
    assert names(before) - set(found) == FROZEN
    assert set(found) == names(trainer.state["opt"]["nu"])
    assert deviation(found, {name: moments[name] for name in found}) <= 1e-5
    squares = sum(float(np.sum(np.square(10 * m))) for m in jax.device_get(found).values())
    assert trainer.norm == pytest.approx(squares**0.5, rel=1e-5)
    after = flatten_dict(trainer.params(), sep=".")
    for name, array in flatten_dict(initial, sep=".").items():
        assert (array == np.asarray(after[name])).all() == (name in FROZEN), name


@exhaustive
def test_maxima_of_frozen_matmuls_are_remembered():
    """Their products still round; gradients equal those of a run without frozen parameters."""
    keys = DELAYED, UNROLLED, BF16
    all_, some = (make_trainer("dense", Cell({"dp": 2}, 1, 2), *keys, *f) for f in ((), (FREEZE,)))
    gradients, found = (
        flatten_dict(trainer.grads(make_batch(ROWS))[2], sep=".") for trainer in (all_, some)
    )
    assert deviation(found, {name: gradients[name] for name in found}) <= 1e-6
    for trainer in (all_, some):
        trainer.step(make_batch(ROWS))
    histories = (trainer.state["buffers"]["fp8"] for trainer in (some, all_))
    jax.tree.map(np.testing.assert_array_equal, *histories)


def equations(jaxpr) -> list:
    """All equations of a program, also those within others."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        params = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        )
        for inner in params:
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += equations(inner)
    return found


def exchanged_and_computed(trainer: Trainer) -> tuple[set, set]:
    """Shapes that the step sums over devices, and shapes of its products."""
    batch = trainer.placer.abstract(ROWS, trainer.cfg.data.seq_length)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    program = trainer._program(TRAIN, batch)
    gate = Gate(scalar, jax.ShapeDtypeStruct((), np.bool_))
    jaxpr = jax.make_jaxpr(program)(trainer.abstract_state(), batch, scalar, scalar, gate).jaxpr
    sums, products = set(), set()
    for equation in equations(jaxpr):
        if equation.primitive.name in ("psum", "reduce_scatter", "psum_scatter", "psum_invariant"):
            sums |= {var.aval.shape for var in equation.invars}
        if equation.primitive.name == "dot_general":
            products |= {var.aval.shape for var in equation.outvars}
    return sums, products


@slow
@pytest.mark.parametrize(
    "cell, more",
    quick(
        [
            (Cell({"dp": 2}, 1, 1), (UNROLLED,)),
            (Cell({"dp": 2}, 1, 2), ()),
            (Cell({"dp": 2}, 3, 2), (UNROLLED,)),
            (Cell({"pp": 2, "dp": 2}, 1, 2), ()),
        ],
        3,
    ),
)
def test_the_program_holds_no_gradient_or_exchange_of_them(cell, more):
    """Of the feed-forward of width 40: nothing else has that width, or 2 * 40 as in a matrix."""
    more = *more, "model.intermediate_size=40"

    def wide(shapes: set) -> set:
        """Shapes of weights or their matrices: no activation has 32 and the width as sizes."""
        return {s for s in shapes if 32 in s and {40, 80, 20} & set(s)}

    plain = exchanged_and_computed(make_trainer("dense", cell, *more))
    frozen = exchanged_and_computed(
        make_trainer("dense", cell, "train.freeze=[dense.mlp.*]", *more)
    )
    assert all(map(wide, plain))
    assert not any(map(wide, frozen))


@exhaustive
def test_a_run_resumes_and_another_choice_is_refused(tmp_path):
    keys = FREEZE, f"run.dir={tmp_path}"
    whole, resumed = (make_trainer("dense", Cell(), *keys) for _ in range(2))
    whole.step(make_batch(ROWS))
    whole.save()
    whole.store.wait()
    whole.step(make_batch(ROWS, 1))
    assert resumed.restore() == 1
    resumed.step(make_batch(ROWS, 1))
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    with pytest.raises(UserError, match=r"has train.freeze=\['embedding'.*but this run has"):
        make_trainer("dense", Cell(), f"run.dir={tmp_path}").restore()


@slow
@pytest.mark.parametrize(
    "feature, stack, part",
    quick([("muon", "dense", "attention"), ("experts", "moe", "mlp")], 1),
)
def test_matrices_of_muon_and_experts_freeze(feature, stack, part):
    where = Cell({"dp": 2, "ep": 2 if feature == "experts" else 1}, 1, 2)
    trainer = make_trainer(feature, where, f"train.freeze=[{stack}.{part}.*]", *PLAIN)
    before = jax.device_get(trainer.params()[stack])
    trainer.step(make_batch(ROWS))
    after = jax.device_get(trainer.params()[stack])
    jax.tree.map(np.testing.assert_array_equal, after.pop(part), before.pop(part))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), after, before)
    assert all(jax.tree.leaves(changed)), changed


@pytest.mark.parametrize(
    "patterns, match",
    [
        ("[dense.mlp.upp]", "train.freeze: 'dense.mlp.upp' is no role .* matches no name"),
        ("['*']", "train.freeze: it names every parameter"),
    ],
)
def test_mistakes_are_said_in_one_line(patterns, match):
    with pytest.raises(UserError, match=match):
        make_trainer("dense", Cell(), f"train.freeze={patterns}")
