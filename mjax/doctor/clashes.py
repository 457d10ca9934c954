"""Known clashes of drivers, CUDA libraries and systems with JAX's wheels, each as one line.

Nothing here starts JAX, which may not start because of them. Sources: JAX's page on installation;
what `jax_plugins` checks and loads (libraries by path from the wheels, their parts by the search
path); NVIDIA's table of drivers for CUDA 12 and 13; the tags of the wheels for glibc.
"""

import ctypes
import glob
import importlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

OLDEST_DRIVERS = {13: 580, 12: 525}  # by CUDA's major version
LIBRARIES = re.compile(r"lib(cudnn|cublas|cusolver|cusparse|nccl)\w*\.so")
OWN_VENV = "give torch a virtual environment of its own"

Version = tuple[int, ...]


@dataclass(frozen=True)
class Installed:
    """Facts of a machine and of its Python that clashes come from.

    - gpus: NVIDIA GPUs that the system shows.
    - plugin: the major version of CUDA that JAX's plugin is for; None: no plugin.
    - driver_cuda: the newest CUDA that the driver runs; None: no driver.
    - glibc, needed_glibc: of the system; of JAX's wheel.
    - cudnn, needed_cudnn: of the wheel; what JAX's plugin was built with.
    - packages: versions of all Python packages, by name.
    - earlier: folders of LD_LIBRARY_PATH that hold a library of CUDA, with its name.
    """

    gpus: int = 0
    plugin: int | None = None
    driver_cuda: Version | None = None
    glibc: Version = ()
    needed_glibc: Version = ()
    cudnn: Version = ()
    needed_cudnn: Version = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, str] = field(default_factory=dict)


def clashes_of(found: Installed) -> Iterator[str]:
    """Yield what keeps JAX from starting, or from the GPUs that are there."""
    if found.glibc and found.glibc < found.needed_glibc:
        needed = f"JAX's wheels need {dotted(found.needed_glibc)}"
        yield f"glibc {dotted(found.glibc)} is too old, {needed}: take a newer system"
    if found.plugin is None and found.gpus:
        yield (
            f"{found.gpus} NVIDIA GPUs are here, but JAX's CUDA plugin is not: pip install "
            "'mjax[cuda13]'"
        )
    if found.plugin is not None:
        yield from _clashes_of_driver(found, found.plugin)
        yield from _clashes_of_libraries(found)


def _clashes_of_driver(found: Installed, plugin: int) -> Iterator[str]:
    mend = f"version {OLDEST_DRIVERS[plugin]} or newer"
    if found.driver_cuda is None and found.gpus:
        yield (
            f"there is no NVIDIA driver (libcuda.so.1 is not found): install {mend}; a container "
            "needs --gpus all"
        )
    elif found.driver_cuda is not None and found.driver_cuda[0] < plugin:
        cuda = dotted(found.driver_cuda)
        yield f"the driver is for CUDA {cuda}, JAX's plugin for CUDA {plugin}: update it to {mend}"


def _clashes_of_libraries(found: Installed) -> Iterator[str]:
    for name in ("cudnn", "nccl"):
        if {f"nvidia-{name}-cu12", f"nvidia-{name}-cu13"} <= found.packages.keys():
            yield (
                f"nvidia-{name}-cu12 and -cu13 are both installed and overwrite each other in "
                f"nvidia/{name}: uninstall both, install mjax[cuda13] again, {OWN_VENV}"
            )
    if found.cudnn and found.cudnn[:2] < found.needed_cudnn[:2]:
        torch = f", or {OWN_VENV}, which pins it" if "torch" in found.packages else ""
        yield (
            f"cuDNN {dotted(found.cudnn)} is older than {dotted(found.needed_cudnn)}, with which "
            f"JAX's plugin was built: pip install -U nvidia-cudnn-cu{found.plugin}{torch}"
        )


