"""Eight fake CPU devices for every test, except on a GPU (`pytest tests/gpu`).

JAX reads these variables when it starts, so they are set before anything imports it; pytest-xdist's
workers inherit them. There is no compile cache between runs: programs of several CPU devices that
XLA (jax 0.10 to 0.11) loads from one may run independent collectives out of order. Processes that a
test starts (`tests/processes.py`) end with it.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from mjax.sharding.processes.fake_devices import fake_devices
from tests.processes import end_processes, end_processes_if_terminated
from tests.programs import keep_programs

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt what they start

on_gpu = os.environ.setdefault(
    "MJAX_TEST_GPU", str(int(any("tests/gpu" in arg for arg in sys.argv)))
)
if on_gpu == "0":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fake_devices(8)}".strip()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of torch and numpy would wait in loops
else:
    # Workers of pytest-xdist, and what tests/gpu/test_processes.py starts, share a GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.35"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # XLA times its own matmuls in dozens of variants, which takes most of the time to compile.
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

collect_ignore = [] if on_gpu == "1" else ["gpu"]
if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore.append("oracle")  # needs the extra `oracle`


if on_gpu == "0":
    keep_programs()
gc.set_threshold(20_000, 10, 10)  # tracing makes many small objects: a tenth less time

AOT = Path(__file__).parent / "aot"
EVERY, OFTEN = 8, 4  # of so many cases of a grid, README's command and .ci/run run one


def pytest_configure() -> None:
    end_processes_if_terminated()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long slow, and slow cases exhaustive where others of their test stay.

    Where all cases are slow, those stay that `tests/marks.py::quick` names, or the first one.
    Programs for H200s take long; of grids one case of eight is not slow, and one of four is not
    exhaustive.
    """
    cases: dict[str, list[pytest.Item]] = {}
    of_grids: Counter[str] = Counter()
    often: set[pytest.Item] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, []).append(item)
        if item.get_closest_marker("grid"):
            of_grids[test] += 1
            if of_grids[test] % EVERY != 1:
                item.add_marker(pytest.mark.slow)
            if of_grids[test] % OFTEN == 1:
                often.add(item)
        if AOT in item.path.parents or item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
    for of_test in cases.values():
        slow_ones = [item for item in of_test if item.get_closest_marker("slow")]
        staying: list[pytest.Item] = []
        if len(slow_ones) == len(of_test):
            staying = [item for item in of_test if item.get_closest_marker("chosen")] or of_test[:1]
        for item in slow_ones:
            if item not in often and item not in staying:
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """No collection of garbage looks at the thousands of items again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ended_processes():
    """No process that a test has started outlives it."""
    yield
    end_processes()
