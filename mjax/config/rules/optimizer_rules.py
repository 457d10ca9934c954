"""The rules about `optimizer`: a part of the table of rules across config keys (`validate.py`)."""

import difflib
from collections.abc import Iterator

from mjax.config.languages.optax_arguments import (
    PREFIX,
    Argument,
    optax_arguments,
    optax_function,
    optax_names,
    own_key,
)
from mjax.config.rules.rule import Rule, rule, rules_of
from mjax.config.schema.model import EXPERTS_GROUP, ROLES
from mjax.config.schema.run import Config

BUILT_IN = ("adamw", "muon")


def _named_by_optax(c: Config) -> bool:
    return c.optimizer.name.startswith(PREFIX)


def _known_arguments(c: Config) -> dict[str, Argument]:
    """Arguments of the function that `optimizer.name` names: {} for AdamW and Muon."""
    return optax_arguments(c.optimizer.name) if _named_by_optax(c) else {}


def _bf16_moves(moment: str, decay: str) -> Rule:
    """An average that moves by less than half a bf16 step (2**-8) is rounded back."""

    def problems(c: Config) -> Iterator[str]:
        o = c.optimizer
        is_low = getattr(o, f"{moment}_dtype") != "float32"
        if is_low and getattr(o, decay) > 0.996 and not o.stochastic_rounding:
            yield f"`optimizer.{moment}_dtype` stands still at `optimizer.{decay}`"

    remedy = f"lower {decay} to 0.996 or set {moment}_dtype=float32 or stochastic_rounding=true"
    return Rule(f"bf16_{moment}_moves", problems, remedy)


@rule("set adamw, muon or a function of optax that makes a transformation, such as optax.lion")
def optimizer_known(c: Config) -> Iterator[str]:
    if c.optimizer.name in BUILT_IN or optax_function(c.optimizer.name) is not None:
        return
    wanted = PREFIX + c.optimizer.name.removeprefix(PREFIX)
    near = difflib.get_close_matches(wanted, optax_names(), n=1)
    yield "`optimizer.name` is no optimizer" + (f" (did you mean {near[0]}?)" if near else "")


@rule("set that key")
def args_not_own(c: Config) -> Iterator[str]:
    for name, value in c.optimizer.args.items() if _named_by_optax(c) else ():
        if own_key(name):
            yield f"optimizer.args.{name}={value!r} has a key of mjax's own, {own_key(name)}"


@rule("correct the name or remove it")
def args_known(c: Config) -> Iterator[str]:
    known = _known_arguments(c)
    for name, value in c.optimizer.args.items() if _named_by_optax(c) else ():
        if name not in known:
            yield (
                f"optimizer.args.{name}={value!r}: {c.optimizer.name} has no such argument "
                f"but {', '.join(known) or 'none at all'}"
            )


@rule("correct the value")
def args_typed(c: Config) -> Iterator[str]:
    known = _known_arguments(c)
    for name, value in c.optimizer.args.items():
        if name in known and not known[name].takes(value):
            yield (
                f"optimizer.args.{name}={value!r} of {c.optimizer.name} must be "
                f"{known[name].expected}"
            )


@rule("set it, or name a transformation that needs none")
def args_complete(c: Config) -> Iterator[str]:
    for name, argument in _known_arguments(c).items():
        if argument.required and name not in c.optimizer.args:
            yield f"`optimizer.args` lacks {name}, which `optimizer.name` needs"


@rule(
    "roles are matrix, embedding, head, router, norm, bias, scalar, conv; in lr_multipliers, "
    "experts and names of parameters with a dot or a *"
)
def roles_known(c: Config) -> Iterator[str]:
    o = c.optimizer
    names = {key for key in o.lr_multipliers if "." in key or "*" in key}
    multiplied = set(o.lr_multipliers) - names - {EXPERTS_GROUP}
    for role in [*o.weight_decay_roles, *multiplied, *o.muon_roles]:
        if role not in ROLES:
            yield f"optimizer: unknown parameter role {role!r}"


@rule("keep to matrix, embedding, head")
def muon_roles_are_matrices(c: Config) -> Iterator[str]:
    if not set(c.optimizer.muon_roles) <= {"matrix", "embedding", "head"}:
        yield "`optimizer.muon_roles` names parameters that are no matrices"


@rule("use numbers of at least 0")
def lr_multipliers_legal(c: Config) -> Iterator[str]:
    if not min(c.optimizer.lr_multipliers.values(), default=0) >= 0:
        yield "`optimizer.lr_multipliers` has a negative entry"


@rule("the ramp only rises: swap them or set weight_decay_end=null")
def weight_decay_rises(c: Config) -> Iterator[str]:
    end = c.optimizer.weight_decay_end
    if end is not None and end < c.optimizer.weight_decay:
        yield "`optimizer.weight_decay_end` is below `optimizer.weight_decay`"


BF16_MU_MOVES = _bf16_moves("mu", "b1")
BF16_NU_MOVES = _bf16_moves("nu", "b2")


# How far its moments move in a step is not known here.
@rule("set optimizer.stochastic_rounding=true, or mu_dtype and nu_dtype to float32")
def bf16_optax_moves(c: Config) -> Iterator[str]:
    is_low = "bfloat16" in (c.optimizer.mu_dtype, c.optimizer.nu_dtype)
    if is_low and _named_by_optax(c) and not c.optimizer.stochastic_rounding:
        yield "moments of `optimizer.name` in bfloat16 might stand still"


@rule("set optimizer.stochastic_rounding=true or precision.params=float32")
def bf16_masters_move(c: Config) -> Iterator[str]:
    if c.precision.params != "float32" and not c.optimizer.stochastic_rounding:
        yield "`precision.params`: updates below half a bf16 step would vanish"


# Muon gathers its matrices to orthogonalize them.
@rule("set optimizer.offload=false")
def offload_of_muon(c: Config) -> Iterator[str]:
    if c.optimizer.offload is True and c.optimizer.name == "muon":
        yield "`optimizer.offload` is built for elementwise updates, not for `optimizer.name`"


OPTIMIZER_RULES = rules_of(globals())
