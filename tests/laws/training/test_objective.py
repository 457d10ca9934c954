"""Law: an objective is one class; it trains alike on every mesh, by the trainer and by the command.

The toy, `Denoise`: tokens that a field of its own marks are hidden, and predicted from those before
them. It took 25 lines of code; nothing in mjax knows of it.
"""

import json
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.data.loader import make_loader
from mjax.data.mock import MockDataset
from mjax.errors import UserError
from mjax.objectives.fields import BatchField
from mjax.objectives.objective import PaddedRows, dataset_kind, objective_of
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.run.evaluation import HeldOut
from mjax.run.loop import train
from mjax.train import Trainer
from mjax.train.batch import field_maker
from tests.marks import exhaustive, quick, slow

HIDDEN = 250  # the id that takes the place of a hidden token
NAME = f"train.objective={__name__}:Denoise"


class Denoise:
    """Predict hidden tokens. Loss: nats per hidden token; `hidden`: their share, only logged."""

    fields: ClassVar = {
        "tokens": BatchField(np.int32),
        "hidden": BatchField(np.int32),
        "weight": BatchField(np.float32, ("batch",), pad=0.0),
    }

    def counts(self, batch):
        hidden = self.weights(batch)
        return {"loss": jnp.sum(hidden), "hidden": jnp.float32(hidden.size)}

    def embed(self, edges, batch, tokens, ctx):
        seen = jnp.where(batch["hidden"] == 1, HIDDEN, batch["tokens"])
        return edges.embed(seen, tokens, ctx)

    def losses(self, edges, x, batch, tokens, ctx):
        hidden = self.weights(batch)
        loss = edges.head_loss(x, batch["tokens"], hidden, ctx)
        return {"loss": loss, "hidden": jnp.sum(hidden)}

    def weights(self, batch):
        return batch["hidden"].astype(jnp.float32) * batch["weight"][:, None]

    def make_fields(self, batch, seed, step, rows):
        width = batch["tokens"].shape[1]
        draws = [np.random.default_rng((seed, step, row)).random(width) for row in rows]
        return {
            "hidden": (np.reshape(draws, (-1, width)) < 0.3).astype(np.int32),
            "weight": 1.0 + rows % 2,
        }


class DenoiseLast(Denoise):
    """Denoising whose hidden tokens are the last of the config's vocabulary."""

    dataset, pads_rows = "labelled", True

    def __init__(self, hidden):
        self.hidden = hidden

    @classmethod
    def of(cls, cfg):
        return cls(cfg.model.vocab_size - 1)


def test_an_objective_may_be_made_of_the_config_and_say_what_data_it_trains_on():
    mine, toy = (
        load(None, ["data.mock=true", f"train.objective={__name__}:{name}"])
        for name in ("DenoiseLast", "Denoise")
    )
    assert objective_of(mine).hidden == mine.model.vocab_size - 1
    assert (dataset_kind(mine), dataset_kind(toy)) == ("labelled", "tokens")
    assert isinstance(objective_of(mine), PaddedRows)
    assert not isinstance(objective_of(toy), PaddedRows)


def noisy_batch(rows: int) -> dict[str, np.ndarray]:
    batch = make_batch(rows)
    return batch | Denoise().make_fields(batch, 0, 0, np.arange(rows))


def first_step(feature: str, cell: Cell, *more: str) -> dict:
    """Metrics and gradients of one step, and the sums of held-out data."""
    trainer, batch = make_trainer(feature, cell, NAME, *more), noisy_batch(cell.rows)
    loss, norm, gradients = trainer.grads(batch)
    held_out = trainer.evaluate(batch)
    metrics = trainer.step(batch)
    assert deviation((metrics["loss"], metrics["grad_norm"]), (loss, norm)) <= 1e-6
    metrics = {name: value for name, value in metrics.items() if value.dtype != bool}
    return jax.device_get({"gradients": gradients, "held out": held_out, **metrics})


@exhaustive
@pytest.mark.parametrize(
    "feature, cell",
    [
        ("dense", Cell({"dp": 2, "tp": 2, "pp": 2}, 1, 3)),
        ("dense", Cell({"dp": 8}, 2, 3)),
        ("dense", Cell({"cp": 2, "tp": 2}, 1, 2)),
        ("experts", Cell({"dp": 2, "ep": 2, "pp": 2}, 1, 2)),
    ],
)
def test_meshes_agree(feature, cell):
    found, one = first_step(feature, cell), first_step(feature, Cell())
    assert deviation(found, one) <= 1e-5
    batch = noisy_batch(cell.rows)
    weights = batch["hidden"] * batch["weight"][:, None]
    assert found["tokens"] == weights.sum()
    assert found["hidden"] == pytest.approx(weights.mean())
    assert ("aux_loss" in found) == (feature == "experts")


