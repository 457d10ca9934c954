"""Tasks of lm-evaluation-harness are scored in a run as on its checkpoint, without a conversion.

Where lm_eval is missing, a bare module stands in for it, which asks the model one request.
"""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import jax
import pytest

from mjax.config import load
from mjax.errors import UserError
from mjax.evaluate.tasks import named_scores, tasks_of
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.laws.run.test_failures import records
from tests.marks import slow
from tests.tiny import TINY

REAL = importlib.util.find_spec("lm_eval") is not None
KEYS = [*TINY, "model.vocab_size=257", "data.tokenizer=byte", "schedule.lr=0.1", "train.steps=4"]


@pytest.fixture
def task(monkeypatch, tmp_path):
    """FOLDER/NAME of a task with the metric acc."""
    documents = [{"q": f"Q{i}", "choices": ["yes", "no!"], "gold": i % 2} for i in range(6)]
    (tmp_path / "d.json").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "choice.yaml").write_text(
        f"task: my_choice\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/d.json\n"
        "test_split: train\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}:'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n"
    )
    if REAL:
        yield f"{tmp_path}/my_choice"
        return
    names = "lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks"
    stubs = {name: ModuleType(name) for name in names}
    stubs["lm_eval.api.model"].LM = type("LM", (), {})

    class TaskManager:
        def __init__(self, include_path):
            self.known = ["my_choice"] if include_path else []

        def match_tasks(self, names):
            return [name for name in names if name in self.known]

    def simple_evaluate(model, tasks, limit, task_manager, log_samples):
        texts = [("Q0:", " yes")] * limit
        found = model.loglikelihood([SimpleNamespace(args=text) for text in texts])
        return {"results": {"my_choice": {"acc,none": found[0][0], "acc_stderr,none": 0.1}}}

    stubs["lm_eval.tasks"].TaskManager = TaskManager
    stubs["lm_eval"].simple_evaluate = simple_evaluate
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)
    yield f"{tmp_path}/my_choice"
    sys.modules.pop("mjax.evaluate.harness", None)


@slow
def test_tasks_are_scored_every_so_many_steps_and_at_the_end(tmp_path, task):
    keys = [f"train.eval_tasks={{{task}: 4}}", "train.eval_tasks_interval=2"]
    cfg = load(None, [*KEYS, *keys, f"run.dir={tmp_path / 'run'}"])
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    found = {r["step"]: r["task/my_choice/acc"] for r in records(tmp_path / "run") if
             "task/my_choice/acc" in r}  # fmt: skip
    assert list(found) == [2, 4]
    if not REAL:
        assert found[2] != found[4]  # those of the weights at each step


def test_scores_are_named_by_task_and_metric():
    values = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "n": 3}
    assert named_scores("t", values) == {"task/t/acc": 0.5, "task/t/em.strict": 1.0}


def test_a_task_that_nobody_knows_is_one_line_before_the_run(tmp_path, task):
    for name, said in (("no_such", "no task 'no_such'"), ("/no/such/task", "no folder /no/such")):
        cfg = load(None, [*KEYS, f"train.eval_tasks={{{name}: null}}"])
        with pytest.raises(UserError, match=said):
            tasks_of(cfg, None, None)
    assert tasks_of(load(None, KEYS), None, None) is None


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)
    cfg = load(None, [*KEYS, "train.eval_tasks={arc_easy: 5}"])
    with pytest.raises(UserError, match=r"install mjax\[lm-eval\]"):
        tasks_of(cfg, None, None)
    sys.modules.pop("mjax.evaluate.harness", None)
