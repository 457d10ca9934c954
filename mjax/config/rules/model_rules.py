"""The rules about `model`: a part of the table of rules across config keys (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    branches_of,
    of_decoder,
    roles_of,
    sizes_of,
)
from mjax.config.rules.rule import rule, rules_of, set_keys
from mjax.config.schema.keys import leaf_keys, value_of
from mjax.config.schema.model import ROPE_KEYS, LayerSizes
from mjax.config.schema.run import Config


def _rotary_dims(c: Config) -> dict[str, int]:
    """The rotated channels of a head, by the key of its size; {} without RoPE."""
    if c.model.position_embedding != "rope":
        return {}
    rotary = [word for word in sorted(c.model.branches) if BRANCHES[word].rotary]
    return {BRANCHES[word].rotary: c.model.rotary_dim(word) for word in rotary}


def _has_windows(c: Config) -> bool:
    return any(BRANCHES[word].windowed for word in c.model.branches)


@rule("use each entry: '@1' stands for the first")
def layer_sizes_fit(c: Config) -> Iterator[str]:
    used, entries = {sizes_of(kind) for kind in c.model.layer_kinds} - {0}, len(c.model.layer_sizes)
    if used != set(range(1, entries + 1)):
        yield (
            f"`model.layer_pattern` takes {sorted(used)} of the {entries} entries of "
            "model.layer_sizes"
        )


@rule("remove it or change model.layer_pattern")
def layer_sizes_read(c: Config) -> Iterator[str]:
    read: dict[int, set[str]] = {}
    for kind in c.model.layer_kinds:
        for word in branches_of(kind):
            branch = BRANCHES[word]
            window = {"attention.sliding_window"} if branch.windowed else set()
            read.setdefault(sizes_of(kind), set()).update(branch.sizes, window)
    for number, sizes in enumerate(c.model.layer_sizes, 1):
        for key in leaf_keys(LayerSizes):
            if value_of(sizes, key) is not None and key not in read.get(number, set()):
                key = f"model.layer_sizes[{number - 1}].{key}"
                yield f"{key} has no effect: its layers have no such size"


@rule("each kv head must serve equally many heads: change either", every_size=True)
def kv_heads_divide_heads(c: Config) -> Iterator[str]:
    if c.model.attention.num_attention_heads % c.model.attention.num_key_value_heads:
        yield (
            "`model.attention.num_attention_heads` is not divisible by "
            "`model.attention.num_key_value_heads`"
        )


@rule("set model.attention.head_dim")
def head_dim_known(c: Config) -> Iterator[str]:
    if c.model.reads_group("attention") and c.model.attention.head_dim <= 0:
        yield "`model.hidden_size` is not divisible by `model.attention.num_attention_heads`"


@rule("set kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim of model.mla")
def mla_sizes_given(c: Config) -> Iterator[str]:
    if c.model.reads_group("mla") and 0 in c.model.mla.model_dump().values():
        yield "`model.layer_pattern` has mla blocks, whose sizes model.mla lacks"


@rule("set it to false")
def mla_features(c: Config) -> Iterator[str]:
    names = "attention_bias attention_out_bias qk_norm attention_sinks key_multiplier".split()
    names += ["attention_in_multiplier", "attention_out_multiplier", "attention_output_gate"]
    for name in names:
        if c.model.reads_group("mla") and value_of(c.model.attention, name):
            yield f"`model.attention.{name}` is not built for mla blocks"


@rule("set it to 1.0")
def mla_rotates_whole_part(c: Config) -> Iterator[str]:
    if c.model.reads_group("mla") and c.model.rope.partial_rotary_factor != 1:
        yield (
            "`model.rope.partial_rotary_factor` is not for mla blocks, which turn qk_rope_head_dim "
            "dims"
        )


@rule("set model.mamba.mamba_num_heads, as a rule 2 x hidden_size / mamba_head_dim")
def mamba_heads_given(c: Config) -> Iterator[str]:
    if c.model.reads_group("mamba") and c.model.mamba.mamba_num_heads <= 0:
        yield "`model.layer_pattern` has mamba blocks, whose heads model.mamba lacks"


@rule("each group must serve equally many heads: change either")
def mamba_groups_divide_heads(c: Config) -> Iterator[str]:
    if c.model.mamba.mamba_num_heads % c.model.mamba.n_groups:
        yield "`model.mamba.mamba_num_heads` is not divisible by `model.mamba.n_groups`"


@rule("set linear_num_key_heads and linear_num_value_heads of model.deltanet, as many values a key")
def deltanet_heads_fit(c: Config) -> Iterator[str]:
    sizes = c.model.deltanet
    keys = sizes.linear_num_key_heads
    fit = keys > 0 and sizes.linear_num_value_heads % keys == 0 and sizes.channels
    if c.model.reads_group("deltanet") and not fit:
        yield (
            "`model.deltanet.linear_num_value_heads` is no multiple of "
            "`model.deltanet.linear_num_key_heads`, or they are missing, for deltanet blocks"
        )


@rule("give [smallest, largest] or null, and time_step_min up to time_step_max")
def mamba_steps_fit(c: Config) -> Iterator[str]:
    sizes = c.model.mamba
    limit = sizes.time_step_limit
    in_order = limit is None or (len(limit) == 2 and 0 <= limit[0] < limit[1])
    if not in_order or sizes.time_step_min > sizes.time_step_max:
        yield "`model.mamba.time_step_limit`, `model.mamba.time_step_min`: bounds are not in order"


@rule("give as many, or null")
def multipliers_fit(c: Config) -> Iterator[str]:
    of_parts, of_mlp = c.model.mamba.ssm_multipliers, c.model.mlp_multipliers
    is_plain = c.model.mlp_gated and not c.model.has_role("experts")
    fit_mlp = of_mlp is None or (is_plain and len(of_mlp) == 2)
    if not fit_mlp or (of_parts is not None and len(of_parts) != 5):
        yield (
            "`model.mamba.ssm_multipliers`, `model.mlp_multipliers`: five numbers for z, x, B, C, "
            "dt; two for the gate and the output of MLPs with a gate, in models without experts"
        )


@rule("RoPE turns pairs: make them even and at least 2")
def rotary_dims_even(c: Config) -> Iterator[str]:
    for key, dims in _rotary_dims(c).items():
        if dims < 2 or dims % 2:
            yield f"`model.{key}` x `model.rope.partial_rotary_factor` rotates {dims} dims"


@rule("remove it")
def scaling_keys_used(c: Config) -> Iterator[str]:
    scaling = c.model.rope.rope_scaling
    if scaling is None:
        return
    given = set_keys(scaling, *type(scaling).model_fields)
    for key in sorted(set(given) - {"rope_type", *ROPE_KEYS[scaling.rope_type]}):
        where = f"model.rope.rope_scaling.{key}"
        yield f"`{where}` has no effect with `model.rope.rope_scaling.rope_type`"


@rule("give both in model.rope.rope_scaling")
def longrope_complete(c: Config) -> Iterator[str]:
    scaling = c.model.rope.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return
    given = {len(scaling.short_factor or ()), len(scaling.long_factor or ())}
    if any(given != {dims // 2} for dims in _rotary_dims(c).values()):
        yield (
            "longrope needs short_factor and long_factor, each with half as many numbers as "
            "rotated dims of `model.attention.head_dim`"
        )


@rule("choose a mesh.tp that divides them", every_size=True)
def all_heads_norm_has_heads(c: Config) -> Iterator[str]:
    attention = c.model.attention
    if attention.qk_norm_all_heads and attention.num_key_value_heads % c.mesh.tp:
        yield (
            "`model.attention.qk_norm_all_heads`: `model.attention.num_key_value_heads` is not "
            "divisible by `mesh.tp`"
        )


@rule("set model.attention.sliding_window")
def window_given(c: Config) -> Iterator[str]:
    if _has_windows(c) and c.model.attention.sliding_window is None:
        yield "`model.layer_pattern` has sliding-window blocks"


@rule("lower the one or raise the other")
def top_k_fits(c: Config) -> Iterator[str]:
    moe = c.model.moe
    if c.model.has_role("experts") and moe.num_experts_per_tok > moe.num_experts:
        yield "`model.moe.num_experts_per_tok` exceeds `model.moe.num_experts`"


@rule("set model.moe.norm_topk_prob=false, or the router learns nothing from the loss")
def top_1_learns(c: Config) -> Iterator[str]:
    moe = c.model.moe
    if c.model.has_role("experts") and moe.num_experts_per_tok <= 1 and moe.norm_topk_prob:
        yield "`model.moe.num_experts_per_tok` with `model.moe.norm_topk_prob` makes every gate 1"


@rule("change them, or set model.moe.n_group=1 and model.moe.topk_group=1")
def groups_fit(c: Config) -> Iterator[str]:
    moe = c.model.moe
    among = moe.num_experts // moe.n_group * moe.topk_group
    # One group is no choice of groups.
    fits = moe.n_group == 1 or (
        moe.num_experts % moe.n_group == 0 and moe.num_experts_per_tok <= among
    )
    if not fits or moe.topk_group > moe.n_group:
        yield (
            "`model.moe.n_group`, `model.moe.topk_group`: groups of equal size, those that a token "
            "is sent to, with at least `model.moe.num_experts_per_tok` experts of "
            "`model.moe.num_experts`"
        )


@rule("lower it or model.moe.n_group")
def group_score_fits(c: Config) -> Iterator[str]:
    moe = c.model.moe
    if moe.n_group != 1 and moe.group_score_topk * moe.n_group > moe.num_experts:
        yield "`model.moe.group_score_topk` exceeds the experts of a group"


@rule("set the one or the other")
def sinkhorn_alone(c: Config) -> Iterator[str]:
    others = "router_aux_loss_coef expert_bias n_group force_balanced skip_padding".split()
    named = " and ".join(f"`model.moe.{name}`" for name in set_keys(c.model.moe, *others))
    if c.model.moe.sinkhorn and named:
        yield f"`model.moe.sinkhorn` balances by itself, not with {named}"


@rule("set model.moe.router_aux_loss_type=sum")
def layers_averaged_in_one_stream(c: Config) -> Iterator[str]:
    of_others = any("experts" in roles_of(k) and not of_decoder(k) for k in c.model.layer_kinds)
    averages = c.model.moe.router_aux_loss_type == "mean_over_layers"
    architecture = c.model.architecture
    if averages and of_others and architecture.has_streams and not architecture.reads_target:
        yield "`model.moe.router_aux_loss_type` is not built for experts of neighbors or towers"


@rule("set model.moe.capacity_factor, or train.experts=auto")
def batched_experts_have_capacity(c: Config) -> Iterator[str]:
    if c.train.experts == "batched" and c.model.moe.capacity_factor is None:
        yield "`train.experts` needs experts that take a known number of rows"


@rule("choose a mesh.ep that divides the experts")
def ep_divides_experts(c: Config) -> Iterator[str]:
    if c.model.moe.num_experts % c.mesh.ep:
        yield "`model.moe.num_experts` is not divisible by `mesh.ep`"


@rule("set it to null, or use experts without a shared one, hidden_act=silu, mlp_gated=true")
def swiglu_limit_is_of_experts(c: Config) -> Iterator[str]:
    has_others = c.model.has_role("feedforward") or c.model.moe.shared_expert_intermediate_size
    is_swiglu = c.model.mlp_gated and c.model.hidden_act == "silu"
    is_of_experts = c.model.has_role("experts") and not has_others
    if c.model.swiglu_limit is not None and not (is_swiglu and is_of_experts):
        yield "`model.swiglu_limit` is built for experts with a gate and silu alone"


@rule("set it to 0, or train.objective=next_token")
def prediction_needs_next_token(c: Config) -> Iterator[str]:
    if c.model.num_nextn_predict_layers and c.train.objective != "next_token":
        yield "`model.num_nextn_predict_layers` are not trained by `train.objective`"


@rule("set it to 0, or use rope")
def prediction_has_no_learned_positions(c: Config) -> Iterator[str]:
    if c.model.num_nextn_predict_layers and c.model.position_embedding == "learned":
        yield "`model.num_nextn_predict_layers` is not built for `model.position_embedding`=learned"


@rule("lower it")
def prediction_fits_sequence(c: Config) -> Iterator[str]:
    if c.model.num_nextn_predict_layers >= c.data.seq_length:
        yield "`model.num_nextn_predict_layers` reaches beyond `data.seq_length`"


@rule("lower the one or raise the other")
def seq_length_fits_positions(c: Config) -> Iterator[str]:
    m, length = c.model, max(c.data.seq_length, c.data.target_length or 0)
    is_bounded = m.position_embedding not in ("none", "relative") and m.architecture.reads_tokens
    if is_bounded and length + m.bert.position_offset > m.max_position_embeddings:
        offset = " with `model.bert.position_offset`" if m.bert.position_offset else ""
        yield f"`data.seq_length`{offset} exceeds `model.max_position_embeddings`"


MODEL_RULES = rules_of(globals())