class WithCopy(Denoise):
    """The loss under another name too, without its gradient."""

    def counts(self, batch):
        counts = super().counts(batch)
        return counts | {"copy": counts["loss"]}

    def losses(self, *args):
        losses = super().losses(*args)
        return losses | {"copy": jax.lax.stop_gradient(losses["loss"])}


@exhaustive
def test_what_is_only_logged_moves_nothing():
    one = first_step("dense", Cell())
    both = first_step("dense", Cell(), NAME.replace("Denoise", "WithCopy"))
    assert both["copy"] == both["loss"] == one["loss"]
    jax.tree.map(np.testing.assert_array_equal, both["gradients"], one["gradients"])


@pytest.mark.parametrize("mesh, micro_batches", quick([({}, 1), ({"pp": 2, "dp": 2}, 2)]))
def test_a_loss_is_divided_by_the_sum_of_weights_below_1_too(mesh, micro_batches):
    """64 weights of 1/1024 give the loss of 64 weights of 1, on any path; the sum is 1/16."""
    cell = Cell(mesh, 0, micro_batches, rows=4)
    trainer = make_trainer("dense", cell, "model.num_hidden_layers=2")
    batch = make_batch(cell.rows)
    ones = np.ones((cell.rows, 16), np.float32)
    whole, light = (trainer.grads(batch | {"loss_mask": ones / n}) for n in (1, 1024))
    assert whole[0] > 5 and whole[1] > 1
    assert deviation(light, whole) <= 1e-6
    nothing = trainer.grads(batch | {"loss_mask": 0 * ones})
    assert nothing[0] == nothing[1] == 0


def test_a_held_out_loss_is_divided_by_the_sum_of_weights_below_1_too():
    sums, counts = {"loss": np.float32(0.25)}, {"loss": np.float32(0.0625)}
    cfg = SimpleNamespace(train=SimpleNamespace(eval_steps=2))
    facts = {"local_rows": None, "step_number": 1, "cfg": cfg}
    trainer = SimpleNamespace(**facts, run_program=lambda kind, batch: (sums, counts))
    held_out = HeldOut(trainer, SimpleNamespace(batches=lambda *which: iter([{}, {}])))
    assert held_out.loss(lambda: None)["eval_loss"] == 0.5 / 0.125


def test_the_loader_makes_the_fields_of_each_row_of_the_global_batch():
    cfg = load(None, ["data.mock=true", NAME])
    data, make_fields = MockDataset(100, 16, 64, 0), field_maker(cfg, Denoise())

    def batches(first: int, rows=None) -> list[dict]:
        steps = make_loader(
            data, lambda s: (8 * s, 8), first, 2, rows=rows, make_fields=make_fields
        )
        return list(steps)

    whole, later = batches(0), batches(1)
    halves = [batches(0, lambda n, p=p: slice(p * n // 2, (p + 1) * n // 2)) for p in range(2)]
    for name in (*Denoise.fields, "labels"):
        np.testing.assert_array_equal(whole[1][name], later[0][name])
        joined = np.concatenate([half[1][name] for half in halves])
        np.testing.assert_array_equal(whole[1][name], joined)
    assert (whole[0]["hidden"] != whole[1]["hidden"]).any()


@slow
def test_a_run_trains_it_and_logs_its_names(tmp_path):
    more = [
        "train.steps=3",
        "schedule.warmup_steps=1",
        "train.eval_interval=3",
        "train.eval_steps=1",
        "log.interval=1",
    ]
    where = Cell({"dp": 4, "tp": 2}, 1, 3)
    train(make_trainer("dense", where, NAME, f"run.dir={tmp_path}", *more).cfg)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert all(0.2 < record["hidden"] < 0.8 for record in trained)
    assert [record["eval_loss"] > 0 for record in records if "eval_loss" in record] == [True]


def test_mistakes_are_said_in_one_line():
    def trainer(name: str) -> Trainer:
        return Trainer(load(None, ["data.mock=true", f"train.objective={name}"]))

    with pytest.raises(UserError, match="train.objective=nowhere.at:All: No module named"):
        trainer("nowhere.at:All")
    with pytest.raises(UserError, match="train.objective=json:None_such.*module.path:Name"):
        trainer("json:None_such")
    with pytest.raises(UserError, match="collections:OrderedDict is no objective: it needs fields"):
        trainer("collections:OrderedDict")
    with pytest.raises(
        UserError, match="batch: field 'hidden' is missing; it needs tokens, hidden"
    ):
        make_trainer("dense", Cell(), NAME).step(make_batch(24))
