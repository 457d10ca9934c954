"""Every `auto` that is about memory: `mesh`, `train.remat`, `optimizer.offload`; and why.

Meshes go from the cheapest communication to the dearest: data parallelism with ZeRO-1, ZeRO-3,
then tensor parallelism, then context parallelism (longer sequences than a device can hold), then
pipeline stages. On the mesh, memory policies go from the fastest to the slowest: keep matmul
outputs and attention; keep nothing of as few layers as will do; of all; then the same with moments
in host memory. The first that fits by the estimate (`memory.py`) is taken. Invariant: the choice is
a pure function of (config, device count, bytes per device). `--dry-run` shows the compiled truth.
"""

import math
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from mjax.config.mesh_rules import mesh_sizes
from mjax.config.schema import Config, MeshConfig
from mjax.config.validate import validate
from mjax.errors import UserError
from mjax.plan.chips import chip_of_kind
from mjax.plan.described import is_described
from mjax.plan.execution import decide_execution
from mjax.plan.memory import bytes_per_device, held_layers

FRACTION = 0.95  # of the device's memory: the estimate's error (docs/memory.md) and fragmentation
GB = 1e9


def resolve_auto(
    cfg: Config, devices: Sequence[jax.Device], specs: dict
) -> tuple[Config, str | None]:
    """(`cfg` with each of its "auto" replaced for `devices`, why: a line for each choice)."""
    limit, why = device_memory(devices), []
    if cfg.mesh.auto:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # CPU devices share it
        mesh, line = propose_mesh(cfg, len(devices), limit or host / len(devices), specs)
        cfg = cfg.model_copy(update={"mesh": mesh})
        why.append(line)
    validate(cfg, device_count=len(devices))
    cfg, line = choose_memory_policy(cfg, len(devices), limit, specs)
    return cfg, "\n".join([*why, line] if line else why) or None


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that JAX may use of each device, the least over all processes.

    None: not known, as of CPUs. Devices that are only described have what their chip has.
    """
    if devices[0].platform == "cpu":
        return None
    if is_described(devices):
        chip = chip_of_kind(devices[0].device_kind)
        return chip.details.usable if chip and chip.details else None
    mine = [d for d in devices if d.process_index == jax.process_index()] or jax.local_devices()
    limit = (mine[0].memory_stats() or {}).get("bytes_limit")
    if limit is None or jax.process_count() == 1:
        return limit
    megabytes = multihost_utils.process_allgather(np.int32(limit >> 20))
    return int(megabytes.min()) << 20


def propose_mesh(cfg: Config, devices: int, memory: float, specs: dict) -> tuple[MeshConfig, str]:
    """(mesh sizes for `devices` of `memory` bytes each, one line that says why).

    `specs` declare the model's parameters. Raises `UserError` where nothing fits.
    """
    tried, traced = [], {}
    for policy in memory_policies(cfg):
        for mesh in mesh_candidates(cfg, devices):
            if not _is_legal(policy.model_copy(update={"mesh": mesh}), devices):
                continue  # heads, layers or batch do not divide
            sizes = tuple(mesh_sizes(mesh, devices).values())
            traced_on_mesh = traced.setdefault(sizes, {})
            need = bytes_per_device(policy, mesh, devices, specs, traced_on_mesh)
            total = sum(need.values())
            tried.append((total, mesh))
            if total <= FRACTION * memory:
                return mesh, (
                    f"mesh: {_mesh_name(mesh)}: the first of {len(tried)} tried that fits "
                    f"{FRACTION * memory / GB:.0f} GB a device ({estimate_text(need)})"
                )
    least = min(tried, key=lambda attempt: attempt[0], default=(math.inf, None))
    raise UserError(
        f"mesh=auto: nothing fits {devices} devices of {memory / GB:.0f} GB; the best needs "
        f"{least[0] / GB:.0f} GB ({_mesh_name(least[1])}); use more devices, a smaller "
        "train.micro_batch_size or train.remat=full"
    )


def choose_memory_policy(
    cfg: Config, devices: int, memory: float | None, specs: dict
) -> tuple[Config, str | None]:
    """(`cfg` with train.remat and optimizer.offload resolved, why).

    `memory` is the bytes of a device. Without a known limit the fastest policy is taken, and if
    nothing fits, the one that needs the least. The reason is None where nothing was to choose.
    """
    execution = decide_execution(cfg, mesh_sizes(cfg.mesh, devices))
    unrolled = memory is not None and not execution.loops and not execution.pipelined
    options = list(memory_policies(cfg, devices, unrolled))
    if options == [cfg]:
        return cfg, None
    if memory is None:
        return options[0], f"{_policy_name(options[0])}: the device does not tell its limit"
    limit = f"{FRACTION * memory / GB:.0f} GB"
    needs, traced = [], {}
    for option in options:
        need = bytes_per_device(option, cfg.mesh, devices, specs, traced)
        needs.append((sum(need.values()), option, need))
        if needs[-1][0] <= FRACTION * memory:
            fits = f"fits {limit}"
            how = f"the first of {len(needs)} tried that {fits}" if len(needs) > 1 else fits
            return option, f"{_policy_name(option)}: {how} a device ({estimate_text(need)})"
    _, option, need = min(needs, key=lambda entry: entry[0])
    return option, (
        f"{_policy_name(option)}: needs the least of {len(needs)} tried but does NOT fit "
        f"{limit} a device ({estimate_text(need)})"
    )


def memory_policies(
    cfg: Config, devices: int | None = None, unrolled: bool = False
) -> Iterator[Config]:
    """`cfg` under every memory policy that its "auto" leaves open, the fastest first.

    Counts of layers are tried only where `devices` says what a device holds. Where layers are a
    loop, or what they keep goes through a pipeline's stash, `dots` is faster than all that autodiff
    asks for; `unrolled` it is slower (docs/tuning.md).
    """
    remats = [cfg.train.remat]
    if remats == ["auto"]:
        layers = held_layers(cfg, mesh_sizes(cfg.mesh, devices)).each if devices else ()
        counts = range(1, len(layers))
        remats = ["none", *(f"dots*{n},none" for n in counts)] if unrolled else []
        remats += ["dots", *(f"full*{n},dots" for n in counts), "full"]
    moments = [False, True] if cfg.optimizer.offload == "auto" else [cfg.optimizer.offload]
    for offload in moments:
        optimizer = cfg.optimizer.model_copy(update={"offload": offload})
        for remat in remats:
            train = cfg.train.model_copy(update={"remat": remat})
            option = cfg.model_copy(update={"train": train, "optimizer": optimizer})
            if _is_legal(option):
                yield option


def _is_legal(cfg: Config, devices: int | None = None) -> bool:
    try:
        validate(cfg, devices)
    except UserError:  # muon's moments stay, a policy keeps none of train.offload
        return False
    return True


def mesh_candidates(cfg: Config, devices: int) -> Iterator[MeshConfig]:
    """Meshes to try, in order of preference."""
    base = {"auto": False, "dp": "auto", "towers": cfg.mesh.towers}
    powers = [2**i for i in range(1, int(math.log2(devices)) + 1)]
    experts = math.gcd(devices, cfg.model.moe.num_experts or 1)
    shapes = [{}, *({"tp": t} for t in powers)]
    shapes += [{"cp": c, "tp": t} for c in powers for t in (1, *powers) if c * t <= devices]
    shapes += [{"pp": p, "tp": t} for p in powers for t in (1, *powers) if p * t <= devices]
    for shape in shapes:
        used = math.prod(shape.values())
        ep = math.gcd(devices // used, experts)
        for zero in (1, 3) if shape.get("pp", 1) == 1 else (1,):
            yield MeshConfig(**base, **shape, ep=ep, zero=zero)


def from_megatron(
    world: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None
) -> dict[str, int]:
    """Sizes in Megatron-LM's meaning -> ours. Megatron's dp = world / (tp pp cp) = our dp * ep.

    Raises `UserError` where the sizes do not multiply or have no counterpart here.
    """
    if world % (tp * pp * cp):
        raise UserError(f"world={world} is not divisible by tp*pp*cp={tp * pp * cp}; change one")
    dp = world // (tp * pp * cp)
    if etp not in (None, tp) and ep > 1:
        raise UserError(f"expert tensor parallelism {etp} differs from tp={tp}; only etp=tp exists")
    if dp % ep:
        raise UserError(
            f"Megatron's dp={dp} is not divisible by ep={ep}; experts over tp or cp ranks have no "
            "counterpart here: lower ep, tp or cp"
        )
    return {"dp": dp // ep, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


# ---- for people ----------------------------------------------------------------------------------


def _policy_name(cfg: Config) -> str:
    moments = str(cfg.optimizer.offload).lower()
    return f"memory: train.remat={cfg.train.remat} optimizer.offload={moments}"


def _mesh_name(mesh: MeshConfig | None) -> str:
    if mesh is None:
        return "no mesh divides the model"
    sizes = {axis: getattr(mesh, axis) for axis in ("tp", "cp", "pp", "ep")}
    named = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " ".join([f"zero={mesh.zero}", *named])


def estimate_text(need: dict[str, float]) -> str:
    """The bytes of a device and what they are for (`bytes_per_device`), in words."""
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in need.items() if size >= GB / 20)
    return f"estimate {sum(need.values()) / GB:.1f} GB: {parts}"
