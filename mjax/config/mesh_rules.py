"""The rules about `mesh`: a part of the table of rules across config keys (`validate.py`).

A rule is a predicate, a message and a remedy. Rules see `mesh.dp` as a number once the device count
is known. While it is "auto", rules that need it pass.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import prod

from mjax.config.keys import value_of
from mjax.config.pattern import BRANCHES
from mjax.config.pipeline_layout import assign_slots, stage_sizes
from mjax.config.schema import Config, MeshConfig
from mjax.errors import UserError

AXES = ("pp", "dp", "ep", "cp", "tp")  # outer to inner


@dataclass(frozen=True)
class Rule:
    """`ok(cfg)` is true where the config is fine; otherwise the error is 'message; remedy'.

    A `group.key` in backticks in a message is printed with its value. A rule with `every_size`
    holds for layers with the sizes of each entry of model.layer_sizes, too.
    """

    name: str
    ok: Callable[[Config], bool]
    message: str | Callable[[Config], str]
    remedy: str
    every_size: bool = False

    def error(self, cfg: Config) -> str | None:
        """The line that a user sees; None where the config is fine."""
        if not self.ok(cfg):
            return self._line(cfg)
        for number, model in enumerate(cfg.model.sizes[1:] if self.every_size else [], 1):
            sized = cfg.model_copy(update={"model": model})
            if not self.ok(sized):
                return f"layers marked '@{number}' in model.layer_pattern: {self._line(sized)}"
        return None

    def _line(self, cfg: Config) -> str:
        message = self.message if isinstance(self.message, str) else self.message(cfg)

        def with_value(match: re.Match) -> str:
            key = match[1]
            return f"{key}={value_of(cfg, key)!r}"

        message = re.sub("`([a-z0-9_.]+)`", with_value, message)
        return f"{message}; {self.remedy}"


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


def _a2a_size(c: Config) -> int:
    """The number of devices that trade heads for sequence."""
    return {"a2a": c.mesh.cp, "a2a_ring": c.mesh.cp_a2a}.get(c.mesh.cp_type, 1)


def _not_for_ring(c: Config) -> list[str]:
    """The keys of a config that ring attention does not support."""
    reasons = [reason for reason in not_for_cudnn(c) if reason.startswith("model.")]
    mla = c.model.mla
    if "A" in c.model.branches and mla.v_head_dim != mla.qk_head_dim:
        reasons.append("model.mla.v_head_dim: values have heads of another size")
    return reasons


def _pipeline_keys(c: Config) -> list[str]:
    """The pipeline's keys that are set."""
    is_set = {
        "pipeline_layout": c.mesh.pipeline_layout is not None,
        "pipeline_account_for": bool(c.mesh.pipeline_account_for),
        "virtual_stages": c.mesh.virtual_stages > 1,
    }
    return [f"`mesh.{name}`" for name in is_set if is_set[name]]


def stages_of(c: Config) -> list[int]:
    """Layers of each pipeline stage. Raises `UserError` for a malformed layout string."""
    mesh, layers = c.mesh, c.model.num_hidden_layers
    options = mesh.virtual_stages, mesh.pipeline_layout, mesh.pipeline_account_for
    return stage_sizes(layers, mesh.pp, *options)


def count_slots(c: Config) -> int:
    """Layers that a pipeline stage has room for. Raises `UserError` for a malformed layout."""
    return len(assign_slots(c.model.layer_kinds, stages_of(c)).stacks)


def _is_read(c: Config, key: str) -> bool:
    """Whether some layer reads the size under `key`; sizes that no branch owns are always read."""
    owners = [letter for letter in BRANCHES if key.removeprefix("model.") in BRANCHES[letter].sizes]
    return not owners or bool(c.model.branches & set(owners))


def _tp_divides(key: str, remedy: str) -> Rule:
    name = key.rpartition(".")[2]
    return Rule(
        f"tp_divides_{name}",
        lambda c: value_of(c, key) % c.mesh.tp == 0 or not _is_read(c, key),
        f"`{key}` is not divisible by `mesh.tp`",
        remedy,
        every_size=True,
    )


def _zero_groups(c: Config) -> list[int]:
    """Sizes that a group of ZeRO shards may have: products of some of dp, ep and cp."""
    sizes = [size for size in (c.mesh.dp, c.mesh.ep, c.mesh.cp) if size != "auto"]
    products = set()
    for count in range(len(sizes) + 1):
        products |= {prod(some) for some in combinations(sizes, count)}
    return sorted(products)


