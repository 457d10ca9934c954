"""From parameter roles to the update of the nested dict of parameters.

Groups (weight decay, learning-rate multipliers, Muon) go by `ParamSpec.role`, never by rank. The
state is `{"count": int32, "mu": a tree like the parameters, "nu": the same without Muon's}`, so
checkpoints and shardings follow the parameters one by one. `state_like` builds such a tree from
anything, shardings for example. The update works on local shards inside jit and shard_map: AdamW is
elementwise, Muon gets `gather` and `shard`. Each array is read and written once: clipping, update,
rounding and the choice to keep the old state are one elementwise expression.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema import OptimizerConfig
from mjax.optim.adam import adam_direction, adam_moments
from mjax.optim.muon import Resharder, muon_direction, muon_momentum
from mjax.optim.offload import update_in_slices
from mjax.optim.rounding import Name, Offsets, element_offsets, random_bits, round_to_bf16
from mjax.sharding.spec import ParamSpec

# name of a parameter -> for each dimension, the global index of every local entry along it
GlobalIndices = Callable[[Name], tuple[jax.Array, ...]]


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

    def adam(
        self, grad: jax.Array, param: jax.Array, moments: tuple, offsets: Offsets
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(param, (mu, nu)) after AdamW. Moments in host memory are updated slice by slice."""
        rows, *columns = offsets
        update = partial(self._adam_rows, tuple(columns))
        inputs = grad, rows
        if self.cfg.offload is True:
            return update_in_slices(update, inputs, param, moments)
        return update(inputs, param, moments)

    def _adam_rows(
        self, columns: Offsets, inputs: tuple, param: jax.Array, moments: tuple
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`adam` of some rows; `inputs` are their gradient and their offsets."""
        cfg = self.cfg
        grad, rows = inputs
        offsets = rows, *columns
        old_mu, old_nu = moments
        mu, nu = adam_moments(self._scaled(grad), old_mu, old_nu, cfg.b1, cfg.b2)
        direction = adam_direction(mu, nu, self.count, cfg.b1, cfg.b2, cfg.eps)
        mu = self._stored(mu, old_mu, "mu", offsets)
        nu = self._stored(nu, old_nu, "nu", offsets)
        return self._moved(param, direction, offsets), (mu, nu)

    def muon(
        self,
        grad: jax.Array,
        param: jax.Array,
        old_mu: jax.Array,
        offsets: Offsets,
        gather: Resharder,
        shard: Resharder,
    ) -> tuple[jax.Array, jax.Array]:
        """(param, mu) after Muon."""
        cfg = self.cfg
        grad = self._scaled(grad)
        matrix, mu = muon_momentum(grad, old_mu, cfg.muon_momentum, cfg.muon_nesterov)
        matrix = matrix.astype(cfg.mu_dtype)
        steps, mode = cfg.muon_steps, cfg.muon_scale
        direction = muon_direction(matrix, self.spec, steps, mode, gather, shard)
        param = self._moved(param, direction, offsets)
        return param, self._stored(mu, old_mu, "mu", offsets)

    def _scaled(self, grad: jax.Array) -> jax.Array:
        return grad * jnp.asarray(self.scale, grad.dtype)

    def _moved(self, param: jax.Array, direction: jax.Array, offsets: Offsets) -> jax.Array:
        """The parameter after a step against `direction`, fp32."""
        role = self.spec.role
        old = param.astype(jnp.float32)
        if role in self.cfg.weight_decay_roles:
            direction += self.weight_decay * old
        lr = self.lr * self.cfg.lr_multipliers.get(role, 1.0)
        return self._stored(old - lr * direction, param, "param", offsets)

    def _stored(self, new: jax.Array, old: jax.Array, tensor: str, offsets: Offsets) -> jax.Array:
        """The replacement of `old`: fp32 `new` in the dtype of `old`, or `old` itself."""
        if self.cfg.stochastic_rounding and old.dtype == jnp.bfloat16:
            bits = random_bits(self.seed, self.count, self.name, tensor, offsets)
            new = round_to_bf16(new, bits)
        return jnp.where(self.keep, new.astype(old.dtype), old)


def uses_muon(cfg: OptimizerConfig, spec: ParamSpec) -> bool:
    """Whether this parameter is trained by Muon rather than AdamW."""
    return cfg.name == "muon" and spec.role in cfg.muon_roles


def state_like(cfg: OptimizerConfig, specs: dict, count: object, mu: dict, nu: dict) -> dict:
    """The state's tree with `count`, `mu` and `nu` (both trees like the parameters) in it."""
    second_moments = flatten_dict(nu)
    for name, spec in flatten_dict(specs).items():
        if uses_muon(cfg, spec):
            second_moments.pop(name, None)
    return {"count": count, "mu": mu, "nu": unflatten_dict(second_moments)}


def _unsharded(x: jax.Array, spec: ParamSpec) -> jax.Array:
    return x


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a nested dict of fp32 or bf16 parameters.

    specs: their declarations.
    gather, shard: make the matrices of a Muon shard complete, and split them again. The default is
        for parameters that are not sharded. Muon's matrices are orthogonalized in `mu_dtype`.
    seed, global_indices: for stochastic rounding; None: parameters are not sharded.

    With `cfg.offload` true, moments are in host memory and stay there.
    """

    cfg: OptimizerConfig
    specs: dict
    gather: Resharder = _unsharded
    shard: Resharder = _unsharded
    seed: int = 0
    global_indices: GlobalIndices | None = None

    def init(self, params: dict) -> dict:
        """The state before the first step."""
        mu_dtype, nu_dtype = self.cfg.mu_dtype, self.cfg.nu_dtype
        count = jnp.zeros((), jnp.int32)
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype), params)
        nu = jax.tree.map(lambda p: jnp.zeros_like(p, nu_dtype), params)
        return state_like(self.cfg, self.specs, count, mu, nu)

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
        """(params, state) after a step; the arguments that are scalars are as `ParameterUpdate`."""
        count = state["count"] + 1
        grads, params = flatten_dict(grads), flatten_dict(params)
        mus, nus = flatten_dict(state["mu"]), flatten_dict(state["nu"])
        for name, spec in flatten_dict(self.specs).items():
            one = ParameterUpdate(
                self.cfg, name, spec, self.seed, count, lr, weight_decay, scale, keep
            )
            grad, param, mu = grads[name], params[name], mus[name]
            offsets = self._offsets(name, spec, param.shape)
            if uses_muon(self.cfg, spec):
                resharders = self.gather, self.shard
                params[name], mus[name] = one.muon(grad, param, mu, offsets, *resharders)
            else:
                moments = mu, nus[name]
                params[name], moments = one.adam(grad, param, moments, offsets)
                mus[name], nus[name] = moments
        state = {
            "count": jnp.where(keep, count, state["count"]),
            "mu": unflatten_dict(mus),
            "nu": unflatten_dict(nus),
        }
        return unflatten_dict(params), state

    def _offsets(self, name: Name, spec: ParamSpec, shape: tuple[int, ...]) -> Offsets:
        """The numbers of a parameter's local entries; `shape` is that of its shard."""
        if self.global_indices is None:
            indices = [jnp.arange(length) for length in shape]
        else:
            indices = self.global_indices(name)
        return element_offsets(indices, spec.shape)
