"""Laws of rollouts: kills, meshes, sampler and trainer, staleness, adapters, and the command."""

import json
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.post import reinforce_batches as batches
from mjax.post.environments.environment import Turn
from mjax.post.reinforce import reinforce_defaults, require_policy
from mjax.post.reinforce_batches import RolloutSetup, reinforce_batches
from mjax.post.rollouts.packing import packed_transcripts
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import trained_only
from mjax.train import Trainer
from tests.laws.run.test_failures import events, losses, records
from tests.marks import exhaustive, slow
from tests.tiny import TINY


@dataclass(frozen=True)
class Evens:
    """The reward is the share of even tokens; a second turn follows answers that begin evenly."""

    chat: object
    is_long: bool = False

    def reset(self, seed, index):
        return Turn((seed % 50, *range(60, 61 + index % 3)), 0)

    def step(self, state, ids):
        if state == 0 and self.is_long and ids[0] % 2 == 0:
            return Turn((70, 71), 1)
        return Turn((), None, float(np.mean(np.array(ids) % 2 == 0)), {"turns": state + 1.0})


def config(folder, *keys, steps=4):
    own = [key for key in TINY if not key.startswith(("data.mock", "model.vocab", "data.seq"))]
    given = ["model.vocab_size=257", "data.tokenizer=byte", "data.seq_length=24"]
    given += [f"run.dir={folder}", f"train.steps={steps}", "train.eval_interval=null"]
    given += ["schedule.lr=1e-2", "schedule.warmup_steps=0", "schedule.decay=constant"]
    given += [f"reinforce.environment={__name__}:Evens", "reinforce.max_new_tokens=8"]
    given += ["reinforce.prompts_per_step=2", "reinforce.group_size=4"]
    given.append("checkpoint.keep=9")  # threads of a run that was killed here would still delete
    return load(None, [*own, *given, *keys], reinforce_defaults)


def run(cfg, devices=1):
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]), reinforce_batches)


def final_params(cfg):
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.restore()
    return jax.device_get(trainer.params())


def first_groups(cfg, devices=1):
    """(a trainer, its setup, the groups of its first phase)."""
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    trainer.init()
    setup = RolloutSetup(trainer)
    setup.policy.take_weights()
    with setup.collector() as collector:
        groups = collector.collect(0, cfg.reinforce.prompts_per_step)
    return trainer, setup, groups


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """A fifth of all tokens ends an answer, as drawn weights draw all alike."""
    monkeypatch.setattr(batches, "answer_ends", lambda *given: [*range(0, 257, 5)])


LONG = "reinforce.environment_args={is_long: true}"


class Killed(BaseException):
    """The end of a process, as far as this one can play it."""


def run_until_killed(run, cfg, number: int, monkeypatch) -> bool:
    """Run `cfg`, which dies in step `number` of its engine; False: it had fewer."""
    step, left = Engine.step, number

    def until_killed(engine):
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", until_killed)
        try:
            run(cfg)
        except Killed:
            return True
    return False


KILLS = [(2, [3, 12]), (1, [*range(1, 21)])]


@exhaustive
@pytest.mark.parametrize(("updates", "kills"), KILLS)
def test_a_run_that_is_killed_in_rollouts_ends_with_the_bits_of_another(
    tmp_path, monkeypatch, updates, kills
):
    """`kills`: the step of the engine, in each start, that a start does not live to see."""
    keys = LONG, "checkpoint.interval=1", f"reinforce.updates_per_rollout={updates}"
    whole, parts = config(tmp_path / "whole", *keys), config(tmp_path / "parts", *keys)
    run(whole)
    for number in kills:
        assert run_until_killed(run, parts, number, monkeypatch)
    run(parts)
    jax.tree.map(np.testing.assert_array_equal, final_params(parts), final_params(whole))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    names = "reward", "completions/mean_length", "staleness_max"
    pairs = zip(figures(tmp_path / "parts"), figures(tmp_path / "whole"), strict=True)
    assert all(a[name] == b[name] for a, b in pairs for name in names)


def figures(folder):
    return [r for r in records(folder) if "reward" in r]


RATED = (  # columns of these fields must be those of the labels, wherever cp puts them
    "reinforce.correction=truncate",
    "reinforce.kl_coef=0.1",
    "reinforce.sampling={temperature: 0.7}",
)
MESHES = {
    "dp2 tp2": (("mesh.dp=2", "mesh.tp=2"), ()),
    "cp2 tp2, rated by roles": (("mesh.cp=2", "mesh.tp=2"), RATED),
}


