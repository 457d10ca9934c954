"""The rules about `mesh`: a part of the table of rules across config keys (`validate.py`).

Rules see `mesh.dp` as a number once the device count is known. While it is "auto", rules that need
it pass.
"""

from collections.abc import Iterator
from itertools import combinations
from math import prod

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.languages.pipeline_layout import assign_slots, stage_sizes
from mjax.config.rules.rule import Rule, rule, rules_of, set_keys
from mjax.config.schema.keys import value_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config, MeshConfig
from mjax.errors import UserError

AXES = ("pp", "dp", "ep", "cp", "tp")  # outer to inner

# An expert whose parts over tp would be narrower stays whole: grouped matmuls of a width F reach
# F / (F + 300) of the widest ones' speed (plan/roofline.py).
NARROW_EXPERT = 1024


def mesh_sizes(mesh: MeshConfig, device_count: int) -> dict[str, int]:
    """The number of devices along each axis, outer to inner, with dp="auto" resolved.

    Raises `UserError` where the sizes do not multiply to `device_count`.
    """
    others = mesh.pp * mesh.ep * mesh.cp * mesh.tp
    shape = f"pp={mesh.pp} ep={mesh.ep} cp={mesh.cp} tp={mesh.tp}"
    if mesh.dp == "auto" and device_count % others:
        raise UserError(
            f"mesh: {shape} make {others}, which does not divide the {device_count} devices; "
            "choose sizes whose product divides them"
        )
    dp = device_count // others if mesh.dp == "auto" else mesh.dp
    if dp * others != device_count:
        raise UserError(
            f"mesh: dp={dp} {shape} need {dp * others} devices but there are {device_count}; "
            "set mesh.dp=auto or start that many"
        )
    return {axis: dp if axis == "dp" else getattr(mesh, axis) for axis in AXES}


