"""Laws of layers as residual branches: every list of them gives one answer on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.languages.layer_pattern import BRANCHES, branch_groups, expand, stack_of
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import build, split
from mjax.models.flops import flops_per_token
from mjax.plan.activations import kept
from mjax.prove import Cell, compare, holds, make_batch, make_trainer
from tests.generation import made_ids
from tests.laws import toy_recurrence
from tests.marks import exhaustive, quick, slow

# gpt-oss: windowed and full attention take turns, each before experts.
GPT_OSS = ["model.layer_pattern='window+experts, full+experts'", "model.attention.sliding_window=5"]


@pytest.fixture
def recurrence(monkeypatch):
    monkeypatch.setitem(BRANCHES, "recurrence", toy_recurrence.ROW)
    expand.cache_clear()
    yield
    expand.cache_clear()


# ---- the language ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, layers, expected",
    [
        ("G", 3, "full+mlp full+mlp full+mlp"),
        ("(LG)*2,L", 5, "window+mlp full+mlp window+mlp full+mlp window+mlp"),
        ("window+experts, full+experts", 3, "window+experts full+experts window+experts"),
        ("([LE]G)*2", 4, "window+experts full+mlp window+experts full+mlp"),
        ("[GD][G|D]", 4, "full+mlp full|mlp full+mlp full|mlp"),
        ("full|mlp", 1, "full|mlp"),
        ("G@1*2,G", 3, "full+mlp@1 full+mlp@1 full+mlp"),
        ("[G][D]@2", 2, "full mlp@2"),
        ("megatron:*-*E", 4, "full mlp full experts"),
        ("megatron:M*M-E", 5, "mamba full mamba mlp experts"),
        ("mamba+mlp, mamba|full", 2, "mamba+mlp mamba|full"),
        ("[ID][GJ]", 2, "linear+mlp full+linear_mlp"),
        ("(window*2, mlp)*2", 6, "window window mlp window window mlp"),
        ("[M|GD]", 1, "mamba|full+mlp"),
    ],
)
def test_patterns(pattern, layers, expected):
    assert " ".join(expand(pattern, layers)) == expected


@pytest.mark.parametrize("pattern", ["[]", "[?]", "[G|]", "[GL]", "full+wide", "G@", "megatron:m"])
def test_a_malformed_pattern_is_one_line(pattern):
    with pytest.raises(UserError, match="layer_pattern") as error:
        expand(pattern, 4)
    assert "\n" not in str(error.value)


def test_branches_and_stacks():
    assert branch_groups("full+experts@1") == (("full",), ("experts",))
    assert branch_groups("mamba|full+mlp") == (("mamba", "full"), ("mlp",))
    assert [stack_of(kind) for kind in ("window+mlp", "window+experts", "mlp", "full+mlp@1")] == [
        "dense",
        "moe",
        "mlp",
        "dense_1",
    ]


# ---- one answer --------------------------------------------------------------------------------

SIZES = [
    "model.layer_pattern='G@1,G'",
    "model.layer_sizes=[{intermediate_size: 96, attention: {num_key_value_heads: 8}}]",
]
CASES = [
    ("experts", {"pp": 2, "ep": 2, "tp": 2}, 1, 2, GPT_OSS),
    ("dense", {"pp": 2, "dp": 2, "tp": 2}, 3, 3, ["model.layer_pattern='G[G|D][D]G'"]),
    ("dense", {"pp": 2, "dp": 2, "tp": 2}, 1, 2, SIZES),
    ("experts", {"pp": 4, "ep": 2}, 1, 4, ["model.layer_pattern='megatron:*-*E-E*-'"]),
    ("dense", {"pp": 2, "dp": 2, "tp": 2}, 1, 2, ["model.layer_pattern='[IJ]G[GJ][ID]'"]),
]


@exhaustive
@pytest.mark.parametrize("feature, mesh, zero, micro_batches, more", quick(CASES))
def test_gradients_equal_one_device(feature, mesh, zero, micro_batches, more):
    layers = ["model.num_hidden_layers=8"] if "megatron" in more[0] else []
    where = Cell(mesh, zero, micro_batches)
    record = compare(feature, where, *more, *layers, steps=1)
    assert holds(record), record


@exhaustive
def test_a_checkpoint_does_not_depend_on_unlike_stages(tmp_path):
    keys = [f"run.dir={tmp_path}", "model.layer_pattern=GEEE", "checkpoint.async_save=false"]
    staged = make_trainer("experts", Cell({"pp": 2, "ep": 2}, 1, 2), *keys)
    batch = make_batch(staged.cfg.train.global_batch_size)
    staged.step(batch)
    staged.save()
    staged.store.wait()
    wanted = float(staged.step(batch)["loss"])
    plain = make_trainer("experts", Cell({"dp": 2}, 3, 2), *keys)
    plain.restore()
    assert float(plain.step(batch)["loss"]) == pytest.approx(wanted, rel=1e-6)


def test_branches_side_by_side_read_one_norm():
    cfg = ModelConfig(
        hidden_size=32,
        num_hidden_layers=1,
        attention={"num_attention_heads": 4},
        layer_pattern="[G|D]",
    )
    model = build(cfg, nnx.Rngs(0))
    stack = model.attention_beside_mlp
    assert hasattr(stack, "attention_norm") and not hasattr(stack, "mlp_norm")


# ---- a mixer of one's own ----------------------------------------------------------------------

TOY = ["model.layer_pattern='recurrence+mlp, full+mlp'"]


@exhaustive
@pytest.mark.parametrize(
    "mesh, zero, more",
    quick([({"dp": 2, "tp": 2, "pp": 2}, 1, []), ({"dp": 4, "tp": 2}, 3, ["train.unroll=0"])], 0),
)
def test_a_toy_mixer_trains_on_every_mesh(recurrence, mesh, zero, more):
    record = compare("dense", Cell(mesh, zero, 2), *TOY, *more, steps=3)
    assert holds(record), record


@exhaustive
def test_a_toy_mixer_is_counted_and_saved(recurrence, tmp_path):
    where = Cell({"dp": 2, "tp": 2}, 1, 2)
    keys = [*TOY, f"run.dir={tmp_path}", "checkpoint.async_save=false", "train.remat=dots"]
    trainer = make_trainer("dense", where, *keys)
    model, per_layer = trainer.cfg.model, 6 * 2 * 32 * 48 + 6 * 48
    alone = model.model_copy(update={"layer_pattern": "recurrence"})
    head = 6 * 32 * model.vocab_size
    assert flops_per_token(alone, 16) == head + model.num_hidden_layers * per_layer
    held = held_bytes(trainer.cfg, "recurrence+mlp")
    assert held["rec_in"] == held["up"] / 2  # of gate and up
    batch = make_batch(trainer.cfg.train.global_batch_size)
    trainer.step(batch)
    trainer.save()
    trainer.store.wait()
    again = make_trainer("dense", Cell(rows=where.rows), *keys)
    assert again.restore() == 1
    losses = [float(t.step(batch)["loss"]) for t in (trainer, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def held_bytes(cfg, kind):
    """Bytes by name of what a layer keeps on one device."""
    sizes = dict.fromkeys(AXES, 1)
    return {tensor.name: tensor.bytes for tensor in kept(cfg, sizes, kind, "dots")}


@slow
def test_a_toy_mixer_generates_with_its_state(recurrence):
    cfg = ModelConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        attention={"num_attention_heads": 4},
        intermediate_size=48,
        initializer_range=0.3,
        max_position_embeddings=64,
        layer_pattern="recurrence+mlp, full+mlp",
    )
    definition, params = split(build(cfg, nnx.Rngs(0)))
    prompts = [[3, 5, 7], list(range(20, 36))]
    rows = made_ids((definition, params, cfg), prompts, 10)
    for prompt, made in zip(prompts, rows, strict=True):
        whole = jnp.asarray([prompt + made])
        logits = np.asarray(jax.jit(definition.bind(params))(whole))[0]
        greedy = logits.argmax(-1)[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(made, greedy)
