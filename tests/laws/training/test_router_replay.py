"""Laws: a trainer sends tokens to the experts that the sampler chose, whatever its routers say."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.models.moe import layer as moe
from mjax.models.moe.router import rerouted, route
from mjax.post import reinforce_batches
from mjax.post.environments.environment import Turn
from mjax.post.rollouts.bank import Bank, PromptGroup
from mjax.post.rollouts.packing import packed_transcripts
from mjax.post.rollouts.transcript import OpenRollout
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from mjax.train.step import GRADIENTS
from tests.laws.training.test_reinforcement import config, figures, first_groups, run
from tests.marks import exhaustive


@dataclass(frozen=True)
class LongPrompts:
    """Prompts of more than a page, which a group shares; a second turn follows each answer."""

    chat: object

    def reset(self, seed, index):
        return Turn(tuple(np.arange(80) * (index + 1) % 257), 0)

    def step(self, state, ids):
        return Turn((70, 71), 1) if state == 0 else Turn((), None, float(len(ids) % 2))


WIDTH = 112
KEYS = (
    f"reinforce.environment={__name__}:LongPrompts",
    f"data.seq_length={WIDTH}",
    "model.num_hidden_layers=3",
    "model.layer_pattern='full+mlp, full+experts*2'",
    "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16}",
    "model.initializer_range=0.3",  # so that experts matter
    "reinforce.router_replay=true",
    "reinforce.correction=truncate",
)


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """A fifth of all tokens ends an answer, as drawn weights draw all alike."""
    monkeypatch.setattr(reinforce_batches, "answer_ends", lambda *given: [*range(0, 257, 5)])


def odd_route(x, router, cfg):
    """A choice that has nothing to do with the router's own, and is as sharp."""
    routing = route(x, router, cfg)
    ranks = jnp.sin(300 * jax.lax.stop_gradient(routing.logits))
    return rerouted(routing, jax.lax.top_k(ranks, cfg.moe.num_experts_per_tok)[1], cfg)


def oddly_drawn(folder, monkeypatch, keys=(), devices=1):
    """(trainer, world, batch) of rollouts whose sampler routed by `odd_route`."""
    add, requests = Engine.add, []

    def noted(*given, **named):
        requests.append(add(*given, **named))
        return requests[-1]

    with monkeypatch.context() as patch:
        patch.setattr(moe, "route", odd_route)
        patch.setattr(Engine, "add", noted)
        trainer, world, groups = first_groups(config(folder, *KEYS, *keys), devices)
    cached = [request.output.num_cached_tokens for request in requests]
    assert sum(count >= 64 for count in cached) >= 8  # a page of the prompt, or all turns
    transcripts = sum(groups, [])
    pack = packed_transcripts(transcripts, 8, WIDTH)
    return trainer, world, pack.batch(advantages=[1.0 * t.is_sampled for t in transcripts])


def error(found, batch):
    drawn = batch["loss_mask"] > 0
    assert drawn.sum() > 20
    return np.abs(found - batch["sampler_log_probs"])[drawn].max()


MESHES = {
    "ep2 cp2 tp2": (("mesh.ep=2", "mesh.cp=2", "mesh.tp=2", "train.micro_batch_size=2"), 8),
    "one device": ((), 1),
}


@exhaustive
@pytest.mark.parametrize("name", MESHES)
def test_a_sampler_that_routes_otherwise_is_followed_to_the_letter(tmp_path, monkeypatch, name):
    """Through prompts that a group shares, second turns, and layers without experts."""
    axes, devices = MESHES[name]
    trainer, world, batch = oddly_drawn(tmp_path, monkeypatch, axes, devices)
    assert batch["experts"].shape == (8, WIDTH, 2, 2)
    assert ((batch["experts"] >= 0).all((2, 3)) == (batch["segment_ids"] > 0)).all()
    alone = batch | {"experts": np.full_like(batch["experts"], -1)}
    rated = world.scorer()(batch)
    assert error(rated["old_log_probs"], batch) < 1e-4
    assert error(world.scorer()(alone)["old_log_probs"], batch) > 0.1
    found = jax.device_get(trainer.run_program(GRADIENTS, batch | rated))
    with monkeypatch.context() as patch:
        patch.setattr(moe, "route", odd_route)
        cfg = trainer.cfg
        other = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
        other.init()
        expected = jax.device_get(other.run_program(GRADIENTS, alone | rated))
    pairs = zip(jax.tree.leaves(found.gradients), jax.tree.leaves(expected.gradients), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(expected.norm))


@exhaustive
def test_a_run_replays_its_sampler(tmp_path):
    """With rollouts that go on over steps, and so through checkpoints."""
    keys = "reinforce.max_staleness=1", "reinforce.engine={rows: 4}", "schedule.lr=1e-4"
    run(config(tmp_path, *KEYS, *keys, steps=2))
    assert all(r["sampling/token_mult_prob_error"] < 1.01 for r in figures(tmp_path))


def test_experts_of_rollouts_are_kept_in_checkpoints():
    rollout = OpenRollout(3, 0, None)
    rollout.add_given([1, 2])
    rollout.experts = np.arange(8, dtype=np.int16).reshape(1, 4, 2)
    bank = Bank(groups={3: PromptGroup(0, [rollout, OpenRollout(3, 1, None)])})
    again = Bank.of_record(bank.record()).groups[3].rollouts
    np.testing.assert_array_equal(again[0].experts, rollout.experts)
    assert again[0].experts.dtype == np.int16 and again[1].experts is None


def test_replay_needs_experts_and_tokens_that_are_kept(tmp_path):
    with pytest.raises(UserError, match="only with experts blocks"):
        config(tmp_path, "reinforce.router_replay=true")
    windows = "model.layer_pattern='window+experts'", "model.attention.sliding_window=8"
    with pytest.raises(UserError, match="have left the windows"):
        first_groups(config(tmp_path, *KEYS, *windows))
