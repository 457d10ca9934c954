"""Laws of adapters: their gradients are those of whole weights by the chain rule, their numbers do
not depend on the mesh, the base stays bit for bit, and checkpoints hold adapters alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.errors import UserError
from mjax.models.base.adapted import is_of_adapter
from mjax.models.base.adapter import Adapter, InputDropout, TokenPlaces
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.weight import Weight, matmul
from mjax.pipeline.storage import canonical
from mjax.prove import Cell, compare, deviation, holds, make_batch, make_trainer
from mjax.run.loop import run_summary
from mjax.train import Trainer
from tests.adapters import adapted_values
from tests.laws.training.test_freeze import exchanged_and_computed
from tests.marks import exhaustive, quick, slow

ROWS = 24
RANK = "lora.rank=3"
PLAIN = "optimizer.clip_grad_norm=0.0", "schedule.warmup_steps=0"
ALL = "lora.targets=['*',embedding,head]"
DORA = "lora.dora=true"
UNROLLED = "train.unroll=0"


def moments(trainer: Trainer) -> dict:
    """A tenth of the gradients, by path, after a step."""
    trainer.loss = float(trainer.step(make_batch(ROWS))["loss"])
    return flatten_dict(jax.device_get(canonical(trainer.storage, trainer.state["opt"]["mu"])))


@functools.cache
def on_one_device(feature: str, *keys: str) -> tuple[float, dict]:
    trainer = make_trainer(feature, Cell(), *PLAIN, RANK, *keys)
    found = moments(trainer)
    return trainer.loss, found


@exhaustive
@pytest.mark.parametrize(
    "feature, keys",
    [
        ("dense", (ALL,)),
        ("experts", ("train.experts=loop",)),
        ("experts", ("train.experts=xla",)),
        ("experts", ("train.experts=xla", "lora.dora=true")),
        ("latent attention", ()),
        ("hybrid", ("lora.rslora=true",)),
        ("gated deltanet", ()),
        ("biases", ()),
    ],
)
def test_gradients_follow_from_those_of_whole_weights(feature, keys):
    """Those of W + scale a b give them by the chain rule: scale dW b', scale a' dW."""
    trainer = make_trainer(feature, Cell(), *PLAIN, RANK, *keys)
    begun = jax.device_get(trainer.params())
    found = moments(trainer)
    plain = [key for key in keys if not key.startswith("lora.")]
    whole = make_trainer(feature, Cell(), *PLAIN, *plain)
    merge = functools.partial(adapted_values, specs=trainer.specs)
    merged = jax.tree.map(jnp.asarray, merge(begun))
    whole.start(merged)
    of_weights = moments(whole)
    assert trainer.loss == pytest.approx(whole.loss, rel=1e-5)
    base = {path: a for path, a in flatten_dict(begun).items() if not is_of_adapter(path)}
    adapters = {path: a for path, a in flatten_dict(begun).items() if is_of_adapter(path)}

    def of_adapters(adapters: dict) -> jax.Array:
        values = flatten_dict(merge(unflatten_dict(base | adapters)))
        return sum(jnp.vdot(of_weights[path], values[path]) for path in values)

    expected = jax.grad(of_adapters)(adapters)
    assert deviation(found, expected) <= 2e-5


@pytest.mark.parametrize(
    "feature, cell, keys",
    quick(
        [
            ("dense", Cell({"dp": 2, "tp": 2}, 1, 2), (UNROLLED, "train.remat=none")),
            ("dense", Cell({"pp": 2, "tp": 4}, 0, 3), (ALL,)),
            ("dense", Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 2), ("lora.dora=true", ALL)),
            ("dense", Cell({"dp": 4}, 2, 3), (UNROLLED,)),
            ("dense", Cell({"pp": 2, "cp": 2, "tp": 2}, 1, 2), ("lora.dropout=0.3",)),
            ("latent attention", Cell({"tp": 4}, 1, 1), ("lora.dropout=0.3",)),
            ("dense", Cell({"pp": 2}, 0, 2), ("mesh.pipeline_layout='Et|tttL'",)),
            ("experts", Cell({"dp": 2, "ep": 2, "tp": 2}, 3, 3), ()),
            ("experts", Cell({"pp": 2, "ep": 4}, 1, 1), ()),
            ("latent attention", Cell({"cp": 2, "tp": 4}, 1, 1), ()),
            ("hybrid", Cell({"dp": 2, "tp": 4}, 3, 2), ()),
            ("experts", Cell({"ep": 2, "tp": 4}, 1, 3), ("mesh.expert_tp=1",)),
            ("experts", Cell({"ep": 2, "tp": 2, "cp": 2}, 3, 2), ("lora.dropout=0.3",)),
            ("experts", Cell({"ep": 2, "tp": 2}), ("mesh.expert_tp=1", "lora.dropout=0.3")),
            ("experts", Cell({"pp": 2, "ep": 2}), ("train.experts=loop", "lora.dropout=0.3")),
            (
                "experts",
                Cell({"ep": 4}, 1, 2),
                ("train.expert_exchange=all_to_all", "lora.dropout=0.3"),
            ),
            ("experts", Cell({"ep": 2, "tp": 2, "cp": 2}, 3, 2), (DORA, "lora.dropout=0.3")),
            ("experts", Cell({"ep": 2, "tp": 2}), ("mesh.expert_tp=1", DORA)),
            ("experts", Cell({"pp": 2, "ep": 2}), ("train.experts=loop", DORA)),
            ("experts", Cell({"tp": 2}), ("train.experts=loop", DORA, "lora.dropout=0.3")),
        ]
    ),
)
def test_numbers_do_not_depend_on_the_mesh(feature, cell, keys):
    own = [key for key in keys if not key.startswith(("train.", "mesh."))]
    loss, expected = on_one_device(feature, *own)
    trainer = make_trainer(feature, cell, *PLAIN, RANK, *keys)
    found = moments(trainer)
    assert trainer.loss == pytest.approx(loss, rel=2e-6)
    # Scans of Mamba sum in another order where cp cuts them.
    assert deviation(found, expected) <= (2e-5 if feature == "hybrid" else 1e-5)


def test_what_an_adapter_reads_of_another_stream_is_dropped_by_its_own_places():
    rng = np.random.default_rng(0)
    x, value, a, b = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 3, 16), (16, 4), (16, 2), (2, 4))
    )
    key, rows, columns = jax.random.key(1), jnp.array([7, 4]), jnp.array([9, 2, 5])
    tokens = tokens_of((2, 3), rows=rows, columns=columns)
    of_layer = TokenPlaces(key, jnp.arange(1), jnp.arange(5))
    adapter = Adapter(a, b, dropout=InputDropout(of_layer, 0.25))
    weight = Weight(value, name="up", adapter=adapter).for_tokens(tokens, Context())
    kept = np.zeros(x.shape)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            own = jax.random.fold_in(jax.random.fold_in(key, row), column)
            kept[i, j] = jax.random.bernoulli(own, 0.75, (16,))
    assert 0 < kept.mean() < 1
    expected = x @ value + (x * kept / 0.75) @ a @ b
    np.testing.assert_allclose(matmul(x, weight), expected, rtol=1e-5, atol=1e-5)


@exhaustive
@pytest.mark.parametrize(
    "feature, cell",
    [
        ("llava", Cell({"dp": 2, "tp": 2}, 1, 2)),
        ("qwen-vl", Cell({"cp": 2, "tp": 2}, 1, 1)),
        ("llava-onevision", Cell({"cp": 2, "tp": 2}, 1, 1)),
        ("mimo, own mesh", Cell({"dp": 2, "tp": 2}, 1, 1)),
    ],
)
def test_dropout_in_several_streams_does_not_depend_on_the_mesh(feature, cell):
    """Projectors and mergers read the tokens of towers, whose rows are items."""
    record = compare(feature, cell, "lora.rank=2", "lora.dropout=0.3", steps=1)
    assert holds(record), record


@exhaustive
def test_an_adapter_at_zero_is_its_base_and_the_base_stays(tmp_path):
    trainer = make_trainer("dense", Cell({"dp": 2}, 1, 2), RANK, "lora.trained=[norm]")
    trainer.init()  # where b is zero
    base = make_trainer("dense", Cell({"dp": 2}, 1, 2))
    before = flatten_dict(jax.device_get(trainer.params()))
    first = float(trainer.step(make_batch(ROWS))["loss"])
    assert first == float(base.step(make_batch(ROWS))["loss"])
    for seed in range(1, 20):
        loss = float(trainer.step(make_batch(ROWS, seed % 2))["loss"])
    assert loss < first
    after = flatten_dict(jax.device_get(trainer.params()))
    for path, array in before.items():
        is_trained = is_of_adapter(path) or "norm" in ".".join(path)
        assert (array != after[path]).any() == is_trained, path
    trained = {path for path in before if is_of_adapter(path) or "norm" in ".".join(path)}
    assert set(flatten_dict(trainer.state["opt"]["mu"])) == trained


@exhaustive
@pytest.mark.parametrize("keys", [(), (UNROLLED,)])
def test_a_base_in_fp8_gives_the_loss_of_its_run(keys):
    """With adapters at zero, but for what blocks round that are one function without adapters."""
    fp8 = "precision.fp8=delayed", "precision.compute=bfloat16", *keys
    trainers = [make_trainer("dense", Cell({"dp": 2}, 1, 2), *fp8, *own) for own in ((), (RANK,))]
    trainers[1].init()
    losses = [float(trainer.step(make_batch(ROWS))["loss"]) for trainer in trainers]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@slow
@pytest.mark.parametrize(
    "cell",
    quick([Cell({"dp": 2}, 1, 2), Cell({"pp": 2, "dp": 2}, 1, 2)], 0),
)
def test_the_program_holds_no_gradient_or_exchange_of_the_base(cell):
    """The feed-forward is 40 wide, which no other size is."""
    keys = RANK, UNROLLED, "model.intermediate_size=40"

    def wide(shapes: set) -> set:
        return {shape for shape in shapes if 32 in shape and {40, 80, 20} & set(shape)}

    found = exchanged_and_computed(make_trainer("dense", cell, *keys))
    assert not any(map(wide, found))


@slow
def test_a_run_resumes_at_another_mesh_from_adapters_alone(tmp_path):
    keys = RANK, f"run.dir={tmp_path}", "lora.trained=[norm]"
    cells = Cell({"dp": 4}, 3, 2), Cell({"tp": 2}, 1, 3)
    whole, resumed = (make_trainer("dense", cell, *keys) for cell in cells)
    whole.step(make_batch(ROWS))
    whole.save()
    whole.store.wait()
    names = {file.name for file in (tmp_path / "checkpoints").rglob("*") if "params." in file.name}
    assert not any("dense.mlp.up" == name.removeprefix("params.") for name in names)
    resumed.state = None
    assert resumed.restore() == 1
    same = jax.device_get((whole.params(), resumed.params()))
    jax.tree.map(np.testing.assert_array_equal, *same)
    for trainer in (whole, resumed):
        trainer.step(make_batch(ROWS, 1))
    same = jax.device_get((resumed.params(), whole.params()))
    assert deviation(*same) <= 1e-5
    other = make_trainer("dense", Cell(), *keys, "run.seed=7")
    with pytest.raises(UserError, match="not the weights that the adapters in .* were trained on"):
        other.restore()
    with pytest.raises(UserError, match="has lora.rank=3 but this run has lora.rank=4"):
        make_trainer("dense", Cell(), *keys, "lora.rank=4").restore()


@pytest.mark.parametrize(
    "keys, match",
    [
        (("lora.targets=[nothing]",), "lora.targets: 'nothing' names no matrix here"),
        (("lora.targets=[]",), "leaves nothing to train"),
        (("lora.targets=[q_proj]",), r"takes an adapter \(PEFT's q_proj is q; "),
        (("lora.rank_pattern={norm: 4}",), "lora.rank_pattern: 'norm' names no matrix"),
        (("lora.rank_pattern={q: 0}",), "lora.rank_pattern.q=0: must be greater than or equal"),
        (("lora.alpha_pattern={q: 0}",), "lora.alpha_pattern.q=0.*: must be greater than 0"),
        (("lora.init=pissa", "checkpoint.init_from=x", "lora.rank=999"), "fewer than a rank"),
        (("lora.trained=[nothing]",), "lora.trained: 'nothing' is no role"),
        (("lora.trained=['*']",), r"lora.trained=\['\*'\] leaves no weight to adapters"),
        (("lora.targets=[q]", "lora.trained=['*.q']"), "leaves no weight to adapters"),
        (("lora.targets=[]", "lora.trained=['*']"), "leaves no weight to adapters"),
        (("lora.rank=0", "lora.dora=true"), "lora.dora=True has no effect with lora.rank=0"),
        (("lora.targets=[head]", "model.tie_word_embeddings=true"), "lora.targets.*share a table"),
    ],
)
def test_mistakes_are_said_in_one_line(keys, match):
    with pytest.raises(UserError, match=match) as raised:
        make_trainer("dense", Cell(), RANK, *keys)
    assert "\n" not in str(raised.value)


@slow
def test_a_rank_that_a_weight_cannot_have_is_a_line():
    """Keys and values have 8 outputs each."""
    keys = "lora.targets=[kv,down]", "lora.rank=9"
    said = run_summary(make_trainer("dense", Cell(), *keys)).splitlines()
    name = "dense.attention.kv (32 x 8)"
    assert f"WARNING: lora.rank: {name} can have 8 at most; lower it in lora.rank_pattern" in said
    said = run_summary(make_trainer("dense", Cell(), *keys, "lora.rank_pattern={kv: 8}"))
    assert "lora.rank" not in said
