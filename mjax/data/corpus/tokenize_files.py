"""Files of raw text to an indexed corpus of tokens, in parallel.

Inputs are read as `documents.py` says: JSON lines are one document each, any other file is one
document. Invariant: the output depends on the inputs, their order and the tokenizer, never on the
number of workers; it appears whole or not at all.
"""

import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from mjax.config.languages.paths import is_address
from mjax.data.base.documents import (
    COMPRESSED,
    Document,
    document_text,
    expand_paths,
    read_documents,
)
from mjax.data.base.sentences import split_sentences
from mjax.data.base.tokenizer import EncodedDocuments, Tokenizer, encode_documents, load_tokenizer
from mjax.data.corpus.indexed import IndexedDatasetWriter, token_dtype
from mjax.errors import UserError

CHUNK_BYTES = 1 << 20  # raw text per task: large enough to hide the cost of sending it


class Summary(NamedTuple):
    documents: int
    tokens: int
    seconds: float


def _chunks_of_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document.raw)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_tokenizer: Tokenizer  # of this worker process


def _start_worker(spec: str, workers: int) -> None:
    global _tokenizer
    if workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = load_tokenizer(spec)


def _encode(
    json_key: str | None, append_eod: bool, by_sentence: bool, chunk: list[Document]
) -> tuple[EncodedDocuments, int]:
    """One task: (the documents, ids in the file's dtype; raw bytes) of a chunk."""
    tokenizer = _tokenizer
    texts = [document_text(d, json_key) for d in chunk]
    parts = [split_sentences(text) if by_sentence else [text] for text in texts]
    found = encode_documents(tokenizer, parts, tokenizer.eod_id if append_eod else None)
    raw = sum(len(d.raw) for d in chunk)
    return found._replace(ids=found.ids.astype(token_dtype(tokenizer.vocab_size))), raw


def _parallel_map(function: partial, items: Iterable, spec: str, workers: int) -> Generator:
    """`map` over processes, in order, never more than a few items ahead. Fresh processes, since a
    fork of one that runs JAX or thread pools may hang."""
    if workers == 1:
        _start_worker(spec, workers)
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (spec, workers)) as pool:
        try:
            pending: deque = deque()
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def preprocess(
    inputs: Sequence[str],
    output: str | os.PathLike,
    tokenizer: str,
    *,
    append_eod: bool = False,
    by_sentence: bool = False,
    json_key: str | None = None,
    workers: int = 1,
) -> Summary:
    """Tokenize `inputs` into `output`.bin and .idx. Shows progress on a terminal's stderr.

    A document is one sequence, or with `by_sentence` one for each sentence (`sentences.py`).
    Documents without a token are left out. Raises `UserError` on bad input, leaving no file.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    loaded = load_tokenizer(tokenizer)
    if append_eod and loaded.eod_id is None:
        raise UserError(f"{tokenizer}: has no end-of-document token, so --append-eod cannot work")
    files = expand_paths(inputs)
    unknown = any(f == "-" or is_address(f) or f.lower().endswith(COMPRESSED) for f in files)
    total = None if unknown else sum(os.path.getsize(f) for f in files)
    began, documents, tokens = time.perf_counter(), 0, 0
    show = TextColumn("{task.fields[rate]:.2f}M tok/s")
    columns = ["tokenize", BarColumn(), TimeElapsedColumn(), show]
    task = partial(_encode, json_key, append_eod, by_sentence)
    chunks = _chunks_of_documents(read_documents(files, text_key=json_key))
    console = Console(stderr=True)
    with (
        IndexedDatasetWriter(output, token_dtype(loaded.vocab_size)) as writer,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        contextlib.closing(_parallel_map(task, chunks, tokenizer, workers)) as encoded,
    ):
        bar = progress.add_task("", total=total, rate=0.0)
        for found, raw in encoded:
            writer.add_documents(*found)
            documents, tokens = documents + len(found.counts), tokens + len(found.ids)
            seconds = time.perf_counter() - began
            progress.update(bar, advance=raw, rate=tokens / seconds / 1e6)
        if documents == 0:
            raise UserError(f"{' '.join(inputs)}: no text found, nothing written")
    return Summary(documents, tokens, time.perf_counter() - began)


def read_texts(inputs: Sequence[str], json_key: str | None = None) -> Iterator[str]:
    """The text of every document of the inputs."""
    for document in read_documents(expand_paths(inputs), text_key=json_key):
        yield document_text(document, json_key)
