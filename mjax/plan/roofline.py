"""The time of a training step, estimated from its FLOPs and bytes: a roofline with measured rates.

A step's work is counted in parts, and each part is divided by the lowest and by the highest rate
that was measured for work of its kind, as a share of the chip's peak. So an estimate is a range.
Shares come from H200s; for other chips it is an assumption that theirs are equal. Invariant: pure
arithmetic on (config, sizes of the mesh, declared parameters, chip); nothing is compiled.

Sources: docs/lab/2026-11-22-breakdowns.md (matmuls 690 to 766 TFLOP/s in whole steps, 1,300 in 8
bits; attention 359 at 8192 tokens and heads of 128, 299 at 2048, 191 at 1024 and heads of 64),
docs/lab/2026-11-23-grouped-matmul.md (experts: 630 at a width of 14336, 530 at 1408, 483 at 768),
docs/lab/2026-11-25-two-gpus.md (experts in 8 bits: 1,228, 1,121 and 782 at 14336),
docs/lab/2026-11-24-encoders.md (full attention, a head of hidden tokens, layers of Mamba-2),
docs/performance.md (K3: 8 bytes a logit beside the loss's matmuls; K4: passes over memory),
docs/train/tuning.md (collectives: 170 to 200 GB/s by NCCL, 360 by copies). Networks between nodes
were not measured: 400 Gb/s a GPU is an assumption.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mjax.config.languages.layer_pattern import BRANCHES, modality_of, roles_of
from mjax.config.rules.mesh_rules import folds_experts
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.kernels.base.chooser import Device, believed
from mjax.models.base.branch import KernelChoices, branch_class, model_heads
from mjax.models.flops import branch_flops, flops_of_run, predicted_share, run_flops_by_part
from mjax.models.moe.exchange import bytes_of_token, group_size, rows_per_peer
from mjax.models.moe.layer import experts_run, runs_all_experts
from mjax.models.runtime.execution import Execution
from mjax.pipeline.layout import layout_of
from mjax.pipeline.schedule import make_schedule
from mjax.plan.balance import head_in_layers, step_time
from mjax.plan.chips import Chip
from mjax.plan.execution import micro_batch_shape
from mjax.plan.kernel_lines import branch_kernels
from mjax.plan.memory import WIDTH, Counts, counts_on_device, moment_bytes_on_device
from mjax.sharding.mesh import parallel_of_run

MEASURED_ON = "h200"  # the chip of all shares below
NETWORK_GBS = 50.0  # of a GPU to other nodes: 400 Gb/s, an assumption


class Span(NamedTuple):
    """The lowest and the highest of something; of a time, in seconds."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def scaled(self, factor: float) -> "Span":
        return Span(self.low * factor, self.high * factor)


OF_RATES = Device("gpu", hopper=True)  # what the rates below were measured on
# Shares of the chip's peak that work of a kind reached on H200s.
MATMUL = Span(0.69, 0.77)  # of bf16
MATMUL_8 = Span(0.62, 0.70)  # of fp8
EXPERT = Span(0.62, 0.70)  # of bf16, for endlessly wide experts; `_expert_rate`
EXPERT_8 = Span(0.49, 0.54)  # of fp8, likewise, weight gradients added to their sums
ATTENTION = Span(0.50, 0.58)  # of bf16, for endless sequences and heads; `_attention_seconds`
PASS = Span(0.50, 0.67)  # of memory: norms, activations, rotary embedding, loss
UPDATE = Span(0.80, 0.92)  # of memory: the optimizer, sums of gradients
LINK = Span(0.42, 0.75)  # of the link: collectives of a node
NETWORK = Span(0.60, 0.95)  # of NETWORK_GBS
HOST_GBS = Span(45, 60)  # moments that come from the host's memory and go back
LAUNCH = Span(0.00005, 0.00015)  # seconds that kernels of a layer wait for each other

# Heads of H and sequences of S reach H / (H + 46) x S / (S + 650) of the endless. With a mask that
# leaves no blocks half empty, and no biases whose gradients are summed, that is S / (S + 225).
HEAD_SIZE, SEQUENCE, FULL_SEQUENCE = 46, 650, 225
# Experts of a width F, one after the other in a grouped matmul, reach F / (F + 300) of the widest.
EXPERT_WIDTH = 300

