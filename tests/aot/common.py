"""Compile training steps for H200s on a machine without a GPU, and read what came out.

Needs the CUDA wheels of jax (extra cuda13), no driver: the plugin's compiler takes a description of
the target. cuDNN attention asks a live device for its compute capability; here it is told. XLA
computes again, and overlaps less, in programs above a limit: on a device 133.1 GB of an H200's 150
at JAX's fraction of 0.92, of a described one three quarters of its memory. Hence 172 GB.
"""

import contextlib
import importlib.metadata
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from mjax.config import load
from mjax.config.mesh_rules import AXES, mesh_sizes
from mjax.train import Trainer

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 172000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  dnn_version: "9.28.0" runtime_version: "13.0.0" driver_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def missing() -> str | None:
    """Why programs for H200 cannot be compiled here, or None."""
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        return "needs the extra cuda13 (jax with its CUDA wheels); no GPU is needed"
    return None if jax.__version_info__ >= (0, 11) else "needs jax >= 0.11"


@dataclass(frozen=True)
class Compiled:
    """A compiled train step: HLO text and bytes per device; `host`: temporaries pinned there."""

    text: str
    arguments: int
    temp: int
    aliased: int
    host: int
    host_arguments: int
    host_aliased: int

    def calls(self, target: str) -> int:
        return len(re.findall(rf'custom_call_target="{re.escape(target)}"', self.text))

    def exposed_in_loops(self) -> list[str]:
        """Collectives in the bodies of loops during which the schedule runs no matmul: 'op type'.

        Synchronous ones count too.
        """
        return sorted(line for body in self.loops() for line in _exposed(body.splitlines()))

    def loops(self) -> list[str]:
        """Bodies of loops: computations named as some while's body."""
        names = set(re.findall(r"body=%?([\w.\-]+)", self.text))
        found = (re.search(rf"^%?{re.escape(n)} .*?^}}", self.text, re.M | re.S) for n in names)
        return [body[0] for body in found if body]

    def exposed_outside_loops(self) -> list[str]:
        """The same for the program itself."""
        return sorted(_exposed(self.text[self.text.index("\nENTRY") :].splitlines()))


_COLLECTIVE = re.compile(
    r"%?([\w.\-]+) = (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)"
    r"(-start|-done)?\((.*)"
)
_MATMUL = re.compile(r"cublas|gemm|__cudnn|triton|\bdot\(|calls=%?\w*dot", re.I)


def _exposed(lines: list[str]) -> list[str]:
    started: dict[str, tuple[int, str]] = {}
    out = []
    for at, line in enumerate(lines):
        if not (m := _COLLECTIVE.search(line)):
            continue
        name, kind, op, phase, operands = m.groups()
        shape = re.search(r"\w+\[[\d,]*\]", kind)
        label = f"{op} {shape[0] if shape else ''}"
        if phase == "-start":
            started[name] = at, label
        elif phase is None:
            out.append(label)
        else:
            begin, label = started[re.search(r"%?([\w.\-]+)\)", operands)[1]]
            if not any(_MATMUL.search(between) for between in lines[begin + 1 : at]):
                out.append(label)
    return out


class HostSharding(NamedSharding):
    """In pinned host memory: devices that are only described have no memory kinds to choose from,
    so the class itself says it."""

    memory_kind = property(lambda self: "pinned_host")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, HostSharding)
        return same and (self.mesh, self.spec) == (other.mesh, other.spec)

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, self.memory_kind))


@contextlib.contextmanager
def _host_memory_described() -> Iterator[None]:
    """The compiler understands these shardings; jax's comparison with what it reports back does
    not, so it is left out. Nothing can run meanwhile."""
    from jax._src.interpreters import pxla

    def to_sharding(s: NamedSharding, kind: str) -> NamedSharding:
        made = HostSharding if kind == "pinned_host" else NamedSharding
        return made(s.mesh, s.spec)

    checks = "_maybe_get_and_check_in_shardings", "_maybe_get_and_check_out_shardings"
    with pytest.MonkeyPatch.context() as patch:
        for check in checks:
            patch.setattr(pxla, check, lambda made, given, *rest: given)
        patch.setattr(NamedSharding, "with_memory_kind", to_sharding)
        yield


def compile_step(
    path: str, *overrides: str, batch_size: int | None = None, xla: dict | None = None
) -> Compiled:
    """The train step of a config, compiled for as many H200s as its mesh names (dp: 1), with
    options `xla` besides the usual."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    fused.check_compute_capability = lambda wanted: wanted <= "9.0"
    cfg = load(path, ["train.attention=cudnn", *overrides])
    n = math.prod(getattr(cfg.mesh, axis) for axis in AXES if axis != "dp" or cfg.mesh.dp != "auto")
    sizes = mesh_sizes(cfg.mesh, n)
    described = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology=f"1x1x{max(n, 1)}"
    )
    grid = np.array(described.devices[:n]).reshape([sizes[a] for a in AXES])
    trainer = Trainer(cfg, Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))
    trainer.bound_documents(1)
    trainer.recompile(xla or {})
    with _host_memory_described():
        made = trainer.lower(batch_size).compile()
    memory = made.memory_analysis()
    return Compiled(
        made.as_text(),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        memory.host_argument_size_in_bytes,
        memory.host_alias_size_in_bytes,
    )
