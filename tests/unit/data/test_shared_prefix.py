"""Rows that hold a prompt once have the tokens of rows that repeat it, each with its label."""

import numpy as np
import pytest

from mjax.data.base.shared_prefix import context_length, placed_blocks
from mjax.errors import UserError
from tests.unit.data.test_answer_records import many_pairs, rows_of

FIELDS = "tokens", "labels", "loss_mask", "answer_values", "margins", "positions"
SHARED = "train.objective=preference", "data.shared_prefixes=true"


def documents_of(batch: dict, row: int) -> list[dict]:
    """The fields of each document of a row, its context in front."""
    segments = batch["segment_ids"][row]
    prefixes = batch.get("prefix_ids", np.zeros_like(batch["segment_ids"]))[row]
    found = []
    for segment in sorted(set(segments) - {0} - set(prefixes)):
        own = np.flatnonzero(segments == segment)
        (prefix,) = set(prefixes[own])
        context = np.flatnonzero(segments == prefix) if prefix else own[:0]
        assert not prefix or segments[context[-1] + 1] in set(segments[prefixes == prefix])
        path = np.append(context, own)
        found.append({name: batch[name][row, path] for name in FIELDS})
    return found


def all_documents(data) -> list[list[tuple]]:
    """The pairs of an epoch in an order that does not depend on rows."""
    batch = data.batch(range(len(data)))
    pairs = []
    for row in range(len(data)):
        documents = documents_of(batch, row)
        for at in range(0, len(documents), 2):
            pair = documents[at : at + 2]
            pairs.append([tuple(one[name].tolist()) for one in pair for name in FIELDS])
    return sorted(pairs)


HOSTILE = [
    {"prompt": "p", "chosen": "good", "rejected": "bad"},
    {"chosen": "implicit prompt yes", "rejected": "implicit prompt no"},
    {"prompt": "one begins ", "chosen": "as the other", "rejected": "as the other does"},
]


@pytest.mark.parametrize(
    "kind, reads_last", [("pairs", False), ("pairs", True), ("matched", False)]
)
def test_shared_rows_have_the_documents_of_plain_rows(kind, reads_last, tmp_path):
    records = many_pairs(30) + HOSTILE
    if kind == "matched":
        answers = [("p" * n, "c" * (n + 1), n % 2 == 0) for n in range(1, 9)]
        names = "prompt", "completion", "label"
        records = [dict(zip(names, answer, strict=True)) for answer in answers]
    plain = rows_of(tmp_path, records, kind, reads_last=reads_last)
    shared = rows_of(tmp_path, records, kind, *SHARED, reads_last=reads_last)
    assert all_documents(shared) == all_documents(plain)
    assert shared.lengths.sum() == plain.lengths.sum() - shared.contexts.sum()
    assert (shared.contexts > 0).any()
    batch = shared.batch(range(len(shared)))
    for segments in batch["segment_ids"]:
        assert (np.diff(segments) != 0).sum() + 1 <= shared.max_documents
    used = (batch["segment_ids"] > 0).sum(1)
    sizes = shared.sizes(range(len(shared)))
    assert sizes[:, 0].tolist() == used.tolist()
    again = rows_of(tmp_path, records, kind, *SHARED, reads_last=reads_last)
    last = len(shared) + 3  # a row of the second epoch
    for name, value in again.batch([last]).items():
        np.testing.assert_array_equal(value, shared.batch([last])[name], err_msg=name)


def test_a_pair_too_long_for_a_row_is_cut_behind_its_prompt(tmp_path):
    long = {"prompt": "p" * 40, "chosen": "c" * 30, "rejected": "r" * 30}
    endless = {"prompt": "p" * 90, "chosen": "c", "rejected": "r"}
    cut = "data.conversations.too_long=cut"
    data = rows_of(tmp_path, [long, endless, *many_pairs(4)], "pairs", *SHARED, cut)
    assert (data.counts.cut, data.counts.dropped) == (1, 1)
    (at,) = np.flatnonzero(data.contexts > 30)
    room = data.seq_length - data.contexts[at]
    assert (data.places[at] == data.contexts[at] + room // 2).all() and data.lengths[at] <= 64
    for row in range(len(data)):
        for document in documents_of(data.batch([row]), 0):
            assert np.count_nonzero(document["answer_values"]) == 1
    with pytest.raises(UserError, match="2 of 6 records of 2 answers are longer"):
        rows_of(tmp_path, [long, endless, *many_pairs(4)], "pairs", *SHARED, cut[:-3] + "refuse")


def test_contexts_end_where_documents_part_and_no_answer_begins():
    def document(ids: str, prompt: int):
        return np.frombuffer(ids.encode(), np.uint8), np.arange(len(ids)) >= prompt

    assert context_length([document("abcdX", 4), document("abcdY", 4)]) == 3
    assert context_length([document("abcXX", 4), document("abcYY", 4)]) == 2
    assert context_length([document("abcdX", 4), document("abcdX", 3)]) == 2
    assert context_length([document("aX", 1), document("aY", 1)]) == 0
    assert context_length([document("Xa", 1), document("Ya", 1)]) == 0
    assert context_length([document("abcdX", 4)]) == 0


def test_blocks_lie_end_to_end_with_numbers_of_their_own():
    blocks = list(placed_blocks([[5, 4, 9], [3, 3], [2]], [3, 0, 0]))
    assert [b.begin for b in blocks] == [0, 3, 5, 6, 12, 15, 18]
    assert [b.segment for b in blocks] == [7, 1, 2, 3, 4, 5, 6]
    assert [b.prefix for b in blocks] == [0, 7, 7, 7, 0, 0, 0]
    assert [b.order for b in blocks] == [None, 0, 1, 2, 0, 1, 0]
