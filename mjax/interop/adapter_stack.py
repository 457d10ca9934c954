"""Several adapters of one model at once, of which each token of a batch has its own.

An adapted weight `q` has an entry `q_lora` beside it, whose arrays have an axis of slots:
a [*lead, slots, *inputs, r], b [*lead, slots, r, *outputs], scales fp32 [*lead, slots]. Slot 0 is
the model without an adapter. Ranks below the largest are filled up with zeros.
`models/base/adapter.py` has the product.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from mjax.checkpoint.base.hub import model_folder
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.merged import Adapters, require_shapes
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.adapted_source import (
    adapter_step,
    adapters_for_others,
    base_of_run,
    named_base,
    read_adapter_run,
)
from mjax.interop.adapters_of_run import joined_trees
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.interop.pretrained import Pretrained
from mjax.interop.sources import source_of
from mjax.models.base.adapted import part_path, part_shapes
from mjax.models.base.params import with_specs
from mjax.pipeline.storage import sharded_by_stages
from mjax.sharding.spec import ParamSpec


def stack_adapters(
    folders: Sequence[str | Path], cfg: ModelConfig, specs: dict
) -> tuple[dict, dict]:
    """(declarations of the model and its adapters, the arrays of these), for `with_specs`.

    folders: runs with adapters, their steps, or folders of PEFT; the first is in slot 1.
    specs: declare the model `cfg`.

    Arrays are numpy's, in the dtype of the files. Raises `UserError` for adapters of another model,
    and for what cannot differ from token to token.
    """
    found = {}
    for number, folder in enumerate(folders):
        found[f"{folder} (slot {number + 1})"] = read_adapters(folder, cfg, specs)
    return stack_of_adapters(found, specs)


def with_stack(model: Pretrained, folders: Iterable[str | Path]) -> Pretrained:
    """A loaded model with the adapters of `stack_adapters` beside its weights."""
    return with_arrays(model, *stack_adapters([*folders], model.cfg, model.definition.specs))


def with_arrays(model: Pretrained, specs: dict, arrays: dict) -> Pretrained:
    """A loaded model with numpy's arrays of adapters beside its weights; `specs` declare both."""
    if model.mesh is None:
        places = SingleDeviceSharding(jax.devices()[0])
    else:
        place, declared = partial(sharded_by_stages, mesh=model.mesh), flatten_dict(specs)
        places = unflatten_dict({path: place(declared[path]) for path in flatten_dict(arrays)})
    params = joined_trees(model.params, jax.device_put(arrays, places))
    return replace(model, definition=with_specs(model.definition, specs), params=params)


def read_adapters(given: str | Path, cfg: ModelConfig, specs: dict) -> Adapters:
    """The adapters of a folder, or of a name on the hub, for the weights of their training."""
    folder = model_folder(given, weights=True)
    if (folder / ADAPTER_CONFIG).is_file():
        return read_adapter(folder, cfg, specs)
    step = adapter_step(folder)
    run = read_adapter_run(step)
    return adapters_for_others(run, lambda: source_of(named_base(step, base_of_run(step)), run.cfg))


def stack_of_adapters(adapters: Mapping[str, Adapters], specs: dict) -> tuple[dict, dict]:
    """`stack_adapters` of adapters by their names in messages."""
    flat = flatten_dict(specs)
    for name, each in adapters.items():
        require_stackable(name, each, flat)
    declared, arrays = dict(flat), {}
    weights = {path for each in adapters.values() for path in each.scales}
    for path in sorted(weights):
        having = {i: each for i, each in enumerate(adapters.values(), 1) if path in each.scales}
        rank = max(each.part(path, "a").shape[-1] for each in having.values())
        of_parts = declared_adapters(flat[path], len(adapters) + 1, rank)
        for part, array in _stack_of_weight(path, of_parts, having).items():
            declared[part_path(path, part)] = of_parts[part]
            arrays[part_path(path, part)] = array
    return unflatten_dict(declared), unflatten_dict(arrays)


def require_stackable(name: str, adapters: Adapters, specs: Mapping[Leaf, ParamSpec]) -> None:
    """Raise `UserError` for what a token cannot have of its own."""
    require_shapes(adapters, specs)
    reasons = dict.fromkeys(adapters.whole, "was trained whole")
    for path in adapters.scales:
        if specs[path].is_of_experts:
            reasons[path] = "is of experts"
        elif specs[path].matmul is None:
            reasons[path] = "is a table"
        elif adapters.part(path, "magnitude") is not None:
            reasons[path] = "has DoRA"
    for path, reason in reasons.items():
        raise UserError(
            f"{name}: {'.'.join(path)} {reason}, which cannot differ from token to token here; "
            "merge this adapter (mjax convert merge)"
        )


def declared_adapters(spec: ParamSpec, slots: int, rank: int) -> dict[str, ParamSpec]:
    """The declarations of the adapters of a weight: those of one, with an axis of slots."""
    lead, halves = spec.lead, ("pair",) if "pair" in spec.output_axes else ()
    of_inputs = *spec.axes[lead : lead + spec.inputs], *halves, None
    axes = {"a": of_inputs, "b": (None, *spec.output_axes)}
    plain = {"fp8": False, "active": 0.0, "whole": spec.whole}
    declared = {}
    for name, own in axes.items():
        shape = part_shapes(spec, rank)[name]
        declared[name] = ParamSpec(
            shape=(*shape[:lead], slots, *shape[lead:]),
            axes=(*spec.axes[:lead], None, *own),
            role="matrix",
            precise=spec.precise,
            **plain,
        )
    of_scales = (*spec.shape[:lead], slots), (*spec.axes[:lead], None)
    declared["scales"] = ParamSpec(*of_scales, role="scalar", precise=True, **plain)
    return declared


def _stack_of_weight(
    path: Leaf, declared: Mapping[str, ParamSpec], having: Mapping[int, Adapters]
) -> dict[str, np.ndarray]:
    """The arrays of the adapters of a weight, by part; `having`: those with one, by slot."""
    lead = declared["a"].lead
    arrays = {"scales": np.zeros(declared["scales"].shape, np.float32)}
    for name in "ab":
        parts = {slot: each.part(path, name) for slot, each in having.items()}
        dtype = np.result_type(*parts.values())
        arrays[name] = np.zeros(declared[name].shape, dtype)
        for slot, part in parts.items():
            own = np.moveaxis(arrays[name], lead, 0)[slot]
            axis = lead if name == "b" else own.ndim - 1
            np.moveaxis(own, axis, 0)[: part.shape[axis]] = np.moveaxis(part, axis, 0)
    for slot, each in having.items():
        arrays["scales"][..., slot] = each.scales[path]
    return arrays
