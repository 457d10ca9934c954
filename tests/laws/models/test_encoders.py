"""Laws of encoders: the losses of rows and of hidden tokens are those of one device.

`python -m mjax.prove` has a row of BERT; here are held-out figures, classification and padding.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.kernels.attention import api
from mjax.kernels.base import chooser
from mjax.kernels.base.chooser import Choice
from mjax.kernels.elementwise import gate
from mjax.models.flops import flops_per_token
from mjax.objectives.masked import MaskedTokens
from mjax.objectives.objective import objective_of
from mjax.prove import FEATURES, Cell, deviation, make_batch, make_trainer
from mjax.train.step import LOSSES
from tests.marks import exhaustive, slow
from tests.measures import measured
from tests.triton_interpreter import interpret

MASKED = [
    "model.layer_pattern=B",
    "train.objective=masked_lm",
    "data.masked.mask_token_id=9",
]
CLASSIFY = [
    "train.objective=classify",
    "model.bert={type_vocab_size: 2, embedding_norm: true, num_labels: 3}",
]


def padded(batch: dict, filler: int = 0) -> dict:
    """The batch with padding behind a part of each row, filled with a token."""
    rows, width = batch["tokens"].shape
    real = np.arange(width) < np.arange(rows)[:, None] % width + 1
    padded = batch | {"segment_ids": real.astype(np.int32)}
    for name in ("tokens", "labels"):
        padded[name] = np.where(real, batch[name], filler)
    return padded | {"loss_mask": batch["loss_mask"] * real}


def numbers(cell: Cell, batch: dict, *more: str) -> dict:
    return measured(make_trainer("bert", cell, *more), batch)


@exhaustive
@pytest.mark.parametrize(
    "cell",
    [
        Cell({"pp": 2, "dp": 2, "cp": 2}, 1, 3, cp_type="all_gather"),
        Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1, cp_type="a2a"),
    ],
)
@pytest.mark.parametrize("more", [[], CLASSIFY], ids=["masked_lm", "classify"])
def test_meshes_agree_on_padded_rows(cell, more):
    batch = padded(make_batch(24))
    if more:
        batch["row_label"] = np.arange(24, dtype=np.int32) % 4 - 1
    found, one = numbers(cell, batch, *more), numbers(Cell(), batch, *more)
    rows = {"loss", "accuracy"} if more else {"loss", "accuracy", "row_loss", "row_accuracy"}
    assert set(found["sums"]) == set(found["counts"]) == rows
    hits = [name for name in rows if name.endswith("accuracy")]
    assert all(found["sums"][name] == one["sums"][name] for name in hits)
    assert deviation(found, one) <= 1e-5
    of_rows = found["counts"]["loss" if more else "row_loss"]
    assert of_rows == (batch["row_label"] >= 0).sum()


@exhaustive
@pytest.mark.parametrize(
    "cell, pooling",
    [
        (Cell({"pp": 2, "dp": 2, "cp": 2}, 1, 3, cp_type="a2a"), None),
        (Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1, cp_type="a2a"), "mean"),
        (Cell({"dp": 2, "tp": 4}, 1, 2), "cls"),
    ],
)
def test_windows_to_both_sides_agree_on_padded_rows(monkeypatch, cell, pooling):
    """On meshes blocks of queries see the keys near by; the reference masks the scores of all.

    Rows are classified by their pooled tokens, or without any `pooling` hidden tokens predicted.
    """
    keys, batch = (), padded(make_batch(24))
    if pooling is not None:
        head = "embedding_norm: true, prediction_head: true, num_labels: 3"
        keys = ("train.objective=classify", f"model.bert={{{head}, pooling: {pooling}}}")
        batch["row_label"] = np.arange(24, dtype=np.int32) % 4 - 1
    one = measured(make_trainer("modernbert", Cell(), *keys), batch)
    monkeypatch.setattr(api, "_FEWEST_NEAR", 1)
    found = measured(make_trainer("modernbert", cell, *keys), batch)
    assert deviation(found, one) <= 1e-5


@slow
def test_flops_of_windows_to_both_sides_are_those_of_the_keys_that_are_seen():
    """Of 1024 tokens 65 are seen to either side; a window of all tokens is full attention."""
    cfg = make_trainer("modernbert", Cell()).cfg.model
    column = np.arange(1024)
    keys = (np.abs(column[:, None] - column) < 65).sum() / 1024
    heads = 12 * cfg.attention.num_attention_heads * cfg.attention.head_dim

    def flops(window: int) -> float:
        attention = cfg.attention.model_copy(update={"sliding_window": window})
        return flops_per_token(cfg.model_copy(update={"attention": attention}), 1024)

    assert flops(1024) - flops(65) == pytest.approx(2 * heads * (1024 - keys), rel=0.01)
    both = cfg.model_copy(update={"layer_pattern": "FBBB"})
    assert flops(4096) == flops_per_token(both, 1024)


@slow
def test_a_type_of_tokens_that_the_table_lacks_is_refused():
    trainer = make_trainer("bert", Cell(), "model.bert.type_vocab_size=1")
    with pytest.raises(UserError, match="token_types holds id 1, outside model.bert.type_vocab"):
        trainer.place(make_batch(24))


@slow
def test_what_padding_holds_moves_nothing():
    found = [numbers(Cell(), padded(make_batch(24), filler)) for filler in (0, 7)]
    jax.tree.map(np.testing.assert_array_equal, *found)


@slow
def test_tokens_see_those_behind_them_and_the_flops_say_so():
    trainer = make_trainer("bert", Cell())
    batch = make_batch(24) | {"segment_ids": np.ones((24, 16), np.int32)}
    batch["loss_mask"] = np.zeros((24, 16), np.float32)
    batch["loss_mask"][:, 0] = 1
    changed = batch | {"tokens": batch["tokens"].copy()}
    changed["tokens"][:, -1] += np.where(batch["tokens"][:, -1] > 100, -1, 1)
    losses = [trainer.run_program(LOSSES, b)[0]["loss"] for b in (batch, changed)]
    assert losses[0] != losses[1]
    model = trainer.cfg.model
    causal = model.model_copy(update={"layer_pattern": "G"})
    more = flops_per_token(model, 16) - flops_per_token(causal, 16)
    assert more == model.num_hidden_layers * 12 * 8 * 4 * 16 / 2


def test_a_stream_hides_other_tokens_at_each_step_and_alike_for_all_readers():
    cfg = load(None, ["data.mock=true", *MASKED])
    objective = objective_of(cfg)
    assert isinstance(objective, MaskedTokens)
    tokens = np.random.default_rng(0).integers(10, 200, (64, 256)).astype(np.int32)
    rows = np.arange(64)
    made = objective.make_fields({"tokens": tokens}, 1, 5, rows)
    part = objective.make_fields({"tokens": tokens[40:]}, 1, 5, rows[40:])
    for name, field in part.items():
        np.testing.assert_array_equal(made[name][40:], field)
    later = objective.make_fields({"tokens": tokens}, 1, 6, rows)
    assert (later["loss_mask"] != made["loss_mask"]).any()
    counts = made["loss_mask"] == 1
    np.testing.assert_array_equal(made["tokens"][~counts], tokens[~counts])
    np.testing.assert_array_equal(made["labels"], tokens)
    masked, kept = made["tokens"][counts] == 9, (made["tokens"] == tokens)[counts]
    assert counts.mean() == pytest.approx(0.15, abs=0.01)
    assert masked.mean() == pytest.approx(0.8, abs=0.03)
    assert kept.mean() == pytest.approx(0.1, abs=0.03)


@slow
def test_a_ring_is_refused_by_name():
    trainer = make_trainer("bert", Cell({"cp": 2}, cp_type="ring"))
    with pytest.raises(UserError, match="cp_type=ring lacks full masks; set .*all_gather or a2a"):
        trainer.step(make_batch(24))
    assert "bert" in FEATURES


OWN_KEYS = ["model.attention.num_key_value_heads=8"]  # of each head; else two heads serve all
NO_BIASES = ["model.attention.attention_bias=false"]


@exhaustive
@pytest.mark.parametrize(
    "cell, more",
    [
        (Cell({}, 0, 2), [*OWN_KEYS, "train.remat=dots"]),
        (Cell({"tp": 2, "pp": 2}, 1, 2), OWN_KEYS),
        (Cell({"dp": 2}, 3, 2), ["train.remat=dots"]),
        (Cell({"tp": 4}), NO_BIASES),
    ],
)
def test_attention_that_reads_its_products_where_they_lie_changes_no_number(
    monkeypatch, cell, more
):
    """One product of q, k and v, or two where heads share keys; the reference cuts and adds."""
    batch = padded(make_batch(8))

    def with_biases(cell: Cell) -> tuple:
        trainer = make_trainer("bert", cell._replace(rows=8), "model.num_hidden_layers=2", *more)
        layers = trainer.state["params"]["dense"]["attention"]
        for name in layers.keys() & {"q_bias", "kv_bias"}:
            layers[name] += jnp.cos(jnp.arange(layers[name].size)).reshape(layers[name].shape)
        return jax.device_get(trainer.grads(batch))  # statistics, the norm, gradients

    one = with_biases(Cell())
    ran = interpret(monkeypatch)
    monkeypatch.setitem(chooser.RULES, "attention", lambda *_, **__: Choice("triton", "asked"))
    monkeypatch.setattr(api, "require_short", lambda *_: None)  # it refuses fp32
    found = with_biases(cell)
    assert {f"attention_{name}" for name in ("forward", "d_queries", "d_keys")} == set(ran)
    assert deviation(found, one) <= 1e-5


@exhaustive
@pytest.mark.parametrize(
    "cell, remat",
    [
        (Cell({"tp": 2, "pp": 2}, 1, 2), "none"),
        (Cell({"dp": 2, "tp": 2}, 3, 2), "none"),
        (Cell({"cp": 2}, 0, 1, cp_type="all_gather"), "none"),
        (Cell({"dp": 2}, 0, 2), "none*1,dots"),
    ],
)
def test_activation_functions_within_matmuls_change_no_number(monkeypatch, cell, remat):
    """What is not of the kernels: fp32 stand-ins take their place; layers with `dots` have none."""
    batch, called = padded(make_batch(8)), []

    def found(cell: Cell) -> tuple:
        keys = ["model.num_hidden_layers=2", "model.mlp_gated=false", "model.mlp_bias=true"]
        keys += ["model.hidden_act=gelu", f"train.remat={remat}"]
        trainer = make_trainer("bert", cell._replace(rows=8), *keys)
        layers = trainer.state["params"]["dense"]["mlp"]
        for name in ("up_bias", "down_bias"):
            layers[name] += jnp.cos(jnp.arange(layers[name].size)).reshape(layers[name].shape)
        return jax.device_get(trainer.grads(batch))

    def multiply_and_activate(x, w, bias, name):
        called.append(name)
        share, slope = gate._share_and_slope(name, u := x @ w + bias)
        return u * share, share + u * slope

    def multiply_by_slope(g, w, slope):
        du = g @ w.T * slope
        return du, du.sum(0)

    one = found(Cell())
    stand_ins = {f.__name__: f for f in (multiply_and_activate, multiply_by_slope)}
    place = sys.modules, "mjax.kernels.matmul.activated_mosaic", SimpleNamespace(**stand_ins)
    monkeypatch.setitem(*place)
    rule = "activated_matmul", lambda *_, **__: Choice("mosaic", "asked")
    monkeypatch.setitem(chooser.RULES, *rule)
    again = found(cell)
    assert called and set(called) == {"gelu"}
    assert deviation(again, one) <= 1e-5
