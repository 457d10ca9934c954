"""`python -m tools.reward_curves --out DIR`: what policies learn from rewards, measured.

Small models are fine-tuned, then go on by reinforcement learning:

  addition    each loss, four updates to a rollout, at equal tokens; then GRPO on answers that are
              up to k updates old, with and without a correction
  countdown   GRPO after a short and a long fine-tuning on traces of a solver; and 300 steps in
              which sampler and trainer are compared
  reverse     GRPO on words to write backwards, likewise

Runs go in the order of their worth, `--jobs` at a time on one device, until `--minutes` are over.
DIR gets the runs, their logs, drawings, and results.md. What DIR holds is not done again. KEY=VALUE
go to all runs, those of `reinforce` to those that have it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mjax.config.load import load
from mjax.errors import run_cli
from mjax.infer.records import powers_of_two
from mjax.post.reinforce import reinforce_defaults
from mjax.report.runs import Run, read_run
from tools.countdown_traces import traces
from tools.json_lines import write_records
from tools.learning_runs import Training, draw_curves, parser_of_trainings, table_head, trainings_of
from tools.reversed_words import reversed_words
from tools.sums import sums

LOSSES = "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "ppo"
AGES = 0, 1, 4, 8  # updates that an answer may be old
SEEDS = 3
TUNED = {"addition": (60,), "reverse": (150, 400), "countdown": (500, 1500)}  # steps of mjax sft
LEARNED = {"addition": 200, "reverse": 100, "countdown": 100}  # steps of mjax reinforce
COMPARED = 300  # steps of the runs that compare sampler and trainer

ANSWERS = 512  # of an update on sums
FOUR_UPDATES = [
    "reinforce.prompts_per_step=128",
    "reinforce.updates_per_rollout=4",
    f"reinforce.engine.rows={ANSWERS}",
    "train.eval_steps=1",
]
OF_LOSS = {
    "dapo": ["reinforce.drops_equal_groups=true"],
    "ppo": ["reinforce.critic_lr=1e-3"],  # the rate of the policy
}
FEW_ANSWERS = ["reinforce.prompts_per_step=16", "train.global_batch_size=24"]
MODES = {"numerics": "false", "numerics_invariant": "true"}
MISMATCH = "sampling/token_mult_prob_error"  # the mean of exp |log p - log p of the sampler|
POINTS = 20  # of a curve


def main() -> int:
    """The command line."""
    parser = parser_of_trainings(__doc__.partition("\n")[0], SEEDS)
    parser.add_argument("--task", choices=LEARNED, help="default: all")
    args = parser.parse_args()
    began, out = time.monotonic(), args.out
    found = list(Plan(out, args.steps, args.keys).trainings(args.seeds))
    if args.task:
        found = [t for t in found if f"start_{args.task}" in (t.name, t.after)]
    if not args.draw:
        out.mkdir(parents=True, exist_ok=True)
        write_lines(out)
        trainings_of(args, began).run(found)
    done = finished(out, found)
    lines = [
        f"{len(done)} of {sum(bool(t.after) for t in found)} runs are done.",
        *results(done, out),
    ]
    (out / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"\n{time.monotonic() - began:.0f} s")
    return 0


# ---- the runs ------------------------------------------------------------------------------------


def write_lines(out: Path) -> None:
    """What the models are fine-tuned on, as files in the folder."""
    makers: dict[str, Callable[[], list[dict]]] = {
        "addition": lambda: sums(20_000, 1, seed=1),
        "countdown": lambda: traces(50_000, 0, **environment_args("countdown")),
        "reverse": lambda: reversed_words(20_000, 0, **environment_args("reverse")),
    }
    for task, make in makers.items():
        file = out / f"{task}.jsonl"
        if not file.is_file():
            write_records(file, make())


def environment_args(task: str) -> dict:
    """The arguments of the environment in the config of a task."""
    return load(f"configs/grpo_{task}.yaml", [], reinforce_defaults).reinforce.environment_args


@dataclass(frozen=True)
class Plan:
    """All runs, in a folder. most: steps of each at most. keys: more keys of each."""

    out: Path
    most: int | None
    keys: Sequence[str]

    def trainings(self, seeds: int) -> Iterator[Training]:
        """The runs in the order of their worth; of equal ones those that take long come first."""
        yield from (self.tuned(task) for task in ("countdown", "reverse", "addition"))
        for seed in range(1, seeds + 1):
            yield from self.tasks("countdown", seed)
            for name, mode in MODES.items() if seed == 1 else ():
                keys = [f"reinforce.engine.batch_invariant={mode}", *FEW_ANSWERS]
                yield self.learned("countdown", name, seed, *keys, steps=COMPARED)
            for loss in LOSSES:
                keys = [f"reinforce.loss_type={loss}", *FOUR_UPDATES, *OF_LOSS.get(loss, [])]
                yield self.learned("addition", loss, seed, *keys)
            for age, correction in ages():
                keys = [f"reinforce.max_staleness={age}", f"reinforce.correction={correction}"]
                rows = powers_of_two(1, ANSWERS * (1 + age))
                keys.append(f"reinforce.engine.rows={rows[-1]}")
                yield self.learned("addition", f"age{age}_{correction}", seed, *keys)
            yield from self.tasks("reverse", seed)

    def tasks(self, task: str, seed: int) -> Iterator[Training]:
        """The runs of a task, one for each length of fine-tuning."""
        for steps in TUNED[task]:
            yield self.learned(task, f"{task}{steps}", seed, tuned=steps)

    def _bounded(self, steps: int) -> int:
        return steps if self.most is None else min(steps, self.most)

    @property
    def _short(self) -> list[str]:
        """Keys of runs with a bound, which may be shorter than the warm-up."""
        return [] if self.most is None else ["schedule.warmup_steps=0"]

    def tuned(self, task: str) -> Training:
        """The fine-tuning that a task's runs start from."""
        keys = [f"data.conversations.path={self.out}/{task}.jsonl", *self._short]
        keys += [
            f"checkpoint.interval={self._bounded(TUNED[task][0])}",
            "checkpoint.keep=9",
            *(key for key in self.keys if not key.startswith("reinforce.")),
        ]
        arguments = "sft", "--config", f"configs/sft_{task}.yaml", *keys
        return Training(f"start_{task}", self._bounded(TUNED[task][-1]), arguments)

    def learned(
        self, task: str, name: str, seed: int, *keys: str, tuned: int = 0, steps: int = 0
    ) -> Training:
        """A run of reinforcement learning; 0: the last step of fine-tuning, the task's steps."""
        start = f"start_{task}"
        place = self.out / start / "checkpoints" / str(self._bounded(tuned or TUNED[task][-1]))
        own = [f"checkpoint.init_from={place}", f"run.seed={seed}", "log.interval=1"]
        command = "reinforce", "--config", f"configs/grpo_{task}.yaml"
        arguments = *command, *own, *keys, *self._short, *self.keys
        steps = self._bounded(steps or LEARNED[task])
        return Training(f"{name}_{seed}", steps, arguments, after=start)


