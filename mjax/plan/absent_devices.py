"""Devices that are not here: described for the compiler, so that a laptop plans a cluster's run.

If jax's CUDA wheels are installed, described devices are jax's own and programs compile for
them; no GPU and no driver is needed. Elsewhere stand-ins with the same facts take their place: all
but compiling works. Invariant: `as_on` changes what this process believes of its devices and
restores it; nothing can run meanwhile.
"""

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from mjax.errors import UserError
from mjax.kernels.base.chooser import NO_TRITON, Device, believed
from mjax.kernels.base.device_facts import has_triton, on_blackwell, on_hopper, rounded_memory
from mjax.plan.chips import Chip, named_chips

MOST_DEVICES = 16_384

# XLA computes again, and overlaps less, in programs above a limit: on a device 133.1 GB of an
# H200's 150.8 at JAX's fraction of 0.92, of a described one three quarters of its memory. So the
# compiler is told that there is this much more, 172 GB.
TOLD_MEMORY = 1.141

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  dnn_version: "9.28.0" runtime_version: "13.0.0" driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""


class Described(NamedTuple):
    """`count` GPUs of a kind, in nodes of `chip.details.node`."""

    chip: Chip
    count: int


@dataclass(frozen=True)
class StandIn:
    """The facts of a device that programs cannot be compiled for here."""

    id: int
    process_index: int
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


def parse_described(text: str) -> Described:
    """The devices that `--on NAME:COUNT` names. Raises `UserError`."""
    chips = named_chips()
    known = ", ".join(chips)
    match = re.fullmatch(r"([a-z0-9]+):(\d{1,9})", text.strip().lower())
    if match is None:
        raise UserError(f"--on {text}: not of the form NAME:COUNT; say h200:8, or one of {known}")
    if match[1] not in chips:
        raise UserError(f"--on {text}: no GPU called {match[1]} is known; use one of {known}")
    chip, count = chips[match[1]], int(match[2])
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(f"--on {text}: the count must be 1 to {MOST_DEVICES:,}")
    node = chip.details.node
    if count > node and count % node:
        raise UserError(
            f"--on {text}: a node has {node} of them, so more must be a multiple of {node}"
        )
    return Described(chip, count)


def cannot_compile(triton: bool = True) -> str | None:
    """The reason why programs cannot be compiled here for devices that are only described; None:
    they can. `triton`: whether they hold Triton kernels."""
    if jax.__version_info__ < (0, 11):
        return "needs jax >= 0.11 (Python >= 3.12) with its CUDA wheels: pip install 'mjax[cuda13]'"
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        return "needs jax's CUDA wheels, but no GPU: pip install 'mjax[cuda13]'"
    return NO_TRITON if triton and not has_triton() else None


def described_devices(described: Described) -> list:
    """The devices: jax's own where programs can be compiled for them, else stand-ins."""
    chip, count = described
    if cannot_compile() is not None:
        capability = ".".join(map(str, chip.details.capability))
        node = chip.details.node
        return [StandIn(i, i // node, chip.kind, capability) for i in range(count)]
    return compiler_devices(chip, count)


def compiler_devices(chip: Chip, count: int) -> list[jax.Device]:
    """Devices that the compiler takes descriptions of for; processes are nodes."""
    nodes = -(-count // chip.details.node)
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=compiler_target(chip),
        topology=f"1x{nodes}x{count // nodes}",
    )
    return list(described.devices)


def compiler_target(chip: Chip) -> str:
    """XLA's description of a chip."""
    details = chip.details
    return _TARGET.format(
        shared_per_core=details.shared_bytes + 1024,
        cores=details.multiprocessors,
        bandwidth=int(details.memory_gbs * 1e9),
        l2=details.l2_bytes,
        clock=details.clock_ghz,
        memory=int(details.memory * TOLD_MEMORY),
        shared=details.shared_bytes,
        major=details.capability[0],
        minor=details.capability[1],
        kind=chip.kind,
    )


def is_described(devices: Sequence[jax.Device]) -> bool:
    """Whether these devices are not this machine's, nor those of processes it runs with."""
    return isinstance(devices[0], StandIn) or devices[0].client is not jax.devices()[0].client


@contextlib.contextmanager
def as_on(chip: Chip) -> Iterator[None]:
    """Choose kernels, trace and compile as if this process's devices were of this chip."""
    capability = chip.details.capability
    one = StandIn(0, 0, chip.kind, ".".join(map(str, capability)))
    memory = rounded_memory(chip.details.usable)
    chosen_for = Device("gpu", on_hopper(one), has_triton(), on_blackwell(one), memory)
    with believed(chosen_for), compiler_told(capability):
        yield


@contextlib.contextmanager
def compiler_told(capability: tuple[int, int]) -> Iterator[None]:
    """Trace and compile for described devices of this compute capability.

    cuDNN's attention and jax-triton ask a live device for it; here they are told. Shardings in
    pinned host memory, which described devices do not offer, are made anyhow.
    """
    import jax._src.cudnn.fused_attention_stablehlo as fused

    major, minor = capability

    def is_at_least(wanted: str) -> bool:
        return tuple(map(int, wanted.split("."))) <= capability

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fused, "check_compute_capability", is_at_least))
        if has_triton():
            from jax_triton import triton_lib

            calls, told = triton_lib.triton_kernel_call_lib, 10 * major + minor
            stack.enter_context(
                mock.patch.object(calls, "get_compute_capability", lambda device: told)
            )
        stack.enter_context(_host_memory_described())
        yield


class _HostSharding(NamedSharding):
    """In pinned host memory: devices that are only described have no memory kinds to choose from,
    so the class itself says it."""

    memory_kind = property(lambda self: "pinned_host")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _HostSharding)
        return same and (self.mesh, self.spec) == (other.mesh, other.spec)

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, self.memory_kind))


@contextlib.contextmanager
def _host_memory_described() -> Iterator[None]:
    """The compiler understands these shardings; jax's comparison with what it reports back does
    not, so it is left out of programs that have them."""
    from jax._src.interpreters import pxla

    def to_sharding(s: NamedSharding, kind: str) -> NamedSharding:
        made = _HostSharding if kind == "pinned_host" else NamedSharding
        return made(s.mesh, s.spec)

    def unless_on_host(check: Callable, made: object, given: Sequence, *more: object) -> Sequence:
        on_host = any(isinstance(sharding, _HostSharding) for sharding in given)
        return given if on_host else check(made, given, *more)

    names = [f"_maybe_get_and_check_{side}_shardings" for side in ("in", "out")]
    checks = {name: functools.partial(unless_on_host, getattr(pxla, name)) for name in names}
    with (
        mock.patch.multiple(pxla, **checks),
        mock.patch.object(NamedSharding, "with_memory_kind", to_sharding),
    ):
        yield