# Tensors [tokens, D] that pass through memory besides matmuls, forward and backward: norms and
# residuals, and biases of the branches. Branches say how many they add (`memory_traffic`).
OF_BLOCK = 20
OF_LOOP = 40  # [tokens, D] that a loop over layers copies to stacks, back, and fills with zeros
ROUNDING = 1.3  # times all these passes where 8-bit matmuls read and write rounded copies
BYTES_A_LOGIT = 8
# Shares of a layer's forward and backward that is computed again, by policy: of passes over memory.
AGAIN = {"dots": 0.3, "attention": 0.4, "full": 0.4}
ATTENTION_FORWARD = 0.25  # of attention's time


class Part(NamedTuple):
    """A part of a step: its name and its time in seconds."""

    name: str
    time: Span


def step_parts(
    cfg: Config, sizes: dict[str, int], execution: Execution, specs: dict, chip: Chip
) -> list[Part]:
    """The parts of a step's time on each device. `chip` has details; `auto` is decided in `cfg`."""
    counts = counts_on_device(cfg, sizes, specs)
    stretch = _pipeline_stretch(cfg, execution)
    parts = [
        *_compute(cfg, sizes, execution, chip, stretch),
        Part("optimizer, sums of gradients", _update(cfg, execution, counts, chip)),
        *_exchanges(cfg, sizes, execution, counts, chip),
    ]
    if cfg.optimizer.offload is True:
        moved = 2 * moment_bytes_on_device(cfg.optimizer, counts)
        parts.append(Part("moments from and to the host", _time(moved, HOST_GBS.scaled(1e9))))
    return [part for part in parts if part.time.high > 0]


def total(parts: list[Part]) -> Span:
    """The time of a step in seconds."""
    return Span(sum(part.time.low for part in parts), sum(part.time.high for part in parts))


def time_lines(
    parts: list[Part], cfg: Config, devices: int, peak_tflops: float | None
) -> list[str]:
    """Lines that say how long a step takes by this estimate, and of what that is made."""
    time = total(parts)
    tokens = cfg.train.global_batch_size * cfg.data.seq_length / devices
    flops = tokens * flops_of_run(cfg)
    speed = f"{tokens / time.high:,.0f} to {tokens / time.low:,.0f} tok/s a GPU"
    if peak_tflops:
        shares = [flops / seconds / (peak_tflops * 1e12) for seconds in (time.high, time.low)]
        speed += f", MFU {shares[0]:.0%} to {shares[1]:.0%}"
    lines = [f"time        estimate {_milliseconds(time)} a step: {speed}"]
    for part in parts:
        lines.append(f"            {part.name}: {_milliseconds(part.time)}")
    return lines


def _milliseconds(time: Span) -> str:
    digits = 0 if time.low >= 0.1 else 1
    return f"{1e3 * time.low:,.{digits}f} to {1e3 * time.high:,.{digits}f} ms"


def _time(work: float, rate: Span) -> Span:
    return Span(work / rate.high, work / rate.low)


def _kernels(cfg: Config, sizes: dict[str, int]) -> KernelChoices:
    """The kernels of the branches; matmuls with activations as on the GPUs of the rates."""
    kernels = branch_kernels(cfg, sizes)
    with believed(OF_RATES):
        as_measured = branch_kernels(cfg, sizes)
    return {op: as_measured[op] if op == "activated matmul" else kernels[op] for op in kernels}


def _expert_rate(cfg: Config, sizes: dict[str, int], chip: Chip) -> Span:
    """FLOP/s that the matmuls of experts reach."""
    bf16 = chip.bf16_tflops * 1e12
    if runs_all_experts(branch_kernels(cfg, sizes)["experts"].name):
        return MATMUL.scaled(bf16)
    cuts = 1 if folds_experts(cfg.model, cfg.mesh) else sizes["tp"]
    width = cfg.model.moe.moe_intermediate_size / cuts
    filled = width / (width + EXPERT_WIDTH)
    if _multiplied_in_8_bits(cfg, sizes):
        return EXPERT_8.scaled(chip.details.fp8_tflops * 1e12 * filled)
    return EXPERT.scaled(bf16 * filled)


