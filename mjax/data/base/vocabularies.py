"""Vocabularies older than tokenizer.json: SentencePiece, vocab.json, vocab.txt, tiktoken.

Each is used as its own library uses it; the settings beside it count as transformers reads them.
Invariant: what would give other ids than that library is refused. Megatron-LM's corpora were made
with these files, some under longer names (gpt2-vocab.json, bert-large-uncased-vocab.txt).
"""

import base64
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mjax.data.base.tokenizer import (
    END_OF_TEXT,
    EOD_NAMES,
    Tokenizer,
    stated_prefix,
    token_text,
    wrapped,
)
from mjax.errors import UserError, or_user_error
from mjax.json_file import parse_json, read_json

SPECIAL_TOKENS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes of transformers, without "Fast" and "Tokenizer", that read a vocabulary as is done here.
ANY = ("", "PreTrained", "TokenizersBackend")
READABLE_CLASSES = {
    "SentencePiece": (*ANY, "SentencePieceBackend", "Llama", "CodeLlama", "Gemma", "T5", "MT5"),
    "byte pairs": (*ANY, "GPT2", "CodeGen", "Roberta", "Bart", "Longformer", "Qwen2"),
    "WordPiece": (*ANY, "Bert", "DistilBert", "Electra", "MobileBert", "ConvBert"),
}
OF_MODEL = {"roberta": "Roberta", "t5": "T5", "mt5": "T5", "bart": "Bart", "longformer": "Roberta"}
OF_MODEL |= dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2")
ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
ROBERTA |= {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}

_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SPLIT_QWEN = rf"{_WORD_PATTERN}\p{{N}}|{_MARKS}"
SPLIT_CL100K = rf"{_WORD_PATTERN}\p{{N}}{{1,3}}|{_MARKS}"  # Llama 3's, too
SPLIT_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_O200K = _CASED % (_SHORT, _SHORT) + r"\p{N}{1,3}|" + _CASED_MARKS
SPLIT_MEGATRON = {  # by --tiktoken-pattern, whose default is v2
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _MARKS,
    "v2": _CASED % ("", "") + r"\p{N}|" + _CASED_MARKS,
}
# tiktoken's files do not say how to split a text, nor their special tokens. Known ones are told by
# the number of ids; others are split as transformers does, like cl100k.
KNOWN_FILES = {
    50_256: (SPLIT_GPT2, {END_OF_TEXT: 50_256}),
    50_280: (SPLIT_GPT2, {END_OF_TEXT: 50_256}),
    100_256: (SPLIT_CL100K, {END_OF_TEXT: 100_257, "<|endofprompt|>": 100_276}),
    128_000: (
        SPLIT_CL100K,
        {
            "<|begin_of_text|>": 128_000,
            "<|end_of_text|>": 128_001,
            "<|start_header_id|>": 128_006,
            "<|end_header_id|>": 128_007,
            "<|eot_id|>": 128_009,
        },
    ),
    151_643: (
        SPLIT_QWEN,
        {END_OF_TEXT: 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645},
    ),
    199_998: (SPLIT_O200K, {END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018}),
}
MEGATRON_SPECIALS, MEGATRON_SIZE = 1000, 2**17  # --tiktoken-num-special-tokens, and its sum


