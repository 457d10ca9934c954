"""Laws of fill-in-the-middle: equal to Megatron's rules written as plain loops, for any order."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from mjax.config import load
from mjax.config.schema.run import DataConfig
from mjax.config.validate import validate
from mjax.data import GPTDataset, IndexedDatasetWriter
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.corpus.fim import FillInTheMiddle, fill_in_the_middle
from mjax.data.loader import build_datasets, make_loader
from mjax.errors import UserError
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.marks import slow
from tests.tiny import TINY

NAMES = ("<|endoftext|>", "<pre>", "<mid>", "<suf>", "<pad>", "<file>")
EOD, PREFIX, MIDDLE, SUFFIX, PAD, FILE = range(6)
WORDS = "the quick brown fox jumps over a lazy dog, naïve café, def f(x): return x + 1".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE whose text does not come back as the same tokens once it is cut."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(NAMES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    """Documents of 0 to 30 words, some of two files, some that begin with "#"; each ends in EOD."""
    rng, loaded = np.random.default_rng(0), load_tokenizer(tokenizer)
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(80):
            text = " ".join(rng.choice(WORDS, rng.integers(0, 30)))
            ids = loaded.encode("# " + text if i % 7 == 0 else text)
            if i % 5 == 0:
                ids = [*ids, FILE, *loaded.encode(text[::2]), *[FILE] * (i % 2)]
            writer.add_document([*ids, EOD])
    return prefix


def rules(tokenizer, split_id=None, **given) -> FillInTheMiddle:
    known = {"rate": 0.5, "spm_rate": 0.5} | given
    data = DataConfig(**{f"fim_{key}": value for key, value in known.items()})
    return FillInTheMiddle(
        load_tokenizer(tokenizer), 7, data, PREFIX, MIDDLE, SUFFIX, split_id, PAD, EOD
    )


def megatron_sample(ids, tokenizer, rng, rate, spm, split=None, fragment=0.0, no_prefix=None):
    """fim_dataset.py, step by step, on a sample's ids; an empty end is left alone."""
    inner = Inner.from_file(str(tokenizer))

    def permute(part, chance):
        if not rng.random() < chance:
            return part
        text = inner.decode(part, skip_special_tokens=False)
        if no_prefix is not None and text.startswith(no_prefix):
            return part
        bounds = list(rng.integers(0, len(text) + 1, 2))
        bounds.sort()
        pieces = text[: bounds[0]], text[bounds[0] : bounds[1]], text[bounds[1] :]
        pre, mid, suf = (inner.encode(p, add_special_tokens=False).ids for p in pieces)
        if rng.random() < spm:
            return [PREFIX, SUFFIX] + suf + [MIDDLE] + pre + mid
        return [PREFIX] + pre + [SUFFIX] + suf + [MIDDLE] + mid

    def split_and_permute(part):
        if split is None or split not in part:
            return permute(part, rate)
        if not rng.random() < rate:
            return part
        out, start = [], 0
        for at, token in enumerate(part):
            if token == split:
                if at > start:
                    out += permute(part[start:at], fragment) + [split]
                start = at + 1
        return out + (permute(part[start:], fragment) if start < len(part) else [])

    out, start = [], 0
    for at, token in enumerate(ids):
        if token == EOD:
            if at > start:
                out += split_and_permute(ids[start:at]) + [EOD]
            start = at + 1
    if start < len(ids):
        out += split_and_permute(ids[start:])
    return (out + [PAD] * len(ids))[: len(ids)], len(out)


KINDS = [
    {},
    {"rate": 1.0, "spm_rate": 0.0},
    {"rate": 1.0, "spm_rate": 1.0},
    {"rate": 0.9, "split_id": FILE, "fragment_rate": 0.5},
    {"rate": 1.0, "no_prefix": "#"},
]


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 5, 40, 300])
def test_samples_are_those_of_megatrons_rules(tokenizer, corpus, kind, length):
    fim = rules(tokenizer, **kind)
    plain, filled = (
        GPTDataset(corpus, "train", (1, 0, 0), length, None, 3, fim=f) for f in (None, fim)
    )
    names = {"rate": "rate", "spm_rate": "spm", "split_id": "split", "fragment_rate": "fragment"}
    given = {"rate": 0.5, "spm": 0.5} | {names.get(k, k): v for k, v in kind.items()}
    changed = 0
    for i in range(min(len(plain), 60)):
        before, sample = plain[i], filled[i]
        ids = [*before["tokens"].tolist(), int(before["labels"][-1])]
        rng = np.random.default_rng([7, i])
        want, held = megatron_sample(ids, tokenizer, rng, **given)
        assert sample["tokens"].tolist() == want[:-1] and sample["labels"].tolist() == want[1:]
        held = min(held, length + 1)
        changed += want != ids
        np.testing.assert_array_equal(sample["loss_mask"], np.arange(1, length + 1) < held)
        np.testing.assert_array_equal(sample["segment_ids"] == 0, np.arange(length) >= held)
        kept = sample["segment_ids"][: min(held, length)]
        ends = np.array(want[: len(kept)]) == EOD
        np.testing.assert_array_equal(np.diff(kept), ends[:-1])  # a new one behind each EOD
        borders = 1 + np.count_nonzero(np.diff(sample["segment_ids"]))
        assert borders <= filled.max_documents
    assert changed


