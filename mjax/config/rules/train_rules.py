"""The rules about schedule, batch, precision and memory: a part of the table (`validate.py`).

While `mesh.dp` is "auto", the batch rules demand what every dp would. The batch and schedule rules
are Megatron-LM's (`num_microbatches_calculator.py`, `optimizer_param_scheduler.py`).
"""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.languages.remat import not_kept, remat_policies
from mjax.config.rules.mesh_rules import count_slots, not_for_cudnn
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config

EIGHT_BIT_SIDE = 128  # heads of attention in 8 bits; rows are multiples of it


def _sequences_per_micro_batch(c: Config) -> int:
    """Sequences in one micro-batch of all devices; of what is "auto", the least there can be."""
    dp = 1 if c.mesh.dp == "auto" else c.mesh.dp
    rows = 1 if c.train.micro_batch_size == "auto" else c.train.micro_batch_size
    return rows * dp * c.mesh.ep


def _has_several_micro_batches(c: Config) -> bool:
    """Whether a step is several micro-batches for sure; where size or dp are "auto", it is not."""
    if "auto" in (c.mesh.dp, c.train.micro_batch_size):
        return False
    return c.train.global_batch_size != _sequences_per_micro_batch(c)


def balances_over_batch(c: Config) -> bool:
    """Whether the balance loss of experts counts the choices of all rows of a step together."""
    moe = c.model.moe
    return moe.router_aux_loss_over == "global_batch" and moe.router_aux_loss_coef > 0


def _micro_batch_factors(c: Config) -> str:
    """The keys whose product is `_sequences_per_micro_batch`, for a message."""
    factors = []
    if c.train.micro_batch_size != "auto":
        factors.append("`train.micro_batch_size`")
    if c.mesh.dp != "auto":
        factors.append("`mesh.dp`")
    if c.mesh.ep != 1:
        factors.append("`mesh.ep`")
    return " x ".join(factors)


def _decay_steps(c: Config) -> int:
    return c.schedule.decay_steps or c.train.steps


@rule("choose one of them")
def adapters_start_once(c: Config) -> Iterator[str]:
    if c.lora.init == "pissa" and c.lora.dora:
        yield "`lora.init` and `lora.dora` both change how the base starts"
    if c.lora.base == "nf4" and c.precision.fp8 != "none":
        yield "`lora.base` is read in precision.compute, not in 8 bits: `precision.fp8`"


@rule("set checkpoint.init_from")
def adapters_start_on_given_weights(c: Config) -> Iterator[str]:
    needs_weights = c.lora.init == "pissa" or c.lora.starts_from is not None
    if needs_weights and c.checkpoint.init_from is None:
        yield "`lora.init` starts from given weights, or from adapters that go with them"


@rule("name what is trained in lora.targets and lora.trained, and leave train.freeze out")
def adapters_freeze_all_else(c: Config) -> Iterator[str]:
    if c.lora.rank and c.train.freeze:
        yield "`lora.rank` freezes all that it does not train, so `train.freeze` would add nothing"


@rule("lower min_lr")
def min_lr_below_lr(c: Config) -> Iterator[str]:
    if c.schedule.min_lr > c.schedule.lr:
        yield "`schedule.min_lr` exceeds `schedule.lr`"


@rule("lower warmup_init_lr")
def warmup_init_below_lr(c: Config) -> Iterator[str]:
    if c.schedule.warmup_init_lr > c.schedule.lr:
        yield "`schedule.warmup_init_lr` exceeds `schedule.lr`"


@rule("shorten it, or raise schedule.decay_steps or train.steps")
def warmup_before_decay_ends(c: Config) -> Iterator[str]:
    if c.schedule.warmup_steps >= _decay_steps(c):
        yield f"`schedule.warmup_steps` fills all {_decay_steps(c)} steps"


@rule("set schedule.wsd_decay_steps")
def wsd_has_decay(c: Config) -> Iterator[str]:
    if c.schedule.decay == "wsd" and c.schedule.wsd_decay_steps <= 0:
        yield "`schedule.decay` has no length of the final decay"


@rule("shorten one of them")
def wsd_fits(c: Config) -> Iterator[str]:
    schedule, steps = c.schedule, _decay_steps(c)
    if schedule.decay == "wsd" and schedule.warmup_steps + schedule.wsd_decay_steps > steps:
        yield f"`schedule.warmup_steps` and `schedule.wsd_decay_steps` exceed {steps} steps"


@rule("[start, increment, samples]: positive, start below it, whole increments up to it")
def ramp_legal(c: Config) -> Iterator[str]:
    if c.train.rampup_batch_size is None:
        return
    start, increment, samples = c.train.rampup_batch_size
    rise = c.train.global_batch_size - start
    if min(start, increment, samples) < 1 or rise <= 0 or rise % increment:
        yield "`train.rampup_batch_size` does not lead to `train.global_batch_size`"