@dataclass(frozen=True)
class Added:
    """A token that is found in a text before the vocabulary's own work begins."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    special: bool = True

    @property
    def pattern(self) -> str:
        """A regular expression for the token with the spaces that it takes."""
        word = re.escape(self.content)
        word = rf"(?<!\w){word}(?!\w)" if self.single_word else word
        return (r"\s*" if self.lstrip else "") + f"({word})" + (r"\s*" if self.rstrip else "")


def load_vocabulary(files: Mapping[str, Path], said: dict) -> Tokenizer:
    """The tokenizer of files as `tokenizer_files` names them; `said`: `read_settings` of their
    folder. Raises `UserError`."""
    name, path = next(iter(files.items()))
    if name == "vocab.txt":
        return _word_pieces(path, said)
    if "merges.txt" in files:
        return _byte_pairs(path, files["merges.txt"], said)
    with or_user_error(f"{path}: cannot be read: {{reason}}"):
        head = path.read_bytes()[:4096]
    if name == "vocab.json":
        if not head.lstrip().startswith(b"["):
            raise UserError(f"{path}: byte pairs need merges.txt beside it; copy that, too")
        return _megatron_tiktoken(path, said)
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", head):
        return _tiktoken(path, said)
    if not path.suffix == ".model":
        raise UserError(f"{path}: no tiktoken file: its lines are a token in base64 and a number")
    return _sentencepiece(path, said)


def _class_of(path: Path, said: dict, kind: str) -> str:
    """The class of transformers that reads a vocabulary. Raises `UserError` for one that it reads
    otherwise than is done here."""
    name = said.get("tokenizer_class")
    if name is None:
        model = read_json(path.with_name("config.json"), missing={}).get("model_type")
        name = OF_MODEL.get(model, "") if isinstance(model, str) else ""
    name = str(name).removesuffix("Fast").removesuffix("Tokenizer")
    if name not in READABLE_CLASSES[kind]:
        raise UserError(
            f"{path}: {name}Tokenizer (tokenizer_config.json) is not built for {kind}; write a "
            "tokenizer.json with transformers: AutoTokenizer.from_pretrained(F).save_pretrained(F)"
        )
    return name


def _added(
    path: Path, said: dict, size: int, id_of: Callable[[str], int | None]
) -> dict[int, Added]:
    """Id -> token of those that the settings add to a vocabulary of `size`, or name in it."""
    wrong = f"{path}: the settings beside it hold added tokens that cannot be read ({{reason}})"
    with or_user_error(wrong, (TypeError, ValueError, AttributeError)):
        found = {int(i): _token(t) for i, t in said.get("added_tokens_decoder", {}).items()}
        for content, number in said.get("added_tokens", {}).items():
            found.setdefault(int(number), _token(content))
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = said.get(key, ())
            for token in map(_token, more.values() if isinstance(more, dict) else more):
                if all(token.content != other.content for other in found.values()):
                    number = id_of(token.content)
                    after = max([size, *(i + 1 for i in found)])
                    found[after if number is None else number] = token
        for token in (_token(said[key]) for key in SPECIAL_TOKENS if key in said):
            number = id_of(token.content)
            if number is not None:
                found.setdefault(number, token)
    return found


def _token(said: str | dict) -> Added:
    if isinstance(said, str):
        return Added(said)
    if not isinstance(said.get("content"), str) or not said["content"]:
        raise ValueError('a token without "content"')
    flags = {k: bool(v) for k, v in said.items() if k in Added.__dataclass_fields__}
    return Added(**flags | {"content": said["content"]})


# ---- SentencePiece ----


@dataclass
class _Pieces:
    """A SentencePiece model and the tokens that its folder adds.

    plain: as its file says; bare: without what begins and ends a text; again: what reads a text
    behind an added token. decoded: what stands for ids in texts.
    """

    plain: Any
    bare: Any
    again: Any
    added: dict[int, Added]
    decoded: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = {number: token.content for number, token in self.added.items()}
        self.decoded = texts | self.decoded
        self.ids = {text: number for number, text in texts.items()}
        self.special = {number for number, token in self.added.items() if token.special}
        longest = list(self.added.values())
        longest.sort(key=lambda token: -len(token.content))
        self.numbers = [self.ids[token.content] for token in longest]
        patterns = [token.pattern for token in longest]
        self.pattern = re.compile("|".join(patterns) or r"(?!)")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = list(texts)
        if not any(map(self.pattern.search, texts)):
            return self.plain.encode(texts)
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids, start, model = [], 0, self.plain
        for match in self.pattern.finditer(text):
            ids += model.encode(text[start : match.start()])
            ids.append(self.numbers[match.lastindex - 1])
            start, model = match.end(), self.again
        return ids + model.encode(text[start:])

    def decode(self, ids: Sequence[int], whole: bool = False) -> str:
        """The text of ids, without special ones unless `whole`; ids of no piece have none."""
        size = self.plain.get_piece_size()
        known = [i for i in map(int, ids) if i in self.decoded or 0 <= i < size]
        kept = [i for i in known if whole or i not in self.special]
        out, model = "", self.plain
        for is_added, run in itertools.groupby(kept, self.decoded.__contains__):
            run = list(run)
            out += "".join(map(self.decoded.get, run)) if is_added else model.decode(run)
            model = self.bare
        return out

    def id_of(self, token: str) -> int | None:
        """The id of a token, which may be an added one."""
        found = self.ids.get(token, self.plain.piece_to_id(token))  # <unk>'s for unknown pieces
        return found if self.piece_of(found) == token else None

    def piece_of(self, number: int) -> str | None:
        """The piece or the added token of an id."""
        if number in self.added:
            return self.added[number].content
        is_piece = 0 <= number < self.plain.get_piece_size()
        return self.plain.id_to_piece(number) if is_piece else None


def _sentencepiece(path: Path, said: dict) -> Tokenizer:
    with or_user_error(f"{path}: needs `pip install sentencepiece`", ImportError):
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    with or_user_error(f"{path}: not a SentencePiece model: {{reason}}", (RuntimeError, OSError)):
        plain = SentencePieceProcessor(model_file=str(path))
    proto = sentencepiece_model_pb2.ModelProto.FromString(plain.serialized_model_proto())
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    bare = SentencePieceProcessor(model_proto=proto.SerializeToString())
    name, size = _class_of(path, said, "SentencePiece"), plain.get_piece_size()
    find = _Pieces(plain, bare, plain, {}).id_of
    if said:  # in a folder of transformers texts may hold control tokens
        controls = [piece.piece for piece in proto.pieces if piece.type == piece.CONTROL]
        if name == "T5" and find("<extra_id_0>") is None and "added_tokens_decoder" not in said:
            count = int(said.get("extra_ids", 100))
            sentinels = {f"<extra_id_{count - 1 - i}>": size + i for i in range(count)}
            said = said | {"added_tokens": sentinels | said.get("added_tokens", {})}
        said = {"unk_token": plain.id_to_piece(plain.unk_id())} | said
        said = said | {"extra_special_tokens": [*said.get("extra_special_tokens", ()), *controls]}
    added = _added(path, said, size, find)
    if said.get("add_prefix_space") is False:
        plain = bare
    is_legacy = said.get("legacy", name not in ("Llama", "CodeLlama"))
    pieces = _Pieces(plain, bare, plain if is_legacy else bare, added)
    # A text keeps its unknown pieces by a character that has none.
    inner = _Pieces(bare, bare, bare, added, {plain.unk_id(): "\ue000"})
    own_end, own_start = map(pieces.piece_of, (plain.eos_id(), plain.bos_id()))  # -1: none
    ends = [token_text(said.get("eos_token")), *([own_end] if own_end else EOD_NAMES)]
    eod = next((i for i in map(pieces.id_of, filter(None, ends)) if i is not None), None)
    said = {"bos_token": own_start} | said
    found = Tokenizer(
        max([size, *(i + 1 for i in added)]),
        eod,
        pieces.encode_batch,
        pieces.decode,
        stated_prefix(said, pieces.id_of) or (),
        partial(pieces.decode, whole=True),
        pieces.id_of,
        pieces.piece_of,
    )
    keys = {"encode_batch": inner.encode_batch, "decode_whole": partial(inner.decode, whole=True)}
    return replace(found, make_inside=lambda: replace(found, decode=inner.decode, **keys))


# ---- vocab.json and vocab.txt, by the library that reads tokenizer.json ----


def _byte_pairs(path: Path, merges: Path, said: dict) -> Tokenizer:
    from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Inner
    from tokenizers.decoders import ByteLevel

    name = _class_of(path, said, "byte pairs")
    vocabulary = read_json(path)
    if any(token.endswith("</w>") for token in vocabulary):
        raise UserError(f"{path}: CLIP's byte pairs are read from tokenizer.json; write that")
    with or_user_error(f"{merges}: no merges of {path}: {{reason}}", Exception):  # theirs are plain
        model = models.BPE.from_file(str(path), str(merges))
    inner = Inner(model)
    space = bool(said.get("add_prefix_space", False))
    inner.decoder, inner.pre_tokenizer = ByteLevel(), pre_tokenizers.ByteLevel(space)
    if name == "Qwen2":
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(SPLIT_QWEN), "isolated")
        pre = [split, pre_tokenizers.ByteLevel(space, use_regex=False)]
        inner.pre_tokenizer = pre_tokenizers.Sequence(pre)
    is_roberta = name in ("Roberta", "Bart", "Longformer")
    said = (ROBERTA if is_roberta else {"eos_token": END_OF_TEXT}) | said
    _add_tokens(inner, path, said)
    if is_roberta:
        ends = [token_text(said[f"{key}_token"]) for key in ("sep", "cls")]
        framed = [(end, inner.token_to_id(end)) for end in ends]
        if all(number is not None for _, number in framed):
            inner.post_processor = processors.RobertaProcessing(*framed)
    return wrapped(inner, said)


def _word_pieces(path: Path, said: dict) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    _class_of(path, said, "WordPiece")
    with or_user_error(f"{path}: cannot be read: {{reason}}", (OSError, ValueError)):
        with open(path, encoding="utf-8") as lines:
            vocabulary = {line.removesuffix("\n"): number for number, line in enumerate(lines)}
    said = BERT | said
    unknown = token_text(said["unk_token"])
    if unknown not in vocabulary:
        raise UserError(f"{path}: no WordPiece vocabulary: it has no line {unknown}")
    named = {token_text(said[key]) for key in BERT}
    is_cased = any(re.search("[A-Z]", token) for token in vocabulary.keys() - named)
    if is_cased and "do_lower_case" not in said:
        raise UserError(
            f"{path} has capital letters, and nothing says whether texts keep theirs: write "
            '{"do_lower_case": false}, or true, to tokenizer_config.json beside it'
        )
    inner = Inner(models.WordPiece(vocabulary, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=said.get("tokenize_chinese_chars", True),
        strip_accents=said.get("strip_accents"),
        lowercase=said.get("do_lower_case", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    _add_tokens(inner, path, said)
    ends = [token_text(said[f"{key}_token"]) for key in ("sep", "cls")]
    if all(end in vocabulary for end in ends):
        framed = [(end, vocabulary[end]) for end in ends]
        inner.post_processor = processors.BertProcessing(*framed)
    return wrapped(inner, said)


def _add_tokens(inner, path: Path, said: dict) -> None:
    """Add the tokens of the settings to a `tokenizers.Tokenizer`, with the ids that they have."""
    from tokenizers import AddedToken

    added = _added(path, said, inner.get_vocab_size(), inner.token_to_id)
    for number, token in sorted(added.items()):
        flags = {key: getattr(token, key) for key in ("lstrip", "rstrip", "single_word")}
        add = inner.add_special_tokens if token.special else inner.add_tokens
        add([AddedToken(token.content, normalized=False, **flags)])
        if inner.token_to_id(token.content) != number:
            raise UserError(
                f"{path}: token {token.content!r} has id {number} in the settings beside it, but "
                f"the vocabulary gives it {inner.token_to_id(token.content)}; mend one of them"
            )


# ---- tiktoken ----


def _tiktoken(path: Path, said: dict) -> Tokenizer:
    wrong = f"{path}: no tiktoken file ({{reason}}): a line is a token in base64 and a number"
    ranks = {}
    with or_user_error(wrong, (OSError, ValueError)):
        for line in filter(None, path.read_bytes().splitlines()):
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    split, specials = KNOWN_FILES.get(len(ranks), (SPLIT_CL100K, {}))
    first_added = max(list(ranks.values())) + 1
    added = _added(path, said, first_added, specials.get)
    specials = specials | {token.content: number for number, token in added.items()}
    if "<|begin_of_text|>" in specials and "add_bos_token" not in said:  # Llama 3's
        said = {"bos_token": "<|begin_of_text|>"} | said
        said["add_bos_token"] = True
    pattern = said.get("pattern", split)
    return _of_ranks(path, said, pattern, ranks, specials, True)


def _megatron_tiktoken(path: Path, said: dict) -> Tokenizer:
    """The list of Megatron-LM's TikTokenizer: special tokens come first, and texts hold none."""
    wrong = f"{path}: no list of Megatron's tiktoken vocabulary ({{reason}}); give the file itself"
    with or_user_error(wrong, (OSError, ValueError, LookupError, TypeError)):
        rows = parse_json(path.read_bytes())
        count = int(said.get("num_special_tokens", MEGATRON_SPECIALS))
        rows = rows[: max(int(said.get("vocab_size", MEGATRON_SIZE)) - count, 0)]
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] + count for row in rows}
    names = said.get("special_tokens", ["<unk>", "<s>", "</s>"])
    names = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
    specials = {name: number for number, name in enumerate(names)}
    said = {"eos_token": "</s>", "bos_token": "<s>"} | said
    pattern = said.get("pattern", "v2")
    return _of_ranks(path, said, SPLIT_MEGATRON.get(pattern, pattern), ranks, specials, False)


