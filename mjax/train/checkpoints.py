"""The checkpoints of a trainer: its state as any mesh can read it, and weights to start from.

There may be two tiers: those in run.dir, and between them faster and more frequent ones
(`checkpoint.local_dir`), near the devices (`checkpoint/local/node_store.py`). Invariant: a state is
saved only if all its weights are finite. The tier is chosen as Megatron-LM does: the local one
counts if its step is not older, and an explicit step is always of run.dir.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from mjax.checkpoint.base.digest import DamagedCheckpoint
from mjax.checkpoint.base.source import Source, arrays
from mjax.checkpoint.local.folder import claim, local_folder
from mjax.checkpoint.local.node_store import NodeStore
from mjax.checkpoint.store import SaveFailed, Store
from mjax.config.schema.run import Config
from mjax.errors import NonFiniteLoss, UserError
from mjax.interop.partial_load import fit
from mjax.pipeline.storage import canonical, canonical_abstract, from_canonical
from mjax.train.finite import first_nonfinite, nonfinite_counts
from mjax.train.state import StateLayout
from mjax.train.step import State

log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """Saves and restores states of this layout, in run.dir/checkpoints.

    source: the tier of the state that was restored last.
    batches_at: returns what the checkpoint of a step records of a run's batches, as JSON.
    """

    cfg: Config
    layout: StateLayout
    source: Store | NodeStore | None = None
    batches_at: Callable[[int], dict] | None = None

    @cached_property
    def store(self) -> Store:
        names = {"keep", "keep_every", "keep_best", "async_save", "digests"}
        options = self.cfg.checkpoint.model_dump(include=names)
        return Store(Path(self.cfg.run.dir) / "checkpoints", self.cfg, **options)

    @cached_property
    def local(self) -> NodeStore | None:
        """The checkpoints of the local tier, or None if this run has no such tier (yet)."""
        folder = local_folder(self.cfg)
        return None if folder is None else NodeStore(folder, self.cfg)

    def claim_local(self) -> None:
        """Give this run a local tier, if the config wants one."""
        claim(self.cfg)
        self.__dict__.pop("local", None)
        if self.local is not None:
            self.local.remove_remains()

    def save(self, step: int, state: State, held_out_loss: float | None) -> None:
        """Start an asynchronous checkpoint in run.dir; `held_out_loss` is that of the step.

        Raises `NonFiniteLoss`, in all processes, if a parameter holds a number that is not finite,
        and `SaveFailed` if the files cannot be written or those of the save before could not.
        """
        self._require_finite(step, state)
        batches = self._batches_record(step)
        self.store.save(step, canonical(self.layout.storage, state), held_out_loss, batches)

    def save_local(self, step: int, state: State) -> None:
        """Start to save a step in the local tier. Raises `NonFiniteLoss` as `save` does."""
        self._require_finite(step, state)
        self.local.save(step, state, self._batches_record(step))

    def _batches_record(self, step: int) -> dict:
        return {} if self.batches_at is None else self.batches_at(step)

    def _require_finite(self, step: int, state: State) -> None:
        bad = first_nonfinite(self._count_nonfinite(state["params"]))
        if bad is not None:
            raise self._nonfinite(step, bad)

    def latest_step(self) -> int | None:
        """The newest step of both tiers, or None."""
        newest = self.store.latest_step()
        steps = [] if self.local is None else self.local.steps()
        return max(steps if newest is None else [newest, *steps], default=None)

    def restore(self, step: int | None) -> State:
        """The state of checkpoint `step` of run.dir, or of the newest of both tiers."""
        abstract = self.layout.abstract()
        if step is None and self.local is not None and (state := self._restore_local(abstract)):
            return state
        wanted = canonical_abstract(self.layout.storage, abstract)
        wanted["loss_scale"] = self.layout.abstract_loss_scale()
        saved = self.store.restore(wanted, step)
        self.source = self.store
        self.clear_local()  # its steps are not this run's any more
        saved = self._with_own_loss_scale(saved)
        return from_canonical(self.layout.storage, saved, abstract)

    def _restore_local(self, abstract: State) -> State | None:
        """The newest intact state of the local tier, or None if run.dir has a newer one."""
        newest, error = self.store.latest_step(), "the local tier holds no step"
        for step in self.local.steps():
            if newest is not None and step < newest:
                return None
            try:
                state = self.local.restore(abstract, step)
            except DamagedCheckpoint as e:
                log.warning("%s; taking the newest before it", e)
                error = e
                continue
            self.source = self.local
            return state
        if newest is None:
            raise UserError(f"{error}; repair it, or start over with checkpoint.resume=never")
        return None

    def _with_own_loss_scale(self, saved: State) -> State:
        """A restored state with the loss scale that this run keeps: the saved one, a new one where
        there is none, none where the run computes in another dtype than fp16."""
        rest = {name: part for name, part in saved.items() if name != "loss_scale"}
        if self.layout.scaler is None:
            return rest
        return rest | {"loss_scale": saved.get("loss_scale") or self.layout.start_loss_scale()}

    def clear_local(self) -> None:
        """Remove the steps of the local tier, once run.dir holds what counts."""
        if self.local is not None:
            self.local.wait()
            shutil.rmtree(self.local.directory, ignore_errors=True)

    def load_weights(self, *sources: Source) -> tuple[dict, str]:
        """Returns (stored parameters, lines on what was and was not loaded from each source).

        A parameter that a source lacks comes from an earlier source, or is drawn. Raises
        `UserError` for a model that differs in more than `checkpoint.init_changes`.
        """
        storage, cfg = self.layout.storage, self.cfg
        stored = self.layout.abstract()["params"]
        params, lines = None, []
        for source in sources:
            found = fit(source, cfg.model, cfg.checkpoint.init_changes, cfg.run.seed)
            source.check()
            if source.has is None:
                self.store.unread = source.unread
            loaded = arrays(found.source, canonical_abstract(storage, stored))
            if found.shared != found.wanted:
                others = params or canonical(storage, self.layout.draw())
                loaded = found.complete(loaded, others)
            params = loaded
            lines.append(found.summary())
        return from_canonical(storage, params, stored), "\n".join(lines)

    @cached_property
    def _count_nonfinite(self) -> jax.stages.Wrapped:
        return nonfinite_counts(self.layout)

    def _nonfinite(self, step: int, parameter: str) -> NonFiniteLoss:
        with contextlib.suppress(SaveFailed):  # the line then names the checkpoint before
            self.store.wait()
        return NonFiniteLoss(
            f"step {step}: parameter {parameter} holds numbers that are not finite, so the step is "
            f"not saved; last good checkpoint: {self._newest() or 'none'}; start again to "
            "resume there, with a lower schedule.lr if it recurs"
        )

    def _newest(self) -> Path | None:
        found = [store.newest() for store in (self.store, self.local) if store is not None]
        return max(filter(None, found), key=lambda step: int(step.name), default=None)