@rule("choose start and increment that are")
def ramp_divisible(c: Config) -> Iterator[str]:
    if c.train.rampup_batch_size is None:
        return
    start, increment, _ = c.train.rampup_batch_size
    for size in range(start, c.train.global_batch_size, increment):
        if size % _sequences_per_micro_batch(c):
            yield (
                f"`train.rampup_batch_size` passes {size}, which is not divisible by "
                f"{_micro_batch_factors(c)}"
            )


@rule(
    "change either: a step is a whole number of micro-batches on every device "
    "(train.micro_batch_size=auto picks their size)"
)
def batch_divisible(c: Config) -> Iterator[str]:
    if c.train.global_batch_size % _sequences_per_micro_batch(c):
        yield f"`train.global_batch_size` is not divisible by {_micro_batch_factors(c)}"


@rule(
    "make a step one micro-batch, or balance each sequence: model.moe.router_aux_loss_over=sequence"
)
def global_balance_needs_one_micro_batch(c: Config) -> Iterator[str]:
    if balances_over_batch(c) and _has_several_micro_batches(c):
        yield (
            "`model.moe.router_aux_loss_over` needs all choices before the first gradient, but "
            f"`train.global_batch_size` is several times {_micro_batch_factors(c)}"
        )


@rule("raise train.micro_batch_size, so that a step is one micro-batch, or set it to auto")
def pairs_need_one_micro_batch(c: Config) -> Iterator[str]:
    if c.train.objective == "contrastive" and _has_several_micro_batches(c):
        yield (
            "`train.objective` compares all rows of a step, but `train.global_batch_size` is "
            f"several times {_micro_batch_factors(c)}"
        )


@rule("raise it")
def pairs_need_others(c: Config) -> Iterator[str]:
    if c.train.objective == "contrastive" and c.train.global_batch_size == 1:
        if c.model.contrastive.loss == "softmax":
            yield "`train.global_batch_size`: a pair that is alone has no other to be told from"


@rule("set precision.fp8_experts=false or precision.fp8=mxfp8")
def fp8_experts_in_four_bits(c: Config) -> Iterator[str]:
    if c.precision.fp8_experts and "nvfp4" in c.precision.fp8_recipes:
        yield "`precision.fp8_experts` with the rounding at random of nvfp4 is not built"


@rule("set it to power_of_two, which every recipe takes")
def fp8_scales_of_recipe(c: Config) -> Iterator[str]:
    for scales, recipe in (("free", "block128"), ("floor", "mxfp8")):
        others = set(c.precision.fp8_recipes) - {recipe, "current", "delayed", "none"}
        if c.precision.fp8_scales == scales and others:
            yield f"`precision.fp8_scales` is of precision.fp8={recipe} alone"


@rule("set precision.fp8_experts=false or train.experts=auto")
def fp8_experts_one_by_one(c: Config) -> Iterator[str]:
    rounds = c.precision.fp8 != "none" and c.precision.fp8_experts
    if rounds and c.train.experts == "loop":
        yield "`train.experts` has no products of 8 bits for `precision.fp8`"


@rule("set it to false, or take experts of such a width")
def fp8_dispatch_in_blocks(c: Config) -> Iterator[str]:
    if c.precision.fp8_dispatch and c.model.expert_width % 128:
        key = "model.moe.latent_size" if c.model.moe.latent_size else "model.hidden_size"
        yield f"`precision.fp8_dispatch`: `{key}` is no multiple of 128, the width of a block"


@rule("set precision.fp8_experts=false, or precision.fp8=block128 with its own blocks and scales")
def fp8_dispatch_rounds_once(c: Config) -> Iterator[str]:
    precision = c.precision
    per_tensor = not {"current", "delayed"}.isdisjoint(precision.fp8_recipes)
    other_scales = per_tensor or precision.fp8_scales != "power_of_two"
    other_blocks = 128 % (precision.fp8_block or 128) > 0
    if precision.fp8_dispatch and precision.fp8_experts and (other_scales or other_blocks):
        yield "`precision.fp8_dispatch`: experts of `precision.fp8` would round tokens once more"


# Limits of cuDNN's kernel as jax and XLA call it (docs/train/precision.md, "Attention").
@rule("change it, or set precision.fp8_attention=false", every_size=True)
def fp8_attention_fits(c: Config) -> Iterator[str]:
    if not c.precision.fp8_attention:
        return
    lacks = "`precision.fp8_attention`: cuDNN has no 8-bit attention"
    if c.data.document_mask:
        yield f"{lacks} within documents (`data.document_mask`)"
    if c.mesh.cp != 1:
        yield f"{lacks} to keys that come in blocks (`mesh.cp`)"
    if c.train.attention in ("mosaic", "triton"):
        yield f"{lacks} of ours (`train.attention`)"
    for word in sorted(c.model.branches):
        branch = BRANCHES[word]
        plain = branch.group == "attention" and branch.mask == "causal" and not branch.windowed
        if branch.has_heads and not plain:
            yield f"{lacks} of {word} blocks (`model.layer_pattern`)"
    for reason in not_for_cudnn(c):
        if reason.startswith("model."):
            yield f"{lacks} with {reason}"
    if c.model.attention.head_dim != EIGHT_BIT_SIDE:
        yield f"{lacks} with heads other than {EIGHT_BIT_SIDE} (`model.attention.head_dim`)"
    if c.data.seq_length % EIGHT_BIT_SIDE:
        yield f"{lacks} where `data.seq_length` is no multiple of {EIGHT_BIT_SIDE}"


