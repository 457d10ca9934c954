"""Every `auto` that is about memory: `mesh`, `mesh.zero`, `train.remat`,
`train.micro_batch_size`, `optimizer.offload`; and `mesh.expert_tp`; and why.

Meshes go from the cheapest communication to the dearest: data parallelism with ZeRO-1, ZeRO-3,
then tensor parallelism, then context parallelism (longer sequences than a device can hold), then
pipeline stages. On a given mesh, ZeRO stages go from 1 to 3. On each, memory policies go from the
fastest to the slowest: keep matmul outputs and attention; keep nothing of as few layers as will do;
of all; then the same with moments in host memory. Under each, the largest micro-batch that fits is
taken. The first that fits by the estimate (`memory.py`) is taken, but of stages the fastest.
Invariant: the choice is a pure function of (config, device count, kind of device, bytes of each).
`--dry-run` shows the compiled truth.
"""

import itertools
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mjax.config.rules.mesh_rules import NARROW_EXPERT, folds_experts, mesh_sizes
from mjax.config.schema.run import Config, MeshConfig
from mjax.config.validate import validate
from mjax.errors import UserError
from mjax.plan import roofline
from mjax.plan.absent_devices import is_described
from mjax.plan.chips import Chip, chip_of_kind
from mjax.plan.execution import decide_execution, micro_batch_sizes
from mjax.plan.memory import Traced, bytes_per_device, held_layers

# Share of the device's memory: the estimate's error (docs/train/memory.md) and fragmentation.
FRACTION = 0.95
BUSY = (
    8192  # tokens of a micro-batch that fill a GPU; a CPU, whose memory is unknown, takes no more
)
COUNTS = (*range(1, 9), *range(16, 1025, 8))  # of devices: within a node, and whole nodes
GB = 1e9


def resolve_auto(
    cfg: Config, devices: Sequence[jax.Device], specs: dict
) -> tuple[Config, str | None]:
    """(`cfg` with each of its "auto" replaced for `devices`, why: a line for each choice)."""
    count, limit, why = len(devices), device_memory(devices), []
    if cfg.mesh.auto:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # CPU devices share it
        mesh, line = propose_mesh(cfg, count, limit or host / count, specs)
        cfg = cfg.model_copy(update={"mesh": mesh})
        why.append(line)
    try:
        validate(cfg, device_count=count)
    except UserError as error:
        smallest = _smallest_count(cfg, limit, specs)
        raise UserError(f"{error}; {smallest}" if smallest else str(error)) from None
    cfg, line = choose_expert_tp(cfg)
    why += [line] if line else []
    asked = cfg
    if cfg.mesh.zero == "auto":
        cfg, line = choose_zero(cfg, count, limit, specs, chip_of_kind(devices[0].device_kind))
        why += [line] if line else []
    cfg, line = choose_memory_policy(cfg, count, limit, specs, asked)
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
            on_mesh = policy.model_copy(update={"mesh": mesh})
            if not _is_legal(on_mesh, devices):
                continue  # heads, layers or batch do not divide
            sizes = mesh_sizes(mesh, devices)
            rows = micro_batch_sizes(on_mesh, sizes)[-1]
            smallest = _with(on_mesh, "train", micro_batch_size=rows)
            traced_on_mesh = traced.setdefault(tuple(sizes.values()), {})
            need = bytes_per_device(smallest, mesh, devices, specs, traced_on_mesh)
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


def choose_expert_tp(cfg: Config) -> tuple[Config, str | None]:
    """(`cfg` with mesh.expert_tp resolved, why); as it is where tp meets no experts."""
    mesh, moe = cfg.mesh, cfg.model.moe
    if mesh.expert_tp != "auto" or mesh.tp == 1 or not cfg.model.has_role("experts"):
        return cfg, None
    part = moe.moe_intermediate_size // mesh.tp
    cut = f"tp={mesh.tp} cuts experts of {moe.moe_intermediate_size} to {part}"
    if folds_experts(cfg.model, mesh):
        expert_tp, why = 1, f"{cut}, too narrow, and divides them instead"
    elif part < NARROW_EXPERT:
        expert_tp, why = mesh.tp, f"{cut}; ep x tp does not divide {moe.num_experts} experts"
    else:
        expert_tp, why = mesh.tp, f"{cut}, wide enough"
    return _with(cfg, "mesh", expert_tp=expert_tp), f"mesh: expert_tp={expert_tp}: {why}"


