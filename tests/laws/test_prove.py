"""Law: all five axes together give the one-device numbers. A sample of `python -m mjax.prove`."""

import functools

import pytest

from mjax.prove import AXES, BOUND, FEATURES, cells, deviation, measure, meshes

SAMPLE = [  # feature, mesh, ZeRO stage, micro-batches
    ("dense, GQA", {"tp": 2, "pp": 2, "cp": 2}, 1, 4),
    ("dense, GQA", {"dp": 2, "tp": 2, "cp": 2}, 3, 2),
    ("dense, GQA", {"dp": 3, "pp": 2}, 1, 3),
    ("MoE, top-2 of 8, balance loss", {"pp": 2, "cp": 2, "ep": 2}, 1, 2),
    ("MoE, top-2 of 8, balance loss", {"tp": 2, "cp": 2, "ep": 2}, 3, 1),
    ("MoE, top-2 of 8, balance loss", {"dp": 2, "tp": 2, "ep": 2}, 2, 4),
    ("tied embeddings", {"dp": 2, "tp": 2, "pp": 2}, 1, 3),
    ("tied embeddings", {"pp": 4, "cp": 2}, 1, 8),
    ("biases, LayerNorm, GELU", {"pp": 8}, 1, 2),
    ("sliding windows, QK norm, sandwich norms", {"pp": 2, "cp": 4}, 1, 2),
    ("learned positions, soft-caps, sinks", {"dp": 2, "tp": 2, "cp": 2}, 2, 2),
    ("dropout", {"tp": 2, "pp": 2, "ep": 2}, 1, 4),
]


@functools.cache
def one_device(feature: str, rows: int) -> tuple:
    return measure(feature, dict.fromkeys(AXES, 1), 0, 1, rows)


@pytest.mark.parametrize("feature,sizes,zero,micro_batches", SAMPLE)
def test_mixed_mesh_equals_one_device(feature, sizes, zero, micro_batches):
    mesh = dict.fromkeys(AXES, 1) | sizes
    rows = 8 * micro_batches if 8 % (mesh["dp"] * mesh["ep"]) == 0 else 24
    mine = measure(feature, mesh, zero, micro_batches, rows)
    assert deviation(mine, one_device(feature, rows)) <= BOUND


def test_the_table_covers_every_factorisation_and_every_stage():
    assert len(meshes(8)) == 35 and len(list(cells(8))) == 35
    assert {zero for _, zero, _ in cells(8)} == {0, 1, 2, 3}
    assert {feature for feature, *_ in SAMPLE} == set(FEATURES)