def folds_experts(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether tp divides experts, as ep does, instead of cutting each of them."""
    experts, width = model.moe.num_experts, model.moe.moe_intermediate_size
    if mesh.tp == 1 or not model.has_role("experts"):
        return False
    if mesh.expert_tp != "auto":
        return mesh.expert_tp == 1
    return width < NARROW_EXPERT * mesh.tp and experts % (mesh.ep * mesh.tp) == 0


def not_for_cudnn(c: Config) -> list[str]:
    """The keys of a config that cuDNN's attention does not support."""
    attention = c.model.attention
    reasons = {
        "model.attention.attn_logit_softcapping": attention.attn_logit_softcapping is not None,
        "model.attention.attention_sinks": attention.attention_sinks,
        "model.attention.attention_dropout": attention.attention_dropout > 0,
        "model.position_embedding=relative": c.model.position_embedding == "relative",
        "precision.compute=float32": c.precision.compute == "float32",
    }
    return [reason for reason, present in reasons.items() if present]


def stages_of(c: Config) -> list[int]:
    """Layers of each pipeline stage. Raises `UserError` for a malformed layout string."""
    mesh, layers = c.mesh, c.model.num_hidden_layers
    options = mesh.virtual_stages, mesh.pipeline_layout, mesh.pipeline_account_for
    return stage_sizes(layers, mesh.pp, *options)


def count_slots(c: Config) -> int:
    """Layers that a pipeline stage has room for. Raises `UserError` for a malformed layout."""
    return len(assign_slots(c.model.layer_kinds, stages_of(c)).stacks)


def _pipeline_keys(c: Config) -> list[str]:
    """The pipeline's keys that are set."""
    names = "pipeline_layout", "pipeline_account_for", "virtual_stages"
    return [f"`mesh.{name}`" for name in set_keys(c.mesh, *names)]


def _tp_divides(key: str, remedy: str) -> Rule:
    """tp divides the size under `key`, if a layer reads it; those of no branch are always read."""
    size = key.removeprefix("model.")
    is_of_experts = key == "model.moe.moe_intermediate_size"
    owners = {word for word, branch in BRANCHES.items() if size in branch.sizes}

    def problems(c: Config) -> Iterator[str]:
        if is_of_experts and folds_experts(c.model, c.mesh):
            return
        if value_of(c, key) % c.mesh.tp and not (owners and c.model.branches.isdisjoint(owners)):
            yield f"`{key}` is not divisible by `mesh.tp`"

    return Rule(f"tp_divides_{key.rpartition('.')[2]}", problems, remedy, every_size=True)


@rule("set mesh.tp_overlap=auto or change mesh.tp")
def tp_overlap_doubles(c: Config) -> Iterator[str]:
    if c.mesh.tp_overlap == "always" and c.mesh.tp & (c.mesh.tp - 1):
        yield (
            "`mesh.tp_overlap` exchanges with 1, 2, 4, .. devices, but `mesh.tp` is no power of two"
        )


@rule("set mesh.expert_tp=1, which leaves experts whole, or to the value of mesh.tp")
def expert_tp_is_one_or_tp(c: Config) -> Iterator[str]:
    if c.mesh.expert_tp not in ("auto", 1, c.mesh.tp):
        yield "`mesh.expert_tp` would cut experts over a part of `mesh.tp`, which is not built"


@rule("choose sizes that divide, or set mesh.expert_tp to the value of mesh.tp", every_size=True)
def folded_experts_divide(c: Config) -> Iterator[str]:
    if folds_experts(c.model, c.mesh) and c.model.moe.num_experts % (c.mesh.ep * c.mesh.tp):
        yield (
            "`model.moe.num_experts` is not divisible by `mesh.ep` x `mesh.tp`, over which "
            "`mesh.expert_tp` lays them"
        )


@rule("remove one of them")
def pipeline_layout_alone(c: Config) -> Iterator[str]:
    keys = _pipeline_keys(c)
    if c.mesh.pipeline_layout is not None and len(keys) > 1:
        yield f"`mesh.pipeline_layout` decides what {keys[-1]} asks for"


@rule("lower either, or name the stages in mesh.pipeline_layout")
def pipeline_stages_filled(c: Config) -> Iterator[str]:
    held = c.model.num_hidden_layers + len(c.mesh.pipeline_account_for)
    is_named = c.mesh.pp == 1 or c.mesh.pipeline_layout is not None
    if not is_named and held < c.mesh.pp * c.mesh.virtual_stages:
        yield (
            "`model.num_hidden_layers` leaves some of `mesh.pp` x `mesh.virtual_stages` stages "
            "empty"
        )


# A chunk's gradients are complete after its last micro-batch only.
@rule("set mesh.zero=1")
def pipeline_zero(c: Config) -> Iterator[str]:
    if c.mesh.pp > 1 and c.mesh.zero == 2:
        yield "`mesh.zero` cannot shard gradients while `mesh.pp` accumulates them"


@rule("set mesh.dp=auto or at least 1")
def dp_positive(c: Config) -> Iterator[str]:
    if c.mesh.dp != "auto" and c.mesh.dp < 1:
        yield "`mesh.dp` is not a number of devices"


TP_DIVIDES = tuple(
    _tp_divides(key, remedy)
    for key, remedy in {
        "model.attention.num_attention_heads": "choose a mesh.tp that divides the heads",
        "model.intermediate_size": "choose a mesh.tp that divides the FFN width",
        "model.moe.moe_intermediate_size": "choose a mesh.tp that divides an expert's width",
        "model.moe.shared_expert_intermediate_size": "choose a mesh.tp that divides its width",
        "model.mamba.mamba_num_heads": "choose a mesh.tp that divides the heads",
        "model.deltanet.linear_num_key_heads": "choose a mesh.tp that divides the heads of keys",
        "model.padded_vocab_size": "make model.vocab_multiple a multiple of mesh.tp",
        "data.seq_length": "sequence parallelism cuts it in mesh.tp parts: change either",
    }.items()
)


@rule("zigzag cuts it in 2 x cp chunks: change either")
def cp_divides_seq_length(c: Config) -> Iterator[str]:
    if c.mesh.cp > 1 and c.data.seq_length % (2 * c.mesh.cp * c.mesh.tp):
        yield "`data.seq_length` is not divisible by 2 x `mesh.cp` x `mesh.tp`"


@rule("a2a_ring needs a proper divisor of mesh.cp, all other types 1")
def cp_a2a_fits(c: Config) -> Iterator[str]:
    fits = c.mesh.cp_a2a == 1
    if c.mesh.cp_type == "a2a_ring":
        fits = c.mesh.cp % c.mesh.cp_a2a == 0 and 1 < c.mesh.cp_a2a < c.mesh.cp
    if not fits:
        yield "`mesh.cp_a2a` does not fit `mesh.cp_type` and `mesh.cp`"


@rule("choose sizes that divide or another cp_type", every_size=True)
def cp_a2a_divides_heads(c: Config) -> Iterator[str]:
    trading = {"a2a": c.mesh.cp, "a2a_ring": c.mesh.cp_a2a}.get(c.mesh.cp_type, 1)  # devices
    if c.model.attention.num_attention_heads // c.mesh.tp % trading:
        yield (
            "`model.attention.num_attention_heads` per `mesh.tp` is not divisible by "
            f"{trading}, over which `mesh.cp_type` deals them out"
        )


@rule("set mesh.cp_type=all_gather or a2a")
def ring_supports(c: Config) -> Iterator[str]:
    if c.mesh.cp == 1 or "ring" not in c.mesh.cp_type:
        return
    for reason in not_for_cudnn(c):
        if reason.startswith("model."):
            yield f"`mesh.cp_type` cannot run with {reason}"
    if c.model.reads_group("mla") and c.model.mla.v_head_dim != c.model.mla.qk_head_dim:
        yield (
            "`mesh.cp_type` cannot run with model.mla.v_head_dim: values have heads of another size"
        )


@rule("choose one; in a dense model mesh.ep splits mesh.dp in two")
def zero_group_fits(c: Config) -> Iterator[str]:
    if c.mesh.zero_group is None or c.mesh.dp == "auto":
        return
    axes = c.mesh.dp, c.mesh.ep, c.mesh.cp
    groups = {prod(some) for count in range(4) for some in combinations(axes, count)}
    if c.mesh.zero_group not in groups:
        yield f"`mesh.zero_group` is none of {sorted(groups)}, products of dp, ep and cp"


MESH_RULES = rules_of(globals())
