"""How fast the data path is: building the indices, and batches through the real loader.

The corpus is synthetic and just written, hence in the page cache. Nothing is left on disk.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mjax.bench.report import add_arguments, report
from mjax.data.gpt import GPTDataset
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.loader import make_loader


def write_corpus(prefix: Path, tokens: int, mean_length: int, vocab_size: int) -> int:
    """A corpus of about `tokens` uint16 ids; lengths are geometric. Returns the documents."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / mean_length, size=max(1, tokens // mean_length))
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, max(1, tokens // 10**7)):
            ids = rng.integers(0, vocab_size, size=part.sum(), dtype=np.uint16)
            writer.add_documents(ids, part)
    return len(lengths)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mjax.bench data")
    parser.add_argument("--tokens", type=float, default=1e8)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--document-length", type=int, default=750, help="mean, in tokens")
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return report(args, measure(args))


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """The record of the index, then that of a pass over the corpus."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        documents = write_corpus(prefix, int(args.tokens), args.document_length, 50257)
        began = time.perf_counter()
        data = GPTDataset(prefix, 0, (1, 0, 0), args.seq_length, None, 1, vocab_size=50257)
        ms = 1e3 * (time.perf_counter() - began)
        case = {"tokens": len(data.dataset.tokens), "documents": documents}
        case |= {"seq_length": args.seq_length, "cores": os.cpu_count()}
        yield {"bench": "data_index", "case": case, "ms": round(ms, 3)}

        steps = len(data) // args.batch
        data.batch(np.arange(min(len(data), args.batch)))  # imports and first touches
        loader = make_loader(
            data,
            lambda step: (step * args.batch, args.batch),
            0,
            steps,
            prefetch=args.prefetch,
            workers=args.workers,
        )
        began = time.perf_counter()
        read = sum(batch["tokens"].size for batch in loader)
        seconds = time.perf_counter() - began
        case |= {"batch": args.batch, "workers": args.workers, "prefetch": args.prefetch}
        record = {"bench": "data_loader", "case": case, "ms": round(1e3 * seconds, 3)}
        yield record | {"tokens_per_second": round(read / seconds)}