def _of_ranks(
    path: Path,
    said: dict,
    split: str,
    ranks: dict[bytes, int],
    specials: dict[str, int],
    in_texts: bool,
) -> Tokenizer:
    """A tiktoken encoding; `in_texts`: texts may hold its special tokens."""
    with or_user_error(f"{path}: needs `pip install tiktoken`", ImportError):
        import tiktoken
    # Its own errors are plain.
    with or_user_error(f"{path}: not a vocabulary of tiktoken: {{reason}}", Exception):
        inner = tiktoken.Encoding(
            path.stem, pat_str=split, mergeable_ranks=ranks, special_tokens=specials
        )
    allowed = {"allowed_special": "all" if in_texts else set(), "disallowed_special": ()}
    tokens = {number: token for token, number in ranks.items()}
    whole = tokens | ({number: name.encode() for name, number in specials.items()})

    def decode(known: dict[int, bytes], ids: Sequence[int]) -> str:
        return b"".join(known.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def piece_of(number: int) -> str | None:
        token = whole.get(number)
        return None if token is None else token.decode("utf-8", errors="replace")

    def id_of(token: str) -> int | None:
        return specials.get(token, ranks.get(token.encode()))

    names = [token_text(said.get("eos_token")), *EOD_NAMES]
    return Tokenizer(
        max(whole) + 1,
        next((specials[name] for name in names if name in specials), None),
        lambda texts: inner.encode_batch(list(texts), **allowed),
        partial(decode, tokens),
        stated_prefix(said, id_of) or (),
        partial(decode, whole if in_texts else tokens),
        id_of,
        piece_of,
    )
