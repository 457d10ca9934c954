"""Answers cut out of rows of random tokens, for speed tests and the proof of meshes."""

import numpy as np

from mjax.data.base.shared_prefix import placed_blocks
from mjax.objectives.fields import HostBatch
from mjax.objectives.objective import MATCHED, PAIRS, STEPS

_ANSWERS = 4  # of a row


def mock_answers(
    batch: HostBatch,
    dataset: str,
    seed: int,
    step: int,
    rows: np.ndarray,
    shares_prefixes: bool = False,
) -> HostBatch:
    """The fields of records of this kind, whose log-probabilities under a reference are random."""
    shape = batch["tokens"].shape
    names = ["segment_ids", "positions"] + ["prefix_ids"] * shares_prefixes
    fields = {name: np.zeros(shape, np.int32) for name in names}
    names = ["loss_mask", "answer_values", "ref_log_probs", "margins"]
    fields |= {name: np.zeros(shape, np.float32) for name in names}
    for place, row in enumerate(rows):
        rng = np.random.default_rng((seed, step, int(row)))
        _fill_row({name: field[place] for name, field in fields.items()}, dataset, rng)
    return fields | {"kl": np.full(len(rows), 0.25, np.float32)}


def _fill_row(row: HostBatch, dataset: str, rng: np.random.Generator) -> None:
    """Fill fields [S] of one row, which hold zeros: documents of random lengths, then padding."""
    spare = len(row["positions"]) - 2 * _ANSWERS
    lengths = 2 + rng.multinomial(spare, [1 / (_ANSWERS + 1)] * (_ANSWERS + 1))
    lengths = lengths[:_ANSWERS].reshape(-1, 2)
    documents, contexts = [], []
    for pair in lengths.tolist():
        made = [_mock_document(length, order, dataset, rng) for order, length in enumerate(pair)]
        prompts = [int(np.argmax(document["loss_mask"])) for document in made]
        contexts.append(min(prompts) if "prefix_ids" in row else 0)
        documents.append(made)
    for block in placed_blocks(lengths, contexts):
        block.fill(row)
        document = documents[block.group][block.order or 0]
        for name, values in document.items():
            row[name][block.places] = values[block.first : block.first + block.count]


def _mock_document(length: int, order: int, dataset: str, rng: np.random.Generator) -> HostBatch:
    """The fp32 fields [length] of the first or second document of a pair."""
    names = "loss_mask", "answer_values", "ref_log_probs", "margins"
    made = {name: np.zeros(length, np.float32) for name in names}
    first = int(rng.integers(1, length))
    made["loss_mask"][first:] = 1
    made["ref_log_probs"][first:] = rng.normal(-5.5, 1, length - first)
    sign = -1 if order else 1
    if dataset != PAIRS:
        sign = int(rng.choice([-1, 1]))
    if dataset == MATCHED and order:
        sign = 0
    made["answer_values"][-1] = sign
    if dataset == STEPS:
        made["answer_values"][first] = sign
    elif not order:
        made["margins"][-1] = rng.random()
    return made
