"""How this run holds, gathers, reduces and recomputes: decided once, here.

`decide_execution` is a pure function of the config, the sizes of the mesh, what the devices can do
and the rows of a batch. Trainer, step, pipeline, memory estimate and compiler options read its
result (`models/runtime/execution.py`) and derive nothing themselves.

|                                  | one micro-batch               | several                    |
|----------------------------------|-------------------------------|----------------------------|
| ZeRO-0, or one device            | gradients as they come        | sums in the matmuls        |
| ZeRO-1                           | and, if layers keep all,      | sums in the matmuls,       |
|                                  | exchanges under other layers' | exchanges once a step      |
|                                  | matmuls                       |                            |
| ZeRO-2                           | as ZeRO-1                     | reduced after each of them |
| ZeRO-3                           | gathered and reduced by each layer                         |
| in a loop (`_unroll`)            | stacks; sums are added after a micro-batch                 |
| pipeline                         | stacks; sums are added slot by slot                        |

Without a loop AdamW takes the gradients of a layer as they are (`gradients_apart`), where our
kernel updates rows of stacks. Otherwise they are put into stacks first.
"""

import logging
import math
from dataclasses import dataclass, replace

from mjax.config.languages.layer_pattern import stack_index, stack_of
from mjax.config.languages.remat import offloaded, remat_policies
from mjax.config.rules.reinforce_rules import trains_in_blocks
from mjax.config.rules.train_rules import balances_over_batch
from mjax.config.schema.run import Config, MeshConfig
from mjax.errors import UserError
from mjax.kernels.fp8.recipe import recipe_of
from mjax.models.base.context import Context, Documents, Kernels, Training
from mjax.models.base.tensor_parallel_overlap import MIN_ROWS
from mjax.models.embedding_noise import EmbeddingNoise
from mjax.models.runtime.execution import Execution, LayerPlan
from mjax.models.runtime.remat import STASHED
from mjax.models.runtime.token_blocks import TokenBlocks
from mjax.models.towers.tower_mesh import tower_handles
from mjax.objectives.objective import WholeBatch, objective_of
from mjax.pipeline.layout import layout_of
from mjax.sharding.collectives import Parallel

log = logging.getLogger(__name__)

