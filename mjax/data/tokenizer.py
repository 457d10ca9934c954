"""Text to token ids and back: byte level, Hugging Face `tokenizer.json`, SentencePiece `.model`.

Invariant: ids are in [0, vocab_size) and no special tokens are added; the end-of-document id is
appended only by who asks for it. The work is done by `tokenizers` and `sentencepiece`.
"""

import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mjax.config.model_schema import ModelConfig
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 10_000_000  # room for more may end the process
# What an end of document is called, where no tokenizer_config.json beside the file says so.
EOD_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class Tokenizer:
    """`encode_batch(texts)` -> one list of ids per text; `decode(ids)` -> text, special ids
    dropped; `eod_id` None where the vocabulary has no end-of-document token; `prefix`: ids that
    the model wants before a text (a BOS), which `encode_batch` does not add; `decode_whole(ids)` ->
    text with the texts of special ids that have one; `id_of(token)` -> the id of a token, or
    None; `piece_of(id)` -> the entry of the vocabulary, None where it has none but bytes."""

    vocab_size: int
    eod_id: int | None
    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[int]], str]
    prefix: tuple[int, ...] = ()
    decode_whole: Callable[[Sequence[int]], str] | None = None
    id_of: Callable[[str], int | None] = lambda token: None
    piece_of: Callable[[int], str | None] | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.encode_batch([text])[0]


def load_tokenizer(spec: str | os.PathLike) -> Tokenizer:
    """`byte` (256 bytes and an end-of-document id 256), a `tokenizer.json`, a folder that holds
    one, or a SentencePiece `.model`. Raises `UserError` if it cannot be loaded."""
    if spec == "byte":
        return _byte_tokenizer()
    path = Path(spec)
    if path.is_dir():
        names = "tokenizer.json", "tokenizer.model"
        path = path / next((n for n in names if (path / n).is_file()), names[0])
    if not path.is_file():
        raise UserError(
            f"tokenizer {str(spec)!r}: no such file; give 'byte', a tokenizer.json or a "
            "SentencePiece .model ('train:VOCAB' is for data.text)"
        )
    if path.suffix == ".model":
        return _sentencepiece_tokenizer(path)
    return _huggingface_tokenizer(path)


def _byte_tokenizer() -> Tokenizer:
    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    return Tokenizer(257, 256, encode_batch, decode, decode_whole=decode)


def _huggingface_tokenizer(path: Path) -> Tokenizer:
    import tokenizers

    # The library raises plain Exception.
    with or_user_error(f"{path}: not a Hugging Face tokenizer.json: {{reason}}", Exception):
        inner = tokenizers.Tokenizer.from_file(str(path))
    inner.no_truncation()  # files often carry the limits of some chat model
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError(f"{path}: the tokenizer has no vocabulary")
    declared = read_json(path.with_name("tokenizer_config.json"), missing={}).get("eos_token")
    names = [token_text(declared), *EOD_NAMES]
    eod = next((vocabulary[n] for n in names if n in vocabulary), None)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in inner.encode_batch(list(texts), add_special_tokens=False)]

    whole, bare = inner.encode("a").ids, encode_batch(["a"])[0]
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    prefix = tuple(whole[: next(starts, 0)])
    return Tokenizer(
        max(vocabulary.values()) + 1,
        eod,
        encode_batch,
        lambda ids: inner.decode([int(i) for i in ids]),
        prefix,
        lambda ids: inner.decode([int(i) for i in ids], skip_special_tokens=False),
        vocabulary.get,
        inner.id_to_token,
    )


