"""`--dry-run`: what a run would be, without allocating or running any of it.

The train step is compiled for the mesh; memory is the compiler's own account of it, per device, and
exchanges are those of its schedule. `--on h200:8` plans for devices that are only described
(`plan/absent_devices.py`). Without it the devices are those of this machine. On a laptop, fake them
with `JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8`: shapes and sharding are
exact there, memory is that of the CPU program.
"""

import argparse
import contextlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec

from mjax.config.languages.remat import offloaded
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.schema.run import Config
from mjax.errors import UserError, first_line
from mjax.interop.adapters_of_run import wide_adapters
from mjax.kernels.nf4.parameters import as_weights
from mjax.models.base.context import Documents
from mjax.models.flops import flops_of_run
from mjax.models.runtime.execution import Execution
from mjax.objectives.objective import TeacherReader
from mjax.pipeline.layout import stage_lines
from mjax.pipeline.schedule import make_schedule, timeline
from mjax.plan import roofline
from mjax.plan.absent_devices import (
    Described,
    as_on,
    cannot_compile,
    described_devices,
    parse_described,
)
from mjax.plan.activations import kept
from mjax.plan.auto import device_memory, estimate_text
from mjax.plan.balance import advice
from mjax.plan.chips import chip_of_kind
from mjax.plan.execution import count_micro_batches, execution_lines
from mjax.plan.hlo_collectives import exchange_lines, read_exchanges
from mjax.plan.kernel_lines import kernel_lines
from mjax.plan.memory import bytes_per_device, held_layers, own_teacher_bytes
from mjax.run.monitor import metrics
from mjax.sharding.collectives import mesh_axes
from mjax.sharding.spec import count_frozen, count_parameters
from mjax.train.trainer import Trainer

# By its name: the engine of a policy stands on what runs are made of.
ENGINE_LINE = "mjax.post.reinforce_batches:engine_line"


def plan_elsewhere(cfg: Config, args: argparse.Namespace) -> int:
    """Print the plan for the devices of --on, which need not exist; no GPU here is touched."""
    if args.on is None:
        raise UserError("--no-compile is for a plan for other GPUs; add --dry-run --on NAME:COUNT")
    if not args.dry_run:
        raise UserError("--on is for a plan, not for a run; add --dry-run")
    jax.config.update("jax_platforms", "cpu")
    dry_run(cfg, parse_described(args.on), not args.no_compile)
    return 0


def dry_run(cfg: Config, described: Described | None = None, compiles: bool = True) -> None:
    """Print the plan of a run on `described` devices, or on those of this machine.

    The plan is the mesh, the sharding, what layers keep, FLOPs, and estimates of memory and time;
    if it `compiles`, also the compiler's memory and exchanges.
    """
    with as_on(described.chip) if described else contextlib.nullcontext():
        devices = described_devices(described) if described else jax.devices()
        trainer = Trainer(cfg, devices=devices)
        trainer.checkpoints.require_start()  # refused here as by the run
        # As the estimate has it, without the data.
        trainer.programs.bound_documents(Documents(1, images=2))
        say(plan_lines(trainer))
        reason = cannot_compile() if described else None
        if not compiles or reason:
            say([f"compiled    not: {reason if compiles else '--no-compile'}"])
            return
        if described is not None:
            print(
                f"mjax: compiling for {described.count} x {described.chip.kind}; a large model "
                "takes minutes (--no-compile leaves it out)",
                file=sys.stderr,
                flush=True,
            )
        try:
            say(compiled_lines(trainer))
        except jax.errors.JaxRuntimeError as error:
            if described is None:
                raise
            say([f"compiled    not: the compiler says {first_line(error)}"])


def say(lines: Iterable[str]) -> None:
    """Print lines, in process 0 only; the others compute them too."""
    for line in lines:
        if jax.process_index() == 0:
            print(line, flush=True)