PER_STAGE = 4  # micro-batches for each stage of a pipeline: it idles for a fifth of a step at most


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of devices that matter. The default is a host of GPUs that copy to each other.

    updates_rows: whether AdamW can update rows of stacks in place.
    copies_permutes, copies_exchanges: whether the compiler can make permutes, and all-to-alls,
    copies from GPU to GPU that take no multiprocessor from matmuls.
    """

    on_cpu: bool = False
    updates_rows: bool = True
    copies_permutes: bool = True
    copies_exchanges: bool = True


def decide_execution(
    cfg: Config,
    sizes: dict[str, int],
    devices: DeviceFacts = DeviceFacts(),  # noqa: B008 - frozen
    rows: int | None = None,
) -> Execution:
    """How a training step of `rows` sequences runs (default: train.global_batch_size).

    `sizes` are those of the mesh axes. `train.remat: auto` counts as "dots", `mesh.zero: auto` as
    1, `train.micro_batch_size: auto` as all of a device's rows.
    """
    pipelined, zero = sizes["pp"] > 1, cfg.mesh.zero_stage
    layers = pipeline_slots(cfg) if pipelined else model_layers(cfg)
    micro_batches = count_micro_batches(cfg, sizes, rows)
    recipe = recipe_of(cfg.precision)
    in_turn = micro_batches > 1 and not pipelined and zero != 3 and recipe is None
    unroll = _unroll(cfg, devices, in_turn and all(plan.remat == "full" for plan in layers))
    is_cut = _is_cut(cfg, sizes)
    keeps_all = not pipelined and all(plan.remat == "none" for plan in layers)
    can_overlap = devices.on_cpu or devices.copies_exchanges
    by_itself = micro_batches == 1 and keeps_all and unroll == 0
    overlap = zero in (1, 2) and is_cut and by_itself and can_overlap
    gather = "layer" if overlap or (zero == 3 and is_cut) else "step"
    reduce = "layer" if gather == "layer" else "step"
    if zero == 2 and is_cut and micro_batches > 1:
        reduce = "micro_batch"
    apart = unroll == 0 and not pipelined
    names = cfg.precision.fp8_recipes
    skips_fp8 = recipe is not None and any(cfg.precision.fp8_left_out)
    return Execution(
        layers=layers,
        unroll=unroll,
        pipelined=pipelined,
        apart=apart,
        micro_batches=micro_batches,
        gather=gather,
        reduce=reduce,
        gradients_apart=apart and devices.updates_rows and _updates_rows(cfg),
        sums_in_matmuls=apart and micro_batches > 1 and gather == reduce == "step",
        overlap=overlap,
        recipe=recipe,
        recipes=tuple((name, recipe_of(cfg.precision, name)) for name in names),
        # Layers that FP8 skips would need a gather of their own.
        quantize_stored=recipe is not None and not (skips_fp8 and is_cut and gather == "step"),
        rounds_dispatch=cfg.precision.fp8_dispatch,
        rounds_attention=cfg.precision.fp8_attention,
        weights=None if cfg.precision.weights == "plain" else cfg.precision.weights,
        compute=cfg.precision.compute,
        accumulate=cfg.precision.grad_accum,
        offload=offloaded(cfg.train.offload),
    )


def decide_evaluation(cfg: Config, sizes: dict[str, int], rows: int | None = None) -> Execution:
    """How a forward pass without gradients runs: in a loop, which compiles sooner."""
    training = decide_execution(cfg, sizes, DeviceFacts(on_cpu=True), rows)
    return replace(
        training,
        layers=tuple(replace(plan, remat="none") for plan in training.layers),
        unroll=1,
        apart=False,
        gather="layer" if cfg.mesh.zero_stage == 3 and _is_cut(cfg, sizes) else "step",
        reduce="step",
        gradients_apart=False,
        sums_in_matmuls=False,
        overlap=False,
        recipe=training.recipe if cfg.precision.fp8_evaluation else None,
        rounds_dispatch=training.rounds_dispatch and cfg.precision.fp8_evaluation,
        rounds_attention=training.rounds_attention and cfg.precision.fp8_evaluation,
        offload=(),
    )


def training_context(
    cfg: Config,
    parallel: Parallel,
    documents: Documents,
    permute: bool = True,
    overlap_rows: int | None = None,
) -> Context:
    """The static choices of a training step; the last three are not made by the config."""
    recipe = recipe_of(cfg.precision)
    measures_norms = recipe is not None and recipe.scales_tensors and not recipe.knows_scales
    kernels = Kernels(
        attention=cfg.train.attention,
        experts=cfg.train.experts,
        expert_exchange=cfg.train.expert_exchange,
        deterministic=cfg.run.deterministic or trains_in_blocks(cfg),
        cp_type=cfg.mesh.cp_type,
        cp_a2a=cfg.mesh.cp_a2a,
        permute=permute,
        measures_norms=measures_norms,
        overlap_rows=overlap_rows,
        blocks=TokenBlocks() if trains_in_blocks(cfg) else None,
    )
    training = Training(
        dropout=True,
        capacity=True,
        rounds_dispatch=cfg.precision.fp8_dispatch,
        rounds_attention=cfg.precision.fp8_attention,
        noise=EmbeddingNoise(alpha) if (alpha := cfg.train.neftune_alpha) else None,
        label_smoothing=cfg.train.label_smoothing,
        z_loss=cfg.train.z_loss,
        loss_chunk=cfg.train.loss_chunk,
    )
    return Context(parallel, tower_handles(cfg, parallel), kernels, documents, training)


def count_micro_batches(cfg: Config, sizes: dict[str, int], rows: int | None = None) -> int:
    """Micro-batches of a step of `rows` sequences on each device."""
    local = _local_rows(cfg, sizes, rows)
    return max(local // _micro_batch_rows(cfg, local), 1)


def micro_batch_shape(cfg: Config, sizes: dict[str, int]) -> tuple[int, int]:
    """(sequences, tokens of each) of one micro-batch on a device, before tp cuts the tokens."""
    rows = _micro_batch_rows(cfg, _local_rows(cfg, sizes))
    return rows, cfg.data.seq_length // sizes["cp"]


def micro_batch_sizes(cfg: Config, sizes: dict[str, int]) -> list[int]:
    """The values that train.micro_batch_size may take on this mesh, the largest first.

    They divide a device's rows of every step. If the loss or
    the balance of experts counts all rows together, all of them is the only value. A pipeline
    needs several micro-batches to fill its stages.
    """
    train, local = cfg.train, max(_local_rows(cfg, sizes), 1)
    if train.micro_batch_size != "auto":
        return [train.micro_batch_size]
    if balances_over_batch(cfg) or isinstance(objective_of(cfg), WholeBatch):
        return [local]
    start, increment, _ = train.rampup_batch_size or (0, 0, 0)
    first = _local_rows(cfg, sizes, math.gcd(train.global_batch_size, start, increment))
    low = [size for size in range(1, math.isqrt(first) + 1) if first % size == 0]
    fitting = sorted({*low, *(first // size for size in low)}, reverse=True)
    if sizes["pp"] > 1:
        least = PER_STAGE * sizes["pp"]
        fitting = [size for size in fitting if local // size >= least] or fitting[-1:]
    return fitting or [1]


def _local_rows(cfg: Config, sizes: dict[str, int], rows: int | None = None) -> int:
    """Sequences of a step on each device."""
    return (rows or cfg.train.global_batch_size) // (sizes["dp"] * sizes["ep"])


def _micro_batch_rows(cfg: Config, local: int) -> int:
    """Sequences of a micro-batch on a device that has `local` of them in a step."""
    size = cfg.train.micro_batch_size
    return max(local if size == "auto" else min(size, local), 1)


def model_layers(cfg: Config) -> tuple[LayerPlan, ...]:
    """The layers of the model, in order."""
    kinds = cfg.model.layer_kinds
    policies = remat_policies(_remat_text(cfg), len(kinds))
    rows, (first, last) = stack_index(kinds), cfg.precision.fp8_left_out
    return tuple(
        LayerPlan((kind,), stack_of(kind), row, policy, first <= i < len(kinds) - last)
        for i, (kind, row, policy) in enumerate(zip(kinds, rows, policies, strict=True))
    )


def pipeline_slots(cfg: Config) -> tuple[LayerPlan, ...]:
    """The slots of a pipeline's chunk, whose policies train.remat counts."""
    layout = layout_of(cfg)
    stacks, slots = layout.slots.stacks, layout.slot_kinds()
    policies = remat_policies(_remat_text(cfg), len(slots), "layers in a pipeline stage")
    counts: dict[str, int] = {}
    plans = []
    for stack, kinds, policy in zip(stacks, slots, policies, strict=True):
        row = counts.get(stack, 0)
        counts[stack] = row + 1
        # All that autodiff asks for would include copies of weights.
        plans.append(LayerPlan(kinds, stack, row, STASHED if policy == "none" else policy))
    return tuple(plans)


