"""Laws of vocabularies older than tokenizer.json: the ids are those of their own library."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from mjax.config.schema.run import DataConfig
from mjax.data.base.tokenizer import encode_behind, load_tokenizer, tokenizer_files
from mjax.data.base.vocabularies import SPLIT_CL100K, SPLIT_MEGATRON
from mjax.data.corpus.fim import FillInTheMiddle
from mjax.errors import UserError

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

LINE = "the cat sat on the mat and the dog ran to the house"
TEXTS = [LINE, " the cat", "  two  spaces ", "the\ncat\t", "é 東京🚀", "", "<s>it's ▁odd</s> 12345"]
AS_WRITTEN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
PLAIN_UNIGRAM = {"model_type": "unigram", "byte_fallback": False, "vocab_size": 40}
# Options of SentencePiece's trainer; the model's own file says how texts are read.
FLAGS = {
    "llama": AS_WRITTEN,
    "by default": {},
    "no dummy prefix": {"add_dummy_prefix": False},
    "no dummy prefix, as written": AS_WRITTEN | {"add_dummy_prefix": False},
    "spaces behind words": AS_WRITTEN | {"treat_whitespace_as_suffix": True},
    "own symbols": AS_WRITTEN | {"user_defined_symbols": ["cat", "<sep>"]},
    "controls": AS_WRITTEN | {"control_symbols": ["<sep>"], "pad_id": 3},
    "no BOS": AS_WRITTEN | {"bos_id": -1},
    "no EOS": AS_WRITTEN | {"eos_id": -1},
    "other names": AS_WRITTEN | {"bos_piece": "<b>", "eos_piece": "<e>", "unk_piece": "<u>"},
    "no bytes": AS_WRITTEN | PLAIN_UNIGRAM,
    "unknown as": AS_WRITTEN | PLAIN_UNIGRAM | {"unk_surface": "?"},
}
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def train(folder: Path, name: str = "tokenizer.model", **flags):
    """A SentencePiece model of a folder, as its own library reads it."""
    folder.mkdir(exist_ok=True)
    options = dict(vocab_size=300, model_type="bpe", byte_fallback=True, unk_id=0, bos_id=1)
    options |= dict(eos_id=2, hard_vocab_limit=False, minloglevel=2) | flags
    lines, prefix = iter([LINE] * 30), str(folder / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=prefix, **options
    )
    (folder / "m.vocab").unlink()
    (folder / "m.model").rename(folder / name)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / name))


def settings(folder: Path, **names: dict) -> None:
    for name, content in names.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def join_after_permuting(tokenizer, ids: list[int], seed: int, spm: float) -> list[int]:
    """The ids of prefix, middle and suffix, in this order, of a permuted document."""
    pre, mid, suf = range(tokenizer.vocab_size, tokenizer.vocab_size + 3)
    data = DataConfig(fim_rate=1.0, fim_spm_rate=spm)
    rules = FillInTheMiddle(tokenizer, 0, data, pre, mid, suf, None, 0, None)
    found = rules._permute_document(np.array(ids), np.random.default_rng(seed)).tolist()
    s, m = found.index(suf), found.index(mid)
    if spm:
        return [*found[m + 1 :], *found[2:m]]
    return [*found[1:s], *found[m + 1 :], *found[s + 1 : m]]


@pytest.mark.parametrize("flags", FLAGS)
def test_sentencepiece_is_read_by_its_own_rules_and_keeps_texts_in_parts(tmp_path, flags):
    inner = train(tmp_path, **FLAGS[flags])
    ours = load_tokenizer(tmp_path)
    assert ours.encode_batch(TEXTS) == inner.encode(TEXTS)
    assert [ours.decode(ids) for ids in inner.encode(TEXTS)] == inner.decode(inner.encode(TEXTS))
    assert ours.eod_id == (None if inner.eos_id() < 0 else inner.eos_id())
    assert ours.prefix == () and ours.vocab_size == inner.get_piece_size()
    past = [ours.vocab_size, 10**6, -1]  # a model of more ids draws them while it is young
    assert ours.decode(past) == ours.decode_whole(past) == ""
    assert [ours.piece_of(number) for number in past] == [None] * 3
    for text in filter(None, TEXTS):
        for ids in (ours.encode(text), ours.encode(text)[1:]):  # a row begins within documents
            if "\ufffd" in ours.decode_whole(ids):  # or within a character, which is then lost
                continue
            for seed in range(6):
                parts = join_after_permuting(ours, ids, seed, seed % 2)
                assert ours.decode_whole(parts) == ours.decode_whole(ids), text


def test_a_sentencepiece_folder_counts_what_its_settings_add(tmp_path):
    inner = train(tmp_path, **AS_WRITTEN)
    size, cat = inner.get_piece_size(), inner.encode("cat")
    more = {size: {"content": "<|end|>", "special": True}}
    more[size + 2] = {"content": "<x>", "special": False, "lstrip": True, "rstrip": True}
    said = LLAMA | {"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": more}
    settings(tmp_path, tokenizer_config=said, added_tokens={"<y>": size + 1})
    ours = load_tokenizer(tmp_path)
    assert (ours.prefix, ours.eod_id, ours.vocab_size) == ((1,), size, size + 3)
    assert ours.encode("cat<|end|>") == [*cat, size] == ours.encode("cat<|end|> ")[:-1]
    assert ours.encode("cat <x>  ") == [*cat, size + 2]
    # Behind a token of its own no space is put: Llama's rule where "legacy" is not said.
    assert ours.encode("<s> cat") == [1, *cat]
    assert "".join(map(ours.piece_of, ours.encode("<s>cat"))) == "<s>cat"
    assert ours.decode([1, *cat, size, size + 1]) == "cat"
    assert ours.decode_whole([*cat, size, size + 2]) == "cat<|end|><x>"
    assert ours.id_of("<y>") == size + 1 and ours.piece_of(size + 2) == "<x>"
    settings(tmp_path, tokenizer_config=said | {"legacy": True})
    assert load_tokenizer(tmp_path).encode("<s>cat") == [1, *cat]
    settings(tmp_path, tokenizer_config=said | {"add_bos_token": False})
    assert load_tokenizer(tmp_path).prefix == ()


def test_a_text_goes_on_without_a_space_that_nobody_wrote(tmp_path):
    train(tmp_path, **AS_WRITTEN)
    settings(tmp_path, tokenizer_config=LLAMA | {"legacy": True})
    ours = load_tokenizer(tmp_path)
    for before, text in [("the cat", " sat"), ("the c", "at"), ("the cat</s>", "sat"), ("", "sat")]:
        ids = ours.encode(before)
        joined = [*ids, *encode_behind(ours, ids, text)]
        assert ours.decode_whole(joined) == ours.decode_whole(ours.encode(before + text))
    assert encode_behind(ours, ours.encode("the"), " cat") == ours.encode("cat")


def test_spiece_model_has_t5s_sentinels_from_the_end(tmp_path):
    inner = train(tmp_path, "spiece.model", **AS_WRITTEN, bos_id=-1, eos_id=1)
    settings(tmp_path, config={"model_type": "t5"}, tokenizer_config={"extra_ids": 3})
    ours, size = load_tokenizer(tmp_path), inner.get_piece_size()
    assert (ours.vocab_size, ours.eod_id) == (size + 3, 1)
    assert ours.encode("the<extra_id_0>") == [*inner.encode("the"), size + 2]
    assert ours.id_of("<extra_id_2>") == size


def byte_pairs(folder: Path, before: str = "") -> Inner:
    folder.mkdir(exist_ok=True)
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    options = dict(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    inner.train_from_iterator([LINE] * 9, trainers.BpeTrainer(**options, show_progress=False))
    inner.model.save(str(folder), before or None)
    return inner


@pytest.mark.parametrize("name", ["", "gpt2-vocab.json", "gpt2-merges.txt"])
def test_vocab_json_with_merges_is_gpt2s_also_under_megatrons_names(tmp_path, name):
    inner = byte_pairs(tmp_path, "gpt2")
    ours = load_tokenizer(tmp_path / name)
    assert ours.encode_batch(TEXTS) == [e.ids for e in inner.encode_batch(TEXTS)]
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS
    assert ours.eod_id == 0 and ours.encode("a<|endoftext|>")[-1] == 0
    assert list(tokenizer_files(tmp_path / name)) == ["vocab.json", "merges.txt"]


def write_ranks(path: Path) -> dict[bytes, int]:
    path.parent.mkdir(exist_ok=True)
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"th", b"the", b" the", b"at", b"12", b"123", b"  ", b"\n\n"]
    ranks = {token: number for number, token in enumerate(tokens)}
    lines = [base64.b64encode(token) + b" %d\n" % number for token, number in ranks.items()]
    path.write_bytes(b"".join(lines))
    return ranks


@pytest.mark.parametrize("name", ["tokenizer.model", "own.tiktoken"])
def test_tiktoken_files_give_tiktokens_ids(tmp_path, name):
    ranks = write_ranks(tmp_path / name)
    made = {"mergeable_ranks": ranks, "special_tokens": {}}
    inner = tiktoken.Encoding("x", pat_str=SPLIT_CL100K, **made)
    ours = load_tokenizer(tmp_path)
    assert ours.encode_batch(TEXTS) == inner.encode_batch(TEXTS)
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == TEXTS
    assert (ours.vocab_size, ours.eod_id, ours.prefix, ours.decode([999])) == (264, None, (), "")
    added = {"264": {"content": "<b>"}, "265": {"content": "<e>"}}
    said = {"added_tokens_decoder": added, "bos_token": "<b>", "eos_token": "<e>"}
    settings(tmp_path, tokenizer_config=said | {"add_bos_token": True})
    ours = load_tokenizer(tmp_path)
    assert (ours.prefix, ours.eod_id) == ((264,), 265) and ours.encode("th<e>") == [256, 265]
    assert ours.decode([256, 265]) == "th" and ours.decode_whole([256, 265]) == "th<e>"


def test_megatrons_list_for_tiktoken_has_its_special_tokens_first(tmp_path):
    ranks = write_ranks(tmp_path / "x")
    rows = [{"rank": n, "token_bytes": base64.b64encode(t).decode()} for t, n in ranks.items()]
    settings(tmp_path, **{"multi.vocab": rows})
    for said, split, count in [
        ({}, "v2", 1000),
        ({"pattern": "v1", "num_special_tokens": 5}, "v1", 5),
    ]:
        settings(tmp_path, tokenizer_config=said)
        made = {token: number + count for token, number in ranks.items()}
        inner = tiktoken.Encoding(
            "x", pat_str=SPLIT_MEGATRON[split], mergeable_ranks=made, special_tokens={}
        )
        ours = load_tokenizer(tmp_path / "multi.vocab.json")
        assert ours.encode_batch(TEXTS) == inner.encode_ordinary_batch(TEXTS)
        assert (ours.eod_id, ours.vocab_size) == (2, 264 + count)
        assert ours.id_of("<SPECIAL_4>") == 4 and ours.decode(ours.encode(LINE)) == LINE


def test_word_pieces_say_whether_they_keep_capitals_and_cannot_be_cut(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "The", ","]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(UserError, match="vocab.txt has capital letters.*do_lower_case"):
        load_tokenizer(tmp_path)
    for is_lower, ids in [(True, [5, 6, 7, 9, 1]), (False, [8, 6, 7, 9, 1])]:
        settings(tmp_path, tokenizer_config={"do_lower_case": is_lower})
        ours = load_tokenizer(tmp_path)
        assert ours.encode("The cats, ran") == ids and ours.prefix == (2,)
    with pytest.raises(UserError, match="fim_rate.*WordPiece"):
        join_after_permuting(ours, [5, 6], 0, 0)


def test_what_cannot_be_read_is_one_line(tmp_path):
    def refused(message: str, name: str, raw: bytes, **beside: dict) -> None:
        folder = tmp_path / re.sub(r"\W", "", message)
        folder.mkdir()
        (folder / name).write_bytes(raw)
        settings(folder, **beside)
        with pytest.raises(UserError, match=message) as error:
            load_tokenizer(folder)
        assert "\n" not in str(error.value)

    train(tmp_path / "sp")
    model = (tmp_path / "sp/tokenizer.model").read_bytes()
    other = {"tokenizer_class": "XLMRobertaTokenizer"}
    refused("XLMRobertaTokenizer .*save_pretrained", "spiece.model", model, tokenizer_config=other)
    wrong = LLAMA | {"added_tokens_decoder": {"x": {"content": "a"}}}
    refused("added tokens that cannot be read", "tokenizer.model", model, tokenizer_config=wrong)
    refused("need merges.txt", "vocab.json", b'{"a": 0}')
    refused("no list of Megatron", "vocab.json", b'[{"a": 0}]')
    refused("no tiktoken file: its lines", "x.tiktoken", b"hello")
    refused("no tiktoken file .*token in base64", "y.tiktoken", b"YQ== 0\nhello\n")
    refused("has no line .UNK.", "vocab.txt", b"the\ncat\n")
    byte_pairs(tmp_path / "pairs")
    (tmp_path / "pairs/merges.txt").write_text("#version: 0.2\nxx yy\n")
    with pytest.raises(UserError, match="merges.txt: no merges of"):
        load_tokenizer(tmp_path / "pairs")
    settings(tmp_path / "pairs", added_tokens={"<x>": 7000})
    byte_pairs(tmp_path / "pairs")
    with pytest.raises(UserError, match="has id 7000 in the settings"):
        load_tokenizer(tmp_path / "pairs")


def test_settings_beside_a_tokenizer_json_say_whether_it_begins_with_bos(tmp_path):
    inner = byte_pairs(tmp_path)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).prefix == ()
    said = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    settings(tmp_path, tokenizer_config=said)
    assert load_tokenizer(tmp_path).prefix == (0,)
    settings(tmp_path, tokenizer_config={}, special_tokens_map={"eos_token": "the"})
    assert load_tokenizer(tmp_path).eod_id == inner.token_to_id("the")


def test_a_digest_changes_with_all_that_changes_ids_and_with_nothing_else(tmp_path):
    train(tmp_path)
    digests = [load_tokenizer(tmp_path).digest]
    settings(tmp_path, tokenizer_config={"chat_template": "x", "model_max_length": 5})
    assert load_tokenizer(tmp_path).digest == digests[0]
    for said in (LLAMA, LLAMA | {"legacy": True}, LLAMA | {"eos_token": "<s>"}):
        settings(tmp_path, tokenizer_config=said)
        digests.append(load_tokenizer(tmp_path).digest)
    train(tmp_path, vocab_size=280)
    digests += [load_tokenizer(tmp_path).digest, load_tokenizer("byte").digest]
    assert len(set(digests)) == 6 and all(digests)