def choose_zero(
    cfg: Config, devices: int, memory: float | None, specs: dict, chip: Chip | None
) -> tuple[Config, str | None]:
    """(`cfg` with mesh.zero resolved, why).

    ZeRO-1 is taken where it fits and no layer is computed twice; else, of the stages that fit, the
    fastest by the estimate of time, or the first on a chip without one. The host's memory counts
    where none fits. Without a known limit, or with nothing to shard over, it is ZeRO-1.
    """
    sizes = mesh_sizes(cfg.mesh, devices)
    stages = [_with(cfg, "mesh", zero=stage) for stage in (1, 2, 3)]
    if memory is None or sizes["dp"] * sizes["ep"] * sizes["cp"] == 1:
        return stages[0], None
    traced: dict[int, Traced] = {}
    for offload in _places_of_moments(cfg):
        seconds: dict[int, float] = {}
        for stage in stages:
            option = _with(stage, "optimizer", offload=offload)
            if not _is_legal(option):
                continue
            found, _ = _first_that_fits(option, devices, memory, specs, traced)
            if not found.fits:
                continue
            if stage is stages[0] and "full" not in found.cfg.train.remat:
                return stage, "mesh: zero=1: it fits, and no layer is computed twice"
            seconds[stage.mesh.zero] = _seconds(found.cfg, sizes, specs, chip)
        if seconds:
            fastest = min(seconds, key=seconds.__getitem__)
            each = ", ".join(f"{stage}: {time:.3g} s" for stage, time in seconds.items())
            how = f"the fastest that fits (estimates of a step: {each})"
            return stages[fastest - 1], f"mesh: zero={fastest}: {how}"
    return stages[2], "mesh: zero=3: no stage fits, and it needs the least"


def _seconds(cfg: Config, sizes: dict[str, int], specs: dict, chip: Chip | None) -> float:
    """The estimate of a step's time; 0 on a chip of which too little is known."""
    if chip is None or chip.details is None:
        return 0.0
    execution = decide_execution(cfg, sizes)
    return roofline.total(roofline.step_parts(cfg, sizes, execution, specs, chip)).middle


def choose_memory_policy(
    cfg: Config, devices: int, memory: float | None, specs: dict, asked: Config | None = None
) -> tuple[Config, str | None]:
    """(`cfg` with train.remat, train.micro_batch_size and optimizer.offload resolved, why).

    `memory` is the bytes of a device. Without a known limit the fastest policy is taken, and if
    nothing fits, the one that needs the least. The reason is None where nothing was to choose.
    `asked` is the config before its ZeRO stage was chosen, if it was.
    """
    chooses_rows = cfg.train.micro_batch_size == "auto"
    first_two = list(itertools.islice(memory_policies(cfg, devices), 2))
    if first_two == [cfg] and not chooses_rows:
        return cfg, None
    if memory is None:
        rows = _rows_to_try(cfg, mesh_sizes(cfg.mesh, devices))[0][-1]
        option = _with(first_two[0], "train", micro_batch_size=rows)
        return option, f"{_policy_name(option, chooses_rows)}: the device does not tell its limit"
    found, tried = _first_that_fits(cfg, devices, memory, specs, {})
    how, smallest = f"fits {FRACTION * memory / GB:.0f} GB a device", ""
    if not found.fits:
        how = f"needs the least but does NOT fit {how.removeprefix('fits ')}"
        none = "no number of them fits it on this mesh: set mesh.tp or mesh.ep, or mesh=auto"
        smallest = f"; {_smallest_count(asked or cfg, memory, specs) or none}"
    elif tried > 1:
        how = f"the first of {tried} tried that {how}"
    name = _policy_name(found.cfg, chooses_rows)
    return found.cfg, f"{name}: {how} ({estimate_text(found.need)}){smallest}"


class Attempt(NamedTuple):
    """A config, the bytes that it needs on a device, and whether they fit."""

    cfg: Config
    need: dict[str, float]
    fits: bool


