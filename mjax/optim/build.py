"""From parameter roles to one optax transform over the nested dict of parameters.

Groups (weight decay, learning-rate multipliers, Muon) go by `ParamSpec.role`, never by rank.
State: `{"count": int32, "mu": tree like params, "nu": the same without the Muon leaves}`, so that
checkpoints and shardings follow the parameters leaf by leaf; `state_like` builds such a tree from
anything, shardings for example. Works on local shards inside jit and shard_map: AdamW is
elementwise, Muon gets `gather` and `shard`. Clipping is done before, on the whole tree.
"""

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config.schema import OptimizerConfig
from mjax.models.params import ParamSpec
from mjax.optim.adam import adam_direction, adam_moments
from mjax.optim.muon import Resharder, muon_direction, muon_momentum


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
) -> optax.GradientTransformationExtraArgs:
    """The optimiser of `params`, a nested dict of fp32 arrays with `ParamSpec` leaves in `specs`.

    `update(grads, state, params, *, lr, weight_decay)` takes the step's learning rate and decay
    as scalars and returns (fp32 updates to add, new state). `gather(x, spec)` makes a shard of a
    Muon matrix whole, `shard(x, spec)` cuts it again; None: parameters are not sharded. Muon's
    matrices are orthogonalised in `mu_dtype`.
    """
    flat_specs: dict[tuple[str, ...], ParamSpec] = flatten_dict(specs)
    gather = gather or (lambda x, spec: x)
    shard = shard or (lambda x, spec: x)

    def init(params: dict) -> dict:
        zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)  # noqa: E731
        count = jnp.zeros((), jnp.int32)
        return state_like(cfg, specs, count, zeros(cfg.mu_dtype), zeros(cfg.nu_dtype))

    def update(
        grads: dict, state: dict, params: dict, *, lr: jax.Array, weight_decay: jax.Array
    ) -> tuple[dict, dict]:
        count = state["count"] + 1
        flat_grads, flat_params = flatten_dict(grads), flatten_dict(params)
        old_mu, old_nu = flatten_dict(state["mu"]), flatten_dict(state["nu"])
        updates, new_mu, new_nu = {}, {}, {}
        for key, spec in flat_specs.items():
            grad, mu = flat_grads[key], old_mu[key]
            if uses_muon(cfg, spec):
                m, mu = muon_momentum(grad, mu, cfg.muon_momentum, cfg.muon_nesterov)
                m = m.astype(cfg.mu_dtype)
                step = muon_direction(m, spec, cfg.muon_steps, cfg.muon_scale, gather, shard)
            else:
                mu, nu = adam_moments(grad, mu, old_nu[key], cfg.b1, cfg.b2)
                step = adam_direction(mu, nu, count, cfg.b1, cfg.b2, cfg.eps)
                new_nu[key] = nu.astype(cfg.nu_dtype)
            if spec.role in cfg.weight_decay_roles:
                step += weight_decay * flat_params[key].astype(jnp.float32)
            updates[key] = -lr * cfg.lr_multipliers.get(spec.role, 1.0) * step
            new_mu[key] = mu.astype(cfg.mu_dtype)
        new_state = {"count": count, "mu": unflatten_dict(new_mu), "nu": unflatten_dict(new_nu)}
        return unflatten_dict(updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)
