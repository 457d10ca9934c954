"""`python -m tools.distillation_curves RUN --out DIR`: a distilled student beside its twin.

The text is Python's standard library. A teacher reads all of it but some held-out files, once. A
student of a fifth of its parameters has a few files of that text, which it reads several times, or
all of it, of which it reads a part. It learns the teacher's distributions, or from the text alone.
Everything else is equal, so both have seen the same tokens. Measured is the cross-entropy of
held-out files, in nats. RUN has the tokenizer, as the quickstart's. DIR gets the runs,
held_out_loss.svg and results.json.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path

import numpy as np

from mjax.config.languages.paths import as_path
from mjax.data.corpus.text import stdlib_files
from mjax.errors import run_cli
from mjax.report.runs import read_run
from tools.learning_runs import Curve, draw_curves, run_mjax, spread, train_once

HELD_OUT, FEW = 28, 5  # files
TEACHER_STEPS, STEPS, EVERY = 2000, 300, 50
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3"}  # folders
CONFIG = """
model: {{vocab_size: 1024, tie_word_embeddings: true}}
data: {{valid_paths: [{out}/held_out], tokenizer: {out}/tokenizer.json, seq_length: 128}}
optimizer: {{name: muon, clip_grad_norm: 1.0}}
schedule: {{lr: 4.0e-3, min_lr: 4.0e-4, warmup_steps: 20}}
train: {{attention: xla, remat: none, eval_steps: 20}}
precision: {{compute: float32}}
"""
TEACHER = ["model.hidden_size=128", "model.num_hidden_layers=3", "model.intermediate_size=384"]
TEACHER += ["model.attention={num_attention_heads: 4, num_key_value_heads: 2, qk_norm: true}"]
STUDENT = ["model.hidden_size=64", "model.num_hidden_layers=2", "model.intermediate_size=128"]
STUDENT += ["model.attention={num_attention_heads: 4, num_key_value_heads: 2, qk_norm: true}"]
TEXTS = {"few": "5 files", "all": "all files"}
WAYS = {  # name: (command, keys, what the log calls the cross-entropy)
    "text alone": ("train", [], "eval_loss"),
    "distilled": ("distill", ["distill.teacher={out}/teacher"], "eval_nll"),
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=as_path, metavar="RUN", help="of configs/quickstart.yaml")
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    out = args.out
    make_texts(out, args.run / "data" / "tokenizer.json")
    config = ["--config", out / "config.yaml"]
    keys = [f"data.paths=[{out}/all]", "train.eval_interval=500", "train.global_batch_size=16"]
    train_once("train", out / "teacher", TEACHER_STEPS, *config, *TEACHER, *keys)
    curves: dict[str, list[Curve]] = {}
    ways = itertools.product(range(1, args.seeds + 1), TEXTS.items(), WAYS.items())
    for seed, (corpus, text), (way, (command, more, field)) in ways:
        name = f"{way}, {text}"
        run = out / f"{way.replace(' ', '_')}_{corpus}{seed}"
        keys = [f"data.paths=[{out}/{corpus}]", f"run.seed={seed}"]
        keys += [f"train.eval_interval={EVERY}", "train.global_batch_size=8", *STUDENT]
        keys += [key.format(out=out) for key in more]
        train_once(command, run, STEPS, *config, *keys)
        steps, values = read_run(run, name).column(field)
        curve = dict(zip(steps.astype(int).tolist(), values.tolist(), strict=True))
        curves.setdefault(name, []).append(curve)
        print(name, seed, curve, flush=True)
    title = "Cross-entropy of held-out text in nats, by step"
    draw_curves(curves, "nats", title, out / "held_out_loss.svg")
    _, of_teacher = read_run(out / "teacher", "teacher").column("eval_loss")
    (out / "results.json").write_text(json.dumps({"teacher": of_teacher.tolist(), **curves}))
    print(f"teacher: {of_teacher[-1]:.3f}")
    print("\n".join(table(curves)))
    return 0


def make_texts(out: Path, tokenizer: Path) -> None:
    """The three corpora, unless they are there."""
    if (out / "config.yaml").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    files = [Path(file) for file in stdlib_files()]
    files = [file for file in files if LEFT_OUT.isdisjoint(file.parts)]
    order = np.random.default_rng(0).permutation(len(files))
    parts = {"held_out": order[:HELD_OUT], "all": order[HELD_OUT:]}
    parts["few"] = parts["all"][:FEW]
    shutil.copy(tokenizer, out / "tokenizer.json")
    for name, numbers in parts.items():
        texts = [json.dumps({"text": files[i].read_text("utf-8")}) for i in numbers]
        (out / f"{name}.jsonl").write_text("\n".join(texts) + "\n")
        given = "--input", out / f"{name}.jsonl", "--output", out / name
        run_mjax("data", "preprocess", *given, "--tokenizer", tokenizer, "--append-eod")
    (out / "config.yaml").write_text(CONFIG.format(out=out))


def table(curves: dict[str, list[Curve]]) -> list[str]:
    """The lines of a Markdown table: means, and the lowest and highest of the seeds."""
    lines = [f"| after steps | {' | '.join(curves)} |", "|---" * (1 + len(curves)) + "|"]
    for step in next(iter(curves.values()))[0]:
        cells = [spread([curve[step] for curve in of_seeds]) for of_seeds in curves.values()]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    run_cli(main)
