"""Text to token ids and back: byte level, Hugging Face `tokenizer.json`, and older files.

Invariant: ids are in [0, vocab_size) and no special tokens are added; the end-of-document id is
appended only by who asks for it. The work is done by `tokenizers`, and for older files
(`vocabularies.py`) by the library that they were made for.
"""

import functools
import hashlib
import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 10_000_000  # room for more may end the process
# What an end of document is called, where no tokenizer_config.json beside the file says so.
EOD_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# Of a folder; the first that is there counts.
VOCABULARIES = (
    *"""tokenizer.json tokenizer.model spiece.model tiktoken.model *merges.txt *vocab.json
    *vocab.txt *.tiktoken""".split(),
)
SETTINGS = frozenset(
    """bos_token eos_token unk_token sep_token pad_token cls_token mask_token added_tokens_decoder
    additional_special_tokens extra_special_tokens add_bos_token add_eos_token add_prefix_space
    legacy extra_ids do_lower_case strip_accents tokenize_chinese_chars tokenizer_class pattern
    num_special_tokens special_tokens vocab_size""".split()
)


class PairFrame(NamedTuple):
    """How two texts are framed: the separators between them, and the type of the second's tokens.

    BERT's row is [CLS] A [SEP] B [SEP], of types 0 and 1. RoBERTa's is <s> A </s></s> B </s>, of
    type 0.
    """

    separators: int
    second_type: int


PlacedIds = tuple[list[int], list[tuple[int, int]]]  # ids, and [begin, end) of their characters

BERT_PAIR, ROBERTA_PAIR = PairFrame(1, 1), PairFrame(2, 0)


@dataclass(frozen=True)
class Tokenizer:
    """`encode_batch(texts)` -> one list of ids per text; `decode(ids)` -> text, special ids
    dropped; `eod_id` None where the vocabulary has no end-of-document token; `prefix`: ids that
    the model wants before a text (a BOS), which `encode_batch` does not add; `decode_whole(ids)` ->
    text with the texts of special ids that have one; `id_of(token)` -> the id of a token, or
    None; `piece_of(id)` -> the entry of the vocabulary, None where it has none but bytes;
    `pair`: how it frames two texts, None where it does not.

    `encode_with_places(texts)` -> for each text its ids and the characters [begin, end) of each;
    None where it cannot say.

    `make_inside()`: the tokenizer for parts of a text, None where its ids cannot be joined; without
    it this one. `digest`: of all that its ids depend on.
    """

    vocab_size: int
    eod_id: int | None
    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[int]], str]
    prefix: tuple[int, ...] = ()
    decode_whole: Callable[[Sequence[int]], str] | None = None
    id_of: Callable[[str], int | None] = lambda token: None
    piece_of: Callable[[int], str | None] | None = None
    pair: PairFrame | None = None
    make_inside: "Callable[[], Tokenizer | None] | None" = None
    encode_with_places: "Callable[[Sequence[str]], list[PlacedIds]] | None" = None
    digest: str = ""

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def special_text(self, id: int) -> str:
        """The text of a special token, which `decode` leaves out; "" of any other."""
        if id >= self.vocab_size or self.decode([id]):
            return ""
        text = self.decode_whole([id]) if self.decode_whole else ""
        piece = self.piece_of(id) if self.piece_of and not text else None
        return text or (piece or "").replace("▁", "")  # that alone is a space

    @functools.cached_property
    def decode_one(self) -> Callable[[int], str]:
        """`decode` of one id, kept for the next time."""
        return functools.lru_cache(2**17)(lambda id: self.decode([id]))

    @functools.cached_property
    def inside(self) -> "Tokenizer | None":
        """The tokenizer for parts of a text, which puts no space before them and takes none away.

        Ids of parts, joined, decode to the parts, joined. None where that cannot be.
        """
        return self if self.make_inside is None else self.make_inside()


