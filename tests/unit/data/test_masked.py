"""Laws of masked samples: equal to Megatron's rules written as plain loops."""

import os
import time

import numpy as np
import pytest

from mjax.config.schema.run import DataConfig, MaskedDataConfig
from mjax.data.base.tokenizer import BERT_PAIR, ROBERTA_PAIR
from mjax.data.corpus.indexed import IndexedDatasetWriter, Watch
from mjax.data.sentences.masked import MaskedDataset
from mjax.data.sentences.sentence_index import build_sample_index, swapped_order, twister64
from mjax.errors import UserError

VOCAB = 300
IDS = dict(cls_token_id=290, sep_token_id=291, mask_token_id=292, pad_token_id=293)


def corpus(seed=0, documents=60, top=40, long=False):
    """(bounds, lengths): documents of 0 to 12 sentences of 0 to `top` tokens, a few longer."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 13, documents)
    lengths = rng.integers(0, top, counts.sum()).astype(np.int32)
    if long:
        lengths[rng.random(len(lengths)) < 0.02] = 600
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), lengths


class Twister:
    """std::mt19937 (32) and std::mt19937_64 (64), word by word."""

    PARTS = {
        32: (
            624,
            397,
            0x9908B0DF,
            1812433253,
            30,
            31,
            11,
            0xFFFFFFFF,
            7,
            0x9D2C5680,
            15,
            0xEFC60000,
            18,
        ),
        64: (312, 156, 0xB5026F5AA96619E9, 6364136223846793005, 62, 31, 29, 0x5555555555555555, 17)
        + (0x71D67FFFEDA60000, 37, 0xFFF7EEE000000000, 43),
    }

    def __init__(self, bits, seed):
        self.bits, self.full = bits, (1 << bits) - 1
        self.n, self.m, self.a, f, shift, self.r, *self.temper = self.PARTS[bits]
        self.x = [seed & self.full]
        for i in range(1, self.n):
            self.x.append((f * (self.x[-1] ^ (self.x[-1] >> shift)) + i) & self.full)
        self.at = self.n

    def draw(self):
        if self.at == self.n:
            low = (1 << self.r) - 1
            for i in range(self.n):
                y = (self.x[i] & ~low) | (self.x[(i + 1) % self.n] & low)
                self.x[i] = self.x[(i + self.m) % self.n] ^ (y >> 1) ^ (self.a if y & 1 else 0)
            self.at = 0
        y = self.x[self.at]
        self.at += 1
        u, d, s, b, t, c, last = self.temper
        y ^= (y >> u) & d
        y ^= (y << s) & b & self.full
        y ^= (y << t) & c & self.full
        return y ^ (y >> last)


def megatron_mapping(bounds, lengths, wanted, longest, probability, seed, least):
    """helpers.cpp: build_mapping, sentence by sentence."""
    ratio = round(1 / probability) if probability else 0
    rng = Twister(32, seed)

    def target_length():
        if ratio == 0:
            return longest
        number = rng.draw()
        return 2 + number % (longest - 1) if number % ratio == 0 else longest

    maps, epoch = [], 0
    while epoch < 1 if wanted is None else len(maps) < wanted:
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            left, start = end - begin, begin
            long = left > 1 and any(lengths[i] > 512 for i in range(begin, end))
            if left < least or long:
                continue
            tokens = sentences = 0
            target = target_length()
            for i in range(begin, end):
                tokens, sentences, left = tokens + lengths[i], sentences + 1, left - 1
                if (tokens >= target and left > 1 and sentences >= least) or left == 0:
                    maps.append([start, i + 1, target])
                    start, tokens, sentences = i + 1, 0, 0
                    target = target_length()
        epoch += 1
    rng = Twister(64, seed + 1)
    for i in range(len(maps) - 1, 0, -1):
        j = rng.draw() % (i + 1)
        maps[i], maps[j] = maps[j], maps[i]
    return maps


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("wanted, seed", [(None, 1), (500, 1234), (1500, 7)])
def test_samples_are_megatrons(least, probability, wanted, seed):
    bounds, lengths = corpus(seed, long=True)
    args = bounds, lengths, wanted, 61, probability, seed, least
    np.testing.assert_array_equal(build_sample_index(*args), megatron_mapping(*args))


def test_draws_are_those_of_the_standard():
    """C++ fixes the 10000th draw of seed 5489."""
    assert (
        twister64(5489, 10_000)[-1]
        == 9981545732273789042
        == [draw() for draw in [Twister(64, 5489).draw] for _ in range(10_000)][-1]
    )
    assert np.random.RandomState(5489).randint(0, 1 << 32, 10_000, np.uint32)[-1] == 4123659995


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 1000])
def test_swaps_without_a_loop(count):
    order, draws = list(range(count)), iter(twister64(3, max(count - 1, 0)).tolist())
    for i in range(count - 1, 0, -1):
        j = next(draws) % (i + 1)
        order[i], order[j] = order[j], order[i]
    np.testing.assert_array_equal(swapped_order(count, 3), order)


def test_a_million_samples_a_second():
    """Checked at a fifth of that, for busy machines; measured in docs/models/encoders.md."""
    bounds, lengths = corpus(0, 20_000)
    build_sample_index(bounds, lengths, 1000, 125, 0.1, 1, 2)
    start = time.thread_time()
    made = build_sample_index(bounds, lengths, 300_000, 125, 0.1, 1, 2)
    assert len(made) / (time.thread_time() - start) > 200_000


# ---- samples -------------------------------------------------------------------------------------


def write(prefix, bounds, lengths, seed=0):
    """Random tokens, of which those from 200 on continue a word; sentences as lists."""
    rng = np.random.default_rng(seed)
    sentences = [rng.integers(0, 280, n).tolist() for n in lengths]
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            for i in range(begin, end):
                writer.add_item(sentences[i])
            writer.end_document()
    return sentences


def megatron_sample(parts, target, settings, size, seed, pairs, continues):
    """bert_dataset.py and masked_dataset.py, token by token; a dictionary as they return it."""
    rng = np.random.RandomState(seed % 2**32)
    pivot, swapped = len(parts), False
    if pairs:
        pivot = 1 if len(parts) < 3 else rng.randint(low=1, high=len(parts))
        swapped = rng.random() < 0.5
    a = [token for part in parts[:pivot] for token in part]
    b = [token for part in parts[pivot:] for token in part]
    if swapped:
        a, b = b, a
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        del longer[0 if rng.random() < 0.5 else -1]
    tokens = [settings.cls_token_id, *a, settings.sep_token_id]
    types = [0] * len(tokens)
    if b:
        tokens += [*b, settings.sep_token_id]
        types += [1] * (len(b) + 1)

    words = []
    for i, token in enumerate(tokens):
        if token in (settings.cls_token_id, settings.sep_token_id):
            continue
        if continues[token] and settings.whole_words and words:
            words[-1].append(i)
        else:
            words.append([i])
    most = min(settings.probability * target, max(1, round(len(tokens) * settings.probability)))
    sizes = np.arange(settings.max_ngram or 3) + 1
    chances = (1.0 / sizes) / (1.0 / sizes).sum()
    grams = [[words[i : i + n] for n in sizes] for i in range(len(words))]
    rng.shuffle(grams)
    seen, hidden = list(tokens), []
    for gram in grams:
        if len(hidden) >= most:
            break
        n = rng.choice(sizes, p=chances / chances.sum())
        while n and len(hidden) + len(sum(gram[n - 1], [])) > most:
            n -= 1
        if n == 0 or set(sum(gram[n - 1], [])) & set(hidden):
            continue
        for i in sum(gram[n - 1], []):
            hidden.append(i)
            if rng.random() < 0.8:
                seen[i] = settings.mask_token_id
            elif rng.random() >= 0.5:
                seen[i] = rng.randint(0, VOCAB)
    padding = size - len(tokens)
    return {
        "tokens": seen + [settings.pad_token_id] * padding,
        "labels": [tokens[i] if i in hidden else 0 for i in range(len(tokens))] + [0] * padding,
        "loss_mask": [float(i in hidden) for i in range(size)],
        "token_types": types + [0] * padding,
        "segment_ids": [1] * len(tokens) + [0] * padding,
        "positions": list(range(size)),
        "row_label": int(swapped) if pairs else -1,
    }


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(
    "size, seed, more",
    [
        (64, 1234, {}),
        (128, 5, {"whole_words": False, "max_ngram": 1, "short_probability": 0.5}),
        (24, 2**32 - 20, {"max_ngram": 5, "probability": 0.4}),
    ],
)
def test_samples_hold_what_megatrons_hold(tmp_path, pairs, size, seed, more):
    bounds, lengths = corpus(3)
    sentences = write(tmp_path / "c", bounds, lengths)
    settings = MaskedDataConfig(**IDS, **more)
    continues = np.arange(VOCAB) >= 200
    index_seed = seed % 2**31
    data = MaskedDataset(
        tmp_path / "c",
        "train",
        (1, 0, 0),
        200,
        index_seed,
        DataConfig(seq_length=size, masked=settings),
        VOCAB,
        pairs=pairs,
        continues=continues,
    )
    batch = data.batch(np.arange(100))
    for n in range(100):
        begin, end, target = data.sample_index[n]
        parts = [sentences[i] for i in range(begin, end)]
        wanted = megatron_sample(parts, target, settings, size, index_seed + n, pairs, continues)
        for name, value in wanted.items():
            np.testing.assert_array_equal(batch[name][n], value, err_msg=f"{name} of sample {n}")
        if n < 5:
            for name, value in data[n].items():
                np.testing.assert_array_equal(value, batch[name][n])


def test_pairs_of_roberta_have_two_separators_and_one_type(tmp_path):
    """<s> A </s></s> B </s>, of type 0 throughout: BERT's row of one token less, but for that."""
    bounds, lengths = corpus(3)
    write(tmp_path / "c", bounds, lengths)

    def made(size: int, framed):
        settings = DataConfig(seq_length=size, masked=MaskedDataConfig(**IDS))
        given = tmp_path / "c", "train", (1, 0, 0), 200, 1, settings, VOCAB
        batch = MaskedDataset(*given, pairs=True, framed=framed).batch(np.arange(40))
        texts = np.where(batch["loss_mask"] == 1, batch["labels"], batch["tokens"])
        return texts, batch["token_types"]

    (ours, types), (bert, bert_types) = made(65, ROBERTA_PAIR), made(64, BERT_PAIR)
    assert not types.any()
    for row, wanted, second in zip(ours, bert, bert_types.argmax(1), strict=True):
        np.testing.assert_array_equal(row, np.insert(wanted, second, IDS["sep_token_id"]))


