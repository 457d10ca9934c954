"""Log-probabilities under a role, computed once for all answers of a run and kept in files.

A file is keyed by the answers, by the weights of the role and by the width of a row, so a run that
resumes reads the same numbers on any mesh, pipelines too. An entry belongs to a place of a
document, whatever row that document is in.
"""

import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

from mjax.data.base.cache import cached_arrays
from mjax.data.conversations.answer_rows import AnswerDataset
from mjax.data.loader import Dataset
from mjax.errors import UserError
from mjax.interop.adapters_of_run import without_adapters
from mjax.pipeline.storage import canonical
from mjax.post.base.roles import Role
from mjax.train.base_digest import digest_of_arrays
from mjax.train.program_kind import ProgramKind

log = logging.getLogger(__name__)


def answer_datasets(data: Dataset | None) -> Iterator[AnswerDataset]:
    """Yield the sources of a run's answers, of which a blend has several."""
    if data is not None:
        yield from getattr(data.rows, "datasets", [data.rows])


def attach_stored_scores(role: Role, kind: ProgramKind, datasets: list[AnswerDataset]) -> None:
    """Give datasets the scores that a program computes with the weights of a role.

    They are computed here unless files have them. Raises `UserError` where that cannot be.
    """
    cfg = role.trainer.cfg
    folder = Path(cfg.data.cache_dir or Path(cfg.run.dir) / "conversations")
    weights = digest_of_weights(role)
    for data in datasets:
        key = {"scores": role.name, "weights": weights, "answers": digest_of_answers(data)}
        compute = partial(compute_scores, role, kind, data)
        arrays, _ = cached_arrays(folder, key, ["scores"], compute)
        data.stored_scores = arrays[0]


def digest_of_weights(role: Role) -> str:
    """A digest of the role's weights, the same on every mesh; of a role without any, the base's."""
    params = canonical(role.trainer.storage, role.weights()["params"])
    return digest_of_arrays(without_adapters(params) if role.held is None else params)


def digest_of_answers(data: AnswerDataset) -> str:
    """A digest of the documents that scores belong to, in their order."""
    source, digest = data.source, hashlib.blake2b(data.kind.encode(), digest_size=16)
    partners = np.array([*data.partners.items()])
    for array in (data.numbers, data.places, partners, source.ids, source.ends, source.is_answer):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def compute_scores(role: Role, kind: ProgramKind, data: AnswerDataset) -> list[np.ndarray]:
    """One array fp32: a score for each place of each document of a dataset, in their order."""
    trainer = role.trainer
    if jax.process_count() > 1:
        raise UserError(
            "preference.precompute_ref_log_probs: the files are not there yet; make them with one "
            "process first, in the same data.cache_dir"
        )
    rows, size = len(data.ranks), trainer.cfg.train.global_batch_size
    log.warning("computing the log-probabilities of %s for %d rows", role.name, rows)
    found = np.zeros(int(data.places.sum()), np.float32)
    for first in range(0, rows, size):
        indices = [index % rows for index in range(first, first + size)]
        placed = trainer.placer.place(data.batch(indices))
        scores = np.asarray(role.compute(kind, placed))
        scores = scores[:, np.argsort(np.asarray(placed["columns"]))]
        for row, index in enumerate(indices):
            for member, block in data.placed_blocks(index):
                offset = data.offset(member, block)
                found[offset : offset + block.count] = scores[row, block.places]
    return [found]
