"""Checkpoints of the train state: one folder per step, written by orbax in the background.

A checkpoint holds the sharded state and a JSON record of what made it: resolved config, step,
consumed samples, versions. Invariants: a folder named by a step is complete, because orbax writes
to a temporary name and renames last, so `kill -9` at any moment leaves the previous checkpoint the
newest; arrays are stored whole, in parameter space, so any mesh can restore them; a checkpoint of
another architecture, optimizer state or sample position is refused before an array is read.
Layout after Megatron's `torch_dist` in its model-space form, on orbax's CheckpointManager.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

import mjax
from mjax.config.pattern import stacks_of
from mjax.config.schema import Config, ModelConfig
from mjax.errors import UserError
from mjax.models.buffers import buffer_keys
from mjax.optim.schedule import consumed_samples

log = logging.getLogger(__name__)

WEIGHTS = "weights"  # meta["contents"] of a checkpoint without optimizer state (weights.py)
CHUNK = 64 * 2**20  # bytes; parameters can then be read in parts without reading much more
STATE_VERSION = 2  # of the tree that is saved, see `_read_state`

# Model fields that leave the trained function as it is: a resumed run may change them.
NOT_ARCHITECTURE = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "initializer_range",
        "model_type",
        "router_aux_loss_coef",
        "scaled_output_init",
    }
)


class Store:
    """The checkpoints in `directory`, which is created by the first save and not before."""

    def __init__(
        self,
        directory: str | Path,
        cfg: Config,
        *,
        keep: int,
        keep_every: int | None,
        async_save: bool,
    ) -> None:
        """Keep the newest `keep` checkpoints and all whose step `keep_every` divides."""
        self.directory = Path(directory).absolute()
        self.cfg = cfg
        self._policies = [LatestN(keep), *([EveryNSteps(keep_every)] if keep_every else [])]
        self._async = async_save
        self._current: int | None = None  # the step this process last saved or restored
        self._writing = False

    def save(self, step: int, state: dict) -> None:
        """Copy `state` to the host and write it; with `async_save` the writing goes on behind.

        Waits for the previous save first, and raises `UserError` if that one failed. The arrays of
        `state` may be donated as soon as this returns.
        """
        if step == self._current:
            return
        self.wait()
        self._prepare()  # first: all processes must find the folder, or none
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise UserError(
                f"{self.directory} already holds a checkpoint of step {latest}, so step {step} "
                "cannot be added; set another run.dir, or checkpoint.resume=never to start over"
            )
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state, _save_args(state, self.cfg.model.layer_kinds)),
            meta=ocp.args.JsonSave(self._meta(step)),
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as e:
            raise self._failed(e) from e
        self._current = step
        if not self._async:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way; raises `UserError` if the last one failed."""
        if "_manager" not in self.__dict__:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._failed(e) from e

    def latest_step(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return self._manager.latest_step() if self.directory.is_dir() else None

    def restore(self, abstract_state: dict, step: int | None = None) -> dict:
        """The state of `step`, laid out as `abstract_state` (shapes, dtypes, shardings) says.

        Without `step`: the newest readable checkpoint; unreadable newer ones are renamed to
        `damaged-STEP`, with a warning. Raises `UserError` where there is none, or where it belongs
        to another architecture, optimizer or sample position.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True) if self.directory.is_dir() else []
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise UserError(f"no {wanted} in {self.directory} (steps there: {steps[::-1]})")
        damaged: list[int] = []
        for candidate in steps if step is None else [step]:
            try:
                meta = self._read_meta(candidate)
                self._check(meta, candidate)
                state = self._read_state(candidate, meta, abstract_state)
            except UserError:
                raise
            except Exception as e:  # orbax reports damage through many types
                log.warning("checkpoint %s/%d is unreadable: %s", self.directory, candidate, e)
                damaged.append(candidate)
                error = e
                continue
            self._rename_damaged(damaged)
            self._current = candidate
            return state
        raise UserError(
            f"no readable checkpoint in {self.directory} (tried steps {damaged}; last error: "
            f"{error}); repair it, or start over with checkpoint.resume=never"
        ) from error

    def read_meta(self, step: int | None = None) -> dict:
        """The JSON record of `step` (default: the newest): config, step, versions."""
        step = self.latest_step() if step is None else step
        if step is None:
            raise UserError(f"no checkpoint in {self.directory}")
        return self._read_meta(step)

    def set_aside(self) -> Path | None:
        """Rename the folder to a free `NAME.old-N`, so that a run can start over; None if empty."""
        if self.latest_step() is None:
            return None
        self.wait()
        n = 1
        while (target := self.directory.with_name(f"{self.directory.name}.old-{n}")).exists():
            n += 1
        _synchronize("mjax_set_aside_name")  # all have chosen the name before it is taken
        if jax.process_index() == 0:
            self.directory.rename(target)
        _synchronize("mjax_set_aside")
        del self._manager
        return target

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(self._policies),
            enable_async_checkpointing=self._async,
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def _prepare(self) -> None:
        """Before the first save: the folder is writable and holds no torso of a killed save."""
        if self._writing:
            return
        if jax.process_index() == 0:
            ensure_writable(self.directory)
            for torso in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(torso, ignore_errors=True)
        _synchronize("mjax_prepare_checkpoints")
        self._writing = True

    def _meta(self, step: int) -> dict:
        return {
            "config": self.cfg.model_dump(mode="json"),
            "state_version": STATE_VERSION,
            "step": step,
            "consumed_samples": consumed_samples(self.cfg.train, step),
            "versions": {"mjax": mjax.__version__, "jax": jax.__version__},
        }

    def _read_meta(self, step: int) -> dict:
        items = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=items)["meta"]

    def _read_state(self, step: int, meta: dict, abstract_state: dict) -> dict:
        """The state of a step. Version 1 had buffers beside the parameters, under their names."""
        wanted, buffers = dict(abstract_state), []
        if meta.get("state_version", 1) < STATE_VERSION:
            buffers = list(wanted.get("buffers", {}))
            wanted |= wanted.pop("buffers", {})
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        state = self._manager.restore(step, args=items)["state"]
        if buffers:
            state["buffers"] = {name: state.pop(name) for name in buffers}
        return state

    def _check(self, meta: dict, step: int) -> None:
        """Raise `UserError` unless this run's config continues the one that saved `meta`."""
        if meta.get("contents") == WEIGHTS:
            raise UserError(
                f"checkpoint {self.directory / str(step)} holds weights only; start from them in "
                f"another run.dir with checkpoint.init_from={self.directory}"
            )
        model = [f for f in ModelConfig.model_fields if f not in NOT_ARCHITECTURE]
        roles = ["muon_roles"] if self.cfg.optimizer.name == "muon" else []
        optimizer = ["name", "args", "mu_dtype", "nu_dtype", *roles]
        saved, current = meta["config"], self.cfg.model_dump(mode="json")
        keys = [f"model.{name}" for name in model]
        keys += [f"optimizer.{name}" for name in optimizer]
        keys += ["precision.params", "train.freeze", *buffer_keys(saved), *buffer_keys(current)]
        for key in keys:
            group, name = key.split(".")
            was, ours = saved[group].get(name, _default(group, name)), current[group][name]
            if was != ours:
                raise UserError(
                    f"checkpoint {self.directory / str(step)} has {key}={was!r} but this run has "
                    f"{key}={ours!r}; set it back to {was!r} or choose another run.dir"
                )
        was, ours = meta["consumed_samples"], consumed_samples(self.cfg.train, step)
        if was != ours:
            raise UserError(
                f"checkpoint {self.directory / str(step)} has consumed {was} samples, but with "
                f"this run's train.global_batch_size and train.rampup_batch_size step {step} is "
                f"sample {ours}; set them back (saved: "
                f"{meta['config']['train']['global_batch_size']}, "
                f"{meta['config']['train']['rampup_batch_size']}) or choose another run.dir"
            )

    def _rename_damaged(self, steps: list[int]) -> None:
        """Out of orbax's sight, or retention would count them and a later save collide."""
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.directory / f"damaged-{step}"
                shutil.rmtree(target, ignore_errors=True)
                (self.directory / str(step)).rename(target)
        _synchronize("mjax_rename_damaged")
        self._manager.reload()

    def _failed(self, error: Exception) -> UserError:
        self._current = None
        return UserError(
            f"writing a checkpoint in {self.directory} failed: {error}; free space or mend the "
            f"folder, then start again: the run resumes from its newest complete checkpoint"
        )


def ensure_writable(directory: str | Path) -> Path:
    """Create `directory` and prove that files can be made in it; raises `UserError`."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise UserError(
            f"cannot write in folder {path}: {e.strerror}; set run.dir to a folder you may write"
        ) from None
    return path


def require_same_model(cfg: ModelConfig, of_weights: ModelConfig) -> None:
    """Raise `UserError` unless weights of the model `of_weights` mean the same in `cfg`."""
    for name in ModelConfig.model_fields:
        ours, theirs = getattr(cfg, name), getattr(of_weights, name)
        if ours != theirs and name not in NOT_ARCHITECTURE:
            raise UserError(
                f"the weights to start from are of a model with {name}={theirs!r}, but this run "
                f"has model.{name}={ours!r}; set it to {theirs!r}"
            )


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block ends well, and else is taken away.

    Raises `UserError` where `folder` already holds something or cannot be written.
    """
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give another folder, or remove it")
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(folder)
    except OSError as e:
        raise UserError(f"cannot write folder {folder}: {e.strerror}; free or mend it") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save_args(state: dict, kinds: Sequence[str]) -> dict:
    """Chunks of at most `CHUNK` bytes; those of a large stack hold one layer.

    `kinds` are those of the model's layers.
    """
    stacks = stacks_of(kinds)

    def one(path: tuple, leaf: jax.Array) -> ocp.SaveArgs:
        stacked = any(getattr(key, "key", None) in stacks for key in path)
        layers = (0,) if stacked and leaf.nbytes > CHUNK else ()
        return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=layers)

    return jax.tree_util.tree_map_with_path(one, state)


def _default(group: str, name: str) -> object:
    """Default of a config key, for checkpoints older than the key."""
    return Config.model_fields[group].annotation.model_fields[name].get_default()


def _synchronize(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
