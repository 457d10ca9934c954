"""The checkpoints of a trainer: its state as any mesh can read it, and weights to start from.

There may be two tiers: those in run.dir, and between them faster and more frequent ones
(`checkpoint.local_dir`), of which the newest alone is kept. Invariant: a state is saved only if all
its weights are finite. The tier is chosen as Megatron-LM does: the local one counts if its step is
not older, and an explicit step is always of run.dir.
"""

import contextlib
import logging
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from mjax.checkpoint.digest import DamagedCheckpoint
from mjax.checkpoint.partial import fit
from mjax.checkpoint.quiet import plain_reason
from mjax.checkpoint.source import Source, arrays
from mjax.checkpoint.store import SaveFailed, Store
from mjax.config.schema import Config
from mjax.pipeline.storage import canonical, canonical_abstract, from_canonical
from mjax.train.finite import first_nonfinite, nonfinite_counts
from mjax.train.local_tier import local_folder
from mjax.train.resilience import NonFiniteLoss
from mjax.train.state import StateLayout
from mjax.train.step import State

log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """Saves and restores states of this layout, in run.dir/checkpoints.

    source: the tier of the state that was restored last.
    """

    cfg: Config
    layout: StateLayout
    source: Store | None = None
    _local: Store | None = None

    @cached_property
    def store(self) -> Store:
        names = {"keep", "keep_every", "keep_best", "async_save", "digests"}
        options = self.cfg.checkpoint.model_dump(include=names)
        return Store(Path(self.cfg.run.dir) / "checkpoints", self.cfg, **options)

    @property
    def local(self) -> Store | None:
        """The checkpoints of the local tier, or None if this run has no such tier."""
        folder = local_folder(self.cfg)
        if folder is None:
            return None
        if self._local is None or self._local.directory != folder.absolute():
            options = self.cfg.checkpoint.model_dump(include={"async_save", "digests"})
            self._local = Store(folder, self.cfg, keep=1, keep_every=None, **options)
        return self._local

    def save(
        self, step: int, state: State, held_out_loss: float | None, store: Store | None = None
    ) -> None:
        """Start an asynchronous checkpoint; `held_out_loss` is that of the step.

        `store` is the tier, by default that of run.dir. Raises `NonFiniteLoss`, in all processes,
        if a parameter holds a number that is not finite, and `SaveFailed` if the files cannot be
        written or those of the save before could not.
        """
        bad = first_nonfinite(self._count_nonfinite(state["params"]))
        if bad is not None:
            raise self._nonfinite(step, bad)
        saved = canonical(self.layout.storage, state)
        (store or self.store).save(step, saved, held_out_loss)

    def latest_step(self) -> int | None:
        """The newest step of both tiers, or None."""
        steps = [store.latest_step() for store in (self.store, self.local) if store is not None]
        return max((step for step in steps if step is not None), default=None)

    def restore(self, step: int | None) -> State:
        """The state of checkpoint `step` of run.dir, or of the newest of both tiers."""
        abstract = self.layout.abstract()
        wanted, local, saved = canonical_abstract(self.layout.storage, abstract), self.local, None
        wanted["loss_scale"] = self.layout.abstract_loss_scale()
        self.wait_local()
        if step is None and local is not None and self._is_newest(local):
            try:
                saved = local.restore(wanted, local.latest_step())
                self.source = local
            except DamagedCheckpoint as e:
                log.warning("%s; taking the newest of %s", e, self.store.directory)
        if saved is None:
            saved = self.store.restore(wanted, step)
            self.source = self.store
            if local is not None:  # of steps that are not this run's any more
                self.clear_local()
        saved = self._with_own_loss_scale(saved)
        return from_canonical(self.layout.storage, saved, abstract)

    def _with_own_loss_scale(self, saved: State) -> State:
        """A restored state with the loss scale that this run keeps: the saved one, a new one where
        there is none, none where the run computes in another dtype than fp16."""
        rest = {name: part for name, part in saved.items() if name != "loss_scale"}
        if self.layout.scaler is None:
            return rest
        return rest | {"loss_scale": saved.get("loss_scale") or self.layout.start_loss_scale()}

    def clear_local(self) -> None:
        """Remove the local tier's folder, once run.dir holds what counts."""
        self.wait_local()
        if self.local is not None:
            shutil.rmtree(self.local.directory, ignore_errors=True)
            self._local = None

    def wait_local(self) -> str:
        """Return when no local save is under way; why the last one failed, or ""."""
        if self.local is None:
            return ""
        try:
            self.local.wait()
        except SaveFailed as e:
            self.drop_local_failure()
            return plain_reason(e.cause)
        return ""

    def drop_local_failure(self) -> None:
        """Remove what a failed local save left."""
        self.local.remove_remains()
        self.local.forget_steps()

    def _is_newest(self, local: Store) -> bool:
        ours, theirs = local.latest_step(), self.store.latest_step()
        return ours is not None and (theirs is None or ours >= theirs)

    def load_weights(self, source: Source) -> tuple[dict, str]:
        """(stored parameters from the weights of `source`, lines on what was and was not loaded).

        Raises `UserError` for a model that differs in more than `checkpoint.init_changes`.
        """
        storage = self.layout.storage
        changes = self.cfg.checkpoint.init_changes
        found = fit(source, self.cfg.model, changes, self.cfg.run.seed)
        source.check()
        stored = self.layout.abstract()["params"]
        params = arrays(found.source, canonical_abstract(storage, stored))
        if not found.is_whole:
            params = found.complete(params, canonical(storage, self.layout.draw()))
        return from_canonical(storage, params, stored), found.summary()

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
