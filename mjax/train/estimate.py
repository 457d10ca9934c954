"""`--dry-run`: what a run would be, without allocating or running any of it.

The train step is compiled for the mesh; memory is the compiler's own account of it, per device.
Run it on as many devices as the run will have; on a laptop, fake them with
`JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8`: shapes and sharding are
exact there, memory is that of the CPU program.
"""

import jax
from jax.sharding import NamedSharding
from rich.console import Console

from mjax.config.schema import Config
from mjax.train import metrics
from mjax.train.trainer import Trainer


def dry_run(cfg: Config, console: Console | None = None) -> None:
    """Print mesh, sharding table, parameter count, FLOPs and memory per device."""
    quiet = jax.process_index() != 0
    console = console or Console(quiet=quiet, soft_wrap=True, highlight=False)
    trainer = Trainer(cfg)
    sizes = " x ".join(f"{axis}={n}" for axis, n in trainer.mesh.shape.items())
    kind = trainer.mesh.devices.flat[0].device_kind
    console.print(f"mesh        {sizes}: {trainer.mesh.size} x {kind}", markup=False)
    rows = sharding_table(trainer)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(n) for cell, n in zip(row, widths, strict=True))
        console.print("  " + "  ".join(cells).rstrip(), markup=False)

    specs = jax.tree.leaves(trainer.specs)
    tokens = cfg.train.global_batch_size * cfg.data.seq_length
    flops = metrics.flops_per_token(cfg.model, cfg.data.seq_length)
    console.print(f"parameters  {sum(spec.size for spec in specs):,}")
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


def sharding_table(trainer: Trainer) -> list[tuple[str, ...]]:
    """A heading, then per parameter: global shape, logical axes, mesh axes, shape on one device."""
    rows = [("parameter", "shape", "axes", "mesh axes", "per device")]
    specs = jax.tree_util.tree_flatten_with_path(trainer.storage)[0]
    partitions = jax.tree.leaves(trainer.partitions)
    for (path, spec), partition in zip(specs, partitions, strict=True):
        local = NamedSharding(trainer.mesh, partition).shard_shape(spec.shape)
        name = ".".join(str(key.key) for key in path)
        cells = (spec.shape, spec.axes, partition, local)
        rows.append((name, *(" ".join(str(x or "-") for x in cell) for cell in cells)))
    return rows


def memory_per_device(trainer: Trainer) -> dict[str, int]:
    """Bytes of the compiled train step: arguments, temporaries, outputs, and their total.

    Donated state is both argument and output; the total counts it once.
    """
    stats = trainer.lower().compile().memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
    }
    return sizes | {"total": sum(sizes.values()) - stats.alias_size_in_bytes}