def notes_of(found: Installed) -> Iterator[str]:
    """Yield what may be wrong, but need not."""
    for folder, library in found.earlier.items():
        yield (
            f"LD_LIBRARY_PATH has {library} in {folder}, which may replace parts of the wheels' "
            "libraries: unset it if cuDNN or NCCL fails"
        )


def unused_gpus(backend: str) -> str:
    """Return why JAX, which runs on this backend, leaves GPUs idle that are there, or ""."""
    if backend != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""
    found = installed()
    unknown = "JAX runs on the CPU, though GPUs are here: `import jax; jax.devices()` says why"
    return next(clashes_of(found), unknown) if found.gpus else ""


# What libraries say when they meet a clash.
SAID = re.compile(
    r"GLIBC_[\d.]+'? not found|libcuda\.so|CUDNN_STATUS_SUBLIBRARY|Loaded runtime CuDNN|DNN lib"
    r"rary initialization|driver version is insufficient|CUDA_ERROR_(SYSTEM_DRIVER|UNSUPPORTED)"
)


def line_on_error(error: BaseException) -> str:
    """Return a line on the clash that another library's error comes from, or ""."""
    if not SAID.search(str(error)):
        return ""
    found = installed()
    unknown = "libraries or drivers clash; `mjax doctor` and docs/start/install.md say more"
    said = " ".join(str(error).split())[:200]
    return f"{[*clashes_of(found), *notes_of(found), unknown][0]} ({said})"


def installed() -> Installed:
    """Look at this machine and this Python."""
    found = metadata.distributions()
    packages = {each.name.lower(): each.version for each in found if each.name}
    plugin = next((n for n in OLDEST_DRIVERS if f"jax-cuda{n}-plugin" in packages), None)
    return Installed(
        gpus=len(glob.glob("/dev/nvidia[0-9]*")),
        plugin=plugin,
        driver_cuda=_cuda_of_driver(),
        glibc=numbers(platform.libc_ver()[1]),
        needed_glibc=_glibc_of_wheel("jaxlib") if "jaxlib" in packages else (),
        cudnn=numbers(packages.get(f"nvidia-cudnn-cu{plugin}", ""))[:3],
        needed_cudnn=_cudnn_of_plugin(plugin),
        packages=packages,
        earlier=_earlier_libraries(os.environ.get("LD_LIBRARY_PATH", "")),
    )


def _cuda_of_driver() -> Version | None:
    """The newest CUDA that the NVIDIA driver runs; None: no driver."""
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return divmod(number.value // 10, 100)  # 12040: 12.4


def _glibc_of_wheel(package: str) -> Version:
    """The oldest glibc that an installed wheel runs on, by its tags; () if they say none."""
    text = metadata.distribution(package).read_text("WHEEL") or ""
    return min(map(numbers, re.findall(r"manylinux_(\d+_\d+)", text)), default=())


def _cudnn_of_plugin(plugin: int | None) -> Version:
    """The cuDNN that JAX's plugin was built with; () where it does not say."""
    try:
        versions = importlib.import_module(f"jax_cuda{plugin}_plugin._versions")
        number = versions.cudnn_build_version()  # 91200: 9.12.0
    except (ImportError, AttributeError):
        return ()
    return number // 10000, number // 100 % 100, number % 100


def _earlier_libraries(path: str) -> dict[str, str]:
    """The folders of a search path that hold libraries of CUDA, with one of each."""
    folders = [folder for folder in path.split(":") if os.path.isdir(folder)]
    found = {folder: sorted(filter(LIBRARIES.match, os.listdir(folder))) for folder in folders}
    return {folder: names[0] for folder, names in found.items() if names}


def numbers(version: str) -> Version:
    """A version's numbers: "9.28.1.4" is (9, 28, 1, 4)."""
    return tuple(map(int, re.findall(r"\d+", version)))


def dotted(version: Version) -> str:
    return ".".join(map(str, version))
