"""Laws of what follows pretraining in several processes: the run of one; errors end all.

Answers are drawn by all processes together, and each environment call is made by one of them.
"""

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest

from mjax.config import load
from mjax.errors import run_cli
from mjax.infer.step_runner import StepRunner
from mjax.post import reinforce, reinforce_batches
from mjax.post.environments.environment import Turn
from tests.laws.run.test_processes import BASE as OF_MOCK
from tests.laws.run.test_processes import finish, losses, start
from tests.marks import exhaustive, slow
from tests.teachers import write_teacher_folder

pytestmark = slow

HERE = __name__
MESH = "mesh.dp=2", "mesh.cp=2", "mesh.tp=2"
BASE = [
    "model.vocab_size=257",
    "data.mock=false",
    "data.tokenizer=byte",
    "data.seq_length=24",
    "schedule.lr=1e-2",
    "schedule.warmup_steps=0",
    "schedule.decay=constant",
    "train.global_batch_size=4",
    "train.eval_interval=2",
    "train.eval_steps=1",
    "train.steps=4",
    "checkpoint.interval=1",
    f"reinforce.environment={HERE}:Evens",
    "reinforce.max_new_tokens=8",
    "reinforce.prompts_per_step=2",
    "reinforce.group_size=4",
    "reinforce.updates_per_rollout=2",
    *MESH,
]
DIVERGENCE = ("reinforce.kl_coef=0.1",)
CRITIC = *DIVERGENCE, "reinforce.loss_type=ppo", "reinforce.kl_in_reward=true"
EXPERTS = (
    *("mesh.cp=1", "mesh.ep=2", "model.layer_pattern=GE", "model.moe.num_experts=4"),
    *("reinforce.router_replay=true", "reinforce.correction=truncate"),
)
ENDS = range(0, 257, 5)
# Each process gives two of its devices to the engine, which draws beside updates.
APART = (
    *("mesh.cp=1", "reinforce.engine={devices: 4, tp: 2}", "reinforce.max_staleness=2"),
    "reinforce.correction=truncate",
)
FIGURES = "loss", "grad_norm", "reward", "completions/mean_length", "environment/turns", "entropy"


class Evens:
    """The reward is the share of even tokens; a second turn follows answers that begin evenly."""

    def __init__(self, chat, fails_to_start=False, device_errs=False):
        if fails_to_start and os.environ["JAX_PROCESS_ID"] == "1":
            raise ValueError("no room here")
        if device_errs and os.environ["JAX_PROCESS_ID"] == "1":
            StepRunner.results = with_an_end(StepRunner.results)

    def reset(self, seed, index):
        return Turn((seed % 50, *range(60, 61 + index % 3)), 0)

    def step(self, state, ids):
        if state == 0 and ids[0] % 2 == 0:
            return Turn((70, 71), 1)
        return Turn((), None, float(np.mean(np.array(ids) % 2 == 0)), {"turns": state + 1.0})


def with_an_end(results):
    """`StepRunner.results`, of which one is read as a token that ends its answer."""
    count = 0

    def found(*given):
        nonlocal count
        for result in results(*given):
            count += 1
            if count == 20:
                result.columns[0][result.kept[0]] = ENDS[0]
            yield result

    return found


class FailsAtOdd(Evens):
    def reset(self, seed, index):
        if index % 2:
            raise ValueError("there is no such prompt")
        return super().reset(seed, index)


def begin(folder, processes, *keys):
    return start(folder, processes, *BASE, *keys, module=HERE)


