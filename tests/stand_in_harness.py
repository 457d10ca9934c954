"""A stand-in for lm-evaluation-harness where it is missing: it asks the model a few requests.

Its tasks are `my_choice`, `my_error`, which fails, and `my_wait`, which takes 3 s.
"""

import sys
import time
from types import ModuleType, SimpleNamespace

TASKS = "my_choice", "my_error", "my_wait"
ENDS = {"until": ["\n"], "max_gen_toks": 4}


class TaskManager:
    """Knows `TASKS` if it has a folder."""

    def __init__(self, include_path):
        self.known = TASKS if include_path else ()

    def match_tasks(self, names):
        return [name for name in names if name in self.known]


def simple_evaluate(model, tasks, limit, task_manager, log_samples):
    """The results of one task: a log-probability, that of a text, and the letters of answers."""
    (name,) = tasks
    texts = [(f"Q{n}:", " yes" * (n + 1)) for n in range(limit)]
    scores = model.loglikelihood(_requests(texts))
    if name == "my_error":
        raise KeyError("no such field")
    if name == "my_wait":
        print("waiting", flush=True)
        time.sleep(3)
    whole = model.loglikelihood_rolling(_requests([("a text",), ("b",)]))
    made = model.generate_until(_requests([("Q1", ENDS), ("Q22", ENDS), ("Q333", ENDS)]))
    found = {
        "acc,none": sum(score for score, _ in scores),
        "acc_stderr,none": 0.1,
        "text,none": sum(whole),
        "letters,none": sum(map(ord, "".join(made))),
    }
    return {"results": {name: found}}


def _requests(args):
    return [SimpleNamespace(args=each) for each in args]


def modules():
    """The modules that stand in, by name."""
    names = "lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks"
    found = {name: ModuleType(name) for name in names}
    found["lm_eval.api.model"].LM = type("LM", (), {})
    found["lm_eval.tasks"].TaskManager = TaskManager
    found["lm_eval"].simple_evaluate = simple_evaluate
    return found


if __name__ == "__main__":  # a process of a run
    from mjax.errors import run_cli
    from mjax.train.__main__ import main

    sys.modules.update(modules())
    run_cli(main)