def test_an_index_that_changes_after_it_was_checked_is_named(tmp_path, monkeypatch):
    bounds, lengths = corpus(1)
    write(tmp_path / "c", bounds, lengths)
    settings = DataConfig(seq_length=32, masked=IDS)
    data = MaskedDataset(tmp_path / "c", "train", (1, 0, 0), 10, 1, settings, VOCAB, pairs=True)
    (file,) = tmp_path.rglob("sentences.npy")
    check = Watch.check

    def check_then_change(self):
        check(self)
        with open(file, "r+b") as opened:
            opened.seek(128)
            opened.write(b"\x7f" * 40)  # numbers of sentences that there are not
        os.utime(file, (1, 1))

    monkeypatch.setattr(Watch, "check", check_then_change)
    with pytest.raises(UserError, match="sentences.npy: changed while it was in use"):
        data.batch(np.arange(10))


def test_what_cannot_be_used_is_said(tmp_path):
    def data(lengths, **more):
        write(tmp_path / "c", np.arange(len(lengths) + 1), lengths)
        split = more.pop("split", "train")
        vocab = more.pop("vocab", VOCAB)
        return MaskedDataset(
            tmp_path / "c",
            split,
            (1, 0, 0),
            10,
            1,
            DataConfig(seq_length=32, cache_dir=str(tmp_path / f"cache{len(lengths)}"), masked=IDS),
            vocab,
            pairs=True,
        )

    with pytest.raises(UserError, match="no document of split 'train' has 2 sentences"):
        data(np.array([5, 5], np.int32))
    with pytest.raises(UserError, match="split 'valid. .*: no document"):
        data(np.array([5, 5, 5], np.int32), split="valid")
    bounds, lengths = corpus(1)
    write(tmp_path / "d", bounds, lengths)
    short = DataConfig(seq_length=32, masked=IDS)
    small = MaskedDataset(tmp_path / "d", "train", (1, 0, 0), 10, 1, short, 100, pairs=True)
    with pytest.raises(UserError, match="holds token id .*, outside the vocabulary of 100"):
        small.batch(np.arange(10))