def plan_lines(trainer: Trainer) -> list[str]:
    """All that needs no compiler."""
    cfg = trainer.cfg  # mesh: auto is resolved in it
    sizes = dict(trainer.mesh.shape)
    kind = trainer.mesh.devices.flat[0].device_kind
    named = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
    lines = [trainer.why] if trainer.why else []
    lines.append(f"mesh        {named}: {trainer.mesh.size} x {kind}")
    lines += aligned(sharding_table(trainer))
    lines += aligned(kept_table(trainer))
    execution = trainer.programs.program(cfg.train.global_batch_size).execution
    lines += execution_lines(execution)
    lines += kernel_lines(cfg, sizes)
    lines += pipeline_lines(trainer)
    tokens = cfg.train.global_batch_size * cfg.data.seq_length
    flops = flops_of_run(cfg)
    weights = as_weights(trainer.specs)
    lines.append(f"parameters  {count_parameters(weights):,}")
    if cfg.train.freeze or cfg.lora.rank:
        key = "lora" if cfg.lora.rank else "train.freeze"
        lines.append(f"frozen      {count_frozen(weights):,} of them, by {key}")
    lines += wide_adapters(trainer.specs)
    need = bytes_per_device(cfg, cfg.mesh, trainer.mesh.size, trainer.specs)
    for role in {"reference", "teacher"}.intersection(need):
        size = f"{need[role] / 1e9:.3f} GB a device"
        lines.append(f"{role:<11} {size}, which the compiled step does not count")
    if trainer.role_devices and isinstance(trainer.objective, TeacherReader):
        own = own_teacher_bytes(cfg, sizes["dp"] * sizes["ep"], trainer.objective)
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in own.items())
        lines.append(f"            {len(trainer.role_devices)} devices of its own: {parts} GB each")
    if draws_answers(cfg) and not cfg.data.mock:
        lines.append(pkgutil.resolve_name(ENGINE_LINE)(trainer))
    lines.append(f"tokens      {tokens:,} a step")
    lines.append(f"FLOPs       {flops:.4g} a token, {flops * tokens:.4g} a step")
    peak = metrics.peak_tflops(cfg.log, kind)
    if peak:
        fastest = 1000 * flops * tokens / (trainer.mesh.size * peak * 1e12)
        lines.append(f"            {fastest:,.1f} ms a step at the chip's peak of {peak:g} TFLOP/s")
    return lines + estimate_lines(trainer, execution, need)


def estimate_lines(trainer: Trainer, execution: Execution, need: dict[str, float]) -> list[str]:
    """The estimates of memory and time; nothing for devices that no table knows."""
    cfg, sizes, specs = trainer.cfg, dict(trainer.mesh.shape), trainer.specs
    devices = list(trainer.mesh.devices.flat)
    chip = chip_of_kind(devices[0].device_kind)
    if chip is None or chip.details is None:
        return []
    limit = device_memory(devices)
    lines = [f"memory      {estimate_text(need)} (of {limit / 1e9:.1f} that JAX may use)"]
    parts = roofline.step_parts(cfg, sizes, execution, specs, chip)
    peak = metrics.peak_tflops(cfg.log, chip.kind)
    lines += roofline.time_lines(parts, cfg, len(devices), peak)
    if chip.name != roofline.MEASURED_ON:
        lines.append(
            f"            rates of {chip.kind}: an H200's shares of the peak, not measured"
        )
    if len(devices) > chip.details.node:
        lines.append(
            f"            network between nodes: {roofline.NETWORK_GBS:g} GB/s a GPU, an assumption"
        )
    return lines


def compiled_lines(trainer: Trainer) -> list[str]:
    """The memory of the compiled step, and its exchanges where they run as on GPUs."""
    compiled = trainer.lower().compile()
    devices = list(trainer.mesh.devices.flat)
    sizes = memory_per_device(compiled)
    lines = [f"{name:<11} {size / 1e9:.3f} GB a device" for name, size in sizes.items()]
    limit = device_memory(devices)
    if limit:
        share = f"{sizes['total'] / limit:.1%} of the {limit / 1e9:.1f} GB"
        lines.append(f"            {share} that JAX may use")
    if devices[0].platform != "cpu":
        lines += exchange_lines(read_exchanges(compiled.as_text(), dict(trainer.mesh.shape)))
    return lines


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows of a table, its columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(n) for cell, n in zip(row, widths, strict=True))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


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
    layout = trainer.layout
    if layout is None:
        return []
    micro_batches = count_micro_batches(trainer.cfg, dict(trainer.mesh.shape))
    schedule = make_schedule(layout.pp, layout.v, micro_batches)
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
    placement = trainer.state_layout.placement
    specs, _ = jax.tree_util.tree_flatten_with_path(trainer.specs)
    weights = jax.tree.leaves(placement.weights)
    stored = jax.tree.leaves(placement.stored)
    masters = jax.tree.leaves(trainer.abstract_state()["params"])
    for (path, spec), weight, cut, master in zip(specs, weights, stored, masters, strict=True):
        row = (
            ".".join(str(key.key) for key in path),
            _cell(spec.shape),
            _cell(spec.axes),
            _cell(_axes_of_dims(weight)),
            _cell(_axes_of_dims(cut)),
            _cell(master.sharding.shard_shape(master.shape)),  # with padding
        )
        rows.append(row)
    return rows


def _axes_of_dims(partition: PartitionSpec) -> list[str]:
    return ["+".join(mesh_axes((entry,))) for entry in partition]


def _cell(entries: Iterable) -> str:
    return " ".join(str(entry or "-") for entry in entries)


def memory_per_device(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a compiled train step: arguments, temporaries, outputs, and their total; and of
    pinned host memory where it uses any.

    Donated state is both argument and output; the total counts it once.
    """
    stats = compiled.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
    }
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    total = {"total": sum(sizes.values()) - stats.alias_size_in_bytes}
    return sizes | total | ({"host": host} if host else {})
