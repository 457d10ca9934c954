"""The rules about `model`: a part of the table of rules across config keys (`validate.py`)."""

from mjax.config.mesh_rules import Rule
from mjax.config.pattern import BRANCHES, sizes_of
from mjax.config.schema import Config


def _rotary_dims(c: Config) -> int:
    return int(c.model.head_dim * c.model.partial_rotary_factor)


def _longrope_complete(c: Config) -> bool:
    s = c.model.rope_scaling
    if s is None or s.rope_type != "longrope":
        return True
    return {len(s.short_factor or ()), len(s.long_factor or ())} == {_rotary_dims(c) // 2}


def _has_experts(c: Config) -> bool:
    return "E" in c.model.branches


def _has_windows(c: Config) -> bool:
    return any(BRANCHES[letter].windowed for letter in c.model.branches)


def _sizes_used(c: Config) -> set[int]:
    """The entries of model.layer_sizes that layers take, from 1."""
    return {sizes_of(kind) for kind in c.model.layer_kinds} - {0}


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
        "kv_heads_divide_heads",
        lambda c: all(
            model.num_attention_heads % model.num_key_value_heads == 0 for model in c.model.sizes
        ),
        "`model.num_attention_heads` is not divisible by `model.num_key_value_heads`",
        "each kv head must serve equally many heads: change either",
    ),
    Rule(
        "head_dim_known",
        lambda c: c.model.head_dim > 0,
        "`model.hidden_size` is not divisible by `model.num_attention_heads`",
        "set model.head_dim",
    ),
    Rule(
        "rotary_dims_even",
        lambda c: c.model.position_embedding != "rope" or _rotary_dims(c) in range(2, 1 << 20, 2),
        lambda c: (
            f"`model.head_dim` x `model.partial_rotary_factor` rotates {_rotary_dims(c)} dims"
        ),
        "RoPE turns pairs: make them even and at least 2",
    ),
    Rule(
        "rope_keys_need_rope",
        lambda c: (
            c.model.position_embedding == "rope"
            or (c.model.rope_scaling is None and c.model.rope_local_theta is None)
        ),
        "rope_scaling and rope_local_theta have no effect with `model.position_embedding`",
        "remove them or set model.position_embedding=rope",
    ),
    Rule(
        "longrope_complete",
        _longrope_complete,
        "longrope needs short_factor and long_factor, each with half as many numbers as rotated "
        "dims of `model.head_dim`",
        "give both in model.rope_scaling",
    ),
    Rule(
        "all_heads_norm_used",
        lambda c: not c.model.qk_norm_all_heads or c.model.qk_norm,
        "`model.qk_norm_all_heads` has no effect without qk_norm",
        "set model.qk_norm=true",
    ),
    Rule(
        "all_heads_norm_has_heads",
        lambda c: not c.model.qk_norm_all_heads or c.model.num_key_value_heads % c.mesh.tp == 0,
        "`model.qk_norm_all_heads`: `model.num_key_value_heads` is not divisible by `mesh.tp`",
        "choose a mesh.tp that divides them",
    ),
    Rule(
        "window_given",
        lambda c: not _has_windows(c) or c.model.sliding_window is not None,
        "`model.layer_pattern` has sliding-window blocks",
        "set model.sliding_window",
    ),
    Rule(
        "window_used",
        lambda c: c.model.sliding_window is None or _has_windows(c),
        "`model.sliding_window` has no effect: `model.layer_pattern` has no L block",
        "add L blocks or set model.sliding_window=null",
    ),
    Rule(
        "experts_used",
        lambda c: c.model.num_experts == 0 or _has_experts(c),
        "`model.num_experts` has no effect: `model.layer_pattern` has no E block",
        "add E blocks or set model.num_experts=0",
    ),
    Rule(
        "top_k_fits",
        lambda c: not _has_experts(c) or c.model.num_experts_per_tok <= c.model.num_experts,
        "`model.num_experts_per_tok` exceeds `model.num_experts`",
        "lower the one or raise the other",
    ),
    Rule(
        "top_1_learns",
        lambda c: (
            not _has_experts(c) or c.model.num_experts_per_tok > 1 or not c.model.norm_topk_prob
        ),
        "`model.num_experts_per_tok` with `model.norm_topk_prob` makes every gate 1",
        "set model.norm_topk_prob=false, or the router learns nothing from the loss",
    ),
    Rule(
        "ep_divides_experts",
        lambda c: c.model.num_experts % c.mesh.ep == 0,
        "`model.num_experts` is not divisible by `mesh.ep`",
        "choose a mesh.ep that divides the experts",
    ),
    Rule(
        "experts_have_no_bias",
        lambda c: not (_has_experts(c) and c.model.mlp_bias),
        "`model.mlp_bias` is not built for the experts of E blocks",
        "set model.mlp_bias=false",
    ),
    Rule(
        "seq_length_fits_positions",
        lambda c: (
            c.model.position_embedding == "none"
            or c.data.seq_length <= c.model.max_position_embeddings
        ),
        "`data.seq_length` exceeds `model.max_position_embeddings`",
        "lower the one or raise the other",
    ),
)
