"""`python -m mjax.evaluate perplexity|answers|loss|harness [options]`: how well a model does.

    python -m mjax.evaluate perplexity --ckpt X --file F
    python -m mjax.evaluate answers --ckpt X --file CONVERSATIONS      # exact matches
    python -m mjax.evaluate loss --run RUN --split test                 # of its own data
    python -m mjax.evaluate harness --ckpt X --tasks hellaswag,gsm8k    # needs mjax[lm-eval]

Perplexity by sliding windows: a window of --seq-length tokens moves on by --stride, and scores
those that no window before it has. Invariant: every token is scored exactly once, with at least
seq_length - stride tokens of context where the text has them. A BOS (or else the end-of-document
token) is put first, so that the first token is scored too; without either it is only context.
"""

import argparse
import difflib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mjax.config.languages.paths import as_path, path_text
from mjax.data.base.documents import read_text
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import CommandParser, UserError, at_least, run_cli
from mjax.generate.options import add_model_arguments, load_model
from mjax.infer.text import windows

if TYPE_CHECKING:  # they import jax
    from mjax.run.batches import RunBatches
    from mjax.train.trainer import Trainer


def main(argv: list[str] | None = None) -> None:
    args = _evaluate_arguments(argv)
    commands = {"perplexity": _perplexity, "answers": _answers, "harness": _harness}
    commands["loss"] = _loss
    commands[args.command](args)


def _evaluate_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("evaluate", description="Score a model.")
    commands = parser.add_subparsers(required=True, dest="command")
    file = commands.add_parser("perplexity", help="of a text file; prints a JSON line")
    answers = commands.add_parser("answers", help="of conversations, to the letter; prints JSON")
    add_model_arguments(answers)
    answers.add_argument("--file", type=path_text, required=True, help="as data.conversations.path")
    answers.add_argument("--limit", type=at_least(1), help="conversations read")
    answers.add_argument("--max-new-tokens", type=at_least(1), default=64, help="of an answer")
    answers.add_argument("--batch-size", type=at_least(1), default=32, help="rows at once")
    answers.add_argument("--show", type=at_least(0), default=3, help="answers to print")
    loss = commands.add_parser("loss", help="of data that a run holds out; prints a JSON line")
    loss.add_argument("--run", type=as_path, required=True, help="folder of a run")
    loss.add_argument("--split", default="test", help="test, valid, or a name of data.eval_sets")
    loss.add_argument("--steps", type=at_least(1), help="batches (default: as in the run)")
    loss.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys, such as mesh.dp=1")
    tasks = commands.add_parser("harness", help="lm-evaluation-harness; prints JSON")
    for command in (file, tasks):
        add_model_arguments(command)
        longest = "tokens the model sees at once (default: what it takes, at most 4096)"
        command.add_argument("--seq-length", type=at_least(1), metavar="N", help=longest)
        command.add_argument("--batch-size", type=at_least(1), default=4, help="rows at once")
    file.add_argument("--file", type=as_path, required=True, help="UTF-8 text")
    file.add_argument("--stride", type=at_least(1), metavar="M", help="default: --seq-length / 2")
    tasks.add_argument("--tasks", required=True, help="names, with commas between")
    tasks.add_argument("--include-path", type=path_text, help="folder with further tasks")
    tasks.add_argument("--num-fewshot", type=at_least(0), help="default: the task's own")
    tasks.add_argument("--limit", type=at_least(1), help="documents of each task, for a trial")
    tasks.add_argument("--chat", action="store_true", help="use the model's chat template")
    return parser.parse_args(argv)


def _harness(args: argparse.Namespace) -> None:
    from mjax.evaluate.harness import HarnessModel  # says so where lm_eval is missing

    from lm_eval import simple_evaluate  # isort: skip
    from lm_eval.tasks import TaskManager  # isort: skip

    manager, tasks = TaskManager(include_path=args.include_path), args.tasks.split(",")
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, 1)
        hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists all"
        raise UserError(f"--tasks: the harness has no task {unknown[0]!r}; {hint}")
    model, dtype, tokenizer = load_model(args)
    sizes = {"batch_size": args.batch_size, "max_length": args.seq_length}
    found = simple_evaluate(
        HarnessModel(model, tokenizer, dtype=dtype, **sizes),
        tasks=manager.match_tasks(tasks),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.chat,
        task_manager=manager,
        log_samples=False,
    )
    print(json.dumps(found["results"], indent=1, default=str))


