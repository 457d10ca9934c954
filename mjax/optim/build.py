"""From parameter roles to the update of the nested dict of parameters.

Groups (weight decay, learning-rate multipliers, Muon) go by `ParamSpec.role`, never by rank; a
multiplier may also go by name. The state is `{"count": int32, ...}` and a tree for each moment that
holds it for the parameters that have it: `mu` for AdamW and Muon, `nu` for AdamW, for a
transformation of optax those of its own, and its `numbers`. So checkpoints and shardings follow the
parameters one by one. `state_like` builds such a tree from anything. The update works on local
shards inside jit and shard_map: AdamW and transformations are elementwise, Muon gets `gather` and
`shard`. Each array is read and written once: clipping, update, rounding and the choice to keep the
old state are one elementwise expression.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema.model import EXPERTS_GROUP, ROLES
from mjax.config.schema.run import OptimizerConfig
from mjax.kernels.elementwise.adam import (
    AdamNumbers,
    Betas,
    adam_direction,
    adam_moments,
    row_update,
)
from mjax.optim.muon import Resharder, muon_direction, muon_momentum
from mjax.optim.offload import update_in_slices
from mjax.optim.rounding import Name, Offsets, element_offsets, random_bits, round_to_bf16
from mjax.optim.transformation import (
    FIRST_MOMENTS,
    SECOND_MOMENTS,
    Transformation,
    transformation_of,
)
from mjax.sharding.spec import ParamSpec, is_named

# name of a parameter -> for each dimension, the global index of every local entry along it
GlobalIndices = Callable[[Name], tuple[jax.Array, ...]]
Moments = tuple[jax.Array, ...]  # of one parameter, in the order of `moments_of`

# Parts of the state that are not moments: the number of steps, the numbers of a transformation.
NOT_MOMENTS = frozenset({"count", "numbers"})


class Moment(NamedTuple):
    """A value kept for each entry of a parameter. first: the value before the first step."""

    name: str
    dtype: np.dtype
    first: float = 0.0


def moments_of(cfg: OptimizerConfig, role: str) -> tuple[Moment, ...]:
    """The moments of a parameter of this role."""
    mu_dtype, nu_dtype = np.dtype(cfg.mu_dtype), np.dtype(cfg.nu_dtype)
    transformation = transformation_of(cfg)
    if transformation is None:
        mu, nu = Moment("mu", mu_dtype), Moment("nu", nu_dtype)
        return (mu,) if uses_muon(cfg, role) else (mu, nu)
    found = []
    for leaf in transformation.moments:
        dtype = leaf.dtype
        if leaf.name in FIRST_MOMENTS:
            dtype = mu_dtype
        elif leaf.name in SECOND_MOMENTS:
            dtype = nu_dtype
        found.append(Moment(leaf.name, dtype, leaf.first))
    return tuple(found)


def moment_bytes(cfg: OptimizerConfig, role: str) -> int:
    """Bytes that are kept for each entry of a parameter of this role."""
    return sum(moment.dtype.itemsize for moment in moments_of(cfg, role))


def moment_trees(state: dict) -> dict:
    """The parts of a state that are moments: trees like the parameters."""
    return {part: tree for part, tree in state.items() if part not in NOT_MOMENTS}


def uses_muon(cfg: OptimizerConfig, role: str) -> bool:
    """Whether parameters of this role are trained by Muon rather than AdamW."""
    return cfg.name == "muon" and role in cfg.muon_roles


def lr_multiplier(cfg: OptimizerConfig, name: Name, spec: ParamSpec) -> float:
    """The factor on the learning rate of a parameter.

    It is that of the first pattern that matches its name, else that of experts' own, else that of
    its role.
    """
    factors = cfg.lr_multipliers
    for pattern in patterns_of(factors):
        if is_named(pattern, name, spec):
            return factors[pattern]
    if "experts" in spec.axes and EXPERTS_GROUP in factors:
        return factors[EXPERTS_GROUP]
    return factors.get(spec.role, 1.0)


def patterns_of(factors: Iterable[str]) -> list[str]:
    """The keys of `optimizer.lr_multipliers` that name parameters, not roles."""
    return [key for key in factors if key not in (*ROLES, EXPERTS_GROUP)]


def state_like(
    cfg: OptimizerConfig,
    specs: dict,
    number: Callable[[float, np.dtype], object],
    moment: Callable[[Name, Moment], object],
) -> dict:
    """The state's tree: `number(first value, dtype)` where it holds a number, `moment(name of the
    parameter, moment)` where it holds a moment."""
    state: dict = {"count": number(0, np.dtype(np.int32))}
    transformation = transformation_of(cfg)
    if transformation is not None and transformation.numbers:
        numbers = transformation.numbers
        state["numbers"] = {leaf.name: number(leaf.first, leaf.dtype) for leaf in numbers}
    trees: dict = {}
    for name, spec in flatten_dict(specs).items():
        for kept in moments_of(cfg, spec.role):
            trees.setdefault(kept.name, {})[name] = moment(name, kept)
    return state | {kept: unflatten_dict(tree) for kept, tree in trees.items()}


class Rows(NamedTuple):
    """Some rows of a parameter, or all: their gradient, values, moments, and where they lie."""

    grad: jax.Array
    param: jax.Array
    moments: Moments
    offsets: Offsets


Updated = tuple[jax.Array, Moments]  # the rows of a parameter and their moments


@dataclass(frozen=True)
class ParameterUpdate:
    """The update of one parameter in one step.

    count: the number of the step, int32 [], from 1.
    lr, weight_decay: of the step, fp32 [].
    scale: a factor on the gradient.
    keep: whether anything changes; false: parameter and moments stay as they were.
    """

    cfg: OptimizerConfig
    name: Name
    spec: ParamSpec
    seed: int
    count: jax.Array
    lr: jax.Array
    weight_decay: jax.Array
    scale: jax.Array | float
    keep: jax.Array | bool

    def elementwise(self, update_rows: Callable[[Rows], Updated], rows: Rows) -> Updated:
        """The update of all rows by `update_rows`.

        Moments in host memory are updated slice by slice.
        """
        first, *others = rows.offsets

        def update(inputs: tuple, param: jax.Array, moments: Moments) -> Updated:
            grad, first = inputs
            return update_rows(Rows(grad, param, moments, (first, *others)))

        inputs = rows.grad, first
        if self.cfg.offload is True:
            return update_in_slices(update, inputs, rows.param, rows.moments)
        return update(inputs, rows.param, rows.moments)

    def adam_rows(self, rows: Rows) -> Updated:
        """AdamW, whose moments are mu and nu."""
        cfg = self.cfg
        mu, nu = adam_moments(self._scaled(rows.grad), *rows.moments, cfg.b1, cfg.b2)
        direction = adam_direction(mu, nu, self.count, cfg.b1, cfg.b2, cfg.eps)
        return self._moved(rows, direction), self._kept(rows, ("mu", "nu"), (mu, nu))

    def adam_stacks(
        self, grads: Sequence[jax.Array], param: jax.Array, moments: Moments
    ) -> Updated:
        """AdamW of stacks [L, ...], by the gradients of their layers [...]."""
        cfg = self.cfg
        decays = self.spec.role in cfg.weight_decay_roles
        numbers = AdamNumbers(
            lr=self.lr * lr_multiplier(cfg, self.name, self.spec),
            decay=self.weight_decay if decays else jnp.float32(0),
            scale=jnp.asarray(self.scale),
            count=self.count,
            keep=jnp.asarray(self.keep),
        )
        betas = Betas(cfg.b1, cfg.b2, cfg.eps)
        stacks = param, *moments
        for row, grad in enumerate(grads):
            stacks = row_update(stacks, grad, row, numbers, betas)
        return stacks[0], stacks[1:]

    def transformed_rows(
        self, transformation: Transformation, numbers: dict[str, jax.Array], rows: Rows
    ) -> Updated:
        """A transformation whose state holds `numbers` so far."""
        grad = self._scaled(rows.grad).astype(jnp.float32)
        param = rows.param.astype(jnp.float32)
        old, names = [], []
        for moment, leaf in zip(rows.moments, transformation.moments, strict=True):
            old.append(moment.astype(leaf.dtype))
            names.append(leaf.name)
        direction, new = transformation.step(grad, param, tuple(old), numbers)
        return self._moved(rows, direction), self._kept(rows, names, new)

    def muon(self, rows: Rows, gather: Resharder, shard: Resharder) -> Updated:
        """Muon, whose moment is mu."""
        cfg = self.cfg
        grad = self._scaled(rows.grad)
        matrix, mu = muon_momentum(grad, *rows.moments, cfg.muon_momentum, cfg.muon_nesterov)
        matrix = matrix.astype(cfg.mu_dtype)
        steps, mode = cfg.muon_steps, cfg.muon_scale
        direction = muon_direction(matrix, self.spec, steps, mode, gather, shard)
        return self._moved(rows, direction), self._kept(rows, ("mu",), (mu,))

    def _scaled(self, grad: jax.Array) -> jax.Array:
        return grad * jnp.asarray(self.scale, grad.dtype)

    def _moved(self, rows: Rows, direction: jax.Array) -> jax.Array:
        """The parameter after a step against `direction`, fp32."""
        old = rows.param.astype(jnp.float32)
        if self.spec.role in self.cfg.weight_decay_roles:
            direction += self.weight_decay * old
        lr = self.lr * lr_multiplier(self.cfg, self.name, self.spec)
        return self._stored(old - lr * direction, rows.param, "param", rows.offsets)

    def _kept(self, rows: Rows, names: Sequence[str], new: Moments) -> Moments:
        """The moments `new`, fp32, as they are stored."""
        stored = []
        for name, value, old in zip(names, new, rows.moments, strict=True):
            stored.append(self._stored(value, old, name, rows.offsets))
        return tuple(stored)

    def _stored(self, new: jax.Array, old: jax.Array, tensor: str, offsets: Offsets) -> jax.Array:
        """The replacement of `old`: fp32 `new` in the dtype of `old`, or `old` itself."""
        if self.cfg.stochastic_rounding and old.dtype == jnp.bfloat16:
            bits = random_bits(self.seed, self.count, self.name, tensor, offsets)
            new = round_to_bf16(new, bits)
        return jnp.where(self.keep, new.astype(old.dtype), old)


def _unsharded(x: jax.Array, spec: ParamSpec) -> jax.Array:
    return x


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a nested dict of fp32 or bf16 parameters.

    specs: their declarations.
    gather, shard: make the matrices of a Muon shard complete, and split them again. The default is
        for parameters that are not sharded. Muon's matrices are orthogonalized in `mu_dtype`.
    seed, global_indices: for stochastic rounding; None: parameters are not sharded.

    With `cfg.offload` true, moments are in host memory and stay there. Raises `UserError` for a
    transformation of optax that is not elementwise.
    """

    cfg: OptimizerConfig
    specs: dict
    gather: Resharder = _unsharded
    shard: Resharder = _unsharded
    seed: int = 0
    global_indices: GlobalIndices | None = None

    def __post_init__(self) -> None:
        if self.transformation is None:
            return
        for shape in {spec.shape for spec in flatten_dict(self.specs).values()}:
            self.transformation.require_shape(shape)

    @cached_property
    def transformation(self) -> Transformation | None:
        return transformation_of(self.cfg)

    def init(self, params: dict) -> dict:
        """The state before the first step."""
        leaves = flatten_dict(params)

        def full(name: Name, moment: Moment) -> jax.Array:
            return jnp.full_like(leaves[name], moment.first, moment.dtype)

        return state_like(self.cfg, self.specs, jnp.asarray, full)

    def first_values(self) -> dict:
        """For each leaf of the state the value of all its entries before the first step."""
        return state_like(
            self.cfg, self.specs, lambda first, dtype: first, lambda name, moment: moment.first
        )

    def update(
        self,
        grads: dict,
        state: dict,
        params: dict,
        *,
        lr: jax.Array,
        weight_decay: jax.Array,
        scale: jax.Array | float = 1.0,
        keep: jax.Array | bool = True,
    ) -> tuple[dict, dict]:
        """(params, state) after a step; the arguments that are scalars are as `ParameterUpdate`.

        For AdamW a list of gradients of layers may take the place of that of a stack.
        """
        count = state["count"] + 1
        grads, params = flatten_dict(grads), flatten_dict(params)
        kept = {part: flatten_dict(tree) for part, tree in moment_trees(state).items()}
        for name, spec in flatten_dict(self.specs).items():
            one = ParameterUpdate(
                self.cfg, name, spec, self.seed, count, lr, weight_decay, scale, keep
            )
            names = [moment.name for moment in moments_of(self.cfg, spec.role)]
            moments = tuple(kept[moment][name] for moment in names)
            if isinstance(grads[name], list):
                params[name], moments = one.adam_stacks(grads[name], params[name], moments)
            else:
                offsets = self._offsets(name, spec, params[name].shape)
                rows = Rows(grads[name], params[name], moments, offsets)
                params[name], moments = self._updated(one, rows, state.get("numbers", {}))
            for moment, value in zip(names, moments, strict=True):
                kept[moment][name] = value
        new = {"count": count}
        if "numbers" in state:
            new["numbers"] = self.transformation.next_numbers(state["numbers"])
        new = jax.tree.map(partial(jnp.where, keep), new, {part: state[part] for part in new})
        return unflatten_dict(params), new | {part: unflatten_dict(of) for part, of in kept.items()}

    def _updated(self, one: ParameterUpdate, rows: Rows, numbers: dict[str, jax.Array]) -> Updated:
        """A parameter and its moments, updated; `numbers` are those of a transformation."""
        if uses_muon(self.cfg, one.spec.role):
            return one.muon(rows, self.gather, self.shard)
        if self.transformation is None:
            return one.elementwise(one.adam_rows, rows)
        update_rows = partial(one.transformed_rows, self.transformation, numbers)
        return one.elementwise(update_rows, rows)

    def _offsets(self, name: Name, spec: ParamSpec, shape: tuple[int, ...]) -> Offsets:
        """The numbers of a parameter's local entries; `shape` is that of its shard."""
        if self.global_indices is None:
            indices = [jnp.arange(length) for length in shape]
        else:
            indices = self.global_indices(name)
        return element_offsets(indices, spec.shape)
