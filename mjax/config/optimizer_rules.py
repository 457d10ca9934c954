"""The rules about `optimizer`: a part of the table of rules across config keys (`validate.py`)."""

import difflib

from mjax.config.mesh_rules import Rule
from mjax.config.model_schema import EXPERTS_GROUP, ROLES
from mjax.config.optax_arguments import (
    PREFIX,
    optax_arguments,
    optax_function,
    optax_names,
    own_key,
)
from mjax.config.schema import Config, OptimizerConfig

BUILT_IN = ("adamw", "muon")


def _named_by_optax(c: Config) -> bool:
    return c.optimizer.name.startswith(PREFIX)


def _names_an_optimizer(c: Config) -> bool:
    return c.optimizer.name in BUILT_IN or optax_function(c.optimizer.name) is not None


def _suggested_optimizer(c: Config) -> str:
    """The end of a sentence about an unknown name: the names near it, if there are any."""
    wanted = PREFIX + c.optimizer.name.removeprefix(PREFIX)
    near = difflib.get_close_matches(wanted, optax_names(), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _first_argument(c: Config, wrong: list[str]) -> str:
    """The first of some arguments as key and value, for a message."""
    return f"optimizer.args.{wrong[0]}={c.optimizer.args[wrong[0]]!r}"


def _own_arguments(c: Config) -> list[str]:
    return [name for name in c.optimizer.args if own_key(name)]


def _unknown_arguments(c: Config) -> list[str]:
    if not _named_by_optax(c):
        return []
    known = optax_arguments(c.optimizer.name)
    return [name for name in c.optimizer.args if name not in known]


def _mistyped_arguments(c: Config) -> list[str]:
    if not _named_by_optax(c):
        return []
    known = optax_arguments(c.optimizer.name)
    return [name for name, value in c.optimizer.args.items() if not known[name].takes(value)]


def _missing_arguments(c: Config) -> list[str]:
    if not _named_by_optax(c):
        return []
    known = optax_arguments(c.optimizer.name).items()
    return [name for name, it in known if it.required and name not in c.optimizer.args]


def _unused_adam_keys(c: Config) -> list[str]:
    """The keys of AdamW that are set although optax's function has arguments of its own."""
    if not _named_by_optax(c):
        return []
    fields = OptimizerConfig.model_fields
    keys = ("b1", "b2", "eps")
    return [key for key in keys if getattr(c.optimizer, key) != fields[key].default]


def _unknown_roles(c: Config) -> list[str]:
    o = c.optimizer
    multiplied = set(o.lr_multipliers) - {EXPERTS_GROUP}
    named = [*o.weight_decay_roles, *multiplied, *o.muon_roles]
    return [role for role in named if role not in ROLES]


def _bf16_moves(moment: str, decay: str) -> Rule:
    """An average that moves by less than half a bf16 step (2**-8) is rounded back."""

    def ok(c: Config) -> bool:
        o = c.optimizer
        low = getattr(o, f"{moment}_dtype") != "float32"
        return not low or getattr(o, decay) <= 0.996 or o.stochastic_rounding

    return Rule(
        f"bf16_{moment}_moves",
        ok,
        f"`optimizer.{moment}_dtype` stands still at `optimizer.{decay}`",
        f"lower {decay} to 0.996 or set {moment}_dtype=float32 or stochastic_rounding=true",
    )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "optimizer_known",
        _names_an_optimizer,
        lambda c: f"`optimizer.name` is no optimizer{_suggested_optimizer(c)}",
        "set adamw, muon or a function of optax that makes a transformation, such as optax.lion",
    ),
    Rule(
        "args_used",
        lambda c: not c.optimizer.args or _named_by_optax(c),
        "`optimizer.args` has no effect with `optimizer.name`, which has keys of its own",
        "remove it and set keys such as optimizer.b1 or optimizer.muon_momentum",
    ),
    Rule(
        "args_not_own",
        lambda c: not _own_arguments(c),
        lambda c: (
            f"{_first_argument(c, _own_arguments(c))} has a key of mjax's own, "
            f"{own_key(_own_arguments(c)[0])}"
        ),
        "set that key",
    ),
    Rule(
        "args_known",
        lambda c: not _unknown_arguments(c),
        lambda c: (
            f"{_first_argument(c, _unknown_arguments(c))}: {c.optimizer.name} has no such argument"
            f" but {', '.join(optax_arguments(c.optimizer.name)) or 'none at all'}"
        ),
        "correct the name or remove it",
    ),
    Rule(
        "args_typed",
        lambda c: not _mistyped_arguments(c),
        lambda c: (
            f"{_first_argument(c, _mistyped_arguments(c))} of {c.optimizer.name} must be "
            f"{optax_arguments(c.optimizer.name)[_mistyped_arguments(c)[0]].expected}"
        ),
        "correct the value",
    ),
    Rule(
        "args_complete",
        lambda c: not _missing_arguments(c),
        lambda c: (
            f"`optimizer.args` lacks {_missing_arguments(c)[0]}, which `optimizer.name` needs"
        ),
        "set it, or name a transformation that needs none",
    ),
    Rule(
        "adam_keys_used",
        lambda c: not _unused_adam_keys(c),
        lambda c: f"`optimizer.{_unused_adam_keys(c)[0]}` has no effect with `optimizer.name`",
        "give it in optimizer.args, if the function has such an argument",
    ),
    Rule(
        "roles_known",
        lambda c: not _unknown_roles(c),
        lambda c: f"optimizer: unknown parameter role {_unknown_roles(c)[0]!r}",
        "roles are matrix, embedding, head, router, norm, bias, scalar; in lr_multipliers, experts",
    ),
    Rule(
        "muon_roles_are_matrices",
        lambda c: set(c.optimizer.muon_roles) <= {"matrix", "embedding", "head"},
        "`optimizer.muon_roles` names parameters that are no matrices",
        "keep to matrix, embedding, head",
    ),
    Rule(
        "lr_multipliers_legal",
        lambda c: min(c.optimizer.lr_multipliers.values(), default=0) >= 0,
        "`optimizer.lr_multipliers` has a negative entry",
        "use numbers of at least 0",
    ),
    Rule(
        "weight_decay_rises",
        lambda c: (
            c.optimizer.weight_decay_end is None
            or c.optimizer.weight_decay_end >= c.optimizer.weight_decay
        ),
        "`optimizer.weight_decay_end` is below `optimizer.weight_decay`",
        "the ramp only rises: swap them or set weight_decay_end=null",
    ),
    _bf16_moves("mu", "b1"),
    _bf16_moves("nu", "b2"),
    Rule(  # how far its moments move in a step is not known here
        "bf16_optax_moves",
        lambda c: (
            not _named_by_optax(c)
            or "bfloat16" not in (c.optimizer.mu_dtype, c.optimizer.nu_dtype)
            or c.optimizer.stochastic_rounding
        ),
        "moments of `optimizer.name` in bfloat16 might stand still",
        "set optimizer.stochastic_rounding=true, or mu_dtype and nu_dtype to float32",
    ),
    Rule(
        "bf16_masters_move",
        lambda c: c.precision.params == "float32" or c.optimizer.stochastic_rounding,
        "`precision.params`: updates below half a bf16 step would vanish",
        "set optimizer.stochastic_rounding=true or precision.params=float32",
    ),
    Rule(
        "rounding_used",
        lambda c: (
            not c.optimizer.stochastic_rounding
            or "bfloat16" in (c.precision.params, c.optimizer.mu_dtype, c.optimizer.nu_dtype)
        ),
        "`optimizer.stochastic_rounding` has no effect: nothing is stored in bf16",
        "set precision.params, optimizer.mu_dtype or optimizer.nu_dtype to bfloat16",
    ),
    Rule(  # Muon gathers its matrices to orthogonalize them
        "offload_of_muon",
        lambda c: c.optimizer.offload is not True or c.optimizer.name != "muon",
        "`optimizer.offload` is built for elementwise updates, not for `optimizer.name`",
        "set optimizer.offload=false",
    ),
)
