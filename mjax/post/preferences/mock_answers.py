"""Answers cut out of rows of random tokens, for speed tests and the proof of meshes."""

import numpy as np

from mjax.config import Config
from mjax.data.base.shared_prefix import placed_blocks
from mjax.errors import UserError
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


def equal_answers(batch: HostBatch, documents: int) -> HostBatch:
    """The fields of pairs of answers in rows [B, S] of so many documents of one length.

    The second half of each document is its answer. They are chosen and rejected in turn, and the
    reference is left out. Raises `UserError` where documents do not pair.
    """
    shape = batch["segment_ids"].shape
    if documents % 2 or shape[1] % documents:
        raise UserError(
            f"--documents {documents}: preferences need an even number that divides {shape[1]}"
        )
    length = shape[1] // documents
    place, value = np.arange(shape[1]) % length, batch["segment_ids"] % 2 * 2 - 1
    return {
        "positions": np.broadcast_to(place.astype(np.int32), shape),
        "loss_mask": np.broadcast_to((place >= length // 2).astype(np.float32), shape),
        "answer_values": np.where(place == length - 1, value, 0).astype(np.float32),
    }


def require_pairs(cfg: Config) -> None:
    """Raise `UserError` for preferences that equal documents do not have."""
    for key, has in {
        "preference.loss_type": cfg.preference.is_unpaired,
        "preference.precompute_ref_log_probs": cfg.preference.precompute_ref_log_probs,
        "data.shared_prefixes": cfg.data.shared_prefixes,
    }.items():
        if has:
            raise UserError(f"--documents: random pairs are not built for {key}; change it")


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