def _unroll(cfg: Config, devices: DeviceFacts, recomputes: bool) -> int:
    """Layer groups in an iteration of the loop over layers; 0: no loop.

    A loop copies what each layer leaves for the backward into stacks, and zero-fills those first:
    without it GPUs are 5 to 18 % faster (docs/train/tuning.md). It compiles in proportion to the
    layers, so CPUs, which run small models, keep the loop. Offloading needs one, too. It copies no
    base of adapters (`ParameterBytes.copies_of_base`), and is no slower where each of several
    micro-batches recomputes all layers (`recomputes`; docs/lab/2026-12-01-scratch.md).
    """
    if cfg.train.unroll != "auto":
        return cfg.train.unroll
    return 1 if devices.on_cpu or cfg.train.offload or (cfg.lora.rank and recomputes) else 0


def _updates_rows(cfg: Config) -> bool:
    """Whether the optimizer is one that `kernels/elementwise/adam.py` computes; fp16 unscales
    stacks."""
    optimizer = cfg.optimizer
    plain = optimizer.offload is not True and not optimizer.stochastic_rounding
    return optimizer.name == "adamw" and plain and cfg.precision.compute != "float16"


def _is_cut(cfg: Config, sizes: dict[str, int]) -> bool:
    """Whether ZeRO stores parameters in finer shards than matmuls read."""
    shards = sizes["dp"] * sizes["ep"] * sizes["cp"]
    return cfg.mesh.zero_stage > 0 and min(shards, cfg.mesh.zero_group or shards) > 1


