"""Tokenizers of folders without tokenizer.json, against transformers on the same folder."""

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers, trainers

from mjax.data.base.tokenizer import load_tokenizer
from tests.unit.data.test_tokenizers import AS_WRITTEN, LLAMA, train

WORDS = "The cat's mat, and the dog ran 12345 times! naïve café über"
TEXTS = [
    "the cat sat on the mat",
    "two  spaces\n\n\tand don't 1234567",
    "Naïve CAFÉ 東京🚀",
    "<s>the cat</s> dog",
    "[CLS] hi [MASK]x",
    "<|endoftext|> x",
    "a\r\n b  ",
    "",
]
TOKENS = {"content": "", "special": True, "lstrip": False, "rstrip": False, "normalized": False}


def added(first: int, *contents: str) -> dict:
    return {str(first + i): TOKENS | {"content": text} for i, text in enumerate(contents)}


def byte_pairs(folder: Path, special: list[str]) -> int:
    """Write vocab.json and merges.txt; how many tokens they hold."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = dict(vocab_size=330, special_tokens=special, show_progress=False)
    options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([WORDS] * 9, trainers.BpeTrainer(**options))
    inner.model.save(str(folder))
    return inner.get_vocab_size()


def word_pieces(folder: Path, is_lower: bool) -> None:
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    options = dict(vocab_size=120, special_tokens=special, show_progress=False)
    inner.train_from_iterator([WORDS] * 9, trainers.WordPieceTrainer(**options))
    inner.model.save(str(folder))


def write(folder: Path, kind: str) -> type:
    """A folder of this kind, and the class that reads it in transformers."""
    said, read_by = {}, transformers.AutoTokenizer
    if kind == "gpt2":
        byte_pairs(folder, ["<|endoftext|>"])
        read_by = transformers.GPT2Tokenizer
    elif kind == "gpt2 for words":
        byte_pairs(folder, ["<|endoftext|>"])
        said = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    elif kind == "opt":
        byte_pairs(folder, ["<pad>", "</s>"])
        said = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"}
        said |= {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    elif kind == "roberta":
        byte_pairs(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        (folder / "config.json").write_text('{"model_type": "roberta"}')
        read_by = transformers.RobertaTokenizer
    elif kind == "qwen2":
        size = byte_pairs(folder, [])
        said = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
        said["added_tokens_decoder"] = added(size, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    elif kind.startswith("bert"):
        is_lower = kind == "bert"
        word_pieces(folder, is_lower)
        said = {} if is_lower else {"do_lower_case": False, "strip_accents": False}
        read_by = transformers.BertTokenizer
    elif kind == "t5":
        flags = dict(model_type="unigram", byte_fallback=False, vocab_size=60)
        train(folder, "spiece.model", **flags, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        said = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}
    else:
        train(folder, **AS_WRITTEN)
        said = LLAMA | {"unk_token": "<unk>"}
        said |= {"llama legacy": {"legacy": True}, "no bos": {"add_bos_token": False}}.get(kind, {})
        if kind == "chat":
            said["added_tokens_decoder"] = added(300, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
            said["eos_token"] = "<|im_end|>"
    if said:
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return read_by


KINDS = ["gpt2", "gpt2 for words", "opt", "roberta", "qwen2", "bert", "bert cased", "t5"]
KINDS += ["llama", "llama legacy", "no bos", "chat"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_ends_and_texts_are_those_of_transformers(tmp_path, kind):
    theirs = write(tmp_path, kind).from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.eod_id == theirs.eos_token_id and ours.vocab_size == len(theirs)
    texts = [*TEXTS, "<extra_id_0> the <extra_id_2>", "a<|im_start|>b<|im_end|>"]
    if kind == "llama legacy":
        # SentencePiece's own rule, and Llama 2's tokenizer.json: a mark before each space, too.
        texts.remove("<s>the cat</s> dog")
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        framed = theirs(text).input_ids
        assert tuple(framed[: len(ours.prefix)]) == ours.prefix
        assert framed[len(ours.prefix) :][: len(ids)] == ids
        said = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids).lstrip(" ") == said.lstrip(" "), text
