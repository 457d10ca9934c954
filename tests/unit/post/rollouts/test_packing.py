"""Transcripts in rows: fields lie at labels, values come back, batches are multiples of rows."""

import numpy as np

from mjax.post.rollouts.bank import batch_record, recorded_batch
from mjax.post.rollouts.figures import reward_figures
from mjax.post.rollouts.packing import packed_transcripts
from mjax.post.rollouts.transcript import Transcript


def transcript(group, length, prompt=2, reward=0.0, version=3):
    rng = np.random.default_rng(100 * group + length)
    is_sampled = np.arange(length) >= prompt
    return Transcript(
        group=group,
        sample=0,
        ids=rng.integers(1, 50, length).astype(np.int32),
        log_probs=np.where(is_sampled, rng.normal(size=length), 0).astype(np.float32),
        is_sampled=is_sampled,
        versions=np.where(is_sampled, version, -1).astype(np.int32),
        reward=reward,
        metrics={"correct": reward},
    )


def test_fields_lie_at_the_labels_that_they_speak_of():
    found = [transcript(0, 5), transcript(1, 9), transcript(2, 7)]
    pack = packed_transcripts(found, 2, 12)
    values = [np.arange(len(t.ids), dtype=np.float32) + 10 * n for n, t in enumerate(found)]
    batch = pack.batch(advantages=values)
    assert batch["tokens"].shape == (2, 12) and sorted(sum(pack.rows, [])) == [0, 1, 2]
    for row, numbers in enumerate(pack.rows):
        for document, number in enumerate(numbers, 1):
            t, at = found[number], batch["segment_ids"][row] == document
            assert batch["tokens"][row, at].tolist() == t.ids[:-1].tolist()
            assert batch["labels"][row, at].tolist() == t.ids[1:].tolist()
            assert batch["loss_mask"][row, at].tolist() == t.is_sampled[1:].tolist()
            assert batch["positions"][row, at].tolist() == list(range(len(t.ids) - 1))
            np.testing.assert_array_equal(batch["sampler_log_probs"][row, at], t.log_probs[1:])
            np.testing.assert_array_equal(batch["advantages"][row, at], values[number][1:])
    padding = batch["segment_ids"] == 0
    assert padding.any() and not batch["loss_mask"][padding].any()
    for taken, given in zip(pack.taken(batch["advantages"]), values, strict=True):
        np.testing.assert_array_equal(taken[1:], given[1:])


def test_what_does_not_fit_makes_a_multiple_of_the_rows():
    found = [transcript(n, 10) for n in range(5)]
    assert len(packed_transcripts(found, 5, 9).rows) == 5
    assert len(packed_transcripts(found, 3, 12).rows) == 6
    assert packed_transcripts(found[:1], 3, 9).batch()["tokens"][1:].any() == 0


def test_a_batch_is_recorded_to_the_bit():
    batch = packed_transcripts([transcript(0, 6)], 1, 8).batch()
    found = recorded_batch(batch_record(batch))
    assert found.keys() == batch.keys()
    for name, values in batch.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_figures_of_rewards_lengths_and_ages():
    groups = [
        [transcript(0, 5, reward=1.0, version=7), transcript(0, 6, reward=0.0, version=5)],
        [transcript(1, 4, reward=1.0, version=7), transcript(1, 4, reward=1.0, version=7)],
    ]
    found = reward_figures(groups, most=4, step=8)
    assert found["reward"] == found["environment/correct"] == 0.75
    assert found["reward_std"] == 0.25 and found["frac_reward_zero_std"] == 0.5
    assert found["completions/mean_length"] == (3 + 4 + 2 + 2) / 4
    assert found["completions/max_length"] == 4 and found["completions/clipped_ratio"] == 0.25
    assert found["staleness_max"] == 3 and found["staleness"] == (7 * 1 + 4 * 3) / 11