@rule("lower it or set precision.fp8=none")
def fp8_layers_left(c: Config) -> Iterator[str]:
    if sum(c.precision.fp8_left_out) >= c.model.num_hidden_layers:
        yield "`precision.fp8_skip_layers` at both ends of `model.num_hidden_layers` leaves none"


# Slots of a chunk hold layers from all over.
@rule("set precision.fp8_skip_layers=0")
def fp8_skip_pipeline(c: Config) -> Iterator[str]:
    if any(c.precision.fp8_left_out) and c.mesh.pp != 1:
        yield "`precision.fp8_skip_layers` is not built for the chunks of `mesh.pp`"


@rule("set precision.weights=plain")
def weights_in_groups(c: Config) -> Iterator[str]:
    if c.precision.weights != "plain" and c.precision.fp8 != "none":
        yield "`precision.weights` would be rounded a second time by `precision.fp8`"
    if c.precision.weights != "plain" and c.lora.rank:
        yield "`precision.weights` is not built for the adapters of `lora.rank`"


@rule("set precision.compute=bfloat16, or leave eight bits out")
def fp16_without_fp8(c: Config) -> Iterator[str]:
    if c.precision.compute == "float16" and c.precision.fp8 != "none":
        yield (
            "`precision.fp8`: its scales are not built for gradients with the loss scale of "
            "`precision.compute`"
        )
    if c.precision.compute == "float16" and c.precision.fp8_dispatch:
        yield "`precision.fp8_dispatch` may round up beyond the range of `precision.compute`"
    if c.precision.compute == "float16" and c.precision.fp8_attention:
        yield "`precision.fp8_attention` is not built for `precision.compute`"


@rule("set precision.params=float32 or precision.compute=bfloat16")
def fp16_masters(c: Config) -> Iterator[str]:
    if c.precision.compute == "float16" and c.precision.params != "float32":
        yield "`precision.params`: `precision.compute` needs fp32 masters"


@rule("set them to Megatron's, which are 4294967296 and 1")
def loss_scale_range(c: Config) -> Iterator[str]:
    if not c.precision.min_loss_scale <= c.precision.initial_loss_scale < 2.0**127:
        yield "`precision.initial_loss_scale` is below `precision.min_loss_scale` or beyond fp32"


@rule("dots keeps q, kv, attn_proj, up, down, attn_out, attn_lse, attention the last two")
def offload_kept(c: Config) -> Iterator[str]:
    text = "dots" if c.train.remat == "auto" else c.train.remat
    if c.mesh.pp > 1:
        policies = remat_policies(text, count_slots(c), "layers in a pipeline stage")
    else:
        policies = remat_policies(text, c.model.num_hidden_layers)
    for name in not_kept(policies, c.train.offload):
        yield f"`train.offload`: no layer keeps {name!r} under `train.remat`"


@rule("set train.offload=[] and, to save memory, train.remat=attention or full")
def offload_pipeline(c: Config) -> Iterator[str]:
    if c.train.offload and c.mesh.pp != 1:
        yield "`train.offload` is not built for what waits in the stages of `mesh.pp`"


# The compiler copies as late as it can: outside a loop, right before it copies back.
@rule("set train.unroll=auto, which is then 1")
def offload_loops(c: Config) -> Iterator[str]:
    if c.train.offload and c.train.unroll not in ("auto", 1):
        yield "`train.offload` saves nothing where layers are unrolled: `train.unroll`"


@rule("only saved steps can be kept: change either")
def keep_every_is_saved(c: Config) -> Iterator[str]:
    saved, kept = c.checkpoint.interval, c.checkpoint.keep_every
    if kept is not None and (saved is None or kept % saved):
        yield "`checkpoint.keep_every` is not a multiple of `checkpoint.interval`"


@rule("give [first, last], as in [10, 12], counted from 1")
def profile_steps_follow(c: Config) -> Iterator[str]:
    steps = c.log.profile_steps
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield "`log.profile_steps` is not a first and a last step"


@rule("set log.diagnostics_interval=null or optimizer.offload=false")
def diagnostics_offload(c: Config) -> Iterator[str]:
    if c.log.diagnostics_interval is not None and c.optimizer.offload is True:
        yield (
            "`log.diagnostics_interval` is not built for moments on the host (`optimizer.offload`)"
        )


@rule("set train.attention=auto")
def cudnn_supports(c: Config) -> Iterator[str]:
    for key in not_for_cudnn(c) if c.train.attention in ("cudnn", "triton") else []:
        yield f"`train.attention` cannot run with {key}"


@rule("set train.attention=auto")
def short_rows_are_whole(c: Config) -> Iterator[str]:
    if c.train.attention == "triton" and c.mesh.cp > 1:
        yield "`train.attention=triton` takes all keys of a row, but `mesh.cp` cuts them"


TRAIN_RULES = rules_of(globals())