def _loss(args: argparse.Namespace) -> None:
    """Print the loss of a run's newest checkpoint on a part of its held-out data."""
    from mjax.run.evaluation import loss_of_split

    given = args.run, args.split, args.steps, args.overrides
    print(json.dumps(loss_of_split(*given, _with_roles)))


def _with_roles(trainer: "Trainer", record: dict) -> "RunBatches":
    """The batches of a run, with what its teacher or reference computes of them."""
    from mjax.config.rules.data_rules import data_sources
    from mjax.config.rules.reinforce_rules import draws_answers
    from mjax.post.preference_batches import preference_batches
    from mjax.post.teacher import distillation_batches
    from mjax.run.batches import from_config

    cfg = trainer.cfg
    if draws_answers(cfg) and not data_sources(cfg) and cfg.data.conversations.path is None:
        raise UserError(
            f"evaluate loss: {cfg.run.dir} learned from the rewards of its own answers and holds "
            "no data out; its metrics.jsonl has the rewards of held-out prompts"
        )
    sources = {"distill": distillation_batches, "preference": preference_batches}
    return sources.get(cfg.train.objective, from_config)(trainer, record)


def _answers(args: argparse.Namespace) -> None:
    from mjax.post.answers import print_exact_matches

    print_exact_matches(*load_model(args), args)


def _perplexity(args: argparse.Namespace) -> None:
    text = read_text(args.file)
    model, _, tokenizer = load_model(args)
    sizes = args.seq_length, args.stride, args.batch_size
    print(json.dumps({"file": str(args.file), **perplexity(model, tokenizer, text, *sizes)}))


def perplexity(
    model, tokenizer: Tokenizer, text: str, length: int | None, stride: int | None, batch: int = 4
) -> dict[str, float]:
    """Figures of a text, by name. `model` is a `Pretrained`; a size that is None is the usual one.

    Raises `UserError` for sizes that do not fit, or a text that is too short.
    """
    length = min(model.cfg.max_position_embeddings, 4096) if length is None else length
    stride = max(1, length // 2) if stride is None else stride
    ids, size = tokenizer.encode(text), len(text.encode())
    first = tokenizer.prefix or (() if tokenizer.eod_id is None else (tokenizer.eod_id,))
    if not first:
        start = tokenizer.decode(ids[:1])
        size -= len(start.encode()) if text.startswith(start) else 1  # a part of a character
    whole = [*first[-1:], *ids]
    nll, tokens = score(model, whole, length, stride, batch)
    return {
        "seq_length": length,
        "stride": stride,
        "tokens": tokens,
        "nll_per_token": nll / tokens,
        "perplexity": math.exp(nll / tokens),
        "bits_per_byte": nll / math.log(2) / size,
    }


def score(model, ids: Sequence[int], length: int, stride: int, batch: int = 4) -> tuple[float, int]:
    """(sum of -log p in nats, number of tokens) of ids[1:], each given what its window holds of the
    ids before it. `model` is a `Pretrained`. Raises `UserError` for sizes that do not fit."""
    from mjax.evaluate.row_scores import batch_of, scorer
    from mjax.infer.checks import require_decoder

    require_decoder(model.cfg)
    limit = model.cfg.max_position_embeddings
    if not 1 <= stride <= length <= limit or batch < 1:
        raise UserError(
            f"--seq-length {length} --stride {stride} --batch-size {batch}: need 1 <= stride <= "
            f"seq-length <= model.max_position_embeddings={limit} and a batch of 1 or more"
        )
    stream = np.asarray(ids, np.int32)
    if len(stream) < 2 or stream.min() < 0 or stream.max() >= model.cfg.vocab_size:
        raise UserError(
            f"{len(stream)} tokens, to be 2 or more, with ids in [0, model.vocab_size="
            f"{model.cfg.vocab_size}); give a longer text, or the model's own tokenizer"
        )
    parts = windows(len(stream) - 1, min(length, len(stream) - 1), stride)
    rows = [(stream[begin : end + 1], end - first) for begin, first, end in parts]
    program, total = scorer(model), 0.0
    for at in range(0, len(rows), batch):
        part = batch_of(rows[at : at + batch], batch, length)
        total -= math.fsum(program(model.params, *part)[0])
    return total, len(stream) - 1


if __name__ == "__main__":
    run_cli(main)