def ages() -> list[tuple[int, str]]:
    """(updates that an answer may be old, correction); without age there is nothing to correct."""
    return [(age, kind) for age in AGES for kind in ("none", "truncate") if age or kind == "none"]


# ---- what is measured ----------------------------------------------------------------------------


def finished(out: Path, trainings: Sequence[Training]) -> dict[str, Run]:
    """The runs of reinforcement learning whose logs have the last step and what follows it."""
    found = {}
    for training in trainings:
        folder = out / training.name
        if training.after and (folder / "metrics.jsonl").is_file():
            run = read_run(folder, training.name)
            if training.steps in run.column("eval_reward")[0]:
                found[training.name] = run
    return found


def results(done: Mapping[str, Run], out: Path) -> list[str]:
    """The lines of all tables; the drawings are written."""
    return [
        *of_losses(done, out),
        *of_ages(done, out),
        *of_tasks(done, out),
        *of_numerics(done),
    ]


def seeds_of(done: Mapping[str, Run], name: str) -> list[Run]:
    """The runs of a name, by seed."""
    return [run for key, run in done.items() if key.rpartition("_")[0] == name]


def tokens_drawn(run: Run) -> np.ndarray:
    """Tokens drawn up to each record, those of groups that were dropped included."""
    prompts, size, updates = (
        run.config[f"reinforce.{key}"]
        for key in ("prompts_per_step", "group_size", "updates_per_rollout")
    )
    _, length = run.column("completions/mean_length")
    _, dropped = run.column("groups_dropped")
    return np.cumsum(length * (prompts + dropped) * size / updates)


def mean_within(places: np.ndarray, values: np.ndarray, begin: float, end: float) -> float:
    """The mean of values at places in (begin, end]; NaN without any."""
    chosen = values[(places > begin) & (places <= end)]
    return float(chosen.mean()) if len(chosen) else float("nan")


def curve_of(places: np.ndarray, values: np.ndarray, last: float) -> dict[int, float]:
    """Means over equal parts of the places up to the last, by the ends of these."""
    ends = np.linspace(0, last, POINTS + 1)
    means = {
        int(b): mean_within(places, values, a, b) for a, b in zip(ends, ends[1:], strict=False)
    }
    return {end: mean for end, mean in means.items() if np.isfinite(mean)}


def quarters(places: np.ndarray, values: np.ndarray, last: float) -> list[float]:
    """Means over a tenth of the places before each quarter of the last."""
    ends = last * np.array([0.25, 0.5, 0.75, 1.0])
    return [mean_within(places, values, end - last / 10, end) for end in ends]


