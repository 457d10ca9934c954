"""From parameter roles to the update of the nested dict of parameters.

Groups (weight decay, learning-rate multipliers, Muon) go by `ParamSpec.role`, never by rank.
State: `{"count": int32, "mu": tree like params, "nu": the same without the Muon leaves}`, so that
checkpoints and shardings follow the parameters leaf by leaf; `state_like` builds such a tree from
anything, shardings for example. Works on local shards inside jit and shard_map: AdamW is
elementwise, Muon gets `gather` and `shard`. Each leaf is read and written once: clipping, update,
rounding and the choice to keep the old state are one elementwise expression.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema import OptimizerConfig
from mjax.optim.adam import adam_direction, adam_moments
from mjax.optim.muon import Resharder, muon_direction, muon_momentum
from mjax.optim.offload import update_in_slices
from mjax.optim.rounding import Name, Places, places, random_bits, round_to_bf16
from mjax.sharding.spec import ParamSpec

Coordinates = Callable[[Name], tuple[jax.Array, ...]]


class Optimizer(NamedTuple):
    """`init(params) -> state`; `update` as `build_optimizer` says."""

    init: Callable[[dict], dict]
    update: Callable[..., tuple[dict, dict]]


@dataclass(frozen=True)
class Leaf:
    """What the update of one parameter in one step goes by. Scalars but for `scale` are fp32."""

    cfg: OptimizerConfig
    name: Name
    spec: ParamSpec
    seed: int
    count: jax.Array  # of this step, from 1
    lr: jax.Array
    weight_decay: jax.Array
    scale: jax.Array | float  # of the gradient
    keep: jax.Array | bool  # false: all stays as it was

    def store(self, new: jax.Array, old: jax.Array, tensor: str, at: Places) -> jax.Array:
        """`new` in fp32 -> what replaces `old`, in its dtype."""
        if self.cfg.stochastic_rounding and old.dtype == jnp.bfloat16:
            bits = random_bits(self.seed, self.count, self.name, tensor, at)
            new = round_to_bf16(new, bits)
        return jnp.where(self.keep, new.astype(old.dtype), old)

    def move(self, param: jax.Array, direction: jax.Array, at: Places) -> jax.Array:
        """The parameter after a step against `direction`, fp32."""
        old = param.astype(jnp.float32)
        if self.spec.role in self.cfg.weight_decay_roles:
            direction += self.weight_decay * old
        lr = self.lr * self.cfg.lr_multipliers.get(self.spec.role, 1.0)
        return self.store(old - lr * direction, param, "param", at)

    def scaled(self, grad: jax.Array) -> jax.Array:
        return grad * jnp.asarray(self.scale, grad.dtype)

    def adam(
        self, within: Places, inputs: tuple, param: jax.Array, moments: tuple
    ) -> tuple[jax.Array, tuple]:
        """(param, moments) of a slice of rows; `inputs`: its gradient and the place of its rows."""
        cfg, (grad, rows) = self.cfg, inputs
        at = rows, *within
        mu, nu = adam_moments(self.scaled(grad), *moments, cfg.b1, cfg.b2)
        direction = adam_direction(mu, nu, self.count, cfg.b1, cfg.b2, cfg.eps)
        kept = self.store(mu, moments[0], "mu", at), self.store(nu, moments[1], "nu", at)
        return self.move(param, direction, at), kept

    def muon(
        self, grad: jax.Array, param: jax.Array, mu: jax.Array, at: Places, *resharders: Resharder
    ) -> tuple[jax.Array, jax.Array]:
        """(param, mu)."""
        cfg = self.cfg
        m, new = muon_momentum(self.scaled(grad), mu, cfg.muon_momentum, cfg.muon_nesterov)
        m = m.astype(cfg.mu_dtype)
        direction = muon_direction(m, self.spec, cfg.muon_steps, cfg.muon_scale, *resharders)
        return self.move(param, direction, at), self.store(new, mu, "mu", at)


def uses_muon(cfg: OptimizerConfig, spec: ParamSpec) -> bool:
    """Whether this parameter is trained by Muon rather than AdamW."""
    return cfg.name == "muon" and spec.role in cfg.muon_roles


def state_like(cfg: OptimizerConfig, specs: dict, count: object, mu: dict, nu: dict) -> dict:
    """The state's tree with `count`, `mu` and `nu` (both trees like the parameters) in it."""
    adam = {key for key, spec in flatten_dict(specs).items() if not uses_muon(cfg, spec)}
    kept = {key: x for key, x in flatten_dict(nu).items() if key in adam}
    return {"count": count, "mu": mu, "nu": unflatten_dict(kept)}


def build_optimizer(
    cfg: OptimizerConfig,
    specs: dict,
    gather: Resharder | None = None,
    shard: Resharder | None = None,
    *,
    seed: int = 0,
    coordinates: Coordinates | None = None,
) -> Optimizer:
    """The optimiser of `params`, a nested dict of fp32 or bf16 arrays with `ParamSpec` leaves in
    `specs`.

    `update(grads, state, params, *, lr, weight_decay, scale=1, keep=True)` takes the step's
    learning rate and decay, the factor on the gradients and whether anything changes, as scalars,
    and returns (params, state). `gather(x, spec)` makes a shard of a Muon matrix whole, `shard(x,
    spec)` cuts it again; None: parameters are not sharded. Muon's matrices are orthogonalised in
    `mu_dtype`. `coordinates(name)`: the index in the whole parameter of every local entry, a vector
    for each dimension, and `seed` are for stochastic rounding. With `cfg.offload` true, moments are
    and stay in host memory.
    """
    flat_specs: dict[Name, ParamSpec] = flatten_dict(specs)

    def same(x, spec):
        return x

    gather, shard = gather or same, shard or same

    def init(params: dict) -> dict:
        def zeros(dtype):
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)

        count = jnp.zeros((), jnp.int32)
        return state_like(cfg, specs, count, zeros(cfg.mu_dtype), zeros(cfg.nu_dtype))

    def update(
        grads: dict,
        state: dict,
        params: dict,
        *,
        lr: jax.Array,
        weight_decay: jax.Array,
        scale: jax.Array | float = 1.0,
        keep: jax.Array | bool = True,
    ) -> tuple[dict, dict]:
        count = state["count"] + 1
        grads, params = flatten_dict(grads), flatten_dict(params)
        mus, nus = flatten_dict(state["mu"]), flatten_dict(state["nu"])
        for name, spec in flat_specs.items():
            leaf = Leaf(cfg, name, spec, seed, count, lr, weight_decay, scale, keep)
            param, grad = params[name], grads[name]
            index = map(jnp.arange, param.shape) if coordinates is None else coordinates(name)
            at = places(tuple(index), spec.shape)
            if uses_muon(cfg, spec):
                params[name], mus[name] = leaf.muon(grad, param, mus[name], at, gather, shard)
                continue
            moments, change = (mus[name], nus[name]), partial(leaf.adam, at[1:])
            run = partial(update_in_slices, change) if cfg.offload is True else change
            params[name], (mus[name], nus[name]) = run((grad, at[0]), param, moments)
        mu, nu = unflatten_dict(mus), unflatten_dict(nus)
        count = jnp.where(keep, count, state["count"])
        return unflatten_dict(params), {"count": count, "mu": mu, "nu": nu}

    return Optimizer(init, update)