def test_a_batch_is_its_samples_whatever_was_read_before(tokenizer, corpus):
    data = GPTDataset(corpus, "train", (1, 0, 0), 40, None, 3, fim=rules(tokenizer))
    numbers = [5, 0, 17, 5]
    batch = data.batch(numbers)
    for row, number in enumerate(numbers):
        for name, value in data[number].items():
            np.testing.assert_array_equal(batch[name][row], value)


def test_rate_zero_is_the_plain_order_and_documents_meet_at_sequences(tokenizer, corpus):
    never = rules(tokenizer, rate=0.0)
    pieces = [np.array([20, 21]), np.array([22, EOD])]
    assert never.fill(0, pieces).tokens.tolist() == [20, 21, 22, EOD]
    always = rules(tokenizer, rate=1.0, spm_rate=0.0)
    tokens = always.fill(0, [np.array([20] * 9), np.array([21] * 9)]).tokens
    assert np.count_nonzero(tokens == PREFIX) == 2, "no EOD between them"
    assert always.fill(0, [np.array([EOD])]).sizes == [0]
    short = always.fill(0, [np.array([20])])  # no room: the length stays
    assert short.tokens.tolist() == [PREFIX] and short.sizes == [1]


def test_rates_are_kept(tokenizer):
    fim = rules(tokenizer, rate=0.3, spm_rate=0.25)
    ids = np.array(load_tokenizer(tokenizer).encode("the quick brown fox") + [EOD] * 20)
    found = [fim.fill(i, [ids]).tokens.tolist() for i in range(2000)]
    permuted = [row for row in found if PREFIX in row]
    spm = [row for row in permuted if row[1] == SUFFIX and row.index(MIDDLE) > 2]
    assert abs(len(permuted) / 2000 - 0.3) < 0.04
    assert abs(len(spm) / len(permuted) - 0.25) < 0.08


KEYS = ["data.fim_rate=0.5", "data.fim_prefix_token=<pre>", "data.fim_middle_token=<mid>"]
KEYS += ["data.fim_suffix_token=<suf>"]


def config(corpus, tokenizer, *overrides):
    given = [key for key in TINY if not key.startswith(("data.mock", "model.vocab_size"))]
    paths = [f"data.paths=[{corpus}]", f"data.tokenizer={tokenizer}", "model.vocab_size=300"]
    return load(None, [*given, *paths, *KEYS, *overrides])


@slow
def test_a_run_reads_it_and_a_resumed_one_reads_on(tokenizer, corpus, tmp_path):
    cfg = config(corpus, tokenizer, "data.eod_mask_loss=true", f"data.eod_token_id={EOD}")
    data, held_out = build_datasets(cfg, 24, 4)
    assert (data.batch(range(24))["tokens"] == PREFIX).any()
    assert (held_out.batch(range(4))["tokens"] == SUFFIX).any()
    whole = list(make_loader(data, lambda step: (4 * step, 4), 0, 6))
    again, _ = build_datasets(cfg, 24, 0)
    later = list(make_loader(again, lambda step: (4 * step, 4), 3, 3, rows=lambda n: slice(2, 4)))
    for full, part in zip(whole[3:], later, strict=True):
        for name in full:
            np.testing.assert_array_equal(full[name][2:], part[name])
    cfg = config(corpus, tokenizer, f"run.dir={tmp_path / 'run'}", "train.steps=2", "mesh.dp=1")
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    records = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert all(np.isfinite(r["loss"]) for r in records if "loss" in r)


