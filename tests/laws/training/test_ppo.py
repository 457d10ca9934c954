"""Laws of PPO's critic: GAE without one, meshes, kills, learning, and where it starts."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.plan.memory import bytes_per_device
from mjax.post.environments.environment import Turn
from mjax.post.policy.advantages import advantages_of
from mjax.post.policy.critic import critic_of, critic_run
from mjax.post.rollouts.packing import packed_transcripts
from mjax.post.rollouts.ppo_batches import ppo_batches
from mjax.post.rollouts.transcript import Transcript
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.training.test_reinforcement import (
    LONG,
    config,
    ends,
    figures,
    run,
    run_until_killed,
)
from tests.marks import exhaustive, slow

assert ends  # a fixture of all tests here, too
PPO = "reinforce.loss_type=ppo", "reinforce.critic_lr=1e-2", "reinforce.gae_lambda=0.9"


@dataclass(frozen=True)
class EvensAndLuck:
    """The reward is the share of even tokens, and 2 more where the prompt says so."""

    chat: object

    def reset(self, seed, index):
        return Turn((60 + index % 2, 70), index % 2)

    def step(self, state, ids):
        return Turn((), None, float(np.mean(np.array(ids) % 2 == 0)) + 2 * state)


def random_transcripts(rng, count=6):
    """Answers of two turns with a tool's tokens between them."""
    found = []
    for number in range(count):
        sizes = rng.integers(1, 5, 4)
        is_sampled = np.repeat([False, True, False, True], sizes)
        ids = rng.integers(0, 200, len(is_sampled)).astype(np.int32)
        log_probs = np.where(is_sampled, -1.0, 0).astype(np.float32)
        versions = np.where(is_sampled, 0, -1)
        given = number // 2, number % 2, ids, log_probs, is_sampled, versions
        found.append(Transcript(*given, reward=float(rng.normal())))
    return found


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_with_values_of_0_and_no_discount_ppo_is_reinforce_pp(scale):
    transcripts = random_transcripts(np.random.default_rng(0))
    packs = [packed_transcripts(part, 2, 32) for part in (transcripts[:2], transcripts[2:])]
    zeros = [{"values": np.zeros((len(pack.rows), 32), np.float32)} for pack in packs]
    settings = ReinforceConfig(loss_type="ppo", advantage_scale=scale)
    batches = ppo_batches(settings, packs, zeros)
    found = [row for p, b in zip(packs, batches, strict=True) for row in p.taken(b["advantages"])]
    rewards = np.array([t.reward for t in transcripts])
    lengths = np.array([t.length for t in transcripts])
    plain = ReinforceConfig(loss_type="reinforce_pp", advantage_scale=scale)
    wanted = advantages_of(plain, rewards, np.arange(6), lengths)
    shift = 0 if scale == "batch" else np.average(rewards, weights=lengths)  # what ppo leaves
    for own, advantage, t in zip(found, wanted, transcripts, strict=True):
        np.testing.assert_allclose(own, (advantage + shift) * t.is_sampled, rtol=1e-5, atol=1e-6)
    for pack, batch in zip(packs, batches, strict=True):
        for own, t in zip(pack.taken(batch["returns"]), pack.transcripts, strict=True):
            np.testing.assert_allclose(own, t.reward * t.is_sampled, rtol=1e-6)


def test_each_token_bears_its_own_divergence():
    pack = packed_transcripts(random_transcripts(np.random.default_rng(1), 2), 2, 32)
    mask = pack.batch()["loss_mask"]
    fields = {"values": np.zeros_like(mask), "old_log_probs": mask, "ref_log_probs": 0 * mask}
    keys = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in_reward": True}
    settings = ReinforceConfig(loss_type="ppo", gamma=0.0, advantage_scale="none", **keys)
    (batch,) = ppo_batches(settings, [pack], [fields])
    for own, t in zip(pack.taken(batch["returns"]), pack.transcripts, strict=True):
        wanted = -0.5 * t.is_sampled
        wanted[np.flatnonzero(t.is_sampled)[-1]] += t.reward
        np.testing.assert_allclose(own, wanted, rtol=1e-6)