def row(label: str, runs: Sequence[Run], numbers: Sequence[Sequence[float]]) -> str:
    """A line of a table: mean, lowest and highest of the runs' numbers, one list for each run."""
    cells = []
    for values in zip(*numbers, strict=True):
        mean, low, high = np.mean(values), min(values), max(values)
        cells.append(f"{mean:.3f} ({low:.3f} to {high:.3f})" if len(values) > 1 else f"{mean:.3f}")
    return f"| {label} | {len(runs)} | {' | '.join(cells)} |"


def likeliest(run: Run, field: str = "eval_reward") -> float:
    """The last mean reward of the likeliest answers to held-out prompts."""
    return float(run.column(field)[1][-1])


def of_losses(done: Mapping[str, Run], out: Path) -> list[str]:
    """Right answers among those drawn, by loss, at equal tokens."""
    runs = {loss: found for loss in LOSSES if (found := seeds_of(done, loss))}
    if not runs:
        return []
    last = min(tokens_drawn(run)[-1] for found in runs.values() for run in found)
    curves, lines = {}, table_head("loss", "seeds", *at_quarters(last, "tokens"), "likeliest")
    for loss, found in runs.items():
        columns = [(tokens_drawn(run), run.column("reward")[1], last) for run in found]
        curves[loss] = [curve_of(*column) for column in columns]
        ends = zip(columns, found, strict=True)
        lines.append(row(loss, found, [[*quarters(*c), likeliest(run)] for c, run in ends]))
    title = "Right answers among those drawn, by tokens drawn"
    draw_curves(curves, "reward", title, out / "reward_losses.svg")
    return lines


def at_quarters(last: float, unit: str) -> list[str]:
    ends = [f"{int(last * part):,}" for part in (0.25, 0.5, 0.75, 1.0)]
    return [f"{ends[0]} {unit}", *ends[1:]]


def of_ages(done: Mapping[str, Run], out: Path) -> list[str]:
    """Right answers among those drawn, by the age of answers, with and without a correction."""
    runs = {f"{age}, {kind}": seeds_of(done, f"age{age}_{kind}") for age, kind in ages()}
    runs = {name: found for name, found in runs.items() if found}
    if not runs:
        return []
    last = max(run.column("reward")[0][-1] for found in runs.values() for run in found)
    columns = *at_quarters(last, "steps"), "likeliest", "mean age", "largest"
    curves, lines = {}, table_head("updates old, correction", "seeds", *columns)
    for name, found in runs.items():
        curves[name] = [curve_of(*run.column("reward"), last) for run in found]
        numbers = []
        for run in found:
            mean, most = run.column("staleness")[1].mean(), run.column("staleness_max")[1].max()
            numbers.append([*quarters(*run.column("reward"), last), likeliest(run), mean, most])
        lines.append(row(name, found, numbers))
    title = "Right answers among those drawn, by step"
    draw_curves(curves, "reward", title, out / "reward_ages.svg")
    return lines


def of_tasks(done: Mapping[str, Run], out: Path) -> list[str]:
    """Rewards before and after, of countdown and of words to write backwards."""
    names = [f"{task}{steps}" for task in ("countdown", "reverse") for steps in TUNED[task]]
    runs = {name: found for name in names if (found := seeds_of(done, name))}
    columns = "reward at step 1", "last tenth of steps", "likeliest", "of these right"
    lines = table_head("task, steps of SFT", "seeds", *columns) if runs else []
    for name, found in runs.items():
        numbers = []
        for run in found:
            steps, values = run.column("reward")
            after = mean_within(steps, values, 0.9 * steps[-1], steps[-1])
            ends = likeliest(run), likeliest(run, "eval_environment/correct")
            numbers.append([float(values[0]), after, *ends])
        lines.append(row(name, found, numbers))
        last = max(run.column("reward")[0][-1] for run in found)
        curves = {name: [curve_of(*run.column("reward"), last) for run in found]}
        draw_curves(curves, "reward", "Mean reward, by step", out / f"reward_{name}.svg")
    return lines


def of_numerics(done: Mapping[str, Run]) -> list[str]:
    """The mean of exp |log p of the trainer - log p of the sampler|, where both had one version."""
    compared = {name: seeds_of(done, name) for name in MODES}
    others = [run for run in done.values() if not run.column("staleness_max")[1].any()]
    by_dtype: dict[str, list[Run]] = {}
    for run in others:
        by_dtype.setdefault(
            f"all without old answers, {run.config['precision.compute']}", []
        ).append(run)
    columns = "first sixth", "last sixth", "largest of a step"
    lines = table_head("mean exp of difference", "runs", *columns) if done else []
    for name, found in (compared | by_dtype).items():
        if found:
            columns = [run.column(MISMATCH)[1] for run in found]
            first = np.mean([values[: -(-len(values) // 6)].mean() for values in columns])
            last = np.mean([values[-(-len(values) // 6) :].mean() for values in columns])
            most = max(values.max() for values in columns)
            lines.append(f"| {name} | {len(found)} | {first:.7f} | {last:.7f} | {most:.7f} |")
    return lines


if __name__ == "__main__":
    run_cli(main)
