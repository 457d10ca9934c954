"""Parameters as generation holds them: in one dtype, and each layer's in arrays of its own.

A step of decoding reads every weight once and computes little, so memory bounds it. XLA copies the
rows of a stack [L, ...] that matmuls read, which doubles the memory traffic. A separate array is
read in place. Invariant: one parameter is in conversion at a time. So beside the result it takes
the memory of one stack, and of one layer where parameters come in layers.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mjax.errors import UserError
from mjax.infer.stages.weights_in_stages import (
    StackMove,
    move_to_stages,
    row_of_each_stage,
    rows_of_slots,
)
from mjax.kernels.fp8.channels import Channels8
from mjax.kernels.nf4.parameters import codes_of
from mjax.pipeline.layout import Layout
from mjax.pipeline.storage import sharded_by_stages
from mjax.sharding.collectives import Parallel
from mjax.sharding.mesh import parallel_of
from mjax.sharding.rules import weight_partition
from mjax.sharding.spec import ParamSpec, is_spec

Form = type[Channels8]
FORMS: dict[str, Form] = {"fp8": Channels8}
Parameter = jax.Array | Channels8 | list


def usual_dtype() -> str:
    """The dtype that models run in unless another is asked for."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def take_apart(
    specs: dict,
    params: dict,
    dtype: jnp.dtype,
    donate: bool = False,
    form: Form | None = None,
) -> dict:
    """Parameters in `dtype` on the devices where they are, stacks [L, ...] as lists of L arrays.

    `params` may have such lists already (`from_pretrained(apart=True)`). An array of its dtype is
    not copied, unless it is a stack. A layer's arrays are sharded as the stack is, less the
    axis of layers. `donate` frees what was copied: a layer of a list at once, a stack after its
    last layer. Otherwise `params` stay as they are. Matmul weights that a `form` takes are rounded
    to it.
    """

    def convert(spec: ParamSpec, given: Parameter | list[jax.Array]) -> Parameter:
        if isinstance(given[0] if isinstance(given, list) else given, Channels8):
            return given  # as `converted_apart` makes them
        layer, wanted = _layer_spec(spec), spec.dtype(dtype)
        rounding = form if form is not None and form.takes(spec) else None
        is_stack = spec.is_stacked and not isinstance(given, list)
        arrays = given if isinstance(given, list) else [given]
        where = _of_layer(given.sharding) if is_stack else arrays[0].sharding
        if rounding is not None and isinstance(where, NamedSharding):
            cuts = rounding.partition(where.spec, layer)
            where = jax.tree.map(partial(NamedSharding, where.mesh), cuts)
        # One small program for all layers: one for a whole stack takes L times as long to compile.
        one = jax.jit(_converted, static_argnums=(2, 3, 4), out_shardings=where)
        rows, made = range(spec.shape[0]) if is_stack else [None], []
        for array in arrays:
            if not (is_stack or rounding) and array.dtype == wanted:
                made.append(array)
                continue
            made += [one(array, row, layer, wanted, rounding) for row in rows]
            if donate:
                jax.block_until_ready(made[-1])
                array.delete()
        return made if spec.is_stacked else made[0]

    return jax.tree.map(convert, specs, params, is_leaf=is_spec)


def put_in_stages(
    specs: dict,
    params: dict,
    dtype: jnp.dtype,
    mesh: Mesh,
    layout: Layout,
    donate: bool = False,
    form: Form | None = None,
) -> dict:
    """`take_apart` of layers in stages: lists of arrays [pp, ...], one for each slot of a stage."""
    parallel = parallel_of(mesh)

    def convert(rows: np.ndarray, spec: ParamSpec, stack: jax.Array) -> list[Parameter]:
        declared = replace(spec, shape=(layout.pp, *spec.shape[1:]))
        cut = weight_partition(declared, parallel)
        rounding = form if form is not None and form.takes(spec) else None
        cuts = cut if rounding is None else rounding.partition(cut, declared)
        where = jax.tree.map(partial(NamedSharding, mesh), cuts)
        assert not isinstance(stack, list), "stages are made of stacks, not of single layers"
        given = stack
        if getattr(given.sharding, "mesh", None) != mesh:
            given = jax.device_put(given, sharded_by_stages(spec, mesh))
        wanted, made = spec.dtype(dtype), []
        move = move_to_stages(given, rows, cut)
        one = jax.jit(_of_stages, static_argnums=(2, 3, 4, 5), out_shardings=where)
        for of_slot in rows:
            row = one(given, of_slot, move, declared, wanted, rounding)
            made.append(jax.block_until_ready(row))
        if donate:
            stack.delete()
        return made

    edges = {name: spec for name, spec in specs.items() if name not in layout.stacks}
    of_edges = {name: params[name] for name in edges}
    found = take_apart(edges, of_edges, dtype, donate, form)
    for name in layout.stacks:
        of_slots = partial(convert, rows_of_slots(layout, name))
        found[name] = jax.tree.map(of_slots, specs[name], params[name], is_leaf=is_spec)
    return found


