"""`python -m tools.precision_curves --out DIR`: what recipes of 8 bits and 4 do to the loss.

A small decoder learns Python's own sources, or `--text`: in bf16, and by each recipe of
`precision.fp8`, with several seeds. Runs of one seed begin with the same weights and read the same
batches, so losses are compared in pairs. Blocks of 128 are multiplied by our kernels on Hopper.
MXFP8 and NVFP4 are rounded exactly and multiplied in plain JAX. NVFP4's published recipe leaves the
first 2 and the last 8 of 62 layers in bf16, 16 %. Here that is the last 2 of 14, so that four
fifths of all FLOPs are of 4 bits. `control` is bf16 in two micro-batches, whose sums are in another
order: it says what chance alone adds.

Runs go in the order of their worth, one seed after the other, `--jobs` at a time on one device,
until `--minutes` are over. The text is tokenized once. DIR gets the runs, their logs, two drawings,
records.jsonl with all losses, and results.md. What DIR holds is not done again. KEY=VALUE go to all
runs.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mjax.config.load import load
from mjax.config.schema.run import Config, DataConfig
from mjax.data.corpus.text import prepare_text
from mjax.errors import run_cli
from mjax.models.flops import run_flops_by_part
from mjax.report.runs import Run, read_run
from tools.json_lines import write_records
from tools.learning_runs import (
    Curve,
    Training,
    draw_curves,
    parser_of_trainings,
    table_head,
    trainings_of,
)

SEEDS, STEPS = 3, 1000
EVALUATIONS = 10  # of a run
WARMUP = 50  # steps
LAST = 10  # the training loss is a mean over this part of the steps, one in ..
AVERAGED = 10  # steps of a mean in records.jsonl
VOCABULARY = 2048
CONFIG = """
model:
  vocab_size: {vocabulary}
  hidden_size: 512
  num_hidden_layers: 14
  intermediate_size: 1536
  max_position_embeddings: 256
  attention: {{num_attention_heads: 8, num_key_value_heads: 4, qk_norm: true}}
data:
  paths: [{out}/data/corpus]
  tokenizer: {out}/data/tokenizer.json
  split: [0.95, 0.05, 0.0]
  seq_length: 256
schedule: {{lr: 1.0e-3, min_lr: 1.0e-4}}
train:
  global_batch_size: 64
  micro_batch_size: 64
  remat: none
  unroll: 1 # a loop compiles several times sooner
  eval_steps: 8
checkpoint: {{keep: 1}}
log: {{interval: 1}}
"""


class Measured(NamedTuple):
    """A recipe, as configs have it, and its bar: how much of bf16's loss it may add, in percent."""

    keys: tuple[str, ...]
    bar: float | None


EMULATED = "precision.fp8_emulate=true"
RECIPES = {
    "control": Measured(("train.micro_batch_size=32",), None),
    "block128": Measured(("precision.fp8=block128",), 0.3),
    "current": Measured(("precision.fp8=current",), 0.5),
    "delayed": Measured(("precision.fp8=delayed",), 0.5),
    "mxfp8": Measured(("precision.fp8=mxfp8", EMULATED), 0.5),
    "nvfp4": Measured(
        ("precision.fp8=nvfp4", EMULATED, "precision.fp8_skip_layers=[0,2]"), 1.5
    ),
}  # fmt: skip
BF16 = "bf16"