def _first_that_fits(
    cfg: Config, devices: int, memory: float, specs: dict, traced: dict[int, Traced]
) -> tuple[Attempt, int]:
    """(the first memory policy that fits, with the largest micro-batch that does; how many were
    tried). If none fits, the one that needs the least.

    `traced` is what layers keep by rows of a micro-batch; what is found is added to it.
    Micro-batches that leave a GPU idle come last, but before moments go to the host.
    """
    sizes = mesh_sizes(cfg.mesh, devices)
    execution = decide_execution(cfg, sizes)
    unrolled = not execution.loops and not execution.pipelined

    def attempt(policy: Config, rows: int) -> Attempt:
        option = _with(policy, "train", micro_batch_size=rows)
        of_rows = traced.setdefault(rows, {})
        need = bytes_per_device(option, cfg.mesh, devices, specs, of_rows)
        return Attempt(option, need, sum(need.values()) <= FRACTION * memory)

    busy, idle = _rows_to_try(cfg, sizes)
    ends = {busy[0], [*busy, *idle][-1]}
    leanest: list[Attempt] = []
    tried = 0
    for offload in _places_of_moments(cfg):
        of_place = _with(cfg, "optimizer", offload=offload)
        least = [attempt(p, rows) for p in list(memory_policies(of_place))[-1:] for rows in ends]
        leanest += least
        if not any(found.fits for found in least):
            continue
        for choices in (busy, idle):
            for policy in memory_policies(of_place, devices, unrolled):
                tried += 1
                rows = _largest_fitting(
                    choices, lambda rows, policy=policy: attempt(policy, rows).fits
                )
                if rows is not None:
                    return attempt(policy, rows), tried
    return min(leanest, key=lambda found: sum(found.need.values())), tried


