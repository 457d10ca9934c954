"""The rules about `model`: a part of the table of rules across config keys (`validate.py`)."""

from mjax.config.keys import leaf_keys, value_of
from mjax.config.mesh_rules import Rule
from mjax.config.model_schema import LayerSizes, MambaConfig, MlaConfig
from mjax.config.pattern import BRANCHES, branches_of, sizes_of
from mjax.config.schema import Config


def _rotary_dims(c: Config) -> dict[str, int]:
    """The rotated channels of a head, by the key of its size; {} without RoPE."""
    if c.model.position_embedding != "rope":
        return {}
    rotary = [letter for letter in sorted(c.model.branches) if BRANCHES[letter].rotary]
    return {BRANCHES[letter].rotary: c.model.rotary_dim(letter) for letter in rotary}


def _odd_rotary(c: Config) -> list[str]:
    """The keys of sizes of heads that RoPE cannot turn."""
    return [key for key, dims in _rotary_dims(c).items() if dims < 2 or dims % 2]


def _longrope_complete(c: Config) -> bool:
    s = c.model.rope.rope_scaling
    if s is None or s.rope_type != "longrope":
        return True
    given = {len(s.short_factor or ()), len(s.long_factor or ())}
    return all(given == {dims // 2} for dims in _rotary_dims(c).values())


def _has_only_experts(c: Config) -> bool:
    """Whether all feed-forward branches are experts, none of them shared."""
    shared = c.model.moe.shared_expert_intermediate_size
    return _has_experts(c) and "D" not in c.model.branches and not shared


def _has_experts(c: Config) -> bool:
    return "E" in c.model.branches


def _has_latents(c: Config) -> bool:
    return "A" in c.model.branches


def _has_states(c: Config) -> bool:
    return "M" in c.model.branches


def _steps_fit(c: Config) -> bool:
    """Whether the bounds of steps are pairs in order."""
    sizes = c.model.mamba
    limit = sizes.time_step_limit
    in_order = limit is None or (len(limit) == 2 and 0 <= limit[0] < limit[1])
    return in_order and sizes.time_step_min <= sizes.time_step_max


def _multipliers_fit(c: Config) -> bool:
    of_parts, of_mlp = c.model.mamba.ssm_multipliers, c.model.mlp_multipliers
    if of_mlp is not None and (not c.model.mlp_gated or _has_experts(c) or len(of_mlp) != 2):
        return False
    return of_parts is None or len(of_parts) == 5


def _has_head_dim(c: Config) -> bool:
    """Whether some attention has heads of model.attention.head_dim, and kv heads."""
    return bool(c.model.branches & set("GLNB"))


def _mla_lacks(c: Config) -> list[str]:
    """The keys of model.attention that are set and that A blocks lack."""
    names = "attention_bias attention_out_bias qk_norm attention_sinks key_multiplier".split()
    names += ["attention_in_multiplier", "attention_out_multiplier"]
    return [name for name in names if value_of(c.model.attention, name)]


def _has_windows(c: Config) -> bool:
    return any(BRANCHES[letter].windowed for letter in c.model.branches)


def _sizes_used(c: Config) -> set[int]:
    """The entries of model.layer_sizes that layers take, from 1."""
    return {sizes_of(kind) for kind in c.model.layer_kinds} - {0}


def _sizes_without_effect(c: Config) -> list[str]:
    """The keys in model.layer_sizes that no branch of their layers reads."""
    read: dict[int, set[str]] = {}
    for kind in c.model.layer_kinds:
        for letter in branches_of(kind):
            branch = BRANCHES[letter]
            window = {"attention.sliding_window"} if branch.windowed else set()
            read.setdefault(sizes_of(kind), set()).update(branch.sizes, window)
    unread = []
    for number, sizes in enumerate(c.model.layer_sizes, 1):
        keys = [key for key in leaf_keys(LayerSizes) if value_of(sizes, key) is not None]
        unread += [
            f"model.layer_sizes[{number - 1}].{key}"
            for key in keys
            if key not in read.get(number, set())
        ]
    return unread


def _groups_fit(c: Config) -> bool:
    moe = c.model.moe
    if moe.n_group == 1:
        return moe.topk_group == 1
    if moe.topk_group > moe.n_group or moe.num_experts % moe.n_group:
        return False
    return moe.num_experts_per_tok <= moe.num_experts // moe.n_group * moe.topk_group


def _balanced_besides_sinkhorn(c: Config) -> str:
    """The keys that choose or balance experts in another way where Sinkhorn does, for a message."""
    moe = c.model.moe
    others = {
        "router_aux_loss_coef": moe.router_aux_loss_coef > 0,
        "expert_bias": moe.expert_bias,
        "n_group": moe.n_group > 1,
        "force_balanced": moe.force_balanced,
        "skip_padding": moe.skip_padding,
    }
    named = [f"`model.moe.{name}`" for name, is_set in others.items() if is_set]
    return " and ".join(named) if moe.sinkhorn else ""


def _past_positions(c: Config) -> bool:
    """Whether a sequence has more tokens than the model has positions."""
    m = c.model
    if m.position_embedding in ("none", "relative"):
        return False
    length = max(c.data.seq_length, c.data.target_length or 0)
    return length + m.bert.position_offset > m.max_position_embeddings


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "layer_sizes_fit",
        lambda c: _sizes_used(c) == set(range(1, len(c.model.layer_sizes) + 1)),
        lambda c: (
            f"`model.layer_pattern` takes {sorted(_sizes_used(c))} of the "
            f"{len(c.model.layer_sizes)} entries of model.layer_sizes"
        ),
        "use each entry: '@1' stands for the first",
    ),
    Rule(
        "layer_sizes_read",
        lambda c: not _sizes_without_effect(c),
        lambda c: f"{_sizes_without_effect(c)[0]} has no effect: its layers have no such size",
        "remove it or change model.layer_pattern",
    ),
    Rule(
        "kv_heads_divide_heads",
        lambda c: (
            c.model.attention.num_attention_heads % c.model.attention.num_key_value_heads == 0
        ),
        "`model.attention.num_attention_heads` is not divisible by "
        "`model.attention.num_key_value_heads`",
        "each kv head must serve equally many heads: change either",
        every_size=True,
    ),
    Rule(
        "head_dim_known",
        lambda c: c.model.attention.head_dim > 0 or not _has_head_dim(c),
        "`model.hidden_size` is not divisible by `model.attention.num_attention_heads`",
        "set model.attention.head_dim",
    ),
    Rule(
        "mla_sizes_given",
        lambda c: (
            not _has_latents(c) or all(size != 0 for size in c.model.mla.model_dump().values())
        ),
        "`model.layer_pattern` has A blocks, whose sizes model.mla lacks",
        "set kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim of model.mla",
    ),
    Rule(
        "mla_used",
        lambda c: _has_latents(c) or c.model.mla == MlaConfig(),
        "model.mla has no effect: `model.layer_pattern` has no A block",
        "add A blocks or remove model.mla",
    ),
    Rule(
        "mla_features",
        lambda c: not (_has_latents(c) and _mla_lacks(c)),
        lambda c: f"`model.attention.{_mla_lacks(c)[0]}` is not built for A blocks",
        "set it to false",
    ),
    Rule(
        "mla_has_no_groups",
        lambda c: (
            not _has_latents(c)
            or _has_head_dim(c)
            or c.model.attention.num_key_value_heads == c.model.attention.num_attention_heads
        ),
        "`model.attention.num_key_value_heads` has no effect: A blocks have no kv heads",
        "leave it out",
    ),
    Rule(
        "mla_rotates_whole_part",
        lambda c: not _has_latents(c) or c.model.rope.partial_rotary_factor == 1,
        "`model.rope.partial_rotary_factor` is not for A blocks, which turn qk_rope_head_dim dims",
        "set it to 1.0",
    ),
    Rule(
        "mamba_heads_given",
        lambda c: not _has_states(c) or c.model.mamba.mamba_num_heads > 0,
        "`model.layer_pattern` has M blocks, whose heads model.mamba lacks",
        "set model.mamba.mamba_num_heads, as a rule 2 x hidden_size / mamba_head_dim",
    ),
    Rule(
        "mamba_used",
        lambda c: _has_states(c) or c.model.mamba == MambaConfig(),
        "model.mamba has no effect: `model.layer_pattern` has no M block",
        "add M blocks or remove model.mamba",
    ),
    Rule(
        "mamba_groups_divide_heads",
        lambda c: c.model.mamba.mamba_num_heads % c.model.mamba.n_groups == 0,
        "`model.mamba.mamba_num_heads` is not divisible by `model.mamba.n_groups`",
        "each group must serve equally many heads: change either",
    ),
    Rule(
        "mamba_steps_fit",
        _steps_fit,
        "`model.mamba.time_step_limit`, `model.mamba.time_step_min`: bounds are not in order",
        "give [smallest, largest] or null, and time_step_min up to time_step_max",
    ),
    Rule(
        "multipliers_fit",
        _multipliers_fit,
        "`model.mamba.ssm_multipliers`, `model.mlp_multipliers`: five numbers for z, x, B, C, "
        "dt; two for the gate and the output of MLPs with a gate, in models without experts",
        "give as many, or null",
    ),
    Rule(
        "rotary_dims_even",
        lambda c: not _odd_rotary(c),
        lambda c: (
            f"`model.{_odd_rotary(c)[0]}` x `model.rope.partial_rotary_factor` rotates "
            f"{_rotary_dims(c)[_odd_rotary(c)[0]]} dims"
        ),
        "RoPE turns pairs: make them even and at least 2",
    ),
    Rule(
        "rope_keys_need_rope",
        lambda c: (
            c.model.position_embedding == "rope"
            or (c.model.rope.rope_scaling is None and c.model.rope.rope_local_theta is None)
        ),
        "rope_scaling and rope_local_theta of model.rope have no effect with "
        "`model.position_embedding`",
        "remove them or set model.position_embedding=rope",
    ),
    Rule(
        "longrope_complete",
        _longrope_complete,
        "longrope needs short_factor and long_factor, each with half as many numbers as rotated "
        "dims of `model.attention.head_dim`",
        "give both in model.rope.rope_scaling",
    ),
    Rule(
        "all_heads_norm_used",
        lambda c: not c.model.attention.qk_norm_all_heads or c.model.attention.qk_norm,
        "`model.attention.qk_norm_all_heads` has no effect without qk_norm",
        "set model.attention.qk_norm=true",
    ),
    Rule(
        "all_heads_norm_has_heads",
        lambda c: (
            not c.model.attention.qk_norm_all_heads
            or c.model.attention.num_key_value_heads % c.mesh.tp == 0
        ),
        "`model.attention.qk_norm_all_heads`: `model.attention.num_key_value_heads` is not "
        "divisible by `mesh.tp`",
        "choose a mesh.tp that divides them",
        every_size=True,
    ),
    Rule(
        "window_given",
        lambda c: not _has_windows(c) or c.model.attention.sliding_window is not None,
        "`model.layer_pattern` has sliding-window blocks",
        "set model.attention.sliding_window",
    ),
    Rule(
        "window_used",
        lambda c: c.model.attention.sliding_window is None or _has_windows(c),
        "`model.attention.sliding_window` has no effect: `model.layer_pattern` has no L block",
        "add L blocks or set model.attention.sliding_window=null",
    ),
    Rule(
        "experts_used",
        lambda c: c.model.moe.num_experts == 0 or _has_experts(c),
        "`model.moe.num_experts` has no effect: `model.layer_pattern` has no E block",
        "add E blocks or set model.moe.num_experts=0",
    ),
    Rule(
        "top_k_fits",
        lambda c: not _has_experts(c) or c.model.moe.num_experts_per_tok <= c.model.moe.num_experts,
        "`model.moe.num_experts_per_tok` exceeds `model.moe.num_experts`",
        "lower the one or raise the other",
    ),
    Rule(
        "top_1_learns",
        lambda c: (
            not _has_experts(c)
            or c.model.moe.num_experts_per_tok > 1
            or not c.model.moe.norm_topk_prob
        ),
        "`model.moe.num_experts_per_tok` with `model.moe.norm_topk_prob` makes every gate 1",
        "set model.moe.norm_topk_prob=false, or the router learns nothing from the loss",
    ),
    Rule(
        "groups_fit",
        _groups_fit,
        "`model.moe.n_group`, `model.moe.topk_group`: groups of equal size, those that a token is "
        "sent to, with at least `model.moe.num_experts_per_tok` experts of "
        "`model.moe.num_experts`",
        "change them, or set model.moe.n_group=1 and model.moe.topk_group=1",
    ),
    Rule(
        "group_score_fits",
        lambda c: (
            c.model.moe.n_group == 1
            or c.model.moe.group_score_topk * c.model.moe.n_group <= c.model.moe.num_experts
        ),
        "`model.moe.group_score_topk` exceeds the experts of a group",
        "lower it or model.moe.n_group",
    ),
    Rule(
        "shared_gate_used",
        lambda c: (
            c.model.moe.shared_expert_intermediate_size > 0 or not c.model.moe.shared_expert_gate
        ),
        "`model.moe.shared_expert_gate` has no effect without a shared expert",
        "set model.moe.shared_expert_intermediate_size",
    ),
    Rule(
        "sinkhorn_alone",
        lambda c: not _balanced_besides_sinkhorn(c),
        lambda c: (
            f"`model.moe.sinkhorn` balances by itself, not with {_balanced_besides_sinkhorn(c)}"
        ),
        "set the one or the other",
    ),
    Rule(
        "drop_policy_used",
        lambda c: c.model.moe.drop_policy == "probs" or c.model.moe.capacity_factor is not None,
        "`model.moe.drop_policy` has no effect without a capacity",
        "set model.moe.capacity_factor",
    ),
    Rule(
        "batched_experts_have_capacity",
        lambda c: c.train.experts != "batched" or c.model.moe.capacity_factor is not None,
        "`train.experts` needs experts that take a known number of rows",
        "set model.moe.capacity_factor, or train.experts=auto",
    ),
    Rule(
        "ep_divides_experts",
        lambda c: c.model.moe.num_experts % c.mesh.ep == 0,
        "`model.moe.num_experts` is not divisible by `mesh.ep`",
        "choose a mesh.ep that divides the experts",
    ),
    Rule(
        "swiglu_limit_is_of_experts",
        lambda c: (
            c.model.swiglu_limit is None
            or (c.model.mlp_gated and c.model.hidden_act == "silu" and _has_only_experts(c))
        ),
        "`model.swiglu_limit` is built for experts with a gate and silu alone",
        "set it to null, or use E blocks without a shared expert, hidden_act=silu, mlp_gated=true",
    ),
    Rule(
        "prediction_needs_next_token",
        lambda c: c.model.num_nextn_predict_layers == 0 or c.train.objective == "next_token",
        "`model.num_nextn_predict_layers` are not trained by `train.objective`",
        "set it to 0, or train.objective=next_token",
    ),
    Rule(
        "prediction_has_no_learned_positions",
        lambda c: c.model.num_nextn_predict_layers == 0 or c.model.position_embedding != "learned",
        "`model.num_nextn_predict_layers` is not built for `model.position_embedding`=learned",
        "set it to 0, or use rope",
    ),
    Rule(
        "prediction_fits_sequence",
        lambda c: c.model.num_nextn_predict_layers < c.data.seq_length,
        "`model.num_nextn_predict_layers` reaches beyond `data.seq_length`",
        "lower it",
    ),
    Rule(
        "seq_length_fits_positions",
        lambda c: not _past_positions(c),
        "`data.seq_length` exceeds `model.max_position_embeddings`",
        "lower the one or raise the other (model.bert.position_offset counts)",
    ),
)
