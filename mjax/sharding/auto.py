"""`mesh: auto`: the simplest mesh whose estimated memory fits, and why.

Candidates go from the cheapest communication to the dearest: data parallelism with ZeRO-1, ZeRO-3,
then tensor parallelism, then context parallelism (longer sequences than a device can hold), then
pipeline stages. Invariant: the proposal is a pure function of (config, device count, bytes per
device). Estimates follow Korthikanti et al. (arXiv 2205.05198) with this code's remat policies;
`--dry-run` shows the compiled truth.
"""

import math
import os
from collections.abc import Iterator, Sequence

import jax

from mjax.config.mesh_rules import mesh_sizes
from mjax.config.schema import Config, MeshConfig
from mjax.config.validate import validate
from mjax.errors import UserError

FRACTION = 0.85  # of the device's memory; the rest is for NCCL, fragmentation, error
GB = 1e9


def resolve(
    cfg: Config, devices: Sequence[jax.Device], parameters: int
) -> tuple[Config, str | None]:
    """`cfg` with `mesh: auto` replaced by sizes for `devices`, and why; any other as it is."""
    if not cfg.mesh.auto:
        return cfg, None
    stats = devices[0].memory_stats() or {}
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # CPU devices share it
    memory = stats.get("bytes_limit", host / len(devices))
    mesh, why = propose(cfg, len(devices), memory, parameters)
    return cfg.model_copy(update={"mesh": mesh}), why


def propose(cfg: Config, devices: int, memory: float, parameters: int) -> tuple[MeshConfig, str]:
    """(mesh sizes for `devices` of `memory` bytes each, one line that says why).

    `parameters` is the model's count. Raises `UserError` where nothing fits.
    """
    tried = []
    for mesh in candidates(cfg, devices):
        try:
            validate(cfg.model_copy(update={"mesh": mesh}), devices)
        except UserError:
            continue  # heads, layers or batch do not divide
        need = bytes_per_device(cfg, mesh, devices, parameters)
        tried.append((sum(need.values()), mesh))
        if sum(need.values()) <= FRACTION * memory:
            parts = ", ".join(f"{name} {n / GB:.1f}" for name, n in need.items())
            return mesh, (
                f"mesh: {_name(mesh)}: the first of {len(tried)} tried that fits "
                f"{FRACTION * memory / GB:.0f} GB a device (estimate in GB: {parts})"
            )
    least = min(tried, key=lambda t: t[0], default=(math.inf, None))
    raise UserError(
        f"mesh=auto: nothing fits {devices} devices of {memory / GB:.0f} GB; the best needs "
        f"{least[0] / GB:.0f} GB ({_name(least[1])}); use more devices, a smaller "
        "train.micro_batch_size or train.remat=full"
    )


def candidates(cfg: Config, devices: int) -> Iterator[MeshConfig]:
    """Meshes to try, in order of preference."""
    base = {"auto": False, "dp": "auto"}
    powers = [2**i for i in range(1, int(math.log2(devices)) + 1)]
    experts = math.gcd(devices, getattr(cfg.model, "num_experts", None) or 1)
    shapes = [{}, *({"tp": t} for t in powers)]
    shapes += [{"cp": c, "tp": t} for c in powers for t in (1, *powers) if c * t <= devices]
    shapes += [{"pp": p, "tp": t} for p in powers for t in (1, *powers) if p * t <= devices]
    for shape in shapes:
        used = math.prod(shape.values())
        ep = math.gcd(devices // used, experts)
        for zero in (1, 3) if shape.get("pp", 1) == 1 else (1,):
            yield MeshConfig(**base, **shape, ep=ep, zero=zero)


def bytes_per_device(
    cfg: Config, mesh: MeshConfig, devices: int, parameters: int
) -> dict[str, float]:
    """Estimated bytes: state (masters and moments), weights, gradients, activations, loss."""
    size = mesh_sizes(mesh, devices)
    copies = size["dp"] * size["ep"] * size["cp"]
    local = parameters / (size["tp"] * size["pp"])
    width = {"float32": 4, "bfloat16": 2}
    optimizer, compute = cfg.optimizer, width[cfg.precision.compute]
    state = 4 + width[optimizer.mu_dtype] + width[optimizer.nu_dtype]
    accum = width[cfg.precision.grad_accum]
    whole_layers = 1 if mesh.zero < 3 else min(1.0, 2 / cfg.model.num_hidden_layers + 1 / copies)
    sharded = copies if mesh.zero >= 2 else 1
    return {
        "state": state * local / (copies if mesh.zero >= 1 else 1),
        "weights": compute * local * whole_layers,
        "gradients": accum * local / sharded + compute * local * whole_layers,
        "activations": activation_bytes(cfg, size, compute),
        "loss": 4.0 * cfg.model.padded_vocab_size / size["tp"] * (cfg.model.hidden_size + 2048),
    }


def activation_bytes(cfg: Config, size: dict[str, int], compute: int) -> float:
    """Bytes kept for the backward pass, with the micro-batches that a pipeline has in flight."""
    m, policy = cfg.model, cfg.train.remat
    tokens = cfg.train.micro_batch_size * cfg.data.seq_length / size["cp"]
    heads = (2 * m.num_attention_heads + 2 * m.num_key_value_heads) * m.head_dim
    ffn = (2 if m.mlp_gated else 1) * m.intermediate_size
    kept = {
        "full": 0,
        "attention": m.num_attention_heads * m.head_dim,
        "dots": heads + ffn + m.hidden_size,
        "none": heads + 2.5 * ffn + 6 * m.hidden_size,
    }[policy]
    per_layer = (m.hidden_size + kept) / size["tp"]  # the block's input is always kept
    work = 3 * (heads + 2 * ffn + 4 * m.hidden_size) / size["tp"]  # one block's backward
    in_flight = 1 if size["pp"] == 1 else 2.0
    layers = m.num_hidden_layers / size["pp"] * (size["pp"] if size["pp"] > 1 else 1) * in_flight
    return compute * tokens * (layers * per_layer + work)


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


def _name(mesh: MeshConfig | None) -> str:
    if mesh is None:
        return "no mesh divides the model"
    sizes = {a: getattr(mesh, a) for a in ("tp", "cp", "pp", "ep") if getattr(mesh, a) > 1}
    return " ".join([f"zero={mesh.zero}", *(f"{a}={n}" for a, n in sizes.items())])