def _multiplied_in_8_bits(cfg: Config, sizes: dict[str, int]) -> bool:
    """Whether experts are, and not only rounded: on the GPUs of the rates, by their sizes."""
    with believed(OF_RATES):
        kernel = branch_kernels(cfg, sizes)["experts"].name
    return cfg.precision.fp8_experts and kernel == "mosaic"


def _share_sent(cfg: Config, sizes: dict[str, int]) -> float:
    """The part of a device's tokens that goes to each other device with experts."""
    if branch_kernels(cfg, sizes)["tokens of experts"].name == "all_gather":
        return 1.0
    rows, width = micro_batch_shape(cfg, sizes)
    tokens = rows * width // sizes["tp"]
    return rows_per_peer(tokens, _expert_group(cfg, sizes), cfg.model.moe) / tokens


def _expert_group(cfg: Config, sizes: dict[str, int]) -> int:
    """The devices over which the experts of a layer lie."""
    return group_size(parallel_of_run(cfg, sizes))


def _exchanges_over_tp(cfg: Config, sizes: dict[str, int]) -> float:
    """Exchanges of a device's tokens over tp in a layer: 5 of each branch, a mean over layers.

    Each is gathered and scattered each way, and gathered again. Experts that tp cuts have those of
    their ep group, folded ones none of their own.
    """
    kinds = cfg.model.layer_kinds
    share = sum("experts" in roles_of(kind) for kind in kinds) / len(kinds)
    of_experts = 5 * sizes["ep"]
    if folds_experts(cfg.model, cfg.mesh):
        of_experts = 5 if cfg.model.moe.shared_expert_intermediate_size else 0
    return 10 - 5 * share + of_experts * share


def _compute(
    cfg: Config, sizes: dict[str, int], execution: Execution, chip: Chip, stretch: float
) -> Iterator[Part]:
    """Matmuls, attention and passes over memory of one device, in all micro-batches."""
    tokens = _tokens(cfg, sizes, execution) * stretch
    flops = run_flops_by_part(cfg)
    remat = [plan.remat for plan in execution.layers]
    again = {name: remat.count(name) / len(remat) for name in AGAIN}  # shares of the layers
    weights_again = 1 + (again["attention"] + again["full"]) / 3
    peak = MATMUL.scaled(chip.bf16_tflops * 1e12)
    rate = peak
    if execution.recipe is not None and execution.recipe.scales_tensors:
        rate = MATMUL_8.scaled(chip.details.fp8_tflops * 1e12)
    yield Part("matmuls", _time(flops["matmul"] * tokens * weights_again, rate))
    if flops["experts"]:
        kernel, moe = branch_kernels(cfg, sizes)["experts"].name, cfg.model.moe
        run = experts_run(moe, kernel, cfg.data.seq_length) / moe.num_experts_per_tok
        work = flops["experts"] * run
        of_experts = _expert_rate(cfg, sizes, chip)
        yield Part("experts", _time(work * tokens * weights_again, of_experts))
    yield Part("head", _time(flops["head"] * tokens, peak))
    seconds = _attention_seconds(cfg, chip) * tokens
    seconds *= 1 + ATTENTION_FORWARD * again["full"]
    yield Part("attention", _time(seconds, ATTENTION))
    passes = _pass_bytes(cfg, sizes, execution, again)
    memory = PASS.scaled(chip.details.memory_gbs * 1e9)
    yield Part("norms, activations, loss", _time(passes * tokens, memory))
    layers = cfg.model.num_hidden_layers / sizes["pp"]
    launched = layers * execution.micro_batches * stretch
    yield Part("gaps between kernels", LAUNCH.scaled(launched))


def _tokens(cfg: Config, sizes: dict[str, int], execution: Execution) -> float:
    """Tokens of a step for each device, if tp and pp cut tokens instead of the model."""
    rows, width = micro_batch_shape(cfg, sizes)
    of_step = rows * width * execution.micro_batches
    return of_step / (sizes["tp"] * sizes["pp"])


