"""`python -m tools.preference_curves --out DIR`: what DPO, KTO and a reward model learn, measured.

A tiny model is fine-tuned on both answers of pairs with a planted preference
(`tools/preference_pairs.py`). Each method starts from it, with several seeds. Measured are new
pairs: how often the chosen answer has the larger log-probability, or reward. Of policies also the
planted reward of answers that they sample: the share of vowels among their letters. DIR gets the
runs, accuracy.svg and results.json.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mjax.config.languages.paths import as_path
from mjax.config.schema.model import ModelConfig
from mjax.errors import run_cli
from mjax.interop.pretrained import Pretrained, from_pretrained
from mjax.models import definition_of
from tools.json_lines import write_records
from tools.learning_runs import Curve, draw_curves, spread, train_once
from tools.preference_pairs import pairs, vowels

END, LENGTH = 256, 32  # the token after an answer; tokens of the longest document, and more
STEPS, EVERY = 60, 10
SAMPLES = 512
METHODS = {  # name: (command, keys)
    "DPO": ("preference", ["preference.loss_type=sigmoid"]),
    "DPO, SFT term": (
        "preference",
        ["preference.loss_type=[sigmoid,sft]", "preference.loss_weights=[1,0.5]"],
    ),
    "KTO": ("preference", ["preference.loss_type=kto"]),
    "reward model": ("reward", []),
}
MODEL = """
  vocab_size: 257
  hidden_size: 64
  num_hidden_layers: 2
  intermediate_size: 192
  attention: {num_attention_heads: 4}
"""
CONFIG = f"""
model: {MODEL}
data: {{tokenizer: byte, seq_length: 256}}
train: {{global_batch_size: 8, attention: xla, remat: none, eval_interval: 100, eval_steps: 4}}
checkpoint: {{keep: 99}}
precision: {{compute: float32}}
"""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    start = make_start(out)
    held_out = pairs(500, seed=2)
    curves: dict[str, list[Curve]] = {}
    shares: dict[str, list[float]] = {"before": [vowel_share(start, seed=0)]}
    for name, (command, keys) in METHODS.items():
        for seed in range(1, args.seeds + 1):
            run = out / f"{name.replace(' ', '_').replace(',', '')}{seed}"
            train(command, run, start, seed, keys)
            steps = {0: start} if command == "preference" else {}
            numbers = sorted(int(step.name) for step in (run / "checkpoints").glob("*[0-9]"))
            steps |= {step: run / "checkpoints" / str(step) for step in numbers}
            if command == "reward":  # the score's head is drawn, and this step moves nothing
                still = ["schedule.lr=1e-30", "schedule.warmup_steps=0"]
                train(command, out / f"first{seed}", start, seed, still, steps=1)
                steps = {0: out / f"first{seed}"} | steps
            measure = accuracy_of_rewards if command == "reward" else accuracy
            curve = {step: measure(folder, held_out) for step, folder in steps.items()}
            curves.setdefault(name, []).append(curve)
            if command == "preference":
                shares.setdefault(name, []).append(vowel_share(run, seed))
            print(name, seed, curve, shares.get(name, [None])[-1], flush=True)
    draw_curves(curves, "accuracy", "New pairs ranked as planted, by step", out / "accuracy.svg")
    (out / "results.json").write_text(json.dumps({"accuracy": curves, "vowels": shares}))
    print("\n".join(table(curves, shares)))
    return 0


def make_start(out: Path) -> Path:
    """The run of a model that is fine-tuned on all answers; writes the data of all runs."""
    (out / "config.yaml").write_text(CONFIG)
    for part, count, seed in ("train", 2000, 1), ("held_out", 500, 2):
        records = pairs(count, seed)
        both = [(r["prompt"], r[key]) for r in records for key in ("chosen", "rejected")]
        answers = [{"prompt": prompt, "completion": answer} for prompt, answer in both]
        for name, lines in (part, records), (f"{part}_answers", answers):
            write_records(out / f"{name}.jsonl", lines)
    keys = [f"data.conversations.path={out}/train_answers.jsonl", "schedule.lr=3e-3"]
    keys += [f"data.valid_paths=[{out}/held_out_answers.jsonl]"]
    train_once("sft", out / "start", 150, "--config", out / "config.yaml", *keys)
    return out / "start"


def train(command: str, run: Path, start: Path, seed: int, keys: list[str], steps: int = STEPS):
    """Train from `start` on pairs, with a checkpoint every few steps."""
    out = run.parent
    common = [f"data.conversations.path={out}/train.jsonl", f"checkpoint.init_from={start}"]
    common += [f"data.valid_paths=[{out}/held_out.jsonl]", f"run.seed={seed}"]
    common += [f"checkpoint.interval={EVERY}", "schedule.lr=3e-4", "schedule.warmup_steps=10"]
    train_once(command, run, steps, "--config", out / "config.yaml", *common, *keys)


def rows_of(held_out: list[dict], key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(documents int32 [N, LENGTH], where their prompts end, where they end), int32 [N]."""
    rows = np.zeros((len(held_out), LENGTH), np.int32)
    prompts, ends = [len(record["prompt"]) for record in held_out], []
    for row, record in zip(rows, held_out, strict=True):
        document = [*(record["prompt"] + record[key]).encode(), END]
        row[: len(document)] = document
        ends.append(len(document))
    return rows, np.array(prompts), np.array(ends)