def load_tokenizer(spec: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a spec: `byte` (256 bytes and an end-of-document id 256), a file or a
    folder (`tokenizer_files` lists them). Raises `UserError` if it cannot be loaded."""
    if spec == "byte":
        return replace(_byte_tokenizer(), digest="byte")
    files = tokenizer_files(spec)
    name, path = next(iter(files.items()))
    said = read_settings(path.parent)
    if name == "tokenizer.json":
        found = _huggingface_tokenizer(path, said)
        said = {}  # but for what stands in `found`
    else:
        from mjax.data.base.vocabularies import load_vocabulary

        found = load_vocabulary(files, said)
    raw = hashlib.blake2b(digest_size=16)
    for path in files.values():
        raw.update(path.read_bytes())
    facts = [found.vocab_size, found.eod_id, found.prefix, said]
    raw.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return replace(found, digest=raw.hexdigest())


def require_vocabulary(size: int, model: ModelConfig, source: str = "data.tokenizer") -> None:
    """Raise `UserError` unless a model has the tokens of a tokenizer of this size."""
    if size > model.vocab_size:
        raise UserError(
            f"model.vocab_size {model.vocab_size} is less than the tokenizer's {size} ({source}): "
            "raise it"
        )


def tokenizer_files(spec: str | os.PathLike) -> dict[str, Path]:
    """Name in a model folder -> file of a vocabulary. Raises `UserError` where there is none.

    The forms, the first of a folder: tokenizer.json; tokenizer.model or spiece.model
    (SentencePiece; tokenizer.model may be tiktoken's); vocab.json with merges.txt; vocab.txt
    (WordPiece); NAME.tiktoken; vocab.json that is Megatron's list for tiktoken. A file may have
    another name with the same end, such as gpt2-vocab.json with gpt2-merges.txt.
    """
    path = Path(spec)
    if path.is_dir():
        path = vocabulary_in(path) or path / VOCABULARIES[0]
    if not path.is_file():
        raise UserError(
            f"tokenizer {str(spec)!r}: no such file; give 'byte', a tokenizer.json, a "
            "SentencePiece .model, a vocab.json with merges.txt, a vocab.txt, a .tiktoken, or a "
            "folder with one ('train:VOCAB' is for data.text)"
        )
    if path.name.endswith("merges.txt"):
        path = path.with_name(path.name.removesuffix("merges.txt") + "vocab.json")
    if path.name.endswith("vocab.json"):
        merges = path.with_name(path.name.removesuffix("vocab.json") + "merges.txt")
        return {"vocab.json": path} | ({"merges.txt": merges} if merges.is_file() else {})
    if path.suffix == ".model":
        return {path.name if path.name in VOCABULARIES else "tokenizer.model": path}
    names = {".txt": "vocab.txt", ".tiktoken": path.name}
    return {names.get(path.suffix, "tokenizer.json"): path}


def vocabulary_in(folder: Path) -> Path | None:
    """The file with the vocabulary of a folder."""
    for pattern in VOCABULARIES:
        found = sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))
        if found:
            return found[0]
    return None


def read_settings(folder: Path) -> dict:
    """Keys of the settings beside a vocabulary that its ids depend on, as transformers reads them:
    tokenizer_config.json, special_tokens_map.json, added_tokens.json (here "added_tokens")."""
    said = read_json(folder / "special_tokens_map.json", missing={})
    said |= read_json(folder / "tokenizer_config.json", missing={})
    added = read_json(folder / "added_tokens.json", missing={})
    kept = {k: v for k, v in said.items() if k in SETTINGS and v is not None}
    return kept | ({"added_tokens": added} if added else {})


def _byte_tokenizer() -> Tokenizer:
    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    return Tokenizer(257, 256, encode_batch, decode, decode_whole=decode)


def _huggingface_tokenizer(path: Path, said: dict) -> Tokenizer:
    import tokenizers

    # The library raises plain Exception.
    with or_user_error(f"{path}: not a Hugging Face tokenizer.json: {{reason}}", Exception):
        inner = tokenizers.Tokenizer.from_file(str(path))
    if not inner.get_vocab_size():
        raise UserError(f"{path}: the tokenizer has no vocabulary")
    return wrapped(inner, said)


def wrapped(inner, said: dict) -> Tokenizer:
    """A `tokenizers.Tokenizer` with what `read_settings` found beside it."""
    inner.no_truncation()  # files often carry the limits of some chat model
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    names = [token_text(said.get("eos_token")), *EOD_NAMES]
    eod = next((vocabulary[n] for n in names if n in vocabulary), None)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in inner.encode_batch(list(texts), add_special_tokens=False)]

    def encode_with_places(texts: Sequence[str]) -> list[PlacedIds]:
        encoded = inner.encode_batch(list(texts), add_special_tokens=False)
        return [(e.ids, e.offsets) for e in encoded]

    whole, bare = inner.encode("a").ids, encode_batch(["a"])[0]
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    prefix = stated_prefix(said, vocabulary.get)
    return Tokenizer(
        max(vocabulary.values()) + 1,
        eod,
        encode_batch,
        lambda ids: inner.decode([int(i) for i in ids]),
        tuple(whole[: next(starts, 0)]) if prefix is None else prefix,
        lambda ids: inner.decode([int(i) for i in ids], skip_special_tokens=False),
        vocabulary.get,
        inner.id_to_token,
        _pair_frame(inner),
        lambda: _inside(inner, said),
        encode_with_places=encode_with_places,
    )


def _pair_frame(inner: Any) -> PairFrame | None:
    """How a tokenizer of `tokenizers` frames two texts; None where it does not."""
    encoded = inner.encode("a", "a")
    texts = encoded.sequence_ids  # None: a token of the frame
    if None not in texts or not {0, 1} <= set(texts):
        return None
    second = texts.index(1)
    separators = texts[:second].count(None) - texts.index(0)
    return PairFrame(separators, encoded.type_ids[second])


def stated_prefix(said: dict, id_of: Callable[[str], int | None]) -> tuple[int, ...] | None:
    """The ids before a text by `add_bos_token`; None where the settings do not speak of it."""
    if "add_bos_token" not in said and "add_eos_token" not in said:
        return None
    bos = token_text(said.get("bos_token"))
    number = id_of(bos) if said.get("add_bos_token") and bos is not None else None
    return () if number is None else (number,)


def _inside(inner, said: dict) -> Tokenizer | None:
    """`Tokenizer.inside` of a `tokenizers.Tokenizer`: the same without what begins a text."""
    import tokenizers

    spec = json.loads(inner.to_str())
    model = spec["model"]
    if model.get("type") in ("WordPiece", "WordLevel") or model.get("end_of_word_suffix"):
        return None
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        spec[part] = _without_start(spec[part])
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return replace(wrapped(made, said), make_inside=None)


def _without_start(part: dict | None) -> dict | None:
    """A part of a tokenizer.json that treats the start and the end of a text like its middle."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    pattern = part.get("pattern", {}).get("Regex", "")
    if part["type"] == "Replace" and pattern.startswith((r"\A", "^")):
        return None
    part = dict(part)
    for key, value in (("prepend_scheme", "never"), ("add_prefix_space", False)):
        if key in part:
            part[key] = value
    lists = [key for key in ("normalizers", "pretokenizers", "decoders") if key in part]
    for key in lists:
        kinds = [one["type"] for one in part[key]]
        # The marks of words are then all that says where spaces are.
        kept = [p for p in part[key] if p["type"] != "WhitespaceSplit" or "Metaspace" not in kinds]
        part[key] = [found for found in map(_without_start, kept) if found is not None]
    return part


def token_text(token: str | dict | None) -> str | None:
    """A token as tokenizer_config.json has it: its text, or a dictionary with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(text, str):
        raise UserError(
            f"tokenizer_config.json or special_tokens_map.json: the token {reprlib.repr(token)} is "
            'neither a text nor {"content": ".."}; mend it'
        )
    return text


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
    where: str = "a text",
) -> list[int]:
    """The ids of a text, with those of all tokens of an item in the place of <image> or <audio>.

    `sizes`: of the items, by modality; None: those that the model's positions are for. An image in
    tiles or of its own size is one id, for its tokens depend on its size. Raises
    `UserError`, which says `where`, for words that use such an id.
    """
    marks = {}
    if "vision" in model.modalities and "<video>" in text:
        if model.vision.video_token_id is None:
            said = "videos are not built; give frames as images (<image>)"
            raise UserError(f"<video> in a text: {said}")
        marks["<video>"] = [model.vision.video_token_id]
    for name in model.modalities:
        tower = model.tower(name)
        count = 1 if tower.is_cut or tower.is_packed else tower.text_tokens((sizes or {}).get(name))
        marks[tower.mark] = [tower.token_id] * count
    if all(tokenizer.encode(mark) == ids[:1] for mark, ids in marks.items()):
        of_id = {ids[0]: ids for ids in marks.values()}
        found = tokenizer.encode(text)
        own = [id for mark, (id, *_) in marks.items() for _ in range(text.count(mark))]
        require_no_items((Counter(found) - Counter(own)).elements(), model, where)
        return [i for id in found for i in of_id.get(id, [id])]
    first, *rest = re.split(f"({'|'.join(marks)})", text)
    ids = tokenizer.encode(first)
    require_no_items(ids, model, where)
    for mark, words in zip(rest[::2], tokenizer.encode_batch(rest[1::2]), strict=True):
        require_no_items(words, model, where)
        ids = [*ids, *marks[mark], *words]
    return ids


def encode_behind(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """The ids of a text that goes on behind these ids of the same text.

    Behind a special token it is what the tokenizer makes of it there.
    """
    if before and not tokenizer.decode(before[-1:]) and tokenizer.piece_of is not None:
        token = tokenizer.piece_of(before[-1]) or ""
        first, *rest = tokenizer.encode(token + text) or [None]
        if first == before[-1]:
            return rest
    inside = tokenizer.inside if before else None
    return (inside or tokenizer).encode(text)


def require_no_items(ids: Iterable[int], model: ModelConfig, where: str) -> None:
    """Raise `UserError` where ids of words hold one that stands for an item."""
    used = set(ids)
    for name in model.modalities:
        tower = model.tower(name)
        if tower.token_id in used:
            raise UserError(
                f"{where} uses token {tower.token_id}, which stands for an {tower.item}; set "
                f"model.{name}.{tower.item}_token_id to an id that no text uses"
            )


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