def _attention_seconds(cfg: Config, chip: Chip) -> float:
    """Seconds of a token's attention in all layers if the share of the peak were 1."""
    length = cfg.data.seq_length
    branches = list(branch_flops(cfg.model, length, cfg.data.target_length))
    work = 0.0
    for word, sizes, flops, _ in branches:
        window = length
        if BRANCHES[word].windowed and sizes.attention.sliding_window:
            window = min(length, sizes.attention.sliding_window)
        heads = branch_class(word).heads(sizes)
        if heads is None:
            work += flops
            continue
        head = (heads.size + heads.value_size) / 2
        of_head = head / (head + HEAD_SIZE)
        of_window = window / (window + _lost_length(word, sizes))
        work += flops / (of_head * of_window)
    all_flops = sum(branch.flops for branch in branches)
    counted = run_flops_by_part(cfg)["attention"]
    trained = counted / all_flops if all_flops else 0.0  # less where layers are frozen
    return work * trained / (chip.bf16_tflops * 1e12)


def _lost_length(word: str, sizes: ModelConfig) -> int:
    """The tokens that a sequence would have to be longer by, for what its attention's time lost."""
    plain = BRANCHES[word].mask != "causal" and sizes.position_embedding != "relative"
    return FULL_SEQUENCE if plain else SEQUENCE


def _pass_bytes(
    cfg: Config, sizes: dict[str, int], execution: Execution, again: dict[str, float]
) -> float:
    """Bytes of a token that pass through memory besides matmuls; `again` are shares of layers."""
    repeated = 1 + sum(AGAIN[name] * share for name, share in again.items())
    passes = _layer_bytes(cfg, sizes) * repeated
    if execution.loops:
        elements = OF_LOOP * cfg.model.hidden_size
        copied = elements * WIDTH[execution.compute]
        passes += copied * cfg.model.num_hidden_layers
    if execution.recipe is not None:
        passes *= ROUNDING
    length = cfg.data.seq_length
    predicted = predicted_share(cfg) * (cfg.data.target_length or length) / length
    logits = (
        0.0
        if cfg.model.architecture.predicts != "tokens"
        else cfg.model.padded_vocab_size * predicted
    )
    return passes + BYTES_A_LOGIT * logits


def _layer_bytes(cfg: Config, sizes: dict[str, int]) -> float:
    """Bytes of a token that pass through memory besides matmuls, in all layers."""
    kernels, elements = _kernels(cfg, sizes), 0.0
    length = cfg.data.seq_length
    for word, model, _, share in branch_flops(cfg.model, length, cfg.data.target_length):
        of_branch = branch_class(word).memory_traffic(model, kernels, length)
        elements += (OF_BLOCK / 2 * model.hidden_size + of_branch) * share
    return elements * WIDTH[cfg.precision.compute]


def _pipeline_stretch(cfg: Config, execution: Execution) -> float:
    """How many times the mean over devices the layers and head take, for bubble and imbalance."""
    if not execution.pipelined:
        return 1.0
    layout, m = layout_of(cfg), execution.micro_batches
    head = head_in_layers(cfg.model, cfg.data.seq_length)
    schedule = make_schedule(layout.pp, layout.v, m)
    all_layers = cfg.model.num_hidden_layers + head
    ideal = all_layers * m / layout.pp
    return step_time(layout, schedule, head) / ideal


def _update(cfg: Config, execution: Execution, counts: Counts, chip: Chip) -> Span:
    """The optimizer reads and writes masters and moments, reads gradients twice and writes weights.

    Sums of several micro-batches begin with zeros. Sums that matmuls do not add are read and
    written after each, the others are copied to stacks at the end.
    """
    trained = sum(counts.trained_of_role.values())
    accumulate, compute = WIDTH[execution.accumulate], WIDTH[execution.compute]
    masters = 2 * WIDTH[cfg.precision.params]
    added = 2 * accumulate + compute
    moved = trained * (masters + added)
    moved += 2 * moment_bytes_on_device(cfg.optimizer, counts)
    if execution.micro_batches > 1:
        by_hand = counts.tables
        if execution.sums_in_matmuls:
            moved += 3 * accumulate * counts.stacks
        else:
            by_hand += counts.stacks
        moved += execution.micro_batches * by_hand * added
    return _time(moved, UPDATE.scaled(chip.details.memory_gbs * 1e9))


# ---- exchanges -----------------------------------------------------------------------------------


