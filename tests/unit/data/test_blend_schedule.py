"""Laws of weights that change: every sample once an epoch, the same order however a run is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.config import load
from mjax.data.blend import BlendedDataset, Epochs, require_same_past, scheduled_indices
from mjax.data.corpus.indexed import IndexedDatasetWriter
from mjax.data.loader import build_datasets
from mjax.errors import UserError


class Numbers:
    """`size` samples, the i-th of which is i."""

    max_documents, padded = 1, False

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def batch(self, indices):
        assert max(indices, default=0) < self.size
        return {"number": np.asarray(indices)[:, None]}


@st.composite
def schedules(draw):
    """(sizes of datasets, weights by sample, samples drawn, seed)."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    share = st.sampled_from([0, 0, 1, 2, 0.3, 7.5])
    weights = st.lists(share, min_size=len(sizes), max_size=len(sizes)).filter(any)
    steps = sorted(draw(st.sets(st.integers(1, 90), max_size=4)))
    schedule = {step: draw(weights) for step in [0, *steps]}
    return sizes, schedule, draw(st.integers(0, 120)), draw(st.integers(0, 2**32 - 1))


def drawn(sizes, schedule, count, seed):
    """[(dataset, its sample)] of a blend."""
    data = BlendedDataset([Epochs(Numbers(n), seed) for n in sizes], schedule, count)
    numbers = data.batch(range(count))["number"][:, 0].tolist() if count else []
    return list(zip(data.dataset_index.tolist(), numbers, strict=True))


@settings(max_examples=60, deadline=None)
@given(schedules(), st.data())
def test_every_sample_once_an_epoch_and_the_past_never_changes(case, data):
    sizes, schedule, count, seed = case
    found = drawn(sizes, schedule, count, seed)
    for k, size in enumerate(sizes):
        own = [sample for dataset, sample in found if dataset == k]
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < size or sorted(epoch) == list(range(size))
    assert found == drawn(sizes, schedule, count, seed)
    # A shorter run, and one whose weights change from a sample on, began the same.
    cut = data.draw(st.integers(0, count))
    assert drawn(sizes, schedule, cut, seed) == found[:cut]
    past = {first: weights for first, weights in schedule.items() if first < cut}
    changed = {0: schedule[0]} | past | {max(cut, 1): [1] * len(sizes)}
    assert drawn(sizes, changed, count, seed)[:cut] == found[:cut]
    # Shares are those of the weights, to one sample.
    bounds = [*schedule, max(count, *schedule)]
    for number, (first, weights) in enumerate(schedule.items()):
        part = [dataset for dataset, _ in found[first : bounds[number + 1]]]
        for k, weight in enumerate(weights):
            wanted = len(part) * weight / sum(weights)
            assert abs(part.count(k) - wanted) <= max(1, len(sizes) - 1)
            assert weight or not part.count(k)


def test_constant_weights_draw_as_megatron_does():
    both = scheduled_indices({0: [3, 1]}, 40)
    changed = scheduled_indices({0: [3, 1], 24: [3, 1]}, 40)
    assert np.array_equal(both[0], changed[0]) and np.array_equal(both[1], changed[1])


@pytest.mark.parametrize(
    "before, now, step, wrong",
    [
        ([1, 1], [2, 1], 7, None),
        ({"0": [1, 1]}, {0: [1, 1], 7: [2, 1]}, 7, None),
        ({"0": [1, 1], "9": [1, 2]}, {0: [1, 1], 8: [2, 1]}, 7, None),
        ({"0": [1, 1]}, {0: [1, 1], 6: [2, 1]}, 7, "entry of step 6"),
        ({"0": [1, 1], "5": [1, 2]}, {0: [1, 1]}, 7, "entry of step 5"),
        ({"0": [1, 1]}, {0: [1, 2]}, 7, "entry of step 0"),
        ([1, 1], {0: [1, 1]}, 7, "began with weights by step"),
        ({"0": [1, 1]}, None, 7, "began with weights by step"),
    ],
)
def test_the_past_of_a_run_may_not_change(before, now, step, wrong):
    if wrong is None:
        require_same_past(before, now, step)
        return
    with pytest.raises(UserError, match=wrong) as e:
        require_same_past(before, now, step)
    assert "\n" not in str(e.value)


def test_a_run_with_weights_by_step_sees_each_sample_once_an_epoch(tmp_path):
    for name, documents in (("a", 6), ("b", 3)):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for first in range(documents):
                writer.add_document(100 * (name == "b") + 8 * first + np.arange(8))
    keys = ["data.mock=false", f"data.paths=[{tmp_path / 'a'},{tmp_path / 'b'}]"]
    keys += ["data.split=[1,0,0]", "data.seq_length=4", "train.global_batch_size=2"]
    keys += ["data.weights={0: [1, 0], 3: [1, 3]}", "train.steps=12", "model.vocab_size=200"]
    data, _ = build_datasets(load(None, keys), 24, 0)
    rows = data.batch(range(24))["tokens"]
    of_b = rows[:, 0] >= 100
    assert not of_b[:6].any() and of_b[6:].sum() in (13, 14)
    for own, epoch in ((rows[~of_b], 11), (rows[of_b], 5)):
        seen = [tuple(row) for row in own]
        assert len(set(seen[:epoch])) == len(seen[:epoch])
        assert set(seen[epoch:]) <= set(seen[:epoch])