def token_text(token: str | dict | None) -> str | None:
    """A token as tokenizer_config.json has it: its text, or a dictionary with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(text, str):
        raise UserError(
            f"tokenizer_config.json or special_tokens_map.json: the token {reprlib.repr(token)} is "
            'neither a text nor {"content": ".."}; mend it'
        )
    return text


def _sentencepiece_tokenizer(path: Path) -> Tokenizer:
    with or_user_error(f"{path}: needs `pip install sentencepiece`", ImportError):
        import sentencepiece
    with or_user_error(f"{path}: not a SentencePiece model: {{reason}}", (RuntimeError, OSError)):
        inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
    eod = inner.eos_id() if inner.eos_id() >= 0 else None

    def encode_batch(texts):
        return inner.encode(list(texts))

    def decode(ids):
        return inner.decode([int(i) for i in ids])

    def id_of(token: str) -> int | None:
        found = inner.piece_to_id(token)  # of unknown pieces, that of <unk>
        return found if inner.id_to_piece(found) == token else None

    return Tokenizer(
        inner.get_piece_size(), eod, encode_batch, decode, (), decode, id_of, inner.id_to_piece
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: str | os.PathLike) -> Tokenizer:
    """Train a byte-level BPE on `texts`, write it to `out` (atomically) and load it.

    The vocabulary holds the 256 bytes, `<|endoftext|>` and merges, at most `vocab_size` in all;
    fewer where the text has no more pairs. The result depends only on the texts.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if not 257 <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"vocabulary of {vocab_size}: at least 257 (the bytes and {END_OF_TEXT}), at most "
            f"{LARGEST_VOCABULARY:,}"
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    temporary = f"{out}.{os.getpid()}.tmp"
    with or_user_error(f"{out}: cannot be written: {{reason}}"):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(temporary).write_text(inner.to_str(), encoding="utf-8")
        os.replace(temporary, out)
    return load_tokenizer(out)


class EncodedDocuments(NamedTuple):
    """Ids end to end, int32; the lengths of sequences, int32; the sequences of each document."""

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


def encode_with_items(
    text: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    sizes: Mapping[str, int | None] | None = None,
) -> list[int]:
    """The ids of a text, with those of all tokens of an item in the place of <image> or <audio>.

    `sizes`: of the items, by modality; None: those that the model's positions are for. An image in
    tiles is one id, for its tokens depend on its size (`data/tiles.py`).
    """
    if "vision" in model.modalities and "<video>" in text:
        raise UserError("<video> in a text: videos are not built; give frames as images (<image>)")
    marks = {}
    for name in model.modalities:
        tower = model.tower(name)
        count = 1 if tower.is_cut else tower.text_tokens((sizes or {}).get(name))
        marks[tower.mark] = [tower.token_id] * count
    if all(tokenizer.encode(mark) == ids[:1] for mark, ids in marks.items()):
        of_id = {ids[0]: ids for ids in marks.values()}
        return [i for id in tokenizer.encode(text) for i in of_id.get(id, [id])]
    first, *rest = re.split(f"({'|'.join(marks)})", text)
    ids = tokenizer.encode(first)
    for mark, words in zip(rest[::2], tokenizer.encode_batch(rest[1::2]), strict=True):
        ids = [*ids, *marks[mark], *words]
    return ids


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Sequence[str]], eod_id: int | None
) -> EncodedDocuments:
    """The ids of documents, each a list of texts that become sequences, the last one's `eod_id`
    behind it. Sequences and documents without ids are left out."""
    lists = iter(tokenizer.encode_batch([text for texts in documents for text in texts]))
    end = [] if eod_id is None else [eod_id]
    flat, counts = [np.zeros(0, np.int32)], []
    for texts in documents:
        sequences = [ids for ids in islice(lists, len(texts)) if ids]
        if sequences:
            sequences[-1] = sequences[-1] + end
            flat += [np.asarray(ids, np.int32) for ids in sequences]
            counts.append(len(sequences))
    lengths = np.array([len(ids) for ids in flat[1:]], np.int32)
    return EncodedDocuments(np.concatenate(flat), lengths, np.array(counts, np.int64))


def word_continuations(spec: str | os.PathLike) -> np.ndarray | None:
    """Which tokens continue a word, bool [V]; None where the tokenizer does not say.

    WordPiece marks those with ##. SentencePiece and byte-level BPE mark the others, which begin
    with a space.
    """
    tokenizer = load_tokenizer(spec)
    if tokenizer.piece_of is None:
        return None
    pieces = [tokenizer.piece_of(i) for i in range(tokenizer.vocab_size)]
    marks = [mark for mark in ("##", "▁", "Ġ") if any(p.startswith(mark) for p in pieces if p)]
    if not marks:
        return None
    (mark, *_) = marks
    marked = np.array([bool(piece) and piece.startswith(mark) for piece in pieces])
    special = np.array([not piece or piece.startswith(("<", "[")) for piece in pieces])
    return marked if mark == "##" else ~marked & ~special
