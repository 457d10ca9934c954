"""Compile training steps for H200s on a machine without a GPU, and read what came out.

Needs the CUDA wheels of jax (extra cuda13), no driver (`mjax/plan/absent_devices.py`). Kernels are
those of CPUs unless a test chooses others, and `auto` policies those of devices that tell no limit.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest

from mjax.config import load
from mjax.config.rules.mesh_rules import AXES, mesh_sizes
from mjax.models.base.context import Documents
from mjax.plan import auto
from mjax.plan.absent_devices import cannot_compile, compiler_devices, compiler_told
from mjax.plan.chips import Chip, named_chips
from mjax.plan.hlo_collectives import Collective, read_exchanges
from mjax.sharding.spec import ParamSpec, is_spec
from mjax.train import Trainer

H200 = named_chips()["h200"]
TWO_LAYERS = (  # of the default width, two rows in two micro-batches
    "model.num_hidden_layers=2",
    "model.vocab_size=8192",
    "data.mock=true",
    "data.seq_length=4096",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "mesh.dp=1",
)


def missing(triton: bool = False) -> str | None:
    """Why programs for H200, with Triton kernels if `triton`, cannot be compiled here, or None."""
    return cannot_compile(triton)


def weights_apart(specs: dict, weight: Callable[[ParamSpec], Any]) -> dict:
    """`weight` of each parameter, of layers in lists, as an engine has them."""

    def made(spec: ParamSpec) -> Any:
        if not spec.is_stacked:
            return weight(spec)
        of_layer = replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        return [weight(of_layer)] * spec.shape[0]

    return jax.tree.map(made, specs, is_leaf=is_spec)


@dataclass(frozen=True)
class Compiled:
    """A compiled train step: HLO text, sizes of the mesh and bytes per device; `host`: temporaries
    pinned there."""

    text: str
    sizes: dict[str, int]
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
        bodies = loop_bodies(self.text)
        return [label(e) for e in self._exposed() if e.computation in bodies]

    def loops(self) -> list[str]:
        """Bodies of loops: computations named as some while's body."""
        names = loop_bodies(self.text)
        found = (re.search(rf"^%?{re.escape(n)} .*?^}}", self.text, re.M | re.S) for n in names)
        return [body[0] for body in found if body]

    def exposed_outside_loops(self) -> list[str]:
        """The same for the program itself."""
        entry = re.search(r"^ENTRY %?([\w.\-]+)", self.text, re.M)[1]
        return [label(e) for e in self._exposed() if e.computation == entry]

    def _exposed(self) -> list[Collective]:
        return sorted((e for e in read_exchanges(self.text, self.sizes) if e.exposed), key=label)


def loop_bodies(text: str) -> set[str]:
    """The names of the computations that are bodies of loops."""
    return set(re.findall(r"body=%?([\w.\-]+)", text))


def label(exchange: Collective) -> str:
    return f"{exchange.op} {exchange.type}"


def compile_step(
    path: str,
    *overrides: str,
    batch_size: int | None = None,
    xla: dict | None = None,
    documents: int = 1,
    chip: Chip = H200,
) -> Compiled:
    """The train step of a config, compiled for as many H200s or other chips as its mesh names
    (dp: 1), with options `xla` besides the usual, for sequences of up to `documents`."""
    cfg = load(path, ["train.attention=cudnn", *overrides])
    n = math.prod(getattr(cfg.mesh, axis) for axis in AXES if axis != "dp" or cfg.mesh.dp != "auto")
    with pytest.MonkeyPatch.context() as patch, compiler_told(chip.details.capability):
        patch.setattr(auto, "device_memory", lambda devices: None)
        trainer = Trainer(cfg, devices=compiler_devices(chip, n))
        trainer.programs.bound_documents(Documents(documents))
        trainer.programs.recompile(xla or {})
        made = trainer.lower(batch_size).compile()
    memory = made.memory_analysis()
    return Compiled(
        made.as_text(),
        mesh_sizes(cfg.mesh, n),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        memory.host_argument_size_in_bytes,
        memory.host_alias_size_in_bytes,
    )
