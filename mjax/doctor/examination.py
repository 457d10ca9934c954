"""Examination of the machines of a job: speeds, room, and what of it is a problem.

Every process measures its own devices and its own host. Results are gathered, so all know the
same problems, and a job stops in all of its processes with one line.
"""

import json
import socket
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from mjax.doctor import clashes, host, speeds
from mjax.plan.chips import chip_of_kind
from mjax.sharding.processes.agreement import values_of_all

LEAST_OF_MEDIAN = 0.9  # of the median of GPUs of its kind: below it a GPU is slow
LEAST_OF_PEAK = 0.35  # of the data sheet's rate, of which large matmuls reach 0.6 to 0.8
LEAST_OF_LINK = 0.1  # of the data sheet's bandwidth between GPUs of a node
MEMORY_GB = 2.0  # free on a host, or a run ends as it starts
LATE = 120  # seconds after which a line is said
LATE_LINE = f"mjax: doctor: no result in {LATE} s; NCCL_DEBUG=INFO says what it waits for"
MOST_TEXT = 1 << 14  # bytes of the results of a process


@dataclass(frozen=True)
class DeviceSpeed:
    """A device, by its host and number there, and TFLOP/s of a bf16 matmul on it."""

    name: str
    kind: str
    tflops: float


@dataclass(frozen=True)
class Examination:
    """Results of an examination. Problems make the exit code 1; notes do not."""

    versions: dict[str, str]
    devices: list[DeviceSpeed]
    all_reduce_gb_per_s: float | None
    free_disk_gb: float
    free_memory_gb: float
    problems: list[str]
    notes: list[str]

    def summary(self) -> str:
        """Return one line for the log of a run."""
        slowest = min(device.tflops for device in self.devices)
        return (
            f"{len(self.devices)} x {self.devices[0].kind}, the slowest {slowest:g} TFLOP/s, "
            f"all-reduce {self.all_reduce_gb_per_s or '-'} GB/s, {self.free_disk_gb:g} GB free"
        )


def examine_machine(folder: Path, needed_gb: float) -> Examination:
    """Measure for some seconds; every process of a job must call it.

    folder, needed_gb: where a run would save, and how much.
    """
    late = threading.Timer(LATE, print, [LATE_LINE], {"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    found = clashes.installed()
    of_all = gathered(_of_this_process(found, folder, needed_gb))
    devices = [DeviceSpeed(*each) for process in of_all for each in process["devices"]]
    bandwidth = speeds.all_reduce_gb_per_s(jax.devices())
    late.cancel()
    problems = [problem for process in of_all for problem in process["problems"]]
    return Examination(
        versions=host.shown_versions(found),
        devices=devices,
        all_reduce_gb_per_s=bandwidth,
        free_disk_gb=round(host.free_disk_gb(folder), 1),
        free_memory_gb=round(min(process["memory"] for process in of_all), 1),
        problems=[*problems, *slow_devices(devices)],
        notes=[*clashes.notes_of(found), *notes_of_speeds(devices, bandwidth)],
    )


def _of_this_process(found: clashes.Installed, folder: Path, needed_gb: float) -> dict:
    """Results of one process, as JSON can hold them."""
    memory, local = host.free_memory_gb(), jax.local_devices()
    problems = [*clashes.clashes_of(found), *host.problems_of_folder(folder, needed_gb)]
    unused = clashes.unused_gpus(jax.default_backend())
    problems += [unused] if unused not in ("", *problems) else []
    if memory < MEMORY_GB:
        problems.append(f"{memory:.1f} GB of host memory are free, {MEMORY_GB:g} are needed")
    at = f"{socket.gethostname()}: " if jax.process_count() > 1 else ""
    rates = speeds.matmul_tflops(local)
    names = [f"{at}{device.platform.upper()} {device.local_hardware_id}" for device in local]
    return {
        "devices": [*zip(names, [device.device_kind for device in local], rates, strict=True)],
        "problems": [at + problem[:500] for problem in problems[:10]],
        "memory": memory,
    }


def gathered(own: dict) -> list[dict]:
    """Return the results of every process, in their order; every process must call it."""
    if jax.process_count() == 1:
        return [own]
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    row = np.zeros(MOST_TEXT, np.uint8)
    row[: len(text)] = text
    rows = np.asarray(jax.device_get(values_of_all(row, jax.devices())))
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]


def slow_devices(devices: Sequence[DeviceSpeed]) -> Iterator[str]:
    """Yield a problem for each GPU that is slow beside its like, or beside its data sheet."""
    for device in devices:
        if device.kind == "cpu":
            continue
        chip = chip_of_kind(device.kind)
        usual = statistics.median_high(d.tflops for d in devices if d.kind == device.kind)
        said = f"{device.name} ({device.kind}) does {device.tflops:g} TFLOP/s"
        look = "nvidia-smi -q -d PERFORMANCE,POWER says why, or leave it out"
        if device.tflops < LEAST_OF_MEDIAN * usual:
            yield f"{said}, the others {usual:g}: {look}"
        elif chip is not None and device.tflops < LEAST_OF_PEAK * chip.bf16_tflops:
            yield f"{said}, {chip.bf16_tflops:g} by its data sheet: {look}"


def notes_of_speeds(devices: Sequence[DeviceSpeed], bandwidth: float | None) -> Iterator[str]:
    """Yield what need not be a fault: no GPU, a slow link."""
    kind = devices[0].kind
    if kind == "cpu":
        yield "there is no GPU: JAX runs on the CPU, whose speeds are not judged"
    chip = chip_of_kind(kind)
    if bandwidth is None or chip is None or chip.details is None:
        return
    link = chip.details.link_gbs
    if len(devices) <= chip.details.node and bandwidth < LEAST_OF_LINK * link:
        yield (
            f"the all-reduce moves {bandwidth:g} GB/s, links of {kind} up to {link:g}: "
            "nvidia-smi topo -m shows how the GPUs are linked"
        )
