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

import numpy as np

from mjax.data.base.cache import cached_arrays, entry_of
from mjax.data.conversations.answer_rows import AnswerDataset
from mjax.data.loader import Dataset
from mjax.errors import UserError
from mjax.interop.adapters_of_run import without_adapters
from mjax.pipeline.storage import canonical
from mjax.post.base.roles import Role, rows_of_process, values_in_order
from mjax.sharding.processes.agreement import said_by_all
from mjax.train.base_digest import digest_of_arrays
from mjax.train.program_kind import ProgramKind

log = logging.getLogger(__name__)


def answer_datasets(data: Dataset | None) -> Iterator[AnswerDataset]:
    """Yield the sources of a run's answers, of which a blend has several."""
    if data is not None:
        yield from getattr(data.rows, "datasets", [data.rows])


def attach_stored_scores(role: Role, kind: ProgramKind, datasets: list[AnswerDataset]) -> None:
    """Give datasets the scores that a program computes with the weights of a role.

    They are computed here unless files have them.
    """
    cfg = role.trainer.cfg
    folder = Path(cfg.data.cache_dir or Path(cfg.run.dir) / "conversations")
    weights = digest_of_weights(role)
    for data in datasets:
        key = {"scores": role.name, "weights": weights, "answers": digest_of_answers(data)}
        require_one_folder(folder, entry_of(folder, key).is_dir())
        compute = partial(compute_scores, role, kind, data)
        arrays, _ = cached_arrays(folder, key, ["scores"], compute)
        data.stored_scores = arrays[0]


def require_one_folder(folder: Path, has_scores: bool) -> None:
    """Raise `UserError` where some processes have the scores and others would compute them."""
    if len(set(said_by_all(b"%d" % has_scores))) > 1:
        raise UserError(
            f"{folder}: some processes have scores there that others have not; all must see one "
            "folder: set data.cache_dir to one that they share, or delete it everywhere"
        )


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
    rows, size = len(data.ranks), trainer.cfg.train.global_batch_size
    log.warning("computing the log-probabilities of %s for %d rows", role.name, rows)
    found = np.zeros(int(data.places.sum()), np.float32)
    for first in range(0, rows, size):
        indices = [index % rows for index in range(first, first + size)]
        placed = trainer.placer.place(rows_of_process(trainer, data.batch(indices)))
        scores = values_in_order(placed, role.compute(kind, placed))
        for row, index in enumerate(indices):
            for member, block in data.placed_blocks(index):
                offset = data.offset(member, block)
                found[offset : offset + block.count] = scores[row, block.places]
    return [found]
