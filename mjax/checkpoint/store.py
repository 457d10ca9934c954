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
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

import mjax
from mjax.checkpoint import orbax_handlers
from mjax.checkpoint.base import digest
from mjax.checkpoint.base.companion_files import (
    SIDE_FILES,
    identify_data,
    identify_text,
    side_files_of_run,
)
from mjax.checkpoint.base.continuation import (
    keeps_buffers,
    require_continuation,
    require_same_arrays,
)
from mjax.checkpoint.base.digest import DamagedCheckpoint, read_digests
from mjax.checkpoint.base.follow_up import FollowUp
from mjax.checkpoint.base.orbax_messages import plain_reason
from mjax.checkpoint.base.retention import SavedStep, retention
from mjax.checkpoint.base.steps import HELD_OUT_LOSS, newest_step
from mjax.config.schema.run import Config
from mjax.errors import UserError, first_line, or_user_error
from mjax.optim.schedule import consumed_samples
from mjax.sharding.processes.agreement import on_process_0, wait_for_every_process

log = logging.getLogger(__name__)

OUTDATED = f"outdated{digest.TEMPORARY}"  # folder of steps that retention has taken away


class SaveFailed(UserError):
    """Step `step` could not be written, because of `cause`.

    is_agreed: every process raises it.
    """

    is_agreed = False

    def __init__(self, step: int, cause: BaseException, line: str) -> None:
        super().__init__(line)
        self.step, self.cause = step, cause