def states(cfg, devices=1):
    """(the policy's parameters, the critic's whole state) of the newest checkpoint."""
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    trainer.restore()
    record = trainer.store.read_meta(trainer.step_number)["batches"]["critic"]
    critic = critic_of(trainer, record).trainer
    assert critic.step_number == trainer.step_number == int(critic.state["step"])
    return jax.device_get((trainer.params(), critic.state))


@exhaustive
@pytest.mark.parametrize("keys", [(), pytest.param(("lora.rank=4",), marks=exhaustive)])
def test_policy_and_critic_of_a_killed_run_have_the_bits_of_another(tmp_path, monkeypatch, keys):
    keys = *PPO, LONG, "checkpoint.interval=1", "reinforce.updates_per_rollout=2", *keys
    whole, parts = config(tmp_path / "whole", *keys), config(tmp_path / "parts", *keys)
    run(whole)
    assert run_until_killed(run, parts, 15, monkeypatch)  # within the second phase
    assert 0 < len(figures(tmp_path / "parts")) < 4
    run(parts)
    jax.tree.map(np.testing.assert_array_equal, states(parts), states(whole))
    for file in (tmp_path / "whole/checkpoints/4/critic").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert states(whole)[1]["step"] == 3  # both are of the newest step that is intact
    names = "value/loss", "value/explained_variance", "reward"
    pairs = list(zip(figures(tmp_path / "parts"), figures(tmp_path / "whole"), strict=True))
    assert len(pairs) == 4 and all(a[name] == b[name] for a, b in pairs for name in names)


@exhaustive
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_a_critic_on_a_mesh_is_that_of_one_device(tmp_path, axis):
    keys = *PPO, LONG, "train.micro_batch_size=2"
    run(config(tmp_path / "one", *keys, steps=2))
    run(config(tmp_path / "four", *keys, f"mesh.{axis}=2", "mesh.tp=2", steps=2), devices=4)
    names = "loss", "grad_norm", "reward", "value/loss", "value/grad_norm", "value/mean"
    for ours, theirs in zip(figures(tmp_path / "four"), figures(tmp_path / "one"), strict=True):
        for name in (*names, "value/explained_variance"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


@exhaustive
def test_values_explain_returns_and_rewards_rise(tmp_path):
    world = f"reinforce.environment={__name__}:EvensAndLuck"
    run(config(tmp_path, *PPO, world, "reinforce.prompts_per_step=4", steps=30))
    found = figures(tmp_path)
    assert abs(found[0]["value/explained_variance"]) < 1e-5 and found[0]["value/mean"] == 0
    late = found[-6:]
    assert np.mean([r["value/explained_variance"] for r in late]) > 0.75
    assert np.mean([r["reward"] for r in late]) > found[0]["reward"] + 0.15


@slow
def test_where_a_critic_starts(tmp_path):
    """It starts as the policy does, with no values, or as the weights of a reward model."""
    cfg = config(tmp_path / "policy", *PPO)
    policy = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    policy.init()
    critic = critic_of(policy, {}).trainer
    own, params = critic.params(), policy.params()
    assert not own.pop("score").any()
    params.pop("head", None)
    jax.tree.map(np.testing.assert_array_equal, own, params)
    scorer = Trainer(critic_run(config(tmp_path / "reward", *PPO)), policy.mesh)
    scorer.init()
    scorer.save()
    scorer.store.wait()
    cfg = config(tmp_path / "second", *PPO, f"reinforce.critic={tmp_path / 'reward'}")
    policy = Trainer(cfg, policy.mesh)
    policy.init()
    critic = critic_of(policy, {}).trainer
    jax.tree.map(np.testing.assert_array_equal, critic.params(), scorer.params())


def test_the_estimate_of_memory_counts_the_critic(tmp_path):
    sizes = []
    for keys in (PPO, ["reinforce.loss_type=reinforce_pp"]):
        cfg = config(tmp_path, *keys)
        specs = definition_of(cfg.model).specs
        sizes.append(bytes_per_device(cfg, cfg.mesh.model_copy(update={"dp": 1}), 1, specs))
    ppo, plain = sizes
    assert ppo.pop("critic") == plain["masters"] + plain["moments"] and ppo == plain


@exhaustive
def test_a_checkpoint_without_a_critic_is_refused(tmp_path):
    run(config(tmp_path, "reinforce.loss_type=reinforce_pp", steps=1))
    with pytest.raises(UserError, match="holds no critic"):
        run(config(tmp_path, *PPO, steps=2))
