"""Agreement of processes: one acts for all, or each hears what all have to say.

Invariant: if an action for all fails, all raise the same error, and no process waits for the one
that gave up.
"""

import itertools
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.errors import NonFiniteLoss, ReplicasDiffer, UserError

log = logging.getLogger(__name__)

LONGEST_MEETING = 10  # seconds that a process waits at its end for others, of which none may come
_A_DAY = 24 * 3600 * 1000  # ms; the watchdog and JAX's heartbeat end what waits in vain
_said: dict[str, Iterator[int]] = defaultdict(itertools.count)  # rounds so far, by topic


class HelperFailed(RuntimeError):
    """A method that all processes ran raised a fault of the program, its cause."""


def on_process_0(action: Callable[[], object], helper: object = None) -> None:
    """Run `action` on process 0; what it raises ends all. Every process must call.

    The others meanwhile run the methods of their `helper` that `action` names by `run_by_all`. So
    all launch the same programs in one order.
    """
    word = "", None
    if jax.process_index() == 0:
        try:
            action()
        except UserError as e:
            if jax.process_count() == 1:
                raise
            word = "", str(e)
        except BaseException as e:
            said_by_all(pickle.dumps(("", f"process 0 failed: {type(e).__name__}: {e}")))
            raise
        said_by_all(pickle.dumps(word))
    while jax.process_index() > 0 and (word := pickle.loads(said_by_all(b"")[0]))[0]:
        method, given = word
        try:
            getattr(helper, method)(*given)
        except Exception as e:  # process 0 has it, too, and decides
            log.info("%s: %s", method, e)
    if word[1] is not None:
        raise UserError(word[1])


def run_by_all(helper: object, method: str, *given: Any) -> Any:
    """The result of `helper.method(*given)`, which all run; process 0 calls it in its action.

    `UserError`s and errors of devices pass; `HelperFailed` is for what else the method raises.
    """
    said_by_all(pickle.dumps((method, given)))
    try:
        return getattr(helper, method)(*given)
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as e:
        raise HelperFailed(f"{method}: {type(e).__name__}: {e}") from e


def same_for_all(attempt: Callable[[], Any]) -> Any:
    """The result of `attempt`; all raise the first `UserError` of any. Every process must call."""
    made, fault = None, b""
    try:
        made = attempt()
    except UserError as e:
        fault = str(e).encode()
    for said in filter(None, said_by_all(fault)):
        raise UserError(said.decode())
    return made


def wait_for_every_process(name: str) -> None:
    """Return when every process has called with this name."""
    said_by_all(b"", name)


@contextmanager
def ends_with_others() -> Iterator[None]:
    """A block that the processes of a run leave together, in good order or with what all know.

    The first one to end closes connections from which others may still read. So they meet through
    JAX's coordination service, which needs no device, and leave it. One that ends alone goes on
    after a while.
    """
    try:
        yield
    except (UserError, NonFiniteLoss, ReplicasDiffer):
        _meet()
        raise
    _meet()


def _meet() -> None:
    """Wait until every process has come here, or for `LONGEST_MEETING` seconds."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost

    everyone = set(range(jax.process_count()))
    with suppress(RuntimeError):  # another one has died, or does not come
        multihost.sync_global_processes("mjax_end", timeout=LONGEST_MEETING, processes=everyone)
        jax.distributed.shutdown()  # or the service, which ends with process 0, kills the others


def said_by_all(word: bytes, topic: str = "") -> list[bytes]:
    """The words of all processes, in their order; every process must call.

    It goes through JAX's coordination service, so nothing waits for what devices are doing. Words
    go up a binary tree to process 0, which says them all: three reads a process at most. Threads
    that may call at the same time have topics of their own.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [word]
    service, number = distributed.global_state.client, next(_said[topic])
    rounds, words = f"mjax/said/{topic}", {me: word}

    def read(process: int) -> dict[int, bytes]:
        name = f"{rounds}/{number}/{process}"
        return pickle.loads(service.blocking_key_value_get_bytes(name, _A_DAY))

    for below in range(2 * me + 1, min(2 * me + 3, count)):
        words |= read(below)
    service.key_value_set_bytes(f"{rounds}/{number}/{me}", pickle.dumps(words))
    if me > 0:
        words = read(0)
    elif number:  # whoever speaks now has read all of the round before
        service.key_value_delete(f"{rounds}/{number - 1}")
    return [words[process] for process in range(count)]


def largest_of_all(value: int, devices: Iterable[jax.Device]) -> jax.Array | int:
    """The largest `value` of all processes, int32 []; every process must call.

    It is exchanged on `devices`, the same number of each process. They run nothing but what one
    thread launches, so in all processes in one order.
    """
    if jax.process_count() == 1:
        return value
    mesh = Mesh(list(devices), ("all",))
    return _largest(mesh)(_rows(mesh, np.full(1, value, np.int32)))


def values_of_all(values: np.ndarray, devices: Iterable[jax.Device]) -> jax.Array | np.ndarray:
    """[processes, n] from each process's `values` [n] of one dtype, as `largest_of_all`."""
    if jax.process_count() == 1:
        return values[None]
    mesh = Mesh(list(devices), ("all",))
    return _gathered(mesh)(_rows(mesh, values[None]))


def _rows(mesh: Mesh, row: np.ndarray) -> jax.Array:
    """[devices, ..]: each process's `row` [1, ..] on its devices."""
    shards = [jax.device_put(row, device) for device in mesh.local_devices]
    sharding = NamedSharding(mesh, P("all"))
    shape = (mesh.size, *row.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@lru_cache(maxsize=1)
def _largest(mesh: Mesh):
    return jax.jit(lambda values: values.max(), out_shardings=NamedSharding(mesh, P()))


@lru_cache(maxsize=1)
def _gathered(mesh: Mesh):
    owners = [device.process_index for device in mesh.devices.flat]
    firsts = np.array([owners.index(process) for process in sorted(set(owners))])
    return jax.jit(lambda rows: rows[firsts], out_shardings=NamedSharding(mesh, P()))
