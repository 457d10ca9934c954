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
from mjax.data.blend import BlendedDataset
from mjax.data.conversations.rows import ConversationDataset
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.text import prepare_text
from mjax.data.global_batches import GlobalBatches
from mjax.data.loader import build_datasets
from mjax.errors import UserError, program, run_cli

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # of terminals, but for tab and line feed
FIELDS = "tokens", "labels", "loss_mask", "segment_ids"


def main(argv: list[str] | None = None) -> int:
    """The command line; prints rows and a summary."""
    about = "Print rows as a run reads them; what the loss is on is green."
    parser = argparse.ArgumentParser(prog=program("data.preview"), description=about)
    add_config_arguments(parser)
    parser.add_argument("--rows", type=int, default=2, help="rows to print (default: 2)")
    args, cfg = config_from_args(parser, argv)
    data, _ = build_datasets(cfg, max(args.rows, 1), 0)
    if not isinstance(data, GlobalBatches | GPTDataset | BlendedDataset):
        raise UserError("mjax data preview shows conversations and corpora of text; give such data")
    console = Console(highlight=False, soft_wrap=True)
    name = prepare_text(cfg.data, Path(cfg.run.dir)).tokenizer_path if cfg.data.text else None
    tokenizer = load_tokenizer(name or cfg.data.tokenizer or "byte")
    for index in range(min(args.rows, len(data))):
        title = f"row {index} ({', '.join(data.names([index]))})"
        for part in _shown_row(data.batch([index]), title, tokenizer, bool(console.color_system)):
            console.print(part)
    if isinstance(data, GlobalBatches):
        for rows in getattr(data.rows, "datasets", [data.rows]):
            for line in _summary(rows, cfg):
                console.print(line, markup=False)
    return 0


def _shown_row(
    batch: dict[str, np.ndarray], title: str, tokenizer: Tokenizer, colored: bool
) -> Iterator[Text]:
    """Yield a line on a row, and each of its documents."""
    tokens, labels, mask, segments = (batch[name][0] for name in FIELDS)
    used, trained = int((segments > 0).sum()), int((mask > 0).sum())
    counts = f"{used:,} of {len(tokens):,} places are used, {trained:,} have a loss"
    yield Text(f"{title}: {counts}", style="bold")
    for document in range(1, int(segments.max()) + 1):
        at = np.flatnonzero(segments == document)
        ids = np.append(tokens[at[0]], labels[at])
        has_loss = np.append(False, mask[at] > 0)
        cuts = np.flatnonzero(np.diff(has_loss)) + 1
        text = Text()
        for number, part in enumerate(np.split(ids, cuts)):
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
    left_out = len(source.left_out)
    count = len(source.names) + left_out
    yield f"{rows.path}: {count:,} records, {left_out:,} left out as broken"
    yield from (f"  {line}" for line in source.left_out)
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
