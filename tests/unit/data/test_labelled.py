"""Texts with classes: how they are framed, cut, ordered, and refused."""

import json

import numpy as np
import pytest

from mjax.config import load
from mjax.config.schema.run import Config, MaskedDataConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.loader import build_datasets
from mjax.data.sentences.labelled import LabelledDataset
from mjax.errors import UserError

IDS = MaskedDataConfig(cls_token_id=257, sep_token_id=258, pad_token_id=259)


def dataset(path, rows, length=16, split="train", shares=(1, 0, 0), labels=3, size=50, seed=1):
    text = rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
    path.write_text(text + "\n\n")
    model = {"vocab_size": 300, "bert": {"num_labels": labels}}
    data = {"seq_length": length, "masked": IDS}
    cfg = Config(model=model, data=data, run={"seed": seed})
    return LabelledDataset(path, split, shares, size, cfg, load_tokenizer("byte"))


def texts_of(tokens: np.ndarray) -> list[str]:
    """The texts of a row, after a check of its frame."""
    tokens = tokens.tolist()
    end = tokens.index(259) if 259 in tokens else len(tokens)
    assert tokens[0] == 257 and tokens[end - 1] == 258 and set(tokens[end:]) <= {259}
    parts = "".join(chr(i) if i < 256 else "|" for i in tokens[1 : end - 1]).split("|")
    return parts


def test_texts_are_framed_and_the_longer_one_is_cut(tmp_path):
    rows = [
        {"text": "abc", "label": 0},
        {"text": "abc", "text_pair": "de", "label": 1},
        {"text": "a" * 40, "text_pair": "bcd", "label": 2},
        {"text": "e" * 9, "text_pair": "f" * 30, "label": 0},
        {"text": "g" * 40, "label": 1},
    ]
    data = dataset(tmp_path / "x.jsonl", rows, size=5)
    batch = data.batch(np.arange(5))
    found = {tuple(texts_of(row)): label for row, label in zip(*_of(batch), strict=True)}
    assert found == {
        ("abc",): 0,
        ("abc", "de"): 1,
        ("a" * 10, "bcd"): 2,
        ("e" * 6, "f" * 7): 0,
        ("g" * 14,): 1,
    }
    real = batch["tokens"] != 259
    np.testing.assert_array_equal(batch["segment_ids"], real)
    for row in range(5):
        tokens, types = batch["tokens"][row], batch["token_types"][row]
        first = tokens.tolist().index(258)
        np.testing.assert_array_equal(types, (np.arange(16) > first) & real[row])


def _of(batch):
    return batch["tokens"], batch["row_label"].tolist()


def test_an_epoch_has_every_line_once_and_splits_have_none_in_common(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 3} for i in range(40)]
    parts = {}
    for split in ("train", "valid"):
        data = dataset(tmp_path / "x.jsonl", rows, split=split, shares=(0.75, 0.25, 0), size=90)
        epoch = len(data.lines)
        texts = [texts_of(row)[0] for row in data.batch(np.arange(2 * epoch))["tokens"]]
        assert sorted(texts[:epoch]) == sorted(texts[epoch:]) and texts[:epoch] != texts[epoch:]
        alone = data.batch([epoch + 3])["tokens"][0]
        assert texts_of(alone) == [texts[epoch + 3]]
        parts[split] = set(texts)
    assert len(parts["train"]) == 30 and len(parts["train"] | parts["valid"]) == 40


def test_held_out_lines_may_have_a_file_of_their_own(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(9)]
    for name, part in (("a", rows[:6]), ("b", rows[6:])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    keys = [
        "model.layer_pattern=B",
        "model.vocab_size=260",
        "model.bert.num_labels=2",
        "data.tokenizer=byte",
        "data.seq_length=8",
        "data.masked={cls_token_id: 257, sep_token_id: 258, pad_token_id: 259}",
        f"data.text={tmp_path}/a",
        "train.objective=classify",
    ]
    training, held_out = build_datasets(
        load(None, [*keys, f"data.valid_paths=[{tmp_path}/b]"]), 6, 3
    )
    texts = [texts_of(row)[0] for row in training.batch(np.arange(6))["tokens"]]
    assert sorted(texts) == [f"t{i}" for i in range(6)]
    texts = [texts_of(row)[0] for row in held_out.batch(np.arange(3))["tokens"]]
    assert sorted(texts) == ["t6", "t7", "t8"]
    with pytest.raises(UserError, match="names 2 files, but .* reads one"):
        build_datasets(load(None, [*keys, "data.valid_paths=[a, b]"]), 6, 3)


@pytest.mark.parametrize(
    "rows, message",
    [
        ("{", r"x.jsonl:1: not a JSON line"),
        ('{"text": "a"}', r'x.jsonl:1: not {"text": "..", "label": 0}'),
        ("[1]", r'x.jsonl:1: not {"text": "..", "label": 0}'),
        ('{"text": "a", "label": true}', r"x.jsonl:1: not"),
        ('{"text": "a", "label": 0}\n{"text": "a", "label": 3}', r"x.jsonl:2: label 3 is none of"),
        ("", r"split 'train' of 0 lines has none"),
    ],
)
def test_lines_that_are_no_samples_are_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        dataset(tmp_path / "x.jsonl", rows)