def _rows_to_try(cfg: Config, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    """(sizes of micro-batches that keep a GPU busy, others), each the largest first.

    If none keeps it busy, the largest counts as one that does.
    """
    choices = micro_batch_sizes(cfg, sizes)
    width = cfg.data.seq_length // sizes["cp"]
    busy = [rows for rows in choices if rows * width >= BUSY] or choices[:1]
    return busy, choices[len(busy) :]


def _largest_fitting(choices: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of descending `choices` that fits, or None.

    If one fits so do smaller ones, but not for the first, which may be a step in one micro-batch.
    """
    if not choices or fits(choices[0]):
        return choices[0] if choices else None
    if len(choices) == 1 or not fits(choices[-1]):
        return None
    return choices[bisect_left(choices, True, 1, len(choices) - 1, key=fits)]


def _smallest_count(cfg: Config, memory: float | None, specs: dict) -> str | None:
    """Words for the end of a line: on how many of such devices a run would fit at least."""
    traced: dict[int, Traced] = {}
    stages = (1, 3) if cfg.mesh.zero == "auto" else (cfg.mesh.zero,)
    leanest = [list(memory_policies(_with(cfg, "mesh", zero=stage)))[-1] for stage in stages]

    def bytes_on(count: int, option: Config) -> float:
        rows = micro_batch_sizes(option, mesh_sizes(option.mesh, count))[-1]
        option = _with(option, "train", micro_batch_size=rows)
        of_rows = traced.setdefault(rows, {})
        return sum(bytes_per_device(option, option.mesh, count, specs, of_rows).values())

    for count in COUNTS:
        if _is_legal(cfg, count) and (
            memory is None
            or any(bytes_on(count, option) <= FRACTION * memory for option in leanest)
        ):
            return f"the smallest number of these devices that fits it is {count}"
    return None


def memory_policies(
    cfg: Config, devices: int | None = None, unrolled: bool = False
) -> Iterator[Config]:
    """`cfg` under every memory policy that its "auto" leaves open, the fastest first.

    Counts of layers are tried only where `devices` says what a device holds. If layers are a
    loop, or what they keep goes through a pipeline's stash, `dots` is faster than all that autodiff
    asks for; `unrolled` it is slower (docs/train/tuning.md).
    """
    remats = [cfg.train.remat]
    if remats == ["auto"]:
        layers = held_layers(cfg, mesh_sizes(cfg.mesh, devices)).each if devices else ()
        counts = range(1, len(layers))
        remats = ["none", *(f"dots*{n},none" for n in counts)] if unrolled else []
        remats += ["dots", *(f"full*{n},dots" for n in counts), "full"]
    for offload in _places_of_moments(cfg):
        for remat in remats:
            option = _with(_with(cfg, "train", remat=remat), "optimizer", offload=offload)
            if _is_legal(option):
                yield option


def _places_of_moments(cfg: Config) -> list[bool]:
    """Whether moments may wait on the host: values of optimizer.offload, the faster first."""
    return [False, True] if cfg.optimizer.offload == "auto" else [cfg.optimizer.offload]


def _with(cfg: Config, group: str, **keys: object) -> Config:
    """`cfg` with other values of keys of a group."""
    return cfg.model_copy(update={group: getattr(cfg, group).model_copy(update=keys)})


def _is_legal(cfg: Config, devices: int | None = None) -> bool:
    try:
        validate(cfg, devices)
    except UserError:  # muon's moments stay, a policy keeps none of train.offload
        return False
    return True


def mesh_candidates(cfg: Config, devices: int) -> Iterator[MeshConfig]:
    """Meshes to try, in order of preference."""
    asked = {"towers": cfg.mesh.towers, "expert_tp": cfg.mesh.expert_tp}
    base = {"auto": False, "dp": "auto", **asked}
    experts = math.gcd(devices, cfg.model.moe.num_experts or 1)
    for shape in _mesh_shapes(devices):
        used = math.prod(shape.values())
        ep = math.gcd(devices // used, experts)
        stages = (cfg.mesh.zero,)
        if cfg.mesh.zero == "auto":
            stages = (1,) if "pp" in shape else (1, 3)
        for zero in stages:
            yield MeshConfig(**base, **shape, ep=ep, zero=zero)


def _mesh_shapes(devices: int) -> Iterator[dict[str, int]]:
    """Sizes of axes besides dp and ep: tp alone, then each of cp and pp with every tp."""
    powers = [2**i for i in range(1, int(math.log2(devices)) + 1)]
    yield {}
    for tp in powers:
        yield {"tp": tp}
    for axis in ("cp", "pp"):
        for size in powers:
            for tp in (1, *powers):
                if size * tp <= devices:
                    yield {axis: size, "tp": tp}


def from_megatron(
    world: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None
) -> dict[str, int]:
    """Sizes in Megatron-LM's meaning -> ours. Megatron's dp = world / (tp pp cp) = our dp * ep.

    Its ep counts the devices of tp, too, where experts are whole (etp 1).
    Raises `UserError` where the sizes do not multiply or have no counterpart here.
    """
    if world % (tp * pp * cp):
        raise UserError(f"world={world} is not divisible by tp*pp*cp={tp * pp * cp}; change one")
    dp = world // (tp * pp * cp)
    expert_tp = tp if etp is None or ep == 1 else etp
    if expert_tp not in (1, tp):
        raise UserError(
            f"expert tensor parallelism {etp} is neither 1 nor tp={tp}; set one of them"
        )
    if expert_tp < tp and ep % tp:
        raise UserError(
            f"Megatron's ep={ep} of whole experts is no multiple of tp={tp}; here they lie on all "
            "of tp: choose one that is"
        )
    folded = {"expert_tp": 1} if expert_tp < tp else {}
    ep = ep // tp if folded else ep
    if dp % ep:
        raise UserError(
            f"Megatron's dp={dp} is not divisible by ep={ep}; experts over tp or cp ranks have no "
            "counterpart here: lower ep, tp or cp"
        )
    return {"dp": dp // ep, "tp": tp, "pp": pp, "cp": cp, "ep": ep} | folded


# ---- for people ----------------------------------------------------------------------------------


def _policy_name(cfg: Config, with_rows: bool) -> str:
    """The values that a memory policy stands for; `with_rows`: those of micro-batches, too."""
    moments = str(cfg.optimizer.offload).lower()
    rows = f" train.micro_batch_size={cfg.train.micro_batch_size}" if with_rows else ""
    return f"memory: train.remat={cfg.train.remat} optimizer.offload={moments}{rows}"


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