def compare(held_out: list[dict], value: Callable) -> float:
    """How often the chosen answer has the larger `value` (rows, prompts, ends)."""
    chosen, rejected = (value(*rows_of(held_out, key)) for key in ("chosen", "rejected"))
    return float(np.mean(chosen > rejected))


def accuracy(folder: Path, held_out: list[dict]) -> float:
    """The share of pairs whose chosen answer a policy gives the larger log-probability."""
    model = from_pretrained(folder)

    def value(rows: np.ndarray, prompts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        log_p = jax.nn.log_softmax(_logits(model, rows))[:, :-1]
        log_p = jnp.take_along_axis(log_p, rows[:, 1:, None], -1)[..., 0]
        place = np.arange(1, LENGTH)
        is_answer = (place >= prompts[:, None]) & (place < ends[:, None])
        return np.sum(np.asarray(log_p) * is_answer, 1)

    return compare(held_out, value)


def accuracy_of_rewards(folder: Path, held_out: list[dict]) -> float:
    """The share of pairs whose chosen answer a reward model gives the larger reward."""
    model = from_pretrained(folder)

    def value(rows: np.ndarray, prompts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        scores = np.asarray(_logits(model, rows))[..., 0]
        return scores[np.arange(len(rows)), ends - 1]

    return compare(held_out, value)


def vowel_share(folder: Path, seed: int) -> float:
    """The share of vowels among the letters of answers that a policy samples."""
    model, key = from_pretrained(folder), jax.random.key(seed)
    records = pairs(SAMPLES, seed=3)
    rows, prompts, _ = rows_of(records, "chosen")
    rows[np.arange(LENGTH) >= prompts[:, None]] = 0
    is_open = np.ones(SAMPLES, bool)
    for place in range(int(prompts[0]), LENGTH):  # all prompts have one length
        logits = _logits(model, rows)[:, place - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, place), logits)
        rows[:, place] = np.where(is_open, drawn, 0)
        is_open &= rows[:, place] != END
    is_letter = (np.arange(LENGTH) >= prompts[:, None]) & (rows > ord(" ")) & (rows < END)
    letters = bytes(rows[is_letter].tolist()).decode("latin1")
    return vowels(letters) / len(letters)


def _logits(model: Pretrained, rows: np.ndarray) -> jax.Array:
    return _compiled(model.cfg.model_dump_json())(model.params, rows)


@functools.cache
def _compiled(model: str) -> Callable:
    """The logits of weights and rows, compiled once for each model."""
    definition = definition_of(ModelConfig.model_validate_json(model))
    return jax.jit(lambda params, rows: definition.bind(params)(rows))


def table(curves: dict[str, list[Curve]], shares: dict[str, list[float]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| | accuracy before | after | vowels in samples before | after |"]
    lines.append("|---|---|---|---|---|")
    before = f"{shares['before'][0]:.3f}"
    for name, of_seeds in curves.items():
        first, last = ([list(c.values())[i] for c in of_seeds] for i in (0, -1))
        sampled = (before, spread(shares[name])) if name in shares else ("", "")
        lines.append(f"| {name} | {spread(first)} | {spread(last)} | {' | '.join(sampled)} |")
    return lines


if __name__ == "__main__":
    run_cli(main)
