"""Answers cut out of rows of random tokens, for speed tests and the proof of meshes."""

import numpy as np

from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import MATCHED, PAIRS, STEPS

_ANSWERS = 4  # of a row


def mock_answers(
    batch: HostBatch, dataset: str, seed: int, step: int, rows: np.ndarray
) -> HostBatch:
    """The fields of records of this kind, whose log-probabilities under a reference are random."""
    shape = batch["tokens"].shape
    fields = {name: np.zeros(shape, np.int32) for name in ("segment_ids", "positions")}
    names = "loss_mask", "answer_values", "ref_log_probs", "margins"
    fields |= {name: np.zeros(shape, np.float32) for name in names}
    for place, row in enumerate(rows):
        rng = np.random.default_rng((seed, step, int(row)))
        _fill_row({name: field[place] for name, field in fields.items()}, dataset, rng)
    return fields | {"kl": np.full(len(rows), 0.25, np.float32)}


def _fill_row(row: HostBatch, dataset: str, rng: np.random.Generator) -> None:
    """Fill fields [S] of one row, which hold zeros: documents of random lengths, then padding."""
    spare = len(row["positions"]) - 2 * _ANSWERS
    lengths = 2 + rng.multinomial(spare, [1 / (_ANSWERS + 1)] * (_ANSWERS + 1))
    begin = 0
    for document, length in enumerate(lengths[:_ANSWERS].tolist(), 1):
        end = begin + length
        row["segment_ids"][begin:end] = document
        row["positions"][begin:end] = np.arange(length)
        first = begin + int(rng.integers(1, length))
        row["loss_mask"][first:end] = 1
        row["ref_log_probs"][first:end] = rng.normal(-5.5, 1, end - first)
        sign = 1 if document % 2 else -1
        if dataset != PAIRS:
            sign = int(rng.choice([-1, 1]))
        if dataset == MATCHED and document % 2 == 0:
            sign = 0
        row["answer_values"][end - 1] = sign
        if dataset == STEPS:
            row["answer_values"][first] = sign
        elif document % 2:
            row["margins"][end - 1] = rng.random()
        begin = end
