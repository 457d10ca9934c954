"""Records of answers: formats, implicit prompts, groups in one row, what is refused."""

import numpy as np
import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.conversations.answer_records import parse_answers
from mjax.data.conversations.answer_rows import AnswerDataset
from mjax.errors import UserError
from tests.chats import chat_config, write_lines


def said(*texts: str) -> list[dict]:
    roles = "user", "assistant"
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def contents(group) -> list:
    return [
        one.plain or [message["content"] for message in one.messages] for one in group.conversations
    ]


PAIRS = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"chosen": said("a", "b"), "rejected": said("a", "c")},  # an implicit prompt
    {"prompt": "a", "chosen": said("a", "b"), "rejected": said("a", "c")},  # UltraFeedback's
    {"prompt": said("a"), "chosen": "b", "rejected": "c"},
    {
        "context": said("a"),
        "completions": [
            {"rank": 1, "completion": [{"role": "assistant", "content": "c"}]},
            {"rank": 0, "completion": [{"role": "assistant", "content": "b"}]},
        ],
    },
]


@pytest.mark.parametrize("record", PAIRS, ids=lambda r: ",".join(r))
def test_pairs_of_all_formats(record):
    (group,) = parse_answers(record, "F:1", "pairs")
    assert contents(group) in ([("a", "b"), ("a", "c")], [["a", "b"], ["a", "c"]])
    assert group.values == [1.0, -1.0]
    singles = parse_answers(record, "F:1", "single")
    assert [one.values for one in singles] == [[1.0], [-1.0]]
    assert [contents(one)[0] for one in singles] == contents(group)


def test_an_implicit_prompt_of_texts_ends_before_the_first_unlike_word():
    record = {"chosen": "Q: 1? A: one dog", "rejected": "Q: 1? A: one cat", "margin": 2}
    (group,) = parse_answers(record, "F:1", "pairs")
    assert contents(group) == [("Q: 1? A: one", " dog"), ("Q: 1? A: one", " cat")]
    assert group.margin == 2


def test_rankings_are_all_pairs_of_unlike_ranks():
    record = {"prompt": "p", "completions": ["a", "b", "c", "d"], "ranks": [2, 0, 1, 1]}
    pairs = [[one[1] for one in contents(g)] for g in parse_answers(record, "F:1", "pairs")]
    assert pairs == [["b", "c"], ["b", "d"], ["b", "a"], ["c", "a"], ["d", "a"]]


BROKEN = [
    ({"chosen": "same", "rejected": "same"}, "pairs", "chosen and rejected are equal"),
    ({"chosen": "x", "rejected": "y"}, "pairs", "no prompt, and chosen and rejected begin unlike"),
    ({"prompt": "p", "completion": "c", "label": True}, "pairs", "loss_type=kto"),
    ({"prompt": "p", "completion": "c", "label": 3}, "single", "label is 3; give true or false"),
    ({"prompt": "p", "completions": ["a", "b"], "ranks": [1, 1]}, "pairs", "have one rank"),
    ({"prompt": "p", "chosen": "", "rejected": "y"}, "pairs", "completion is empty"),
    ({"prompt": "p", "completions": ["a"], "labels": []}, "steps", "one entry for each"),
    ({"prompt": 3, "chosen": [], "rejected": None}, "pairs", "no chosen and rejected"),
    ({"prompt": "p", "completions": 7, "ranks": [1]}, "pairs", "mend the record"),
    ({"prompt": "p", "completions": [{"x": 1}]}, "pairs", "mend the record"),
    ({"prompt": "p", "chosen": {"a": 1}, "rejected": 2, "margin": "x"}, "pairs", "F:9"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "x"}, "pairs", "mend the record"),
]


@pytest.mark.parametrize("record, kind, message", BROKEN, ids=lambda x: str(x)[:40])
def test_a_broken_record_is_named(record, kind, message):
    with pytest.raises(UserError, match=message) as found:
        parse_answers(record, "F:9", kind)
    assert str(found.value).startswith("F:9") and "\n" not in str(found.value)


def rows_of(folder, records, kind, *keys, reads_last=False) -> AnswerDataset:
    path = write_lines(folder / "answers.jsonl", records)
    cfg = chat_config(folder, path, *keys)
    given = path, "train", [1, 0, 0], None, cfg, load_tokenizer(cfg.data.tokenizer)
    return AnswerDataset(*given, kind=kind, reads_last=reads_last)


def many_pairs(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, (count, 3))
    return [{"prompt": "p" * a, "chosen": "c" * b, "rejected": "r" * c} for a, b, c in sizes]


@pytest.mark.parametrize("reads_last", [False, True])
def test_a_pair_is_whole_in_one_row(reads_last, tmp_path):
    data = rows_of(tmp_path, many_pairs(30), "pairs", reads_last=reads_last)
    batch = data.batch(range(len(data)))
    assert len(data) < 20
    for name in ("tokens", "segment_ids", "answer_values"):
        assert batch[name].shape == (len(data), 64)
    pairs = 0
    for segments, values, mask in zip(
        batch["segment_ids"], batch["answer_values"], batch["loss_mask"], strict=True
    ):
        documents = segments.max()
        assert documents % 2 == 0 and documents < data.max_documents
        for document in range(1, documents + 1):
            (ends,) = np.nonzero(values * (segments == document))
            assert ends == np.flatnonzero(segments == document)[-1]
            assert values[ends] == (1 if document % 2 else -1)
            assert mask[segments == document].sum() >= 1
        pairs += documents // 2
    assert pairs == 30
    assert (batch["labels"].any()) == (not reads_last)


def test_long_answers_are_cut_but_stay_pairs(tmp_path):
    long = [{"prompt": "p", "chosen": "c" * 90, "rejected": "r" * 9}]
    data = rows_of(tmp_path, long + many_pairs(3), "pairs")
    assert data.counts.cut == 1 and len(data.numbers) == 4
    assert data.lengths.max() <= 64
    no_answer = [{"prompt": "p" * 50, "chosen": "c" * 90, "rejected": "r" * 9}]
    data = rows_of(tmp_path, no_answer + many_pairs(3), "pairs", "data.conversations.rows=padded")
    assert data.counts.dropped == 1 and len(data) == 3


def test_a_mismatched_answer_follows_the_same_prompt(tmp_path):
    records = [{"prompt": f"{n}?", "completion": f"<{n}>", "label": n != 1} for n in range(3)]
    data = rows_of(tmp_path, records, "matched")
    decode = load_tokenizer(tmp_path / "tokenizer").decode
    own, other = data._documents(0)
    partner = data.partners[0]
    assert partner != 0
    assert decode(own[0].tolist()) == "0?<0>" and decode(other[0].tolist()) == f"0?<{partner}>"
    assert own[2][-1] == 1 and not other[2].any()
    with pytest.raises(UserError, match="kto needs two answers"):
        rows_of(tmp_path, records[:1], "matched")


def test_values_of_steps_stand_at_their_ends(tmp_path):
    records = [{"prompt": "2+2 ", "completions": ["so 4", "is 5"], "labels": [True, False]}]
    data = rows_of(tmp_path, records, "steps", reads_last=True)
    batch = data.batch([0])
    (places,) = np.nonzero(batch["answer_values"][0])
    assert batch["answer_values"][0, places].tolist() == [1, -1]
    decode = load_tokenizer(tmp_path / "tokenizer").decode
    texts = [decode(batch["tokens"][0, : place + 1].tolist()) for place in places]
    assert texts == ["2+2 so 4\n", "2+2 so 4\nis 5\n"]