MESH_RULES: tuple[Rule, ...] = (
    Rule(
        "tp_overlap_doubles",
        lambda c: c.mesh.tp_overlap != "always" or c.mesh.tp & (c.mesh.tp - 1) == 0,
        "`mesh.tp_overlap` exchanges with 1, 2, 4, .. devices, but `mesh.tp` is no power of two",
        "set mesh.tp_overlap=auto or change mesh.tp",
    ),
    Rule(
        "pipeline_keys_used",
        lambda c: c.mesh.pp > 1 or not _pipeline_keys(c),
        lambda c: f"{_pipeline_keys(c)[0]} has no effect with `mesh.pp`",
        "remove it or set mesh.pp above 1",
    ),
    Rule(
        "pipeline_layout_alone",
        lambda c: c.mesh.pipeline_layout is None or _pipeline_keys(c) == ["`mesh.pipeline_layout`"],
        lambda c: f"`mesh.pipeline_layout` decides what {_pipeline_keys(c)[-1]} asks for",
        "remove one of them",
    ),
    Rule(
        "pipeline_stages_filled",
        lambda c: (
            c.mesh.pp == 1
            or c.mesh.pipeline_layout is not None
            or c.model.num_hidden_layers + len(c.mesh.pipeline_account_for)
            >= c.mesh.pp * c.mesh.virtual_stages
        ),
        "`model.num_hidden_layers` leaves some of `mesh.pp` x `mesh.virtual_stages` stages empty",
        "lower either, or name the stages in mesh.pipeline_layout",
    ),
    Rule(  # a chunk's gradients are complete after its last micro-batch only
        "pipeline_zero",
        lambda c: c.mesh.pp == 1 or c.mesh.zero != 2,
        "`mesh.zero` cannot shard gradients while `mesh.pp` accumulates them",
        "set mesh.zero=1",
    ),
    Rule(
        "dp_positive",
        lambda c: c.mesh.dp == "auto" or c.mesh.dp >= 1,
        "`mesh.dp` is not a number of devices",
        "set mesh.dp=auto or at least 1",
    ),
    _tp_divides("model.attention.num_attention_heads", "choose a mesh.tp that divides the heads"),
    _tp_divides("model.intermediate_size", "choose a mesh.tp that divides the FFN width"),
    _tp_divides(
        "model.moe.moe_intermediate_size", "choose a mesh.tp that divides an expert's width"
    ),
    _tp_divides(
        "model.moe.shared_expert_intermediate_size", "choose a mesh.tp that divides its width"
    ),
    _tp_divides("model.mamba.mamba_num_heads", "choose a mesh.tp that divides the heads"),
    _tp_divides("model.padded_vocab_size", "make model.vocab_multiple a multiple of mesh.tp"),
    _tp_divides("data.seq_length", "sequence parallelism cuts it in mesh.tp parts: change either"),
    Rule(
        "cp_divides_seq_length",
        lambda c: c.mesh.cp == 1 or c.data.seq_length % (2 * c.mesh.cp * c.mesh.tp) == 0,
        "`data.seq_length` is not divisible by 2 x `mesh.cp` x `mesh.tp`",
        "zigzag cuts it in 2 x cp chunks: change either",
    ),
    Rule(
        "cp_a2a_fits",
        lambda c: (
            c.mesh.cp % c.mesh.cp_a2a == 0 and 1 < c.mesh.cp_a2a < c.mesh.cp
            if c.mesh.cp_type == "a2a_ring"
            else c.mesh.cp_a2a == 1
        ),
        "`mesh.cp_a2a` does not fit `mesh.cp_type` and `mesh.cp`",
        "a2a_ring needs a proper divisor of mesh.cp, all other types 1",
    ),
    Rule(
        "cp_a2a_divides_heads",
        lambda c: c.model.attention.num_attention_heads // c.mesh.tp % _a2a_size(c) == 0,
        lambda c: (
            "`model.attention.num_attention_heads` per `mesh.tp` is not divisible by "
            f"{_a2a_size(c)}, over which `mesh.cp_type` deals them out"
        ),
        "choose sizes that divide or another cp_type",
        every_size=True,
    ),
    Rule(
        "ring_supports",
        lambda c: c.mesh.cp == 1 or "ring" not in c.mesh.cp_type or not _not_for_ring(c),
        lambda c: f"`mesh.cp_type` cannot run with {_not_for_ring(c)[0]}",
        "set mesh.cp_type=all_gather or a2a",
    ),
    Rule(
        "zero_group_fits",
        lambda c: (
            c.mesh.zero_group is None or c.mesh.dp == "auto" or c.mesh.zero_group in _zero_groups(c)
        ),
        lambda c: f"`mesh.zero_group` is none of {_zero_groups(c)}, products of dp, ep and cp",
        "choose one; in a dense model mesh.ep splits mesh.dp in two",
    ),
)
