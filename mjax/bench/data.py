"""How fast the data path is: building the indices, and batches through the real loader.

With `--images` it is images in place of texts, beside the rate of Pillow alone: as many processes
that decode and resize, and hand nothing over. The data is synthetic and just written, hence in the
page cache. Nothing is left on disk.
"""

import argparse
import io
import math
import multiprocessing
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from mjax.bench.report import add_arguments, report
from mjax.config import load
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.indexed import IndexedDatasetWriter
from mjax.data.loader import build_datasets, make_loader
from mjax.data.multimodal.pixels import decode_image
from mjax.errors import CommandParser, UserError, at_least


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
    parser = CommandParser("bench data")
    parser.add_argument("--tokens", type=float, default=1e8, help="of the corpus")
    parser.add_argument("--seq-length", type=at_least(1), default=4096, help="tokens of a row")
    parser.add_argument("--batch", type=at_least(1), default=64, help="sequences per step")
    parser.add_argument("--document-length", type=at_least(1), default=750, help="mean, in tokens")
    parser.add_argument("--prefetch", type=at_least(1), default=4, help="batches made ahead")
    workers = "loader threads; with --images, processes that decode"
    parser.add_argument("--workers", type=at_least(1), default=2, help=workers)
    parser.add_argument("--images", type=at_least(1), help="JPEGs to decode, in place of texts")
    parser.add_argument("--image-size", type=at_least(1), default=336, help="pixels of a side")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.tokens < math.inf:
        raise UserError(f"--tokens {args.tokens}: give 1 or more")
    return report(args, measure_images(args) if args.images else measure_data(args))


def measure_data(args: argparse.Namespace) -> Iterator[dict]:
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


# ---- images --------------------------------------------------------------------------------------

held: dict = {}  # in a process that only decodes


def write_images(path: Path, count: int, size: int) -> list[bytes]:
    """A webdataset tar of JPEGs of random clouds and their classes; returns the JPEGs."""
    from PIL import Image

    rng, encoded = np.random.default_rng(0), []
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            clouds = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            out = io.BytesIO()
            Image.fromarray(clouds).resize((size, size)).save(out, "jpeg", quality=90)
            encoded.append(out.getvalue())
            for suffix, content in (("jpg", encoded[-1]), ("cls", b"0")):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return encoded


def measure_images(args: argparse.Namespace) -> Iterator[dict]:
    """The record of images through the loader, and through Pillow alone."""
    size, batch, steps = args.image_size, args.batch, -(-args.images // args.batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.tar"
        encoded = write_images(path, min(args.images, 512), size)
        vision = f"{{image_size: {size}, patch_size: {size // 24}, num_labels: 2}}"
        keys = ["model.layer_pattern=B", "model.position_embedding=learned"]
        keys += [f"model.vision={vision}", "train.objective=classify_images"]
        keys += ["data.split=[1,0,0]", "train.eval_interval=null", "data.seq_length=1024"]
        keys += [f"data.images.path={path}", f"data.images.workers={args.workers}"]
        data, _ = build_datasets(load(None, keys), (steps + 1) * batch, 0)
        data.batch(np.arange(batch))  # processes start
        loader = make_loader(
            data, lambda step: (step * batch, batch), 1, steps, prefetch=args.prefetch
        )
        began = time.perf_counter()
        read = sum(len(fields["patches"]) for fields in loader)
        seconds = time.perf_counter() - began
    case = {"size": size, "bytes": sum(map(len, encoded)) // len(encoded)}
    case |= {"cores": os.cpu_count(), "batch": batch, "workers": args.workers}
    record = {"bench": "data_images", "case": case, "ms": round(1e3 * seconds, 3)}
    record["images_per_second"] = round(read / seconds)
    yield record | {"decoder_images_per_second": round(decoder_rate(encoded, size, args))}


def decoder_rate(encoded: list[bytes], size: int, args: argparse.Namespace) -> float:
    """Images per second of Pillow in so many processes that keep what they decode."""
    context, workers = multiprocessing.get_context("spawn"), max(args.workers, 1)
    with ProcessPoolExecutor(workers, context, hold, (encoded, size)) as pool:
        list(pool.map(decode_held, [1] * workers))  # processes start
        turns = max(1, args.images // len(encoded) // workers)
        began = time.perf_counter()
        list(pool.map(decode_held, [turns] * workers))
        seconds = time.perf_counter() - began
    return turns * workers * len(encoded) / seconds


def hold(encoded: list[bytes], size: int) -> None:
    """Keep images for `decode_held`, in a process of its own."""
    held["encoded"], held["size"] = encoded, size


def decode_held(turns: int) -> None:
    """Decode the images that this process holds, so many times."""
    for image in held["encoded"] * turns:
        decode_image(image, held["size"], 3)