def _remat_text(cfg: Config) -> str:
    return "dots" if cfg.train.remat == "auto" else cfg.train.remat


def tp_overlap_rows(mesh: MeshConfig, devices: DeviceFacts, uniform: bool = True) -> int | None:
    """Tokens in a tp shard from which on exchanges run under matmuls; None: never.

    They are permutes, which wait for all devices. A pipeline that is not `uniform`, where only some
    devices run a layer, rules them out.
    """
    if mesh.tp == 1 or mesh.tp_overlap == "never":
        return None
    if mesh.tp_overlap == "always":
        if not uniform:
            raise UserError(
                "mesh.tp_overlap=always needs stages of equal layers, but those of mesh.pp differ "
                "in number or kind; set mesh.tp_overlap=auto"
            )
        return 0
    power_of_two = mesh.tp & (mesh.tp - 1) == 0
    if power_of_two and uniform and not devices.on_cpu and devices.copies_permutes:
        return MIN_ROWS
    if not devices.on_cpu:
        log.warning(
            "mesh.tp=%d: exchanges run between the matmuls, not under them (slower): that needs a "
            "power of two, equal stages, one process and a jaxlib with peer-memory permutes",
            mesh.tp,
        )
    return None


def execution_lines(execution: Execution) -> list[str]:
    """Lines that say what was decided, in words."""
    e = execution
    layers = {0: "one after the other", 1: "in a loop"}.get(e.unroll, f"in a loop of {e.unroll}")
    held = "arrays of their own" if e.apart else "rows of stacks"
    gathered = "by each layer" if e.gather == "layer" else "once a step"
    reduced = {"step": "once a step", "micro_batch": "after every micro-batch"}.get(
        e.reduce, "by each layer"
    )
    if e.micro_batches == 1:
        sums = "gradients of the only micro-batch, no sums"
    else:
        sums = "added by the matmuls" if e.sums_in_matmuls else "added after each micro-batch"
    if e.gradients_apart:
        sums += "; AdamW updates rows of stacks"
    if e.overlap:
        gathered += ", under other layers' matmuls"
    lines = [
        f"layers      run {layers}; weights are {held}",
        f"exchanges   weights gathered {gathered}; gradients reduced {reduced}",
        f"gradients   {e.micro_batches} micro-batches a step: {sums}",
    ]
    if e.recipe is not None:
        stored = e.quantize_stored and e.recipe.stores_weights
        where = "where they are stored" if stored else "in every matmul"
        skipped = sum(not plan.fp8 for plan in e.layers)
        lines.append(f"FP8         {e.recipe}; weights rounded {where}; {skipped} layers left out")
        lines += [f"            {other}: some weights" for _, other in e.recipes[1:]]
    return lines
