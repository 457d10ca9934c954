"""`python -m tools.reward_curves --out DIR`: what losses of policies learn on sums, measured.

Each loss goes on from the model of configs/sft_addition.yaml by configs/grpo_addition.yaml, on as
many answers. Measured is the share of right answers among those drawn in training, a mean over
some steps, and at the end that of the likeliest answers. DIR gets the runs and reward.svg.
"""

import argparse
import json
from pathlib import Path

from mjax.config.languages.paths import as_path
from mjax.errors import run_cli
from mjax.report.runs import Run, read_run
from tools.distillation_curves import table
from tools.learning_runs import Curve, draw_curves, run_mjax, spread, train_once
from tools.sums import sums

STEPS, EVERY = 200, 25
SEEDS = {"grpo": 3, "ppo": 1}
CRITIC = ["reinforce.critic_lr=1e-3"]  # the rate of the policy


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    out = parser.parse_args().out
    make_start(out)
    curves: dict[str, list[Curve]] = {}
    likeliest: dict[str, list[float]] = {}
    for loss, seeds in SEEDS.items():
        for seed in range(1, seeds + 1):
            name = f"{loss}{seed}"
            keys = [f"reinforce.loss_type={loss}", f"checkpoint.init_from={out}/start"]
            keys += [f"run.seed={seed}", *(CRITIC if loss == "ppo" else [])]
            config = "--config", "configs/grpo_addition.yaml"
            train_once("reinforce", out / name, STEPS, *config, *keys)
            run = read_run(out / name, name)
            curves.setdefault(loss, []).append(means(run, "reward"))
            _, rewards = run.column("eval_reward")
            likeliest.setdefault(loss, []).append(float(rewards[-1]))
    draw_curves(curves, "reward", "Right answers among those drawn, by step", out / "reward.svg")
    print("\n".join(table(curves)))
    print(f"| likeliest | {' | '.join(spread(values) for values in likeliest.values())} |")
    return 0


def make_start(out: Path) -> None:
    """The model that knows a third of the sums, in the folder `start`, unless it is there."""
    if (out / "start" / "checkpoints").is_dir():
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in sums(20_000, 1, seed=1)]
    (out / "sums.jsonl").write_text("\n".join(lines) + "\n")
    keys = f"data.conversations.path={out}/sums.jsonl", f"run.dir={out}/start"
    run_mjax("sft", "--config", "configs/sft_addition.yaml", *keys)


def means(run: Run, field: str) -> Curve:
    """The mean of what was logged in the `EVERY` steps up to each, by step."""
    steps, values = run.column(field)
    ends = range(EVERY, STEPS + 1, EVERY)
    return {end: float(values[(steps > end - EVERY) & (steps <= end)].mean()) for end in ends}


if __name__ == "__main__":
    run_cli(main)
