"""Laws of blending: equal to Megatron's greedy loop, and within the built sizes."""

import numpy as np
import pytest

from mjax.data import blend_indices
from mjax.data.blend import BlendedDataset, normalize, sizes_per_dataset
from mjax.data.mock import MockDataset
from mjax.errors import UserError


def naive(weights, size):
    taken, dataset, sample = [0] * len(weights), [], []
    for i in range(size):
        errors = [w * max(float(i), 1.0) - t for w, t in zip(weights, taken, strict=True)]
        k = errors.index(max(errors))
        dataset.append(k)
        sample.append(taken[k])
        taken[k] += 1
    return dataset, sample


@pytest.mark.parametrize("case", range(24))
def test_blend_equals_the_naive_loop(case):
    rng = np.random.default_rng(case)
    d = int(rng.integers(1, 12))
    if case % 3 == 0:  # ties
        weights = normalize(rng.integers(1, 4, size=d).astype(float))
    else:  # from even to very uneven
        weights = normalize(rng.dirichlet(np.full(d, [0.1, 1.0, 10.0][case % 3])) + 1e-9)
    size = int(rng.integers(0, 6000))
    dataset, sample = blend_indices(weights, size)
    assert dataset.dtype == np.int16 and sample.dtype == np.int64
    expected = naive(weights, size)
    assert dataset.tolist() == expected[0] and sample.tolist() == expected[1]


def test_blend_of_many_chunks_is_exact_from_any_guess(monkeypatch):
    weights = normalize([3, 1, 7, 0.01, 2])
    expected = naive(weights, 9000)

    def absurd(w, steps):
        return np.zeros((len(steps), len(w)), np.int64)

    monkeypatch.setattr("mjax.data.blend._guess", absurd)
    assert [a.tolist() for a in blend_indices(weights, 9000)] == list(expected)


def test_unnormalized_weights_are_normalized():
    assert blend_indices([3, 1], 100)[0].tolist() == naive([0.75, 0.25], 100)[0]


def test_surplus_covers_the_blend_and_too_little_is_named():
    weights = normalize([0.2, 0.5, 0.3])
    target, built = sizes_per_dataset(weights, 1000), sizes_per_dataset(weights, 1000, 0.005)
    assert target == [200, 500, 300] and built == [201, 503, 302]

    def make(sizes):
        return [MockDataset(50, 4, n, seed) for seed, n in enumerate(sizes)]

    blend = BlendedDataset(make(built), weights, sum(target))
    assert len(blend) == 1000
    with pytest.raises(UserError, match="dataset 1 has 400 samples, the blend takes 500.*surplus"):
        BlendedDataset(make([201, 400, 302]), weights, 1000)


def test_batch_equals_single_samples():
    parts = [MockDataset(50, 4, 40, seed) for seed in range(3)]
    blend = BlendedDataset(parts, [1, 2, 3], 30)
    batch = blend.batch(range(30))
    for i in range(30):
        one = parts[blend.dataset_index[i]].batch(blend.dataset_sample_index[i : i + 1])
        for name, (array,) in one.items():
            np.testing.assert_array_equal(array, batch[name][i])
    assert blend.max_documents == 1


@pytest.mark.parametrize("weights", [[], [0, 1], [-1, 2], [float("nan")], [1] * 40000])
def test_bad_weights_are_refused(weights):
    with pytest.raises(UserError):
        blend_indices(weights, 5)