@exhaustive
@pytest.mark.parametrize("name", MESHES)
def test_rollouts_on_a_mesh_are_those_of_one_device(tmp_path, name):
    axes, keys = MESHES[name]
    keys = LONG, *keys
    _, _, expected = first_groups(config(tmp_path, *keys))
    mesh = *axes, "train.micro_batch_size=2"
    _, _, found = first_groups(config(tmp_path, *keys, *mesh), devices=4)
    # fp32 sums over shards differ by a few ulp; a draw would change only at a tie that close.
    for ours, theirs in zip(sum(found, []), sum(expected, []), strict=True):
        assert (ours.group, ours.sample, ours.reward) == (
            theirs.group,
            theirs.sample,
            theirs.reward,
        )
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.is_sampled, theirs.is_sampled)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
    run(config(tmp_path / "one", *keys, "train.micro_batch_size=2"))
    run(config(tmp_path / "four", *keys, *mesh), devices=4)
    pairs = zip(figures(tmp_path / "four"), figures(tmp_path / "one"), strict=True)
    for ours, theirs in pairs:
        for figure in (
            "loss",
            "grad_norm",
            "entropy",
            "reward",
            *(["kl"] if len(keys) > 1 else []),
        ):
            np.testing.assert_allclose(ours[figure], theirs[figure], rtol=1e-3, atol=1e-5)


@slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_rate_tokens_alike(tmp_path, temperature):
    keys = (
        LONG,
        "reinforce.correction=truncate",
        f"reinforce.sampling={{temperature: {temperature}}}",
    )
    trainer, setup, groups = first_groups(config(tmp_path, *keys))
    transcripts = sum(groups, [])
    pack = packed_transcripts(transcripts, 8, 24)
    batch = pack.batch(advantages=[t.log_probs for t in transcripts])
    found = setup.scorer()(batch)["old_log_probs"]
    drawn = batch["loss_mask"] > 0
    ratios = np.exp(np.abs(found - batch["sampler_log_probs"])[drawn])
    # Both are sums of fp32 over 32 channels and 257 logits: a few ulp of numbers below 10.
    assert drawn.sum() > 20 and ratios.mean() < 1 + 1e-5 and ratios.max() < 1 + 1e-4


@slow
def test_rollouts_go_on_over_steps_up_to_the_bound_and_no_further(tmp_path):
    run(config(tmp_path, LONG, "reinforce.max_staleness=1", "reinforce.engine={rows: 4}", steps=6))
    found = figures(tmp_path)
    assert max(r["staleness_max"] for r in found) == 1
    assert found[0]["staleness_max"] == 0 and len(found) == 6
    with_bank = config(tmp_path, LONG, "reinforce.max_staleness=1", "reinforce.engine={rows: 4}")
    trainer = Trainer(with_bank, make_mesh(with_bank.mesh, jax.devices()[:1]))
    record = trainer.store.read_meta(6)["batches"]["rollouts"]
    assert record["phase"] == 6 and len(record["bank"]["groups"]) == 2
    run(with_bank.model_copy(update={"train": with_bank.train.model_copy(update={"steps": 8})}))
    assert [r["step"] for r in figures(tmp_path)] == [*range(1, 9)]
    assert max(r["staleness_max"] for r in figures(tmp_path)) == 1


@exhaustive
def test_adapters_alone_are_handed_over_and_what_happens_is_seen(tmp_path):
    cfg = config(tmp_path, "lora.rank=8", "train.eval_interval=2", "train.eval_steps=2")
    run(cfg)
    found = figures(tmp_path)
    # An engine with the adapters of a step before would rate tokens otherwise.
    assert all(r["sampling/token_mult_prob_error"] < 1 + 1e-5 for r in found)
    evaluated = [r for r in records(tmp_path) if "eval_reward" in r]
    assert [r["step"] for r in evaluated] == [2, 4]
    assert all(r["eval_loss"] == -r["eval_reward"] for r in evaluated)
    assert any(line.startswith("rollout: ") for line in events(tmp_path))
    for name in ("rollout", "rewards", "log_probs", "update", "hand_over"):
        assert found[-1][f"seconds/{name}"] >= 0
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    policy = RolloutSetup(trainer).policy
    before = policy.take_weights().runner.params
    trainer.step_number = 1
    after = policy.take_weights().runner.params
    same = jax.tree.map(lambda a, b: a is b, before, after)
    leaves = jax.tree.leaves(same)
    trained = len(jax.tree.leaves(trained_only(trainer.specs, trainer.specs)))
    assert len(leaves) > leaves.count(False) >= trained > 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "checkpoint={interval: 4, local_dir: tier, local_interval: 2}",
            "no critic, which reinforce.loss_type=ppo needs",
        ),
        ("reinforce.updates_per_rollout=3", "does not divide"),
        ("data.tokenizer=null", "prompts and answers need one"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, key, message):
    with pytest.raises(UserError, match=message):
        require_policy(config(tmp_path, key, "reinforce.loss_type=ppo"))
    with pytest.raises(UserError, match="has no rollouts"):
        require_policy(load(None, TINY))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("reinforce.engine={lanes: 2}", "no option lanes; known: rows"),
    ],
)
def test_a_run_refuses_unknown_options_before_it_draws(tmp_path, key, message):
    cfg = config(tmp_path, key)
    with pytest.raises(UserError, match=message):
        reinforce_batches(Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1])), {})


def test_defaults_give_a_row_to_each_answer_of_an_update():
    found = reinforce_defaults({"reinforce": {"prompts_per_step": 6, "updates_per_rollout": 2}})
    assert found["train"] | {"objective": "policy", "global_batch_size": 24} == found["train"]
    assert json.dumps(reinforce_defaults({})["train"]["global_batch_size"]) == "128"