class Store:
    """The checkpoints in `directory`, which is created by the first save and not before."""

    def __init__(
        self,
        directory: str | Path,
        cfg: Config,
        *,
        keep: int,
        keep_every: int | None,
        keep_best: int = 0,
        async_save: bool,
        digests: bool = True,
    ) -> None:
        """Keep the newest `keep` checkpoints, all whose step `keep_every` divides, and the
        `keep_best` of lowest held-out loss.

        Without `digests` none are made and none are checked.
        """
        self.directory = Path(directory).absolute()
        self.cfg = cfg
        self._retention = retention(keep, keep_every, keep_best, self._loss_of)
        self._async = async_save
        self._digests = digests
        if not digests and jax.process_index() == 0:
            log.warning(
                "checkpoint.digests=false: checkpoints in %s are written and read without digests; "
                "damage in their files will be loaded as weights",
                self.directory,
            )
        self.unread: Callable[[], dict[str, bytes]] = dict  # of the weights that a run begins with
        self.follow_up = FollowUp()
        self._losses: dict[int, float | None] = {}  # by step
        self._current: int | None = None  # the step this process last saved or restored
        self._saving: int | None = None  # the step that is being written
        self._last_failed: int | None = None  # the step whose save failed last
        self._removal: threading.Thread | None = None

    def save(
        self,
        step: int,
        state: dict,
        held_out_loss: float | None = None,
        further: dict | None = None,
        critic: dict | None = None,
    ) -> None:
        """Copy `state` to the host and write it; with `async_save` the writing goes on behind.

        `further`: entries of the record beyond those of all runs. `critic`: a critic's state.
        Waits for the previous save first, and raises `SaveFailed` if that one failed. The arrays of
        `state` may be donated as soon as this returns.
        """
        if step == self._current:
            return
        self.wait()
        self._prepare(step)  # first: all processes must find the folder, or none
        try:
            latest = self.latest_step()
        except OSError as e:
            raise self._failed(step, e) from e
        if step == self._last_failed and self.newest() == self.directory / str(step):
            self._current = self._saving = step  # it was complete; what failed came after it
            return
        if latest is not None and step <= latest:
            raise UserError(
                f"{self.directory} already holds a checkpoint of step {latest}, so step {step} "
                "cannot be added; set another run.dir, or checkpoint.resume=never to start over"
            )
        self._losses[step] = held_out_loss
        try:
            record = self._record(step, held_out_loss, further or {})
            self._manager.save(step, args=self._items(state, record, critic), force=True)
        except Exception as e:
            if jax.process_count() == 1:  # several would have to make a new one together
                self.forget_steps()  # the next save might fail of what is left of this one
            raise self._failed(step, e) from e
        self._current = self._saving = step
        if not self._async:
            self.wait()

    def _items(self, state: dict, record: dict, critic: dict | None) -> ocp.args.Composite:
        """Orbax's arguments for writing a step, in the order in which it ends them."""
        critics = {} if critic is None else {orbax_handlers.CRITIC: critic}
        kinds, items = self.cfg.model.layer_kinds, {}
        for name, tree in {**critics, "state": state}.items():
            items[name] = ocp.args.StandardSave(tree, orbax_handlers.save_args(tree, kinds))
        items["meta"] = ocp.args.JsonSave(record)
        if self._side_files:
            items[SIDE_FILES] = orbax_handlers.FilesSave(self._side_files)
        return ocp.args.Composite(**items)

    def wait(self) -> None:
        """Return when no save is under way; raises `SaveFailed` if the last one failed."""
        self._end_save()
        self._end_follow_up(waits=True)
        if self._removal is not None:
            self._removal.join()

    def _end_save(self) -> None:
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._failed(step, e) from e
        self._remove_outdated()
        if jax.process_index() == 0:
            self.follow_up.begin(step)

    def _end_follow_up(self, waits: bool) -> None:
        if (failed := self.follow_up.end(waits)) is not None:
            raise self._failed(*failed) from failed[1]

    def _remove_outdated(self) -> None:
        """Begin to remove the steps that retention has taken away, and remains of failed saves.

        The steps have lost their names by then, so that a removal that ends midway leaves no part
        of a checkpoint that looks like one.
        """
        if jax.process_index() != 0:
            return
        outdated = self.directory / OUTDATED
        try:  # the next save moves steps to a folder of this name again
            outdated.rename(outdated.with_name(f"{time.monotonic_ns()}-{OUTDATED}"))
        except FileNotFoundError:
            pass
        except OSError:  # storage that fails is no reason to fail a save that has ended well
            shutil.rmtree(outdated, ignore_errors=True)
        self._removal = threading.Thread(target=self.remove_remains)
        self._removal.start()

    def forget_steps(self) -> None:
        """Look which steps are on disk when next needed; all processes call it after a failure.

        Retention would else count a step whose save failed.
        """
        manager = self.__dict__.pop("_manager", None)
        if manager is not None:
            # Ends orbax's thread: Python 3.12.1 may wait for ever where garbage holds an ended one
            # that was not joined. It may raise what is known, that the save has failed.
            with contextlib.suppress(Exception):
                manager.close()

    def poll(self) -> None:
        """Raise `SaveFailed` if a save has failed by now; never waits for one under way."""
        if self._saving is not None and not self.is_saving:
            self._end_save()
        self._end_follow_up(waits=False)

    @property
    def is_saving(self) -> bool:
        """Whether the last save that this process began is still being written."""
        return self._saving is not None and self._manager.is_saving_in_progress()

    def latest_step(self) -> int | None:
        """The newest step, one that is being written among them, or None; all processes agree."""
        return self._manager.latest_step() if self.directory.is_dir() else None

    def newest(self) -> Path | None:
        """The newest step on disk that is complete at this moment, though one may be in writing.

        It is for messages: processes may see a shared file system at different moments.
        """
        return newest_step(self.directory)

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
                state = self._read_intact(candidate, abstract_state)
            except DamagedCheckpoint as e:
                if step is not None:
                    raise
                log.warning("%s; trying the step before", e)
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

    def _read_intact(self, step: int, abstract_state: dict) -> dict:
        """The state of `step`, once its files are known to be as they were written.

        Raises `DamagedCheckpoint`, in all processes if in one, and `UserError` where this run does
        not continue it.
        """
        where = self.directory / str(step)
        with _agreed_damage(where):
            digests = read_digests(where) if self._digests else None
            if digests is not None:
                digests.verify("meta/")
            meta = self.read_meta(step)
        require_continuation(self.cfg, meta, where)
        with _agreed_damage(where):
            if digests is not None:
                digests.verify(process=jax.process_index(), processes=jax.process_count())
            elif self._digests:
                require_old(where, meta)
        try:
            with _agreed_damage(where):
                return self._read_state(step, meta, abstract_state)
        except DamagedCheckpoint as e:
            if digests is None:
                raise
            # Never set aside what is as it was written: a device may be full, a file system gone.
            raise UserError(
                f"checkpoint {where} is intact but cannot be loaded: {first_line(e.__cause__ or e)}"
            ) from e

    def set_aside(self, *beside: str) -> Path | None:
        """Rename the folder, and files `beside` it, to free `NAME.old-N`: a run can start over.

        Returns the folder's new path, or None if it holds no step.
        """
        is_empty = self.latest_step() is None
        self.wait()
        names = *beside, *([] if is_empty else [self.directory.name])
        n = 1
        while any(self.directory.with_name(f"{name}.old-{n}").exists() for name in names):
            n += 1
        wait_for_every_process("mjax_set_aside_name")  # all have chosen the name before it is taken
        if jax.process_index() == 0:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    old = self.directory.with_name(name)
                    old.rename(old.with_name(f"{name}.old-{n}"))
        wait_for_every_process("mjax_set_aside")
        self.forget_steps()
        return None if is_empty else self.directory.with_name(f"{self.directory.name}.old-{n}")

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            enable_async_checkpointing=self._async,
            # Else orbax's threads wait for minutes, at exit too, for a folder that was refused.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            todelete_subdir=OUTDATED,
        )
        registry = orbax_handlers.registry(self._digests)
        return ocp.CheckpointManager(self.directory, options=options, handler_registry=registry)

    def remove_remains(self) -> None:
        """Remove remains of killed or failed saves; only for the holder of the folder's lock.

        Remains that cannot be removed now are left to the next time.
        """
        with contextlib.suppress(OSError):
            for torso in list(self.directory.glob(f"*{digest.TEMPORARY}*")):
                shutil.rmtree(torso, ignore_errors=True)

    def apply_retention(self) -> None:
        """Remove the steps that the last save would have removed, had its process lived.

        All processes of the job that holds the folder's lock call it: they read the records of
        steps together. The next save does it, too; this is for when none comes.
        """
        saved = [SavedStep(step) for step in sorted(self._manager.all_steps())]
        stay = self._retention.should_preserve(saved, context=None)
        if jax.process_index() != 0:
            return
        with contextlib.suppress(OSError):
            outdated = self.directory / OUTDATED
            outdated.mkdir(exist_ok=True)
            for (step,), stays in zip(saved, stay, strict=True):
                if not stays:
                    (self.directory / str(step)).rename(outdated / str(step))
        self.remove_remains()

    def _prepare(self, step: int) -> None:
        """The folder is there and can be written."""
        try:
            on_process_0(lambda: ensure_writable(self.directory))
        except UserError as e:
            self._current = None
            failure = SaveFailed(step, e, str(e))
            failure.is_agreed = True
            raise failure from e

    def _loss_of(self, step: int) -> float | None:
        """The held-out loss in the record of a step."""
        if step not in self._losses:
            self._losses[step] = self.read_meta(step).get(HELD_OUT_LOSS)
        return self._losses[step]

    @cached_property
    def _side_files(self) -> dict[str, bytes]:
        return side_files_of_run(self.cfg, self.directory) | self.unread()

    @cached_property
    def _data(self) -> list[dict]:
        return identify_data(self.cfg) if jax.process_index() == 0 else []

    @cached_property
    def _text_digests(self) -> dict[str, str]:
        return identify_text(self.cfg) if jax.process_index() == 0 else {}

    def read_sources(self) -> None:
        """Read what steps keep of other files now, before those files can change."""
        _ = self._side_files, self._data, self._text_digests

    def _record(self, step: int, held_out_loss: float | None, further: dict) -> dict:
        return {
            "config": self.cfg.model_dump(mode="json"),
            "digests": digest.FORMAT if self._digests else None,
            "step": step,
            "consumed_samples": consumed_samples(self.cfg.train, step),
            HELD_OUT_LOSS: held_out_loss,
            "data": self._data,
            "text_digests": self._text_digests,
            "versions": {"mjax": mjax.__version__, "jax": jax.__version__},
            **further,
        }

    def read_meta(self, step: int) -> dict:
        """The JSON record of a step: config, step, versions."""
        items = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=items)["meta"]

    def _read_state(self, step: int, meta: dict, abstract_state: dict) -> dict:
        """Return the state of a step, without a loss scale or buffers that do not fit this run."""
        saved = self._manager.item_metadata(step)["state"]
        shapes = [_shapes_of(state.get("params", {})) for state in (saved, abstract_state)]
        require_same_arrays(self.cfg, meta, self.directory / str(step), *shapes)
        wanted = dict(abstract_state)
        if meta["config"].get("precision", {}).get("compute") != "float16":
            wanted.pop("loss_scale", None)
        keeps = keeps_buffers(self.cfg, meta)
        if not keeps:
            log.warning("step %s is of another FP8 recipe: what it remembers starts anew", step)
            wanted = orbax_handlers.with_buffers(wanted, saved)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        state = self._manager.restore(step, args=items)["state"]
        return state if keeps else {name: state[name] for name in state if name != "buffers"}

    def read_critic(self, step: int, abstract_state: dict) -> dict:
        """The state of the critic that `step` holds, which `restore` has found intact."""
        items = ocp.args.Composite(critic=ocp.args.StandardRestore(abstract_state))
        with _agreed_damage(self.directory / str(step)):
            return self._manager.restore(step, args=items)["critic"]

    def _rename_damaged(self, steps: list[int]) -> None:
        """Out of orbax's sight, or retention would count them and a later save collide."""
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.directory / f"damaged-{step}"
                shutil.rmtree(target, ignore_errors=True)
                (self.directory / str(step)).rename(target)
        wait_for_every_process("mjax_rename_damaged")
        self._manager.reload()

    def _failed(self, step: int, error: Exception) -> SaveFailed:
        self._current, self._last_failed = None, step
        return SaveFailed(
            step,
            error,
            f"writing a checkpoint in {self.directory} failed: {plain_reason(error)}; free space "
            "or mend the folder, then start again: the run resumes from its newest complete "
            "checkpoint",
        )