def test_ids_serve_where_the_tokenizer_has_no_such_token():
    numbers = ["data.fim_prefix_token=257", "data.fim_middle_token=258"]
    numbers += ["data.fim_suffix_token=259", "data.fim_rate=1", "model.vocab_size=260"]
    cfg = load(None, [*numbers, "data.tokenizer=byte", "data.paths=[x]"])
    fim = fill_in_the_middle(cfg.data, 0, 260)
    assert (fim.prefix_id, fim.middle_id, fim.suffix_id) == (257, 258, 259)
    assert fim.pad_id == fim.eod_id == 256
    text = np.frombuffer(b"hello world", np.uint8)
    got = fim.fill(0, [np.append(text, [256] * 9)]).tokens
    assert sorted(got[got < 256]) == sorted(text)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.fim_rate=1.5"], "data.fim_rate=1.5"),
        (["data.fim_rate=-0.1"], "data.fim_rate=-0.1"),
        (["data.fim_spm_rate=2"], "data.fim_spm_rate"),
        (["data.fim_rate=0"], "data.fim_prefix_token='<pre>' has no effect with data.fim_rate"),
        (["data.fim_suffix_token=null"], "needs data.fim_suffix_token"),
        (["data.tokenizer=null"], "needs data.tokenizer"),
        (["data.paths=[]", "data.mock=true"], "data.mock=True has none"),
        (["data.fim_split_sample=<file>"], "data.fim_fragment_rate=None belong together"),
        (["data.fim_fragment_rate=0.5"], "belong together"),
        (["data.fim_prefix_token=<nope>"], "'<nope>': the tokenizer has no such token"),
        (["data.fim_prefix_token=<mid>"], "data.fim_middle_token: id 2 is data.fim_prefix_token"),
        (["data.fim_prefix_token=0"], "data.fim_prefix_token: id 0 is the end of a document, too"),
        (["data.fim_prefix_token=300"], "id 300 is outside model.vocab_size=300"),
        (["data.fim_prefix_token=-1"], "id -1 is outside"),
        (["model.vocab_size=200"], "the tokenizer has 300 ids"),
        (["data.tokenizer=/nope.json"], "no such file"),
    ],
)
def test_what_cannot_be_used_is_one_line(tokenizer, corpus, overrides, message):
    with pytest.raises(UserError) as e:
        cfg = config(corpus, tokenizer, *overrides)
        validate(cfg)
        build_datasets(cfg, 4, 0)
    assert message in str(e.value) and "\n" not in str(e.value)


def with_marks(kind: str) -> Inner:
    """A tokenizer that marks words with ▁ and puts a mark before each text, in one of the ways."""
    inner = Inner(models.BPE(unk_token="<unk>", fuse_unk=True))
    strip = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(strip)
    to_mark = normalizers.Replace(" ", "▁")
    if kind == "prepend":  # Llama 2
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark])
    elif kind == "byte level":  # RoBERTa for words
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        inner.decoder = decoders.ByteLevel()
    elif kind == "trimmed":  # SentencePiece by default, as transformers converts it
        trim = normalizers.Replace(Regex(r"\A +| +\z"), "")
        inner.normalizer = normalizers.Sequence([trim, to_mark])
        inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    elif kind == "by words":  # T5
        parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
        inner.decoder = decoders.Metaspace()
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    return inner


KINDS_OF_MARKS = ["prepend", "byte level", "trimmed", "by words", "always", "first"]


@pytest.mark.parametrize("kind", KINDS_OF_MARKS)
@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_parts_joined_are_the_document_where_a_space_is_put_before_texts(tmp_path, kind, spm):
    inner, text = with_marks(kind), "two mice sleep in an old clock"
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator([text] * 50, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    pre, mid, suf = range(loaded.vocab_size, loaded.vocab_size + 3)
    data = DataConfig(fim_rate=1.0, fim_spm_rate=spm)
    fim = FillInTheMiddle(loaded, 0, data, pre, mid, suf, None, 0, None)
    whole = loaded.encode(text)
    assert loaded.decode(whole).strip() == text
    for ids in (whole, whole[1:], loaded.encode(" " + text)):
        for seed in range(40):
            found = fim._permute_document(np.array(ids), np.random.default_rng(seed)).tolist()
            s, m = found.index(suf), found.index(mid)
            before = found[1:s] if spm == 0 else []
            after, behind = (found[m + 1 :], found[s + 1 : m])
            assert loaded.decode_whole([*before, *after, *behind]) == loaded.decode_whole(ids)