def converted_apart(specs: dict, params: dict, dtype: jnp.dtype, form: Form | None) -> dict:
    """`take_apart` of those parameters that are given, as part of one program; all are copies.

    It takes the memory of all its results at a time, and compiles once for the whole model.
    """
    declared, found = flatten_dict(specs), {}
    for path, given in flatten_dict(params).items():
        spec = declared[path]
        layer, wanted = _layer_spec(spec), spec.dtype(dtype)
        rounding = form if form is not None and form.takes(spec) else None
        rows = range(spec.shape[0]) if spec.is_stacked else [None]
        made = [_converted(jnp.copy(given), row, layer, wanted, rounding) for row in rows]
        found[path] = made if spec.is_stacked else made[0]
    return unflatten_dict(found)


def mesh_of(params: dict) -> Mesh | None:
    """The mesh that parameters are sharded over; None on a single device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def require_weights(specs: dict, params: dict, dtype: jnp.dtype) -> None:
    """Raise `UserError` for arrays that are not the parameters of a model with these specs.

    dtype: of the model.
    """
    wanted, model = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    if jax.tree.structure(params) != model:
        raise UserError("the weights are not those of this model: other names; give its own")
    for (path, spec), given in zip(wanted, jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = getattr(given, "shape", None)
        if not isinstance(given, jax.Array) or shape != spec.shape:
            raise UserError(f"weights: {name} is {type(given).__name__} {shape}, not {spec.shape}")
        if given.is_deleted():
            raise UserError(f"weights: {name} is deleted, as by donation; give one that is there")
        kinds = [jnp.issubdtype(x, jnp.floating) for x in (given.dtype, spec.dtype(dtype))]
        if kinds[0] != kinds[1]:
            raise UserError(f"weights: {name} has dtype {given.dtype}, not {spec.dtype(dtype)}")


def memory_of(params: dict) -> dict[str, int]:
    """Figures of a device here that has parameters; empty where it does not say its memory."""
    device = next(iter(jax.tree.leaves(params)[0].sharding.addressable_devices))
    stats = device.memory_stats() or {}
    return stats if "bytes_limit" in stats else {}


def fit_twice(params: dict) -> bool:
    """Whether memory has room for other parameters beside these; True where it is not known."""
    stats = memory_of(params)
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(params)]
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return not stats or free > sum(shard.nbytes for shard in shards)


def partitions_apart(
    specs: dict, parallel: Parallel, form: Form | None = None, layout: Layout | None = None
) -> dict:
    """The partitions of what `take_apart` or `put_in_stages` gives, as matmuls read it."""

    def of(count: int, spec: ParamSpec) -> PartitionSpec | Channels8 | list:
        layer, count = _layer_spec(spec), count or spec.shape[0]
        if layout is not None and spec.is_stacked:
            layer = replace(spec, shape=(layout.pp, *spec.shape[1:]))
        cut = weight_partition(layer, parallel)
        if form is not None and form.takes(spec):
            cut = form.partition(cut, layer)
        return [cut] * count if spec.is_stacked else cut

    found = {}
    for name, declared in specs.items():
        slots = 0 if layout is None else layout.slots.stacks.count(name)
        found[name] = jax.tree.map(partial(of, slots), declared, is_leaf=is_spec)
    return found


def form_of(name: str | None, specs: dict) -> Form | None:
    """The form that matmul weights are rounded to; None: they have the dtype of the model.

    Raises `UserError` for an unknown one, and where weights have few bits already.
    """
    if name is None:
        return None
    if name not in FORMS:
        raise UserError(
            f"weight_dtype={name} (LLM: quantization): give fp8, or nothing for the model's own"
        )
    if codes_of(specs):
        raise UserError(
            f"weight_dtype={name}: the weights are in NF4 (lora.base=nf4), which are not rounded "
            "again; leave weight_dtype out"
        )
    return FORMS[name]


def _converted(
    given: jax.Array, row: int | None, spec: ParamSpec, dtype: jnp.dtype, form: Form | None
) -> jax.Array | Channels8:
    """A parameter, or one row of a stack, as it is wanted; `spec` declares the result."""
    if row is not None:
        given = lax.dynamic_index_in_dim(given, row, keepdims=False)
    value = given.astype(dtype)
    return value if form is None else form.rounded(value, spec.inputs, spec.lead)


def _of_stages(
    stack: jax.Array,
    rows: np.ndarray,
    move: StackMove,
    spec: ParamSpec,
    dtype: jnp.dtype,
    form: Form | None,
) -> jax.Array | Channels8:
    """A slot's parameter in all stages, as it is wanted."""
    return _converted(row_of_each_stage(stack, rows, move), None, spec, dtype, form)


def _layer_spec(spec: ParamSpec) -> ParamSpec:
    """The declaration of a parameter as one layer has it."""
    if not spec.is_stacked:
        return spec
    return replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])


def _of_layer(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