def _shapes_of(params: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters, or of orbax's record of them, by name."""
    return {name: tuple(array.shape) for name, array in flatten_dict(params, sep=".").items()}


def ensure_writable(directory: str | Path) -> Path:
    """Create `directory` and prove that files can be made in it; raises `UserError`."""
    path = Path(directory)
    with or_user_error(
        f"cannot write in folder {path}: {{reason}}; set run.dir to a folder you may write"
    ):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    return path


def require_old(folder: Path, meta: dict) -> None:
    """Say that the step in `folder` has no digests; raises if its record `meta` says it had."""
    digest.require_never_made(folder, meta)
    if jax.process_index() == 0:
        log.warning("checkpoint %s has no digests: damage in its files would not be found", folder)


@contextlib.contextmanager
def _agreed_damage(folder: Path) -> Iterator[None]:
    """A block that all processes run; if it finds damage in one, all raise `DamagedCheckpoint`.

    Orbax reports damage through many types, so every error but a `UserError` counts.
    """
    error = None
    try:
        yield
    except DamagedCheckpoint as e:
        error = e
    except UserError:
        raise
    except Exception as e:
        error = DamagedCheckpoint(f"checkpoint {folder} is unreadable: {first_line(e)}")
        error.__cause__ = e
    if jax.process_count() > 1:
        found = multihost_utils.process_allgather(np.int32(error is not None))
        if error is None and found.any():
            where = found.argmax()
            error = DamagedCheckpoint(f"checkpoint {folder} is damaged: process {where} found it")
    if error is not None:
        raise error
