"""The plan of runs, and what tables say of their logs."""

from pathlib import Path

import numpy as np

from mjax.data.base.tokenizer import load_tokenizer
from mjax.post.environments.environment import make_environment
from mjax.report.runs import Run
from tools.reversed_words import reversed_words
from tools.reward_curves import MISMATCH, Plan, results


def test_words_written_backwards_earn_the_whole_reward():
    tokenizer = load_tokenizer("byte")
    environment = make_environment("reverse_text", tokenizer, [256], words=2)
    for index, record in enumerate(reversed_words(5, 7, words=2)):
        turn = environment.reset(7, index)
        answer = [*tokenizer.encode(record["completion"]), 256]
        assert tokenizer.decode(turn.ids) == record["prompt"]
        assert environment.step(turn.state, answer).reward == 1


def test_runs_have_names_of_their_own_and_start_from_runs_before_them():
    found = list(
        Plan(Path("out"), None, ["reinforce.group_size=4", "train.eval_steps=1"]).trainings(2)
    )
    names = [training.name for training in found]
    assert len(set(names)) == len(names)
    for place, training in enumerate(found):
        assert training.after in ["", *names[:place]]
        assert "train.eval_steps=1" in training.arguments
        assert ("reinforce.group_size=4" in training.arguments) == bool(training.after)


def made_up(name: str, rewards: np.ndarray, dropped: float = 0) -> Run:
    """A run of one token an answer, with an answer to each of its 4 prompts."""
    step = np.arange(1.0, len(rewards) + 1)
    columns = {"completions/mean_length": 1, "groups_dropped": dropped, MISMATCH: 1 + 1e-6}
    is_old = name.startswith("age")
    columns |= {"staleness": 2 * is_old, "staleness_max": 4 * is_old}
    training = {"step": step, "reward": rewards}
    training |= {field: np.full(len(step), float(value)) for field, value in columns.items()}
    held_out = {"step": step[-1:], "eval_reward": np.array([0.5])}
    keys = {"prompts_per_step": 4, "group_size": 1, "updates_per_rollout": 1}
    config = {f"reinforce.{key}": value for key, value in keys.items()}
    return Run(name, training, held_out, [], config | {"precision.compute": "bfloat16"})


def test_losses_are_compared_at_equal_tokens(tmp_path):
    """One that drops a group for each that it keeps gets half as far."""
    rewards = np.arange(1, 41) / 40
    runs = [
        made_up("grpo_1", rewards),
        made_up("grpo_2", rewards + 1),
        made_up("dapo_1", rewards, 4),
    ]
    runs.append(made_up("age4_none_1", rewards))
    lines = results({run.name: run for run in runs}, tmp_path)
    [said] = [line for line in lines if line.startswith("| grpo | 2 ")]
    means = [float(cell.partition(" ")[0]) for cell in said.split(" | ")[2:6]]
    np.testing.assert_allclose(means, [0.7125, 0.9625, 1.2125, 1.4625], atol=1e-3)
    [said] = [line for line in lines if line.startswith("| dapo | 1 ")]
    means = [float(cell) for cell in said.split(" | ")[2:6]]
    np.testing.assert_allclose(means, [4.5 / 40, 9.5 / 40, 14.5 / 40, 19.5 / 40], atol=1e-3)
    [said] = [line for line in lines if line.startswith("| 4, none | 1 ")]
    assert said.endswith("| 0.500 | 2.000 | 4.000 |")
    assert any("bfloat16 | 3 | 1.0000010" in line for line in lines)
    assert (tmp_path / "reward_losses.svg").read_text().count("<polyline") == 3
