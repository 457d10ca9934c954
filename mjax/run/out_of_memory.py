"""A run that is out of memory: a table of what held it, and one line with the ways out.

The table has the arrays of the state by name, those of a batch, what else is alive, and the
compiler's temporaries, beside what the plan expected (`plan/memory.py`). Invariant: nothing here
hides the error; a part that cannot be found out is left out.
"""

import contextlib
import math
from collections.abc import Iterator

import jax

from mjax.errors import UserError, first_line
from mjax.optim.build import moment_trees
from mjax.plan.memory import bytes_per_device, ways_to_save
from mjax.run.monitor.log_writer import warn
from mjax.run.monitor.profile import save_memory_profile
from mjax.train.trainer import Trainer

MOST_ARRAYS = 6  # named in each part of the table


class OutOfMemory(UserError):
    """Some device had no memory for an array."""


@contextlib.contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """Raise errors for want of memory as `OutOfMemory`, after a table of what held it."""
    owner = " of the trainer" if trainer.role_devices else ""
    try:
        with owned_by(owner, "; ".join(ways_to_save(trainer.cfg))):
            yield
    except OutOfMemory:
        say_what_held_memory(trainer)
        raise


@contextlib.contextmanager
def owned_by(owner: str, ways: str) -> Iterator[None]:
    """Raise errors for want of memory as `OutOfMemory` on a device " of the teacher", say."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise OutOfMemory(f"out of memory on a device{owner}: {first_line(e)}; {ways}") from e


def say_what_held_memory(trainer: Trainer) -> None:
    """Print the table, and save jax's own profile of the memory beside it."""
    table: list[tuple[str, str, str]] = [("GB a device", "held", "planned")]
    with contextlib.suppress(Exception):  # it is no worse than none
        table += memory_table(trainer)
    for name, held, planned in table:
        warn(f"{name:<48} {held:>9} {planned:>9}".rstrip())
    if file := save_memory_profile(trainer.store.directory.with_name("out_of_memory")):
        warn(f"memory by allocation: {file} (docs/train/monitoring.md)")


def memory_table(trainer: Trainer) -> list[tuple[str, str, str]]:
    """Rows of (what, GB held, GB that the plan expected), texts; arrays stand under their part."""
    state = trainer.abstract_state()
    moments = moment_trees(state["opt"])
    parts = {"parameters": array_bytes(state["params"]), "optimizer": array_bytes(moments)}
    cfg = trainer.cfg
    batch = trainer.placer.abstract(cfg.train.global_batch_size, cfg.data.seq_length)
    parts["batch"] = array_bytes(batch)
    need = bytes_per_device(cfg, cfg.mesh, trainer.mesh.size, trainer.specs)
    planned = {"parameters": need.pop("masters"), "optimizer": need.pop("moments")}
    planned["temporaries"] = sum(need.values())
    rows = []
    for part, arrays in parts.items():
        rows.append(_table_row(part, sum(arrays.values()), planned.get(part)))
        largest = sorted(arrays, key=arrays.get)[::-1]
        rows += [_table_row(f"  {name}", arrays[name]) for name in largest[:MOST_ARRAYS]]
        rest = [arrays[name] for name in largest[MOST_ARRAYS:]]
        rows += [_table_row(f"  {len(rest)} more", sum(rest))] if rest else []
    rows.append(_table_row("temporaries", temporary_bytes(trainer), planned.get("temporaries")))
    firsts = {"": jax.local_devices()[0]}
    if trainer.role_devices:
        firsts = {", trainer": trainer.mesh.devices.flat[0], ", role": trainer.role_devices[0]}
    for owner, device in firsts.items():
        rows.append(_table_row(f"all that is alive now{owner}", live_bytes(device)))
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            rows.append(_table_row("most that was in use", stats.get("peak_bytes_in_use")))
            rows.append(_table_row("that JAX may use", stats["bytes_limit"]))
    return rows


def _table_row(name: str, held: float | None, planned: float | None = None) -> tuple[str, str, str]:
    texts = ("" if value is None else f"{value / 1e9:.3f}" for value in (held, planned))
    return (name[:48], *texts)


def array_bytes(tree: dict) -> dict[str, int]:
    """The bytes that each array of a tree takes on one device, by its dotted path."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if leaf.sharding.memory_kind == "pinned_host":
            continue
        shard = leaf.sharding.shard_shape(leaf.shape)
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        found[name] = math.prod(shard) * leaf.dtype.itemsize
    return found


def temporary_bytes(trainer: Trainer) -> int | None:
    """The bytes that the compiler sets aside for a step; None where it cannot be asked now.

    A kept program is found again. Several processes do not ask, for one might wait for the others.
    """
    if jax.process_count() > 1:
        return None
    with contextlib.suppress(Exception):  # it may be the compiler that found no room
        return trainer.lower().compile().memory_analysis().temp_size_in_bytes
    return None


def live_bytes(device: jax.Device) -> int:
    """The bytes of all arrays that are alive on a device of this process."""
    total = 0
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # donated meanwhile
            shards = [shard for shard in array.addressable_shards if shard.device == device]
            total += sum(shard.data.nbytes for shard in shards)
    return total
