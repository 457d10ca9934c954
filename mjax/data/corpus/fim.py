"""Fill-in-the-middle: documents whose middle is predicted from what is before and behind it.

The text of a document is cut at two random characters into prefix, middle and suffix, and these are
put in another order with a sentinel token before each. With PSM it is prefix, suffix, middle. With
SPM the suffix comes first (variant 2 of Bavarian et al., arXiv 2207.14255). Loss is on all tokens.
Invariant: what becomes of a sample is a pure function of (seed, number of the sample, its tokens).
The rules are those of Megatron-LM's `GPTFIMDataset`, but for its random numbers, which depend on
what was read before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mjax.config.schema.run import DataConfig
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError


class FilledRow(NamedTuple):
    """A sample of S + 1 tokens after it was permuted.

    tokens: with `pad_id` behind the last document. sizes: tokens of each piece; their sum is less
    than S + 1 where there is padding.
    """

    tokens: np.ndarray
    sizes: list[int]


@dataclass(frozen=True)
class FillInTheMiddle:
    """The rules for the documents of a sample.

    data: the shares `fim_rate` that is permuted and `fim_spm_rate` of those in the order SPM;
    `fim_no_prefix`: the text of what is never permuted begins so.
    split_id: a token between the files of a document, or None. A document that has it is permuted
    file by file: with `fim_rate` at all, then each file with `fim_fragment_rate`.
    eod_id: of the token that ends documents, None if they end with the index's sequences alone.
    """

    tokenizer: Tokenizer
    seed: int
    data: DataConfig
    prefix_id: int
    middle_id: int
    suffix_id: int
    split_id: int | None
    pad_id: int
    eod_id: int | None

    def __post_init__(self) -> None:
        """Raise `UserError` for a tokenizer whose parts cannot be joined."""
        if self.tokenizer.inside is None:
            raise UserError(
                "data.fim_rate: the tokenizer joins words with spaces (WordPiece), so that parts "
                "of a text do not give it back; take one of bytes or SentencePiece, or fim_rate=0"
            )

    def fill(self, sample: int, pieces: Sequence[np.ndarray]) -> FilledRow:
        """Sample number `sample`, given as its pieces, one of each sequence of the index.

        The length stays: what is too long is cut off at the end, and what is too short is padded.
        """
        rng = np.random.default_rng([self.seed, sample])
        length = sum(map(len, pieces))
        permuted = [self._permute_piece(piece, rng) for piece in pieces]
        sizes, room = [], length
        for piece in permuted:
            sizes.append(min(len(piece), room))
            room -= sizes[-1]
        padding = np.full(room, self.pad_id, np.int64)
        return FilledRow(np.concatenate([*permuted, padding])[:length], sizes)

    def _permute_piece(self, piece: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A piece, whose documents end with `eod_id` and at its end."""
        parts = [self._permute_document(part, rng) for part in _parts_between(piece, self.eod_id)]
        return _joined_parts(parts, piece, self.eod_id)

    def _permute_document(self, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.split_id is None or self.split_id not in document:
            return self._permute(document, self.data.fim_rate, rng)
        if rng.random() >= self.data.fim_rate:
            return document
        files = _parts_between(document, self.split_id)
        rate = self.data.fim_fragment_rate or 0.0
        parts = [self._permute(part, rate, rng) for part in files]
        return _joined_parts(parts, document, self.split_id)

    def _permute(self, ids: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
        """Ids of a text, permuted with this probability."""
        if rng.random() >= rate:
            return ids
        text = self.tokenizer.decode_whole(ids)
        never = self.data.fim_no_prefix
        if never is not None and text.startswith(never):
            return ids
        # With the space that a tokenizer puts before a text: it belongs to the first part.
        spaced = self.tokenizer.inside.decode_whole(ids)
        text = text if spaced.endswith(text) else spaced
        lead = len(spaced) - len(text)
        cuts = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        first, second = (cut and cut + lead for cut in cuts)
        texts = [spaced[:first], spaced[first:second], spaced[second:]]
        prefix, middle, suffix = self.tokenizer.inside.encode_batch(texts)
        if rng.random() < self.data.fim_spm_rate:
            order = [self.prefix_id, self.suffix_id, *suffix, self.middle_id, *prefix, *middle]
        else:
            order = [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id, *middle]
        return np.array(order, np.int64)


def _parts_between(ids: np.ndarray, at: int | None) -> Iterator[np.ndarray]:
    """The non-empty parts of `ids` between the tokens `at`."""
    borders = [] if at is None else np.flatnonzero(ids == at).tolist()
    start = 0
    for border in [*borders, len(ids)]:
        if border > start:
            yield ids[start:border]
        start = border + 1


def _joined_parts(parts: list[np.ndarray], ids: np.ndarray, at: int | None) -> np.ndarray:
    """Parts of `ids` with the token `at` between them, and behind the last one if it was there."""
    ended = [token for part in parts for token in (part, [at])]
    if at is None or len(ids) == 0 or ids[-1] != at:
        ended = ended[:-1]
    return np.concatenate([np.zeros(0, np.int64), *ended])


def fill_in_the_middle(
    data: DataConfig, seed: int, vocab_size: int, tokenizer_path: str | None = None
) -> FillInTheMiddle | None:
    """The rules that `data` asks for, or None; `tokenizer_path` takes the place of data.tokenizer.

    Raises `UserError` for tokens that the tokenizer or the model does not have.
    """
    if data.fim_rate == 0:
        return None
    tokenizer = load_tokenizer(tokenizer_path or data.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.fim_rate: the tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size is "
            f"{vocab_size}: raise it"
        )

    def id_of(key: str) -> int | None:
        return _token_id(key, getattr(data, key), tokenizer, vocab_size)

    eod = tokenizer.eod_id if data.eod_token_id is None else data.eod_token_id
    pad = eod if data.fim_pad_token is None else id_of("fim_pad_token")
    if pad is None:
        raise UserError("data.fim_pad_token: the tokenizer has no end of document; set it")
    keys = "fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_split_sample"
    ids = {key: id_of(key) for key in keys}
    taken = {eod: "the end of a document"}
    for key, number in ids.items():
        if number is not None and number in taken:
            raise UserError(f"data.{key}: id {number} is {taken[number]}, too; take another token")
        taken[number] = f"data.{key}"
    return FillInTheMiddle(tokenizer, seed, data, *ids.values(), pad, eod)


def _token_id(key: str, token: str | int | None, tokenizer: Tokenizer, size: int) -> int | None:
    """The id of a token that is given by its text or its id."""
    if token is None:
        return None
    number = tokenizer.id_of(token) if isinstance(token, str) else token
    if number is None:
        raise UserError(
            f"data.{key}={token!r}: the tokenizer has no such token; add it there, or give an id"
        )
    if not 0 <= number < size:
        raise UserError(f"data.{key}: id {number} is outside model.vocab_size={size}; raise that")
    return number
