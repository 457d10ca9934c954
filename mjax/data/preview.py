"""`mjax data preview --config X [a.b=c ...]`: rows of conversations, with the loss made visible.

Text that the loss is on is green, or between « and » without colors. A summary follows: what is
left out, cut and dropped, and how full the rows are.
"""

import argparse
import re
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from mjax.config.load import add_config_arguments, config_from_args
from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.data.conversations.rows import ConversationDataset
from mjax.data.loader import Dataset, build_datasets
from mjax.errors import CommandParser, UserError, run_cli

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # of terminals, but for tab and line feed
FIELDS = "tokens", "labels", "loss_mask", "segment_ids"


def main(argv: list[str] | None = None) -> int:
    """The command line; prints rows and a summary."""
    about = "Print rows of conversations as a run reads them; what the loss is on is green."
    parser = CommandParser("data.preview", description=about)
    add_config_arguments(parser)
    parser.add_argument("--rows", type=int, default=2, help="rows to print (default: 2)")
    args, cfg = config_from_args(parser, argv)
    print_rows(cfg, args.rows)
    return 0


def add_preview(parser: argparse.ArgumentParser) -> None:
    """The option `--preview` of commands that train on conversations."""
    about = "print so many rows as the run reads them, with the loss made visible, and exit"
    parser.add_argument("--preview", type=int, metavar="ROWS", help=about)


def preview(cfg: Config, args: argparse.Namespace) -> int | None:
    """Print the rows that `--preview` asks for and return 0; None without it."""
    if args.preview is None:
        return None
    print_rows(cfg, args.preview)
    return 0


def print_rows(cfg: Config, count: int) -> None:
    """Print the first `count` rows of a run on conversations, and a summary."""
    if count < 0:
        raise UserError(f"a preview of {count} rows: give a number from 0")
    if cfg.data.conversations.path is None:
        raise UserError("a preview shows conversations; set data.conversations.path")
    data, _ = build_datasets(cfg, max(count, 1), 0)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    for index in range(min(count, len(data))):
        for part in _shown_row(data, index, tokenizer, bool(console.color_system)):
            console.print(part)
    for rows in getattr(data.rows, "datasets", [data.rows]):
        for line in _summary(rows, cfg):
            console.print(line, markup=False)


def _shown_row(data: Dataset, index: int, tokenizer: Tokenizer, colored: bool) -> Iterator[Text]:
    """Yield a line on a row, and each of its documents."""
    batch = data.batch([index])
    tokens, labels, mask, segments = (batch[name][0] for name in FIELDS)
    used, trained = int((segments > 0).sum()), int((mask > 0).sum())
    counts = f"{used:,} of {len(tokens):,} places are used, {trained:,} have a loss"
    yield Text(f"row {index} ({', '.join(data.names([index]))}): {counts}", style="bold")
    for document in dict.fromkeys(segments[segments > 0].tolist()):
        at = np.flatnonzero(segments == document)
        is_prefix = document in batch.get("prefix_ids", ())
        ids = np.append(tokens[at[0]], labels[at])
        has_loss = np.append(False, mask[at] > 0)
        text, parts = Text(), np.split(ids, np.flatnonzero(np.diff(has_loss)) + 1)
        if "answer_values" in batch:
            values = batch["answer_values"][0, at]
            other = "prompt" if is_prefix else "of another prompt"
            said = ", ".join(f"{value:+g}" for value in values[values != 0]) or other
            text.append(f"{said}: ", style="bold")
        for number, part in enumerate(parts):
            said = _text_of(part.tolist(), tokenizer)
            if number % 2 == 0:  # the first token of a document is not predicted
                text.append(said, style="dim")
            else:
                text.append(said if colored else f"«{said}»", style="bold green")
        yield text


def _text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, special ones too, without what controls a terminal."""
    text = (tokenizer.decode_whole or tokenizer.decode)(ids)
    if ids[-1] == tokenizer.eod_id and not tokenizer.special_text(ids[-1]):
        text += "<end>"
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _summary(rows: ConversationDataset, cfg: Config) -> Iterator[str]:
    """Yield lines on a source of conversations."""
    source, counts = rows.source, rows.counts
    used, left_out = len(source.names), len(source.left_out)
    yield f"{rows.path}: {used + left_out:,} records, {left_out:,} left out as broken"
    yield from (f"  {line}" for line in source.left_out)
    tokens = int(rows.lengths.sum())
    trained = rows.trained_tokens()
    yield (
        f"  conversations of this split: {len(rows.numbers):,}; {counts.cut:,} are cut to "
        f"data.seq_length={rows.seq_length}, {counts.dropped:,} dropped; {counts.lost:,} tokens "
        f"are lost, {counts.lost_trained:,} of answers"
    )
    epoch = len(rows.ranks)
    full = tokens / (epoch * rows.seq_length)
    yield (
        f"  an epoch: {tokens:,} tokens, {trained:,} ({trained / tokens:.1%}) with a loss, in "
        f"{epoch:,} rows, {full:.1%} full, or {epoch / cfg.train.global_batch_size:,.1f} steps"
    )


if __name__ == "__main__":
    run_cli(main)
