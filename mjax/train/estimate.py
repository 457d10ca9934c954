"""`--dry-run`: what a run would be, without allocating or running any of it.

The train step is compiled for the mesh; memory is the compiler's own account of it, per device.
Run it on as many devices as the run will have; on a laptop, fake them with
`JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8`: shapes and sharding are
exact there, memory is that of the CPU program.
"""

from collections import Counter

import jax
from rich.console import Console

from mjax.config.remat import offloaded
from mjax.config.schema import Config
from mjax.models.flops import flops_per_token
from mjax.pipeline.layout import stage_lines
from mjax.pipeline.schedule import make_schedule, timeline
from mjax.plan.balance import advice
from mjax.plan.execution import execution_lines
from mjax.plan.kept import kept
from mjax.plan.kernels import kernel_lines
from mjax.plan.memory import held_layers
from mjax.sharding.collectives import mesh_axes
from mjax.sharding.spec import count_frozen, count_parameters
from mjax.train import metrics
from mjax.train.trainer import Trainer


def dry_run(cfg: Config, console: Console | None = None) -> None:
    """Print mesh, sharding, what layers keep, parameter count, FLOPs and memory per device."""
    quiet = jax.process_index() != 0
    console = console or Console(quiet=quiet, soft_wrap=True, highlight=False)
    trainer = Trainer(cfg)
    cfg = trainer.cfg  # mesh: auto is resolved in it
    if trainer.why:
        console.print(trainer.why, markup=False)
    sizes = " x ".join(f"{axis}={n}" for axis, n in trainer.mesh.shape.items())
    kind = trainer.mesh.devices.flat[0].device_kind
    console.print(f"mesh        {sizes}: {trainer.mesh.size} x {kind}", markup=False)
    print_table(console, sharding_table(trainer))
    print_table(console, kept_table(trainer))
    program = trainer.program(cfg.train.global_batch_size, trainer.max_documents)
    lines = execution_lines(program.execution)
    lines += kernel_lines(cfg, dict(trainer.mesh.shape))
    for line in [*lines, *pipeline_lines(trainer)]:
        console.print(line, markup=False)
    tokens = cfg.train.global_batch_size * cfg.data.seq_length
    flops = flops_per_token(cfg.model, cfg.data.seq_length)
    console.print(f"parameters  {count_parameters(trainer.specs):,}")
    if cfg.train.freeze:
        console.print(
            f"frozen      {count_frozen(trainer.specs):,} of them, by train.freeze", markup=False
        )
    console.print(f"tokens      {tokens:,} a step")
    console.print(f"FLOPs       {flops:.4g} a token, {flops * tokens:.4g} a step")
    peak = metrics.peak_tflops(cfg.log, kind)
    if peak:
        fastest = 1000 * flops * tokens / (trainer.mesh.size * peak * 1e12)
        console.print(
            f"            {fastest:,.1f} ms a step at the chip's peak of {peak:g} TFLOP/s"
        )
    for name, size in memory_per_device(trainer).items():
        console.print(f"{name:<11} {size / 1e9:.3f} GB a device")


def print_table(console: Console, rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(n) for cell, n in zip(row, widths, strict=True))
        console.print("  " + "  ".join(cells).rstrip(), markup=False)


def kept_table(trainer: Trainer) -> list[tuple[str, ...]]:
    """A heading, then per policy and kind of layer each tensor that is kept for the backward: shape
    and MB on one device, where it waits, GB of all those layers (and micro-batches in flight)."""
    cfg, sizes = trainer.cfg, dict(trainer.mesh.shape)
    layers, on_host = held_layers(cfg, sizes), offloaded(cfg.train.offload)
    rows = [("policy", "layers", "kept for the backward", "shape", "MB", "on", "GB in all")]
    for (kind, policy), count in Counter(layers.each).items():
        for tensor in kept(cfg, sizes, kind, policy):
            rows.append(
                (
                    policy,
                    f"{count} x {kind}",
                    tensor.name,
                    f"{tensor.dtype} {' '.join(map(str, tensor.shape))}",
                    f"{tensor.bytes / 1e6:.3f}",
                    "host" if tensor.goes_to_host(policy, on_host) else "device",
                    f"{tensor.bytes * count * layers.waiting / 1e9:.3f}",
                )
            )
    return rows


def pipeline_lines(trainer: Trainer) -> list[str]:
    """Which layers are where, the bubble and a picture of the schedule; nothing without pp."""
    layout, train = trainer.layout, trainer.cfg.train
    if layout is None:
        return []
    rows = train.global_batch_size // trainer.parallel.size("dp", "ep")
    schedule = make_schedule(layout.pp, layout.v, rows // min(train.micro_batch_size, rows))
    return [
        f"pipeline    {layout.pp} devices x {layout.v} chunks, {schedule.m} micro-batches: bubble "
        f"{schedule.bubble:.1%}, {len(layout.kinds)} layers each placed once, "
        f"{schedule.slots} stash slots",
        *(f"  {line}" for line in stage_lines(layout)),
        "  0-9: forward of that micro-batch (mod 10), a-j: its backward, '.': idle",
        *(f"  {line}" for line in timeline(schedule)),
        *advice(trainer.cfg, schedule.m),
    ]


def sharding_table(trainer: Trainer) -> list[tuple[str, ...]]:
    """A heading, then per parameter: global shape, logical axes, mesh axes of the weight and of
    its stored master (ZeRO), shape of the latter on one device."""
    rows = [("parameter", "shape", "axes", "weight over", "stored over", "stored per device")]
    specs = jax.tree_util.tree_flatten_with_path(trainer.specs)[0]
    layouts = jax.tree.leaves(trainer.placement.weights), jax.tree.leaves(trainer.placement.stored)
    masters = jax.tree.leaves(trainer.abstract_state()["params"])
    for (path, spec), weight, stored, master in zip(specs, *layouts, masters, strict=True):
        local = master.sharding.shard_shape(master.shape)  # with padding
        name = ".".join(str(key.key) for key in path)
        over = [["+".join(mesh_axes((entry,))) for entry in p] for p in (weight, stored)]
        cells = (spec.shape, spec.axes, *over, local)
        rows.append((name, *(" ".join(str(x or "-") for x in cell) for cell in cells)))
    return rows


def memory_per_device(trainer: Trainer) -> dict[str, int]:
    """Bytes of the compiled train step: arguments, temporaries, outputs, and their total; and of
    pinned host memory where it uses any.

    Donated state is both argument and output; the total counts it once.
    """
    stats = trainer.lower().compile().memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
    }
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    total = {"total": sum(sizes.values()) - stats.alias_size_in_bytes}
    return sizes | total | ({"host": host} if host else {})