def main() -> int:
    """The command line."""
    parser = parser_of_trainings(__doc__.partition("\n")[0], SEEDS)
    parser.add_argument("--text", default="stdlib", help="what is read, as data.text")
    args = parser.parse_args()
    began, out = time.monotonic(), args.out
    jax.config.update("jax_platforms", "cpu")  # this process leaves the device to the runs
    found = list(trainings(out, args.seeds, args.steps, args.keys))
    if not args.draw:
        write_config(out, args.text)
        trainings_of(args, began).run(found)
    done, records = finished(out, found), records_of_runs(out, found)
    write_records(out / "records.jsonl", records)
    lines = [
        f"{len(done)} of {len(found)} runs are done, jax {jax.__version__}. "
        f"{time.monotonic() - began:.0f} s.",
        *facts(load(out / "config.yaml", args.keys), found[0].steps),
        *results(done, shares(out, args.keys), out),
    ]
    (out / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


# ---- the runs ------------------------------------------------------------------------------------


def write_config(out: Path, text: str) -> None:
    """The tokenized text and the config of all runs; what is there already is not made again."""
    prepare_text(DataConfig(text=text, tokenizer=f"train:{VOCABULARY}"), out)
    (out / "config.yaml").write_text(CONFIG.format(out=out.absolute(), vocabulary=VOCABULARY))


def trainings(
    out: Path, seeds: int, most: int | None = None, keys: Sequence[str] = ()
) -> Iterator[Training]:
    """The runs in the order of their worth; `most`: steps of each at most."""
    steps = STEPS if most is None else min(most, STEPS)
    own = [
        f"train.eval_interval={max(steps // EVALUATIONS, 1)}",
        f"schedule.warmup_steps={WARMUP if steps > WARMUP else 0}",
    ]
    for seed in range(1, seeds + 1):
        for name in (BF16, *RECIPES):
            of_recipe = RECIPES[name].keys if name in RECIPES else ()
            arguments = "train", "--config", str(out / "config.yaml"), *own, *of_recipe
            yield Training(f"{name}_{seed}", steps, (*arguments, f"run.seed={seed}", *keys))


# ---- what is measured ----------------------------------------------------------------------------


def finished(out: Path, found: Sequence[Training]) -> dict[str, Run]:
    """The runs whose logs have the held-out loss of the last step."""
    runs = {run.name: run for run in logged(out, found)}
    steps = {training.name: training.steps for training in found}
    return {name: run for name, run in runs.items() if steps[name] in run.column("eval_loss")[0]}


def logged(out: Path, found: Sequence[Training]) -> Iterator[Run]:
    """The runs that have a log, as far as it goes."""
    for training in found:
        file = out / training.name / "metrics.jsonl"
        if file.is_file() and '"loss"' in file.read_text():
            yield read_run(out / training.name, training.name)


def records_of_runs(out: Path, found: Sequence[Training]) -> Iterator[dict]:
    """All losses of all runs: held-out ones, and means of training's over several steps."""
    for run in logged(out, found):
        steps, losses = run.column("eval_loss")
        for step, loss in zip(steps, losses, strict=True):
            yield {"run": run.name, "step": int(step), "eval_loss": loss}
        steps, losses = run.column("loss")
        for end in range(AVERAGED, int(steps[-1]) + 1, AVERAGED):
            mean = losses[(steps > end - AVERAGED) & (steps <= end)].mean()
            yield {"run": run.name, "step": end, "loss": round(float(mean), 6)}


def shares(out: Path, keys: Sequence[str]) -> dict[str, float]:
    """`rounded_share` by recipe."""
    configs = {name: [*measured.keys, *keys] for name, measured in RECIPES.items()}
    return {name: rounded_share(load(out / "config.yaml", own)) for name, own in configs.items()}


def rounded_share(cfg: Config) -> float:
    """The part of a decoder's FLOPs, head and attention among them, that are of few bits."""
    if cfg.precision.fp8 == "none":
        return 0.0
    parts = run_flops_by_part(cfg)
    rounded = 1 - sum(cfg.precision.fp8_left_out) / cfg.model.num_hidden_layers
    return rounded * parts["matmul"] / sum(parts.values())


def facts(cfg: Config, steps: int) -> list[str]:
    """The sizes of all runs."""
    model, tokens = cfg.model, cfg.train.global_batch_size * cfg.data.seq_length
    return [
        "",
        f"{model.num_hidden_layers} layers of {model.hidden_size}, MLPs of "
        f"{model.intermediate_size}, vocabulary of {model.vocab_size}. {steps} steps of "
        f"{tokens:,} tokens, held-out losses over {cfg.train.eval_steps * tokens:,}.",
    ]


def last_of(run: Run) -> tuple[float, float]:
    """The last held-out loss, and the mean training loss of the last part of the steps."""
    steps, losses = run.column("loss")
    losses = losses[steps > steps[-1] * (1 - 1 / LAST)]
    return float(run.column("eval_loss")[1][-1]), float(losses.mean())


def percent(value: float, of: float) -> float:
    """How much more a value is, in percent."""
    return 100 * (value / of - 1)


def with_error(values: Sequence[float]) -> str:
    """The mean of values and its standard error, which one value has none of."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    return f"{np.mean(values):+.3f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}"


def pairs_of(done: Mapping[str, Run], recipe: str) -> dict[str, tuple[Run, Run]]:
    """(a recipe's run, bf16's) by seed."""
    found = {}
    for name, run in done.items():
        of, _, seed = name.rpartition("_")
        if of == recipe and f"{BF16}_{seed}" in done:
            found[seed] = run, done[f"{BF16}_{seed}"]
    return found


def results(done: Mapping[str, Run], rounded: Mapping[str, float], out: Path) -> list[str]:
    """The lines of the table; the drawings are written. rounded: `shares`."""
    paired = {name: pairs for name in (BF16, *RECIPES) if (pairs := pairs_of(done, name))}
    if not paired:
        return []
    columns = "recipe", "seeds", "FLOPs rounded", "held-out loss", "more than bf16's, %"
    lines = table_head(*columns, "at most", "within", "of each seed, %", "training loss, %")
    for name, pairs in paired.items():
        lines.append(row(name, pairs, rounded.get(name, 0.0)))
    lines += ["", "Differences are means of pairs and their standard errors. The training loss is"]
    lines += [f"that of the last {100 // LAST} % of steps."]
    losses = {name: [curve(run) for run, _ in pairs.values()] for name, pairs in paired.items()}
    title = "Held-out loss, by step"
    draw_curves(losses, "nats", title, out / "precision_loss.svg")
    more = {
        name: [difference(curve(a), curve(b)) for a, b in pairs.values()]
        for name, pairs in paired.items()
        if name != BF16
    }
    if more:
        title = "Held-out loss beyond that of bf16 with the same seed in percent, by step"
        draw_curves(more, "percent", title, out / "precision_difference.svg")
    return lines


def row(name: str, pairs: Mapping[str, tuple[Run, Run]], share: float) -> str:
    """A line of the table."""
    held_out = f"{np.mean([last_of(run)[0] for run, _ in pairs.values()]):.4f}"
    cells = [name, str(len(pairs)), f"{share:.1%}", held_out]
    if name in RECIPES:
        ends = [(last_of(a), last_of(b)) for a, b in pairs.values()]
        of_eval, of_training = ([percent(a[i], b[i]) for a, b in ends] for i in (0, 1))
        bar = RECIPES[name].bar
        cells.append(with_error(of_eval))
        cells += ["", ""] if bar is None else [f"{bar}", "yes" if np.mean(of_eval) <= bar else "no"]
        cells += [", ".join(f"{value:+.3f}" for value in of_eval), with_error(of_training)]
    else:
        cells += [""] * 5
    return f"| {' | '.join(cells)} |"


def curve(run: Run) -> Curve:
    """Held-out losses by step."""
    steps, losses = run.column("eval_loss")
    return dict(zip(steps.astype(int).tolist(), losses.tolist(), strict=True))


def difference(one: Curve, other: Curve) -> Curve:
    """How much more a curve has than another, in percent, where both have a value."""
    return {step: percent(value, other[step]) for step, value in one.items() if step in other}


if __name__ == "__main__":
    run_cli(main)
