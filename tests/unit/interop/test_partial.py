"""Laws of partial loads: what both models have is loaded bit for bit, the rest drawn and named."""

import jax
import numpy as np
import pytest

from mjax.checkpoint.base.continuation import NOT_ARCHITECTURE
from mjax.checkpoint.base.source import flat
from mjax.config import load
from mjax.config.schema.keys import leaf_keys
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.pretrained import source_of
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.marks import exhaustive, quick, slow

BASE = """data.mock=true data.seq_length=16 model.vocab_size=97 model.hidden_size=32
    model.attention.num_attention_heads=4 model.intermediate_size=48 model.num_hidden_layers=3
    model.layer_pattern=GEG model.moe.num_experts=2 train.global_batch_size=4
    train.micro_batch_size=1""".split()


def make_trainer(folder, *overrides: str, **mesh: int) -> Trainer:
    sizes = [f"mesh.{axis}={size}" for axis, size in ({"dp": 1} | mesh).items()]
    cfg = load(None, [*BASE, *sizes, f"run.dir={folder}", *overrides])
    return Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: int(np.prod(list(mesh.values())))]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """(a run with a checkpoint of weights drawn from another seed, these weights)."""
    folder = tmp_path_factory.mktemp("weights")
    trainer = make_trainer(folder, "run.seed=7")
    trainer.init()
    trainer.save()
    trainer.store.wait()
    return folder, jax.tree.map(np.asarray, trainer.params())


CHANGED = [
    (["model.vocab_size=200"], "vocab_size", {"dp": 2, "tp": 2}),
    (["model.vocab_size=50", "model.vocab_multiple=10"], "vocab_size", {"dp": 1}),
    (["model.vocab_multiple=100"], "vocab_size", {"dp": 2}),
    (["model.num_hidden_layers=4"], "num_hidden_layers", {"dp": 2, "pp": 2}),
    (["model.num_hidden_layers=2", "model.layer_pattern=GE"], "num_hidden_layers", {"dp": 1}),
    (["model.num_hidden_layers=5", "model.layer_pattern=GEGGE"], "num_hidden_layers", {"ep": 2}),
]


@pytest.mark.parametrize(("model", "change", "mesh"), quick(CHANGED))
def test_what_both_models_have_is_loaded_and_the_rest_drawn(weights, tmp_path, model, change, mesh):
    folder, given = weights
    trainer = make_trainer(tmp_path, *model, f"checkpoint.init_changes=[{change}]", **mesh)
    trainer.init()
    drawn = flat(jax.tree.map(np.asarray, trainer.params()))
    said = trainer.load_params(source_of(folder))
    vocab = min(97, trainer.cfg.model.vocab_size)
    changed = 0
    for path, got in flat(jax.tree.map(np.asarray, trainer.params())).items():
        spec, theirs = flat(trainer.specs)[path], flat(given)[path]
        sizes = [
            vocab if axis == "vocab" else min(a, b)
            for axis, a, b in zip(spec.axes, got.shape, theirs.shape, strict=True)
        ]
        part = tuple(map(slice, sizes))
        np.testing.assert_array_equal(got[part], theirs[part])
        inside = np.zeros(got.shape, bool)
        inside[part] = True
        if "vocab" in spec.axes:  # what pads it is masked and may be anything
            rows = [
                slice(trainer.cfg.model.vocab_size) if a == "vocab" else slice(None)
                for a in spec.axes
            ]
            got, inside, drawn[path] = (a[tuple(rows)] for a in (got, inside, drawn[path]))
        np.testing.assert_array_equal(got[~inside], drawn[path][~inside])
        is_named = f"  {'.'.join(path)}: {sizes} loaded of " in said
        real = [
            97 if axis == "vocab" else n for axis, n in zip(spec.axes, theirs.shape, strict=True)
        ]
        assert is_named == (list(got.shape) != real), path
        changed += is_named
    assert changed < len(drawn) and trainer.step_number == 0
    assert said.startswith(f"loaded: {len(drawn) - changed} of {len(drawn)} parameters as they are")


@slow
def test_nothing_may_differ_unasked(weights, tmp_path):
    folder, _ = weights
    for change, message in [
        ("model.vocab_size=200", "vocab_size=97, but this run has model.vocab_size=200"),
        ("model.num_hidden_layers=4", "num_hidden_layers=3, but this run has"),
        ("model.rope.rope_theta=5.0", "rope_theta=10000.0, but this run has"),
    ]:
        other = "num_hidden_layers" if "vocab" in change else "vocab_size"
        trainer = make_trainer(tmp_path, change, f"checkpoint.init_changes=[{other}]")
        with pytest.raises(UserError, match=message):
            trainer.load_params(source_of(folder))
        assert trainer.state is None


