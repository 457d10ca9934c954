"""Laws of `TrainingClient`: a loop by hand is the command's, and parts of a batch are the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import NonFiniteLoss, ReplicasDiffer, UserError
from mjax.infer.requests import SamplingParams
from mjax.post import TrainingClient
from mjax.post.policy.advantages import advantages_of
from mjax.run.loop import train
from mjax.run.rehearsal import with_flipped_bit
from mjax.sharding.mesh import make_mesh
from tests.laws.training.test_reinforcement import (
    Evens,
    config,
    ends,
    figures,
    final_params,
    first_groups,
    run,
)
from tests.marks import exhaustive, slow
from tests.tiny import TINY

assert ends  # a fixture of all tests here, too


def client_of(cfg, devices=1):
    return TrainingClient(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))


def grpo_steps(client, steps):
    """GRPO by hand: the figures of each step."""
    settings, world, found = client.trainer.cfg.reinforce, Evens(None), []
    for step in range(client.step_number, client.step_number + steps):
        numbers = range(2 * step, 2 * step + 2)
        prompts = [world.reset(client.trainer.cfg.run.seed, number).ids for number in numbers]
        groups = client.sample(prompts, n=settings.group_size)
        answers = [answer for group in groups for answer in group]
        rewards = np.array([world.step(1, a.ids[a.is_sampled]).reward for a in answers])
        groups = np.array([answer.group for answer in answers])
        lengths = np.array([answer.length for answer in answers])
        advantages = advantages_of(settings, rewards, groups, lengths)
        figures = client.forward_backward(answers, "policy", advantages=advantages)
        figures["reward"] = rewards.mean()
        found.append(figures | client.optim_step())
    return found


@exhaustive
@pytest.mark.parametrize("keys", [(), pytest.param(("lora.rank=4",), marks=exhaustive)])
def test_grpo_by_hand_is_mjax_reinforce_and_each_goes_on_from_the_other(tmp_path, keys):
    whole = config(tmp_path / "whole", *keys, steps=3)
    run(whole)
    cfg = config(tmp_path / "hand", *keys, steps=3)
    client = client_of(cfg)
    found = grpo_steps(client, 2)
    assert client.save().name == "2"
    again = client_of(cfg)
    assert again.load() == 2
    found += grpo_steps(again, 1)
    again.save()
    for ours, theirs in zip(found, figures(tmp_path / "whole"), strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy"):
            np.testing.assert_allclose(float(ours[name]), theirs[name], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(final_params(cfg)), jax.tree.leaves(final_params(whole)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    run(config(tmp_path / "hand", *keys, steps=4))  # the command goes on from the client's
    assert [r["step"] for r in figures(tmp_path / "hand")] == [4]


@exhaustive
def test_calls_are_one_batch_on_any_mesh(tmp_path):
    """Gradients of parts of unequal size add up to that of the whole; figures are the trainer's."""
    cfg = config(tmp_path / "one")
    _, _, groups = first_groups(cfg)
    texts = [t for group in groups for t in group]
    advantages = np.linspace(-1, 1, len(texts)).astype(np.float32)
    found = []
    for name, devices, parts in (("one", 1, [8]), ("parts", 1, [1, 4, 3]), ("mesh", 4, [3, 5])):
        mesh = ["mesh.dp=2", "mesh.tp=2", "train.micro_batch_size=2"] if devices > 1 else []
        client = client_of(config(tmp_path / name, *mesh), devices)
        for loss in ("cross_entropy", _halved):
            for own in map(slice, np.cumsum([0, *parts[:-1]]), np.cumsum(parts)):
                values = {} if loss == "cross_entropy" else {"advantages": advantages[own]}
                client.forward_backward(texts[own], loss, **values)
        norm = client.optim_step(lr=1e-2)["grad_norm"]
        found.append((norm, np.concatenate(client.log_probs(texts))))
    for norm, log_probs in found[1:]:
        np.testing.assert_allclose(norm, found[0][0], rtol=1e-5)
        np.testing.assert_allclose(log_probs, found[0][1], atol=1e-4)


def _halved(scores, fields):
    """Half of the weighted likelihood, as a user would write it."""
    return -0.5 * scores.log_p * fields["advantages"], {"p": jnp.exp(scores.log_p)}