def steps(folder):
    """What a run has logged of each step, later lines in place of earlier ones."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found: dict[tuple, dict] = {}
    for record in lines:
        kind = next((k for k in ("loss", "eval_loss", "event") if k in record), "")
        found[record["step"], kind] = record
    return found


def figures(folder):
    found = steps(folder)
    trained = [[found[step, "loss"][name] for name in FIGURES] for step in range(1, 5)]
    return np.array(trained), [found[step, "eval_loss"]["eval_reward"] for step in (2, 4)]


@exhaustive
@pytest.mark.parametrize(
    "keys",
    [
        DIVERGENCE,
        APART,
        pytest.param(CRITIC, marks=exhaustive),
        pytest.param(EXPERTS, marks=exhaustive),
    ],
)
def test_a_run_of_two_processes_of_which_one_is_killed_is_that_of_one(tmp_path, keys):
    one, two = tmp_path / "one", tmp_path / "two"
    said = finish(one, begin(one, 1, *keys))
    running = begin(two, 2, *keys, "reinforce.workers=1")
    while not (two / "metrics.jsonl").exists() or (2, "loss") not in steps(two):
        assert all(p.poll() is None for p in running), (tmp_path / "two.0").read_text()
        time.sleep(0.1)
    running[1].send_signal(signal.SIGKILL)
    assert running[0].wait(timeout=120) != 0
    again = finish(two, begin(two, 2, *keys, "reinforce.workers=1"))
    assert "resumed from" in again[0] and "step" not in again[1]  # one process logs
    for found, expected in zip(figures(two), figures(one), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    last = [re.findall(r"rollout: .*", text)[-1] for text in (again[0], said[0])]
    assert last[0] == last[1] and "reward" in last[0]


@exhaustive
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ([f"reinforce.environment={HERE}:FailsAtOdd"], "there is no such prompt"),
        pytest.param(
            ["reinforce.environment_args={fails_to_start: true}"], "no room here", marks=exhaustive
        ),
    ],
)
def test_an_error_in_the_environment_of_one_process_ends_all_with_its_line(tmp_path, keys, line):
    require_line_of_all(tmp_path / "run", begin(tmp_path / "run", 2, *keys), line)


@exhaustive
def test_processes_of_which_one_reads_another_token_say_so(tmp_path):
    """The answer ends in one of them alone, so the other would wait for its part of a step."""
    keys = "reinforce.environment_args={device_errs: true}", "train.step_timeout_minutes=60"
    running = begin(tmp_path / "run", 2, *keys)
    # XLA's CPU runtime may abort a process that ends while a program runs.
    codes = {1, -signal.SIGABRT}
    require_line_of_all(tmp_path / "run", running, "drawn other answers", codes, "mjax: stopped")


def require_line_of_all(folder, running, line, codes=frozenset([2]), start="mjax: error"):
    assert {p.wait(timeout=240) for p in running} <= codes
    for number in range(2):
        said = folder.with_name(f"{folder.name}.{number}").read_text()
        errors = [text for text in said.splitlines() if text.startswith(start)]
        assert len(errors) == 1 and line in errors[0] and "Traceback" not in said


@exhaustive
def test_two_processes_write_the_teacher_s_tokens_of_one(tmp_path):
    teacher = write_teacher_folder(tmp_path / "teacher", load(None, OF_MOCK).model)
    keys = "train.steps=2", *MESH
    stored = []
    for count in (1, 2):
        store, folder = tmp_path / f"store{count}", tmp_path / str(count)
        own = f"distill.teacher={teacher}", "--write", str(store), "--top", "5"
        said = finish(folder, start(folder, count, *keys, *own, module="mjax.post.distill"))
        assert "likeliest tokens of 32 samples" in said[0] and "likeliest" not in "".join(said[1:])
        stored.append({p.name: np.load(p) for p in store.glob("*.npz")})
    assert stored[0].keys() == stored[1].keys() and len(stored[0]) == 4
    for name, one in stored[0].items():
        np.testing.assert_array_equal(stored[1][name]["checksums"], one["checksums"])
        for field in ("teacher_ids", "teacher_log_probs"):
            np.testing.assert_allclose(stored[1][name][field], one[field], rtol=1e-5)


@exhaustive
@pytest.mark.parametrize(
    ("mesh", "of_teacher"),
    [
        (("mesh.dp=2", "mesh.tp=2"), "devices: 4, tp: 2"),
        pytest.param(("mesh.pp=2", "mesh.dp=2"), "devices: 4, tp: 4", marks=exhaustive),
    ],
)
def test_a_teacher_on_devices_of_two_processes_is_that_of_one(tmp_path, mesh, of_teacher):
    """A batch is split by processes, or each has all rows of it."""
    teacher = write_teacher_folder(tmp_path / "teacher", load(None, OF_MOCK).model)
    keys = "train.steps=3", *mesh, f"distill.teacher_mesh={{{of_teacher}}}"
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        given = *keys, f"distill.teacher={teacher}"
        finish(folder, start(folder, count, *given, module="mjax.post.distill"))
        found.append(losses(folder))
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], rel=1e-5)


@exhaustive
def test_two_processes_learn_from_the_student_s_answers_of_one(tmp_path):
    """Prompts of conversations are shared out as calls of environments are."""
    model = load(None, [*OF_MOCK, "model.vocab_size=257"]).model
    teacher, pairs = write_teacher_folder(tmp_path / "teacher", model), tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}:", "completion": str(n % 7)} for n in range(60)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    keys = [key for key in BASE if not key.startswith(("train.eval", "reinforce.env"))]
    keys += ["train.eval_interval=null", f"distill.teacher={teacher}", "distill.student_share=1"]
    keys += [f"data.conversations.path={pairs}", "data.split=[0.8, 0.2, 0]"]
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        finish(folder, start(folder, count, *keys, module="mjax.post.distill"))
        found.append(losses(folder))
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], rel=1e-5)


@exhaustive
def test_a_teacher_that_needs_other_rows_in_a_process_says_so(tmp_path):
    teacher, folder = write_teacher_folder(tmp_path / "teacher", load(None, OF_MOCK).model), "no"
    keys = f"distill.teacher={teacher}", "distill.teacher_mesh={devices: 4}", "mesh.tp=4"
    write = "--write", str(tmp_path / "store"), "--top", "5"
    running = start(tmp_path / folder, 2, *keys, *write, module="mjax.post.distill")
    require_line_of_all(tmp_path / folder, running, "need the same rows of a batch in each")
    assert not (tmp_path / "store").exists()


if __name__ == "__main__":  # a process of a run
    reinforce_batches.answer_ends = lambda *given: [*ENDS]
    sys.exit(run_cli(reinforce.main))
