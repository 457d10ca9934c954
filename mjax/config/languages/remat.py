"""The language of `train.remat` and `train.offload`: what each layer keeps for its backward.

A policy names tensors that are kept. The backward computes the others again (Chen et al., arXiv
1604.06174). `train.remat` gives every layer one policy, in layer order, with counts as in
"full*8,dots". `train.offload` names kept tensors that wait in pinned host memory.
`models/runtime/remat.py` makes a layer follow its policy.
"""

import functools
import re

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.errors import UserError

POLICIES = ("none", "dots", "attention", "full")


def kept_names(policy: str) -> tuple[str, ...] | None:
    """The names of the tensors that a policy keeps besides a layer's input.

    "dots" keeps the outputs of matmuls and of attention, "attention" the latter, "full" nothing.
    None: all that autodiff asks for.
    """
    if policy == "none":
        return None
    others = [name for branch in BRANCHES.values() for name in branch.kept]
    names = {"dots": [*matmul_names(), *others], "attention": others, "full": []}[policy]
    return tuple(dict.fromkeys(names))


def matmul_names() -> tuple[str, ...]:
    """The names of all branches' matmuls, which parameters declare (`sharding/spec.py`)."""
    names = [name for branch in BRANCHES.values() for name in branch.matmuls]
    return tuple(dict.fromkeys(names))


@functools.cache
def remat_policies(
    text: str, layers: int, where: str = "model.num_hidden_layers"
) -> tuple[str, ...]:
    """The policy of each of `layers` layers; a last policy without a count takes the rest.

    Raises `UserError` for an unknown name or counts that do not add up to `where`.
    """
    remedy = f"policies are {', '.join(POLICIES)}; counts go as in 'full*8,dots'"
    policies: list[str] = []
    parts = text.split(",")
    for number, part in enumerate(parts):
        found = re.fullmatch(r"\s*(\w+)(?:\*([1-9]\d*))?\s*", part)
        if found is None or found[1] not in POLICIES:
            raise UserError(f"train.remat={text!r} has no policy {part.strip()!r}; {remedy}")
        if found[2] is None and number < len(parts) - 1:
            raise UserError(f"train.remat={text!r}: only the last may lack a count; {remedy}")
        rest = layers - len(policies)
        policies += [found[1]] * (int(found[2]) if found[2] else max(rest, 0))
        if len(policies) > layers or rest <= 0:
            raise UserError(
                f"train.remat={text!r} counts more layers than {where}={layers} and leaves none "
                f"for {part.strip()!r}; lower a count"
            )
    if len(policies) < layers:
        raise UserError(
            f"train.remat={text!r} counts {len(policies)} layers but {where}={layers}; "
            "leave out the last count and it takes the rest"
        )
    return tuple(policies)


def offloaded(names: str | list[str]) -> tuple[str, ...]:
    """The tensors that `train.offload` sends to the host."""
    return kept_names("dots") or () if names == "all" else tuple(names)


def not_kept(policies: tuple[str, ...], names: str | list[str]) -> list[str]:
    """The names in `train.offload` that none of the layers' `policies` keeps."""
    kept = {name for policy in policies for name in kept_names(policy) or ()}
    wanted = ["all"] if names == "all" else names
    return [name for name in wanted if name not in kept and not (name == "all" and kept)]
