"""Figures of learning: curves of seeds, tables, and what is measured of an answer."""

import numpy as np

from tools.distillation_curves import table
from tools.learning_runs import draw_curves
from tools.preference_curves import END, compare, rows_of
from tools.preference_pairs import pairs, vowels


def test_a_table_has_the_mean_and_the_ends_of_all_seeds(tmp_path):
    curves = {"a": [{10: 1.0, 20: 0.5}, {10: 2.0, 20: 0.7}]}
    assert table(curves)[2:] == [
        "| 10 | 1.500 (1.000 to 2.000) |",
        "| 20 | 0.600 (0.500 to 0.700) |",
    ]
    draw_curves(curves, "nats", "Title", tmp_path / "drawn.svg")
    text = (tmp_path / "drawn.svg").read_text()
    assert text.count("<polyline") == 2 and "a: 0.6" in text


def test_the_planted_reward_ranks_all_pairs_and_its_opposite_none():
    """Documents are a prompt, an answer and an end, as the training reads them."""
    held_out = pairs(20, seed=5)
    rows, prompts, ends = rows_of(held_out, "chosen")
    for row, prompt, end, record in zip(rows, prompts, ends, held_out, strict=True):
        text = bytes(row[: end - 1].astype(np.uint8)).decode()
        assert text == record["prompt"] + record["chosen"] and row[end - 1] == END
        assert text[prompt:] == record["chosen"] and not row[end:].any()

    def planted(rows, prompts, ends):
        return np.array([vowels(bytes(r[:e].astype(np.uint8)).decode("latin1")) for r, e in
                         zip(rows, ends, strict=True)])  # fmt: skip

    assert compare(held_out, planted) == 1.0
    assert compare(held_out, lambda *given: -planted(*given)) == 0.0