def _exchanges(
    cfg: Config, sizes: dict[str, int], execution: Execution, counts: Counts, chip: Chip
) -> Iterator[Part]:
    """Exchanges between devices. One that is hidden under matmuls takes no time at best, and
    all of its time at worst, because it then slows the matmuls."""
    rows, width = micro_batch_shape(cfg, sizes)
    compute = WIDTH[execution.compute]
    layers = cfg.model.num_hidden_layers / sizes["pp"]
    crossed = layers * execution.micro_batches  # layers that micro-batches pass through
    hidden = cfg.model.hidden_size / sizes["tp"]
    activations = rows * width * hidden * compute

    def part(name: str, axes: tuple[str, ...], moved: float, hides: bool) -> Part:
        time = _time(moved, group_rate(sizes, axes, chip))
        return Part(name, Span(0.0, time.high) if hides else time)

    shards = sizes["dp"] * sizes["ep"] * sizes["cp"]
    if shards > 1:
        moved = _zero_bytes(cfg, execution, counts) * (shards - 1) / shards
        hides = execution.overlap or cfg.mesh.zero_stage == 3
        yield part("weights and gradients over dp", ("dp", "ep", "cp"), moved, hides)
    others = {axis: n - 1 for axis, n in sizes.items()}
    own = {axis: _share_of_own(cfg, axis) for axis in ("tp", "cp")}
    if others["tp"]:
        moved = others["tp"] * activations * crossed * (1 - own["tp"])
        moved *= _exchanges_over_tp(cfg, sizes)
        yield part("activations over tp", ("tp",), moved, False)
    heads = model_heads(cfg.model)
    if others["cp"] and heads is not None:  # keys and values, and their gradients
        pair = heads.kv_channels / sizes["tp"]
        of_layer = 3 * others["cp"] * rows * width * pair * compute
        moved = of_layer * crossed * (1 - own["cp"])
        yield part("keys and values over cp", ("cp",), moved, True)
    group = _expert_group(cfg, sizes)
    if group > 1 and cfg.model.has_role("experts"):
        given = cfg.model.expert_width, cfg.precision.compute
        sent = bytes_of_token(*given, cfg.precision.fp8_dispatch) / bytes_of_token(*given, False)
        moved = 4 * sent * (group - 1) * activations * crossed * _share_sent(cfg, sizes)
        over = parallel_of_run(cfg, sizes).expert_axes.over
        yield part("tokens of experts", over, moved, False)
    if others["pp"]:
        chunks = execution.micro_batches * cfg.mesh.virtual_stages
        yield part("activations over pp", ("pp",), 2 * activations * chunks, True)


def _share_of_own(cfg: Config, axis: str) -> float:
    """The share of the layers whose tower's size along `axis` is 1, so that none is exchanged."""
    own = [name for name, sizes in cfg.mesh.towers.items() if sizes.get(axis) == 1]
    kinds = cfg.model.layer_kinds
    return sum(modality_of(kind) in own for kind in kinds) / len(kinds)


def _zero_bytes(cfg: Config, execution: Execution, counts: Counts) -> float:
    """Bytes of weights that are gathered and of gradients that are reduced in a step."""
    compute = WIDTH[execution.compute]
    m = execution.micro_batches
    weights = counts.tables + counts.stacks
    summed = compute if execution.overlap else WIDTH[execution.accumulate]
    eight = counts.eight_bits * (compute - 1) if execution.quantize_stored else 0
    gathered = weights * compute - eight
    if cfg.mesh.zero_stage == 0:
        return 2 * weights * summed
    if cfg.mesh.zero_stage == 3:
        return 2 * m * gathered + m * weights * compute
    times = m if execution.reduce == "micro_batch" else 1
    return gathered + times * weights * summed


def group_rate(sizes: dict[str, int], axes: tuple[str, ...], chip: Chip) -> Span:
    """Bytes a second at which each GPU of a group along mesh axes exchanges.

    Within a node that is the link's. A group that spans nodes has the network of all its GPUs in a
    node, if that is slower.
    """
    link = LINK.scaled(chip.details.link_gbs * 1e9)
    size = inside = 1
    for axis, along in reversed(sizes.items()):  # inner to outer
        stride = size
        size *= along
        if axis in axes and along > 1:
            inside *= max(1, min(along, chip.details.node // stride))
            if size > chip.details.node:
                network = NETWORK.scaled(NETWORK_GBS * 1e9 * inside)
                link = Span(min(link.low, network.low), min(link.high, network.high))
    return link
