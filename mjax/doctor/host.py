"""Facts of this host: versions, and free room on disk and in memory. Nothing here needs JAX."""

import os
import platform
import re
import shutil
from contextlib import suppress
from pathlib import Path

import mjax
from mjax.doctor.clashes import Installed, dotted

VERSIONED = "jax jaxlib flax jax-triton jax-cuda13-plugin nvidia-cudnn-cu13 nvidia-nccl-cu13 torch"


def shown_versions(found: Installed) -> dict[str, str]:
    """Versions that a report of a fault should name."""
    versions = {"mjax": mjax.__version__, "Python": platform.python_version()}
    versions |= {name: found.packages[name] for name in VERSIONED.split() if name in found.packages}
    versions["glibc"] = dotted(found.glibc) or "none"
    if found.driver_cuda is not None:
        versions["the driver's CUDA"] = dotted(found.driver_cuda)
    return versions


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    folder = folder.resolve()
    return next(each for each in (folder, *folder.parents) if each.exists())


def problems_of_folder(folder: Path, needed_gb: float) -> list[str]:
    """Return why a run cannot save in this folder."""
    place = existing_folder(folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        return [f"{place} is no folder that can be written to: give run.dir another"]
    free = free_disk_gb(place)
    if free < needed_gb:
        return [f"{place} has {free:.1f} GB free, {needed_gb:.1f} are needed: make room"]
    return []


def free_disk_gb(folder: Path) -> float:
    return shutil.disk_usage(existing_folder(folder)).free / 1e9


def free_memory_gb(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that this host, or its container, can still give."""
    free = [_number_in(proc / "meminfo", r"MemAvailable:\s+(\d+) kB") * 1024]
    with suppress(OSError, ValueError):  # no container, or no limit
        most = int((group / "memory.max").read_text())
        free.append(most - _number_in(group / "memory.stat", r"anon (\d+)"))  # files give way
    return min(free) / 1e9


def _number_in(file: Path, pattern: str) -> int:
    match = re.search(pattern, file.read_text())
    return int(match[1]) if match else 0