CONTEXT = ["model.max_position_embeddings=64", "checkpoint.init_changes=[context]"]


@exhaustive
def test_a_longer_context_is_a_word_and_learned_positions_are_extended(weights, tmp_path):
    folder, given = weights
    scaling = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 16}"
    rope = [f"model.rope.rope_scaling={scaling}", "model.rope.rope_theta=5e5"]
    with pytest.raises(UserError, match="set it to 2048, or name context in checkpoint.init_chang"):
        make_trainer(tmp_path / "a", *CONTEXT[:1]).load_params(source_of(folder))
    trainer = make_trainer(tmp_path / "a", *CONTEXT, *rope)
    said = trainer.load_params(source_of(folder))
    assert said.startswith(f"loaded: {len(flat(given))} of {len(flat(given))} parameters as they")
    jax.tree.map(equal_rows, jax.tree.map(np.asarray, trainer.params()), given)
    learned = "model.position_embedding=learned"
    short = make_trainer(tmp_path / "b", learned, "model.max_position_embeddings=16")
    short.init()
    short.save()
    short.store.wait()
    longer = make_trainer(tmp_path / "c", learned, *CONTEXT)
    longer.init()
    drawn = np.asarray(longer.params()["position_embedding"])
    said = longer.load_params(source_of(tmp_path / "b"))
    rows = np.asarray(longer.params()["position_embedding"])
    np.testing.assert_array_equal(rows[:16], np.asarray(short.params()["position_embedding"]))
    np.testing.assert_array_equal(rows[16:], drawn[16:])
    assert "  position_embedding: [16, 32] loaded of [16, 32], the rest of [64, 32]" in said


@slow
def test_keys_that_no_weight_depends_on_may_differ(weights, tmp_path):
    folder, given = weights
    trainer = make_trainer(tmp_path, "model.moe.skip_padding=true")
    trainer.load_params(source_of(folder))
    jax.tree.map(equal_rows, jax.tree.map(np.asarray, trainer.params()), given)
    for key in ("vision.max_images", "audio.max_audios", "moe.skip_padding", "mamba.chunk_size"):
        assert key in NOT_ARCHITECTURE & leaf_keys(ModelConfig).keys()


SOUNDS = [
    "model.layer_pattern='S,[Q],GEG'",
    "model.num_hidden_layers=5",
    "model.audio={max_source_positions: 4, hidden_size: 16, intermediate_size: 16, "
    "audio_token_id: 3}",
    "checkpoint.init_changes=[towers]",
]


def equal_rows(a: np.ndarray, b: np.ndarray) -> None:
    """Assert that two parameters are equal, without what pads a vocabulary."""
    np.testing.assert_array_equal(a[:97], b[:97])


@exhaustive
def test_a_text_with_towers_starts_from_a_text_and_back(weights, tmp_path):
    folder, given = weights
    trainer = make_trainer(tmp_path / "mimo", *SOUNDS)
    trainer.init()
    drawn = jax.tree.map(np.asarray, trainer.params())
    said = trainer.load_params(source_of(folder))
    loaded = jax.tree.map(np.asarray, trainer.params())
    towers = {"audio_mlp", "audio_projector", "frame_embedding"}
    assert set(loaded) == set(given) | towers
    for name, tree in loaded.items():
        jax.tree.map(equal_rows, tree, (drawn if name in towers else given)[name])
        assert (f"  {name}." in said) == (name in towers)
    trainer.save()
    trainer.store.wait()
    back = make_trainer(tmp_path / "text", "checkpoint.init_changes=[towers]")
    said = back.load_params(source_of(tmp_path / "mimo"))
    assert all(f"\n  {name}: left out" in said for name in towers)
    jax.tree.map(equal_rows, jax.tree.map(np.asarray, back.params()), given)
    shorter = [*SOUNDS[2:], "model.layer_pattern='S,[Q],GE'", "model.num_hidden_layers=4"]
    with pytest.raises(UserError, match="have 3 layers of a text, but .* has 2"):
        make_trainer(tmp_path / "x", *shorter).load_params(source_of(folder))


def test_layers_are_added_after_the_last_only(weights, tmp_path):
    folder, _ = weights
    changes = "checkpoint.init_changes=[num_hidden_layers]"
    trainer = make_trainer(tmp_path, "model.layer_pattern=EG", changes)
    with pytest.raises(UserError, match=f"layer 0 of the weights in {folder} is 'full.mlp', but"):
        trainer.load_params(source_of(folder))