@slow
def test_what_a_client_samples_rates_and_refuses(tmp_path):
    cfg = config(tmp_path)
    client = client_of(cfg)
    first, second = client.sample([[5, 6], [7]], SamplingParams(temperature=1.0, max_tokens=6), n=2)
    assert [t.group for t in first + second] == [0, 0, 1, 1]
    assert first[0].ids.tolist() != first[1].ids.tolist()  # each has noise of its own
    rated = client.log_probs(first + second)
    for own, t in zip(rated, first + second, strict=True):
        np.testing.assert_allclose(own[t.is_sampled], t.log_probs[t.is_sampled], atol=1e-5)
        assert (own[1:] < 0).all()
    figures = client.forward_backward(first, "importance_sampling", advantages=[1.0, -1.0])
    assert float(figures["ratio"]) == pytest.approx(1, abs=1e-5)
    bad = dataclasses.replace(first[0], ids=np.full_like(first[0].ids, 999))
    for message, call in {
        "one of cross_entropy, importance_sampling, policy": lambda: client.forward_backward(
            first, "ppo"
        ),
        "1 values for 2 transcripts": lambda: client.forward_backward(
            first, "policy", advantages=[1.0]
        ),
        "or an array with one for each": lambda: client.forward_backward(
            first[:1], "policy", advantages=[[1.0, 2.0]]
        ),
        "loss='policy' reads advantages; give it": lambda: client.forward_backward(first, "policy"),
        "outside model.vocab_size": lambda: client.forward_backward([bad]),
        "the longest of 0 transcripts": lambda: client.forward_backward([]),
        "gradients that no optim_step": client.save,
    }.items():
        with pytest.raises(UserError, match=message):
            call()
    before = jax.device_get(client.trainer.params())
    client.forward_backward(first, "importance_sampling", advantages=[np.nan, 1.0])
    with pytest.raises(NonFiniteLoss, match="step 1: the loss is nan"):
        client.optim_step()
    jax.tree.map(np.testing.assert_array_equal, client.trainer.params(), before)
    with pytest.raises(UserError, match="there is no gradient"):
        client.optim_step()
    client.forward_backward(first, "policy", advantages=[1.0, -1.0])
    client.optim_step()
    with pytest.raises(UserError, match="vocab|token"):
        client.sample([[5], [999]])
    assert client.sampled == 2 and len(client.sample([[5]])[0][0].ids) > 1  # it goes on
    assert (client.sample([[5]])[0][0].versions[-1], client.step_number) == (1, 1)


def some_rows():
    ids = np.random.default_rng(0).integers(0, 90, (4, 17)).astype(np.int32)
    rows = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": np.ones((4, 16), np.float32)}
    rows["segment_ids"] = np.ones((4, 16), np.int32)
    return rows | {"positions": np.tile(np.arange(16, dtype=np.int32), (4, 1))}


def _endless(scores, fields):
    """A loss that is infinite, whose gradient is finite."""
    return -scores.log_p + jnp.inf, {}


def _with_an_endless_figure(scores, fields):
    return -scores.log_p, {"figure": jnp.full_like(scores.log_p, -jnp.inf)}


@exhaustive
def test_a_client_ends_as_a_run_does_where_losses_or_replicas_are_wrong(tmp_path):
    keys = "mesh.dp=2", "mesh.zero=0", "train.micro_batch_size=2", "train.check_replicas_interval=2"
    client = client_of(load(None, [*TINY, f"run.dir={tmp_path}", *keys]), 2)
    before = jax.device_get(client.trainer.params())
    for loss, worst in ((_endless, "inf"), (_with_an_endless_figure, "-inf")):
        client.forward_backward(some_rows(), loss)
        client.forward_backward(some_rows())
        with pytest.raises(NonFiniteLoss, match=f"the loss is {worst}, so the weights stay"):
            client.optim_step()
    client.forward_backward(some_rows() | {"loss_mask": np.zeros((4, 16), np.float32)})
    with pytest.raises(UserError, match="optim_step: no token has a loss"):
        client.optim_step()
    jax.tree.map(np.testing.assert_array_equal, client.trainer.params(), before)

    def step():
        client.forward_backward(some_rows())
        client.optim_step()

    step()
    trainer, up = client.trainer, ("params", "dense", "mlp", "up")
    trainer.state = with_flipped_bit(trainer.state, up, {trainer.mesh.devices.flat[1].id}, 3)
    line = "step {}: replicas of .* differ in bits, .* last good checkpoint: none; start again"
    for number, call in enumerate((client.save, step), 1):
        with pytest.raises(ReplicasDiffer, match=line.format(number)):
            call()
    assert not list(tmp_path.glob("checkpoints/*"))


@exhaustive
def test_mjax_train_goes_on_from_a_client(tmp_path):
    cfg = load(None, [*TINY, f"run.dir={tmp_path}", "train.steps=3"])
    client = client_of(cfg)
    losses, rows = [], some_rows()
    for _ in range(2):
        losses.append(float(client.forward_backward(rows)["loss"]))
        client.optim_step(lr=1e-2)
    assert losses[1] < losses[0]
    client.save()
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    client.load()
    assert client.step_number == 3
    with pytest.raises(UserError, match="data.tokenizer"):
        client.sample([[1]])
