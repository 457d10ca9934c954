"""`mjax data preview --config X [a.b=c ...]`: rows as a run reads them, with the loss made visible.

Text that the loss is on is green, or between « and » without colors. For conversations a summary
follows: what is left out, cut and dropped, and how full the rows are.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from mjax.config.load import add_config_arguments, config_from_args
from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.data.conversations.rows import ConversationDataset, GlobalBatches
from mjax.data.corpus.text import prepare_text
from mjax.data.loader import build_datasets
from mjax.errors import UserError, program, run_cli

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # of terminals, but for tab and line feed
_NEEDED = "tokens", "labels", "loss_mask", "segment_ids"


def main(argv: list[str] | None = None) -> int:
    """The command line; prints rows and a summary."""
    about = "Print rows as a run reads them; what the loss is on is green."
    parser = argparse.ArgumentParser(prog=program("data.preview"), description=about)
    add_config_arguments(parser)
    parser.add_argument("--rows", type=int, default=2, help="rows to print (default: 2)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    args, cfg = config_from_args(parser, argv)
    if args.rows < 0 or args.first < 0:
        raise UserError("--rows and --first: give numbers of at least 0")
    data, _ = build_datasets(cfg, args.first + max(args.rows, 1), 0)
    if args.first + args.rows > len(data):
        raise UserError(f"--first {args.first}: the data has {len(data)} rows; give a lower one")
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(_tokenizer_name(cfg))
    for index in range(args.first, args.first + args.rows):
        (name,) = data.names([index])
        for part in _shown_row(data.batch([index]), f"row {index} ({name})", tokenizer, console):
            console.print(part)
    if isinstance(data, GlobalBatches):
        for rows in getattr(data.rows, "datasets", [data.rows]):
            for line in _summary(rows, cfg):
                console.print(line, markup=False)
    return 0


def _tokenizer_name(cfg: Config) -> str:
    if cfg.data.text:
        return prepare_text(cfg.data, Path(cfg.run.dir)).tokenizer_path
    if cfg.data.tokenizer is None:
        raise UserError("data.tokenizer: none is set, so tokens have no text; set it")
    return cfg.data.tokenizer


def _shown_row(
    batch: dict[str, np.ndarray], title: str, tokenizer: Tokenizer, console: Console
) -> Iterator[Text]:
    """Yield a line on a row, and each of its documents."""
    if missing := [name for name in _NEEDED if name not in batch]:
        raise UserError(f"mjax data preview: rows of this run have no {', '.join(missing)}")
    tokens, labels, mask, segments = (batch[name][0] for name in _NEEDED)
    used, trained = int((segments > 0).sum()), int((mask > 0).sum())
    counts = f"{used:,} of {len(tokens):,} places are used, {trained:,} have a loss"
    yield Text(f"{title}: {counts}", style="bold")
    for document in range(1, int(segments.max(initial=0)) + 1):
        at = np.flatnonzero(segments == document)
        if len(at):
            ids = [tokens[at[0]], *labels[at]]
            has_loss = [False, *(mask[at] > 0)]
            yield _shown(ids, has_loss, tokenizer, bool(console.color_system))


def _shown(ids: list[int], has_loss: list[bool], tokenizer: Tokenizer, colored: bool) -> Text:
    """The text of a document, what has a loss in green or between marks."""
    text, begin = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or has_loss[end] != has_loss[begin]:
            part = _text_of([int(i) for i in ids[begin:end]], tokenizer)
            if has_loss[begin]:
                text.append(part if colored else f"«{part}»", style="bold green")
            else:
                text.append(part, style="dim")
            begin = end
    return text


def _text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, special ones too, without what controls a terminal."""
    decode = tokenizer.decode_whole or tokenizer.decode
    parts, begin = [], 0
    for at, id in enumerate([*ids, None]):
        if id is None or (id == tokenizer.eod_id and not decode([id])):
            parts += [decode(ids[begin:at]), "" if id is None else "<end>"]
            begin = at + 1
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], "".join(parts))


def _summary(rows: ConversationDataset, cfg: Config) -> Iterator[str]:
    """Yield lines on a source of conversations."""
    source, counts = rows.source, rows.counts
    left_out = len(source.left_out)
    count = len(source.names) + left_out
    yield f"{rows.path}: {count:,} records, {left_out:,} left out as broken"
    for line in source.left_out[:20]:
        yield f"  {line}"
    if left_out > 20:
        yield f"  .. and {left_out - 20:,} more"
    tokens = int(rows.lengths.sum())
    trained = sum(
        int(source[number][1][1 : length + 1].sum())
        for number, length in zip(rows.numbers, rows.lengths, strict=True)
    )
    yield (
        f"  conversations of this split: {len(rows.numbers):,}; {counts.cut:,} are cut to "
        f"data.seq_length={rows.seq_length}, {counts.dropped:,} dropped; {counts.lost:,} tokens "
        f"are lost, {counts.lost_trained:,} of answers"
    )
    epoch = len(rows.ranks)
    full = tokens / (epoch * rows.seq_length)
    yield (
        f"  an epoch: {tokens:,} tokens, {trained:,} ({trained / tokens:.1%}) with a loss, in "
        f"{epoch:,} rows, {full:.1%} full; {epoch / cfg.train.global_batch_size:,.1f} steps of "
        f"train.global_batch_size={cfg.train.global_batch_size}"
    )


if __name__ == "__main__":
    run_cli(main)
