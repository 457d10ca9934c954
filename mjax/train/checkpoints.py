"""The checkpoints of a trainer: its state as any mesh can read it, and weights to start from.

A run with adapters saves what it trains. Its base is read again from where the run starts, and is
compared with the digest that each step records.

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
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.digest import DamagedCheckpoint
from mjax.checkpoint.base.hub import model_folder, pinned
from mjax.checkpoint.base.source import Source, arrays
from mjax.checkpoint.base.steps import newest_step, run_of
from mjax.checkpoint.local.folder import claim, local_folder
from mjax.checkpoint.local.node_store import NodeStore
from mjax.checkpoint.orbax_handlers import CRITIC
from mjax.checkpoint.store import SaveFailed, Store
from mjax.config.schema.run import Config
from mjax.errors import NonFiniteLoss, UserError
from mjax.interop.adapted_source import read_starting_arrays
from mjax.interop.adapters_of_run import joined_trees, without_adapters
from mjax.interop.after_save import follow_up, mirror_of
from mjax.interop.base_of_adapters import outside_nf4, read_nf4, whole_base, with_adapters
from mjax.interop.huggingface.whisper import whisper_source
from mjax.interop.partial_load import Fit, fit
from mjax.interop.sources import described_on_hub, source_of
from mjax.objectives.objective import OWN_WEIGHTS
from mjax.pipeline.storage import canonical, canonical_abstract, from_canonical
from mjax.sharding.processes.agreement import on_process_0
from mjax.sharding.spec import frozen_only, trained_only
from mjax.train.base_digest import digest_of_arrays
from mjax.train.finite import first_nonfinite, nonfinite_counts
from mjax.train.state import StateLayout
from mjax.train.step import State

log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """Saves and restores states of this layout, in run.dir/checkpoints.

    source: the tier of the state that was restored last.
    base: the digest of the weights that adapters belong to.
    batches_at: returns what the checkpoint of a step records of a run's batches, as JSON.
    critic: returns the state of a critic that a step holds, too, as its own trainer stores it.
    """

    cfg: Config
    layout: StateLayout
    source: Store | NodeStore | None = None
    base: str = ""
    batches_at: Callable[[int], dict] | None = None
    critic: Callable[[], State] | None = None

    @cached_property
    def store(self) -> Store:
        names = {"keep", "keep_every", "keep_best", "async_save", "digests"}
        options = self.cfg.checkpoint.model_dump(include=names)
        store = Store(Path(self.cfg.run.dir) / "checkpoints", self.cfg, **options)
        store.follow_up.action = follow_up(self.cfg)
        return store

    def fetch_mirror(self) -> None:
        """Copy the newest step of `checkpoint.mirror` to run.dir, where that has none as new."""
        mirror, starts_over = mirror_of(self.cfg), self.cfg.checkpoint.resume == "never"
        if mirror is not None:
            on_process_0(mirror.require_empty if starts_over else mirror.pull)
            self.store.forget_steps()

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
        saved = self.stored(step, state)
        critic = None if self.critic is None else self.critic()
        self.store.save(step, saved, held_out_loss, self._further_records(step), critic)

    def stored(self, step: int, state: State) -> State:
        """A state as checkpoints hold it, for any mesh. Raises `NonFiniteLoss` as `save` does."""
        self._require_finite(step, state)
        return canonical(self.layout.storage, self._saved(state))

    def save_local(self, step: int, state: State) -> None:
        """Start to save a step in the local tier. Raises `NonFiniteLoss` as `save` does."""
        self._require_finite(step, state)
        self.local.save(step, self._saved(state), self._further_records(step))

    def _further_records(self, step: int) -> dict:
        """Entries of the record of a step: the run's batches, and the base of its adapters."""
        records = {"batches": {} if self.batches_at is None else self.batches_at(step)}
        if self.cfg.lora.rank:
            records["base"] = {"from": pinned(self.cfg.checkpoint.init_from), "digest": self.base}
        return records

    def _saved(self, state: State) -> State:
        """The part of a state that checkpoints hold."""
        if not self.cfg.lora.rank:
            return state
        return state | {"params": trained_only(state["params"], self.layout.placement.specs)}

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
        abstract = self._saved(self.layout.abstract())
        if step is None and self.local is not None and (state := self._restore_local(abstract)):
            return self._with_base(state)
        wanted = canonical_abstract(self.layout.storage, abstract)
        wanted["loss_scale"] = self.layout.abstract_loss_scale()
        saved = self.store.restore(wanted, step)
        self.source = self.store
        self.clear_local()  # its steps are not this run's any more
        saved = self._with_own_loss_scale(saved)
        kept = {name: abstract[name] for name in saved}
        state = self._with_base(from_canonical(self.layout.storage, saved, kept))
        if "buffers" not in state:
            state |= self.layout.start_buffers(state["params"], abstract.get("buffers", {}))
        return state

    def restore_critic(self, store: Store, step: int) -> State:
        """The state of the critic that `step` in a policy's `store` holds, as far as `stored`."""
        if not (where := store.directory / str(step) / CRITIC).is_dir():
            raise UserError(
                f"checkpoint {where.parent} holds no critic, so reinforce.loss_type=ppo cannot go "
                "on from it; set loss_type back, or choose another run.dir"
            )
        abstract = self._saved(self.layout.abstract())
        saved = store.read_critic(step, canonical_abstract(self.layout.storage, abstract))
        return from_canonical(self.layout.storage, saved, abstract)

    def _with_base(self, state: State) -> State:
        """A restored state with the weights that its adapters belong to."""
        if not self.cfg.lora.rank:
            return state
        sources = self.start_sources()
        base = self.load_weights(*sources.values(), adapts=False)[0] if sources else self.draw()
        record = self.source.read_meta(int(state["step"])).get("base", {})
        if record.get("digest", self.base) != self.base:
            raise UserError(
                f"checkpoint.init_from={self.cfg.checkpoint.init_from}: these are not the weights "
                f"that the adapters in {self.source.directory} were trained on (digest "
                f"{self.base}, wanted {record['digest']}, then from {record['from']}); give that "
                "folder as it was, or start over with checkpoint.resume=never"
            )
        return state | {"params": joined_trees(base, state["params"])}

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

    def start_sources(self) -> dict[str, Source]:
        """The weights that the config starts from, by the folders they are in.

        Raises `UserError` for another model of the hub before its weights are fetched.
        """
        names, sources = self.cfg.checkpoint, {}
        if names.init_from is not None:
            if described := described_on_hub(names.init_from, self.cfg.model):
                self.fitted(described)
            sources[names.init_from] = source_of(names.init_from, self.cfg.model)
        if names.init_audio is not None:
            folder = model_folder(names.init_audio, weights=True)
            sources[names.init_audio] = whisper_source(folder, self.cfg.model)
        return sources

    def fitted(self, source: Source) -> Fit:
        """Fit weights to the model, reading none. Raises `UserError` for those of another one."""
        cfg = self.cfg
        return fit(source, cfg.model, cfg.checkpoint.init_changes, cfg.run.seed)

    def require_start(self) -> None:
        """Raise `UserError` for weights on disk that the run would not start from.

        None is read or fetched. A run that goes on from a checkpoint needs those of adapters alone.
        """
        self.given_adapters()
        run, names = Path(self.cfg.run.dir), self.cfg.checkpoint
        goes_on = names.resume != "never" and newest_step(run) is not None
        folders = [name for name in (names.init_from, names.init_audio) if name is not None]
        is_here = all(run_of(Path(name)).exists() for name in folders)
        if is_here and (self.cfg.lora.rank or not goes_on):
            for source in self.start_sources().values():
                self.fitted(source)

    def start_params(self) -> tuple[dict, str]:
        """(stored parameters at step 0 of a run, lines on where they are from)."""
        sources = self.start_sources()
        if not sources:
            return self.draw(), "starting at step 0"
        params, loaded = self.load_weights(*sources.values())
        return params, f"starting at step 0 from the weights in {' and '.join(sources)}\n{loaded}"

    def draw(self) -> dict:
        """Stored parameters drawn from run.seed."""
        params = self.layout.draw()
        if self.cfg.lora.rank:
            self._note_base(canonical(self.layout.storage, params))
        return params

    def _note_base(self, params: dict) -> None:
        """Note the digest of the base of adapters, of canonical parameters."""
        self.base = digest_of_arrays(frozen_only(params, self.layout.specs))

    def load_weights(self, *sources: Source, adapts: bool = True) -> tuple[dict, str]:
        """Returns (stored parameters, lines on what was and was not loaded from each source).

        A parameter that a source lacks comes from an earlier source, or is drawn. `adapts`: with
        the first adapters of a run that has some. Raises `UserError` for a model that differs in
        more than `checkpoint.init_changes`.
        """
        storage, cfg = self.layout.storage, self.cfg
        stored = self.layout.abstract()["params"]
        wanted = canonical_abstract(storage, stored)
        of_objective = wanted.pop(OWN_WEIGHTS, None)
        of_model = outside_nf4(without_adapters(wanted), self.layout.specs)
        params, lines = None, []
        in_nf4: dict = {}
        fits = [self.fitted(source) for source in sources]  # refused before any is read
        for source, found in zip(sources, fits, strict=True):
            source.check()
            if source.has is None:
                self.store.unread = source.unread
            loaded = arrays(found.source, of_model)
            if found.shared != found.wanted:
                drawn = params or without_adapters(canonical(storage, self.layout.draw()))
                drawn.pop(OWN_WEIGHTS, None)
                others = outside_nf4(drawn, self.layout.specs)
                loaded = found.complete(loaded, others)
            params = loaded
            in_nf4 = read_nf4(found, in_nf4, wanted, self.layout.specs, cfg)
            lines.append(found.summary())
        if self.cfg.lora.rank:
            params, taken = whole_base(params, in_nf4, self.layout.specs, cfg)
            self._note_base(params)
            if adapts:
                params = with_adapters(params, taken, wanted, self.layout.specs, cfg)
            else:
                stored = without_adapters(stored)
        if of_objective is not None:
            shardings = jax.tree.map(lambda a: a.sharding, {OWN_WEIGHTS: of_objective})
            params |= jax.jit(self.layout.own_params, out_shardings=shardings)()
        return from_canonical(storage, params, stored), "\n".join(lines)

    def given_adapters(self) -> dict[tuple[str, ...], np.ndarray]:
        """The arrays in the folder that `lora.init` names, by path; {} if it names none.

        Raises `UserError` where they do not fit those of the run.
        """
        lora = self.cfg.lora
        if not lora.rank or lora.starts_from is None:
            return {}
        declared = flatten_dict(self.layout.specs)
        return read_starting_arrays(lora.starts_from, self.cfg.model, declared)

    def with_given_adapters(self, params: dict) -> dict:
        """Stored parameters with `given_adapters` in their places."""
        given, storage = self.given_adapters(), self.layout.storage
        if not given:
            return params
        whole = flatten_dict(canonical(storage, params))
        for path, array in given.items():
            like = whole[path]
            array = array.astype(like.dtype)
            made = jax.make_array_from_callback(like.shape, like.sharding, array.__getitem__)
            whole[path] = made
        return from_canonical(storage, unflatten_dict(whole), self.layout.abstract()["params"])

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
