"""AdamW against optax, Muon against numpy, and groups by role whatever the stacking."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, PartitionSpec

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import OptimizerConfig
from mjax.models import definition_of
from mjax.optim.build import Optimizer, state_like
from mjax.optim.muon import muon_direction, newton_schulz, update_scale
from mjax.sharding.spec import ParamSpec

SPECS = {
    "embedding": ParamSpec((11, 4), ("vocab", "embed"), "embedding"),
    "dense": {
        "q": ParamSpec((3, 4, 2, 6), ("layers", "embed", "heads", "head_dim"), "matrix"),
        "out": ParamSpec((3, 2, 6, 4), ("layers", "heads", "head_dim", "embed"), "matrix", 2),
        "up": ParamSpec((3, 4, 2, 5), ("layers", "embed", "pair", "mlp"), "matrix"),
        "norm": ParamSpec((3, 4), ("layers", "embed"), "norm"),
    },
    "head": ParamSpec((4, 11), ("embed", "vocab"), "head"),
}
is_spec = {"is_leaf": lambda x: isinstance(x, ParamSpec)}


def random_tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def draw(spec):
        return jnp.asarray(rng.standard_normal(spec.shape), jnp.float32)

    return jax.tree.map(draw, SPECS, **is_spec)


def train(cfg: OptimizerConfig, steps: int = 5, lr: float = 1e-2, **kw) -> tuple[dict, dict]:
    optimizer = Optimizer(cfg, SPECS, **kw)
    params = random_tree(0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for i in range(steps):
        grads = random_tree(i + 1)
        params, state = update(grads, state, params, lr=lr / (i + 1), weight_decay=0.1)
    return params, state


def max_error(a: dict, b: dict) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


def test_adamw_equals_optax():
    cfg = OptimizerConfig()
    mask = jax.tree.map(lambda s: s.role in cfg.weight_decay_roles, SPECS, **is_spec)
    reference = optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        0.0, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=0.1, mask=mask
    )
    params = random_tree(0)
    state = reference.init(params)
    for i in range(5):
        state.hyperparams["learning_rate"] = jnp.float32(1e-2 / (i + 1))
        updates, state = reference.update(random_tree(i + 1), state, params)
        params = optax.apply_updates(params, updates)
    assert max_error(train(cfg)[0], params) < 1e-6


def test_bf16_moments_are_stored_in_bf16_and_stay_close():
    params, state = train(OptimizerConfig(mu_dtype="bfloat16", nu_dtype="bfloat16"))
    kinds = {x.dtype for x in jax.tree.leaves((state["mu"], state["nu"]))}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
    exact, start = train(OptimizerConfig())[0], random_tree(0)
    assert 0 < max_error(params, exact) < 0.02 * max_error(exact, start)


def test_groups_go_by_role_not_rank():
    """With zero gradients only decay moves a parameter: a stacked norm is a matrix by rank."""
    optimizer = Optimizer(OptimizerConfig(lr_multipliers={"head": 0.5}), SPECS)
    params = random_tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = optimizer.update(zeros, optimizer.init(params), params, lr=0.1, weight_decay=0.2)
    moved = jax.tree.map(lambda n, p: float((n / p).mean()), new, params)
    assert moved["dense"]["norm"] == 1
    assert moved["dense"]["q"] == pytest.approx(0.98) == moved["embedding"]
    assert moved["head"] == pytest.approx(0.99)


def test_experts_and_their_router_have_groups_of_their_own():
    specs = {
        "up": ParamSpec((2, 4, 6), ("experts", "embed", "mlp"), "matrix"),
        "up_bias": ParamSpec((2, 6), ("experts", "mlp"), "bias"),
        "shared": ParamSpec((4, 6), ("embed", "mlp"), "matrix"),
        "router": ParamSpec((4, 2), ("embed", "router"), "router"),
    }
    params = jax.tree.map(lambda s: jnp.ones(s.shape), specs, **is_spec)
    grads = jax.tree.map(jnp.ones_like, params)

    def moves(decay: float, **kw) -> dict:
        optimizer = Optimizer(OptimizerConfig(**kw), specs)
        state = optimizer.init(params)
        new, _ = optimizer.update(grads, state, params, lr=0.1, weight_decay=decay)
        return {name: round(float(1 - p.mean()), 5) for name, p in new.items()}

    factors = {"experts": 0.5, "matrix": 2.0, "router": 3.0}
    with_factors = moves(0.0, lr_multipliers=factors)
    assert with_factors == {"up": 0.05, "up_bias": 0.05, "shared": 0.2, "router": 0.3}
    without_experts = moves(0.0, lr_multipliers={"matrix": 2.0})
    assert without_experts == {"up": 0.2, "up_bias": 0.1, "shared": 0.2, "router": 0.1}
    decayed = moves(1.0, weight_decay_roles=["matrix"])
    assert decayed == {"up": 0.2, "up_bias": 0.1, "shared": 0.2, "router": 0.1}
    assert moves(1.0)["router"] == 0.2


def numpy_newton_schulz(x: np.ndarray, steps: int) -> np.ndarray:
    """On singular values: the quintic acts on each alone."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / (np.linalg.norm(s) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (9, 3)])
def test_newton_schulz_acts_on_singular_values(shape):
    x = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    got = np.asarray(newton_schulz(jnp.asarray(x), 5))
    for i in range(2):
        np.testing.assert_allclose(got[i], numpy_newton_schulz(x[i], 5), atol=2e-5)
        values = np.linalg.svd(got[i], compute_uv=False)
        assert 0.6 < values.min() and values.max() < 1.3
    rough = newton_schulz(jnp.asarray(x, jnp.bfloat16), 5)
    assert rough.dtype == jnp.bfloat16 and np.abs(rough - got).max() < 0.1


def test_muon_equals_numpy_on_each_matrix_of_a_stack():
    cfg = OptimizerConfig(name="muon")
    optimizer = Optimizer(cfg, SPECS)
    params = random_tree(0)
    state = optimizer.init(params)
    for i in (1, 2):
        grads = random_tree(i)
        new, state = optimizer.update(grads, state, params, lr=1.0, weight_decay=0.0)
    updates = jax.tree.map(jnp.subtract, new, params)
    m = cfg.muon_momentum

    def expected(g1: np.ndarray, g2: np.ndarray) -> np.ndarray:
        mu = m * (1 - m) * g1 + (1 - m) * g2
        factor = 0.2 * max(g1.shape) ** 0.5
        return -factor * numpy_newton_schulz(m * mu + (1 - m) * g2, cfg.muon_steps)

    first, second = (jax.tree.map(np.asarray, random_tree(i)["dense"]) for i in (1, 2))
    for layer in range(3):
        for name, cut in [
            ("q", lambda x, n=layer: x[n].reshape(4, 12)),
            ("out", lambda x, n=layer: x[n].reshape(12, 4)),
            ("up", lambda x, n=layer: x[n][:, 0]),
            ("up", lambda x, n=layer: x[n][:, 1]),
        ]:
            want = expected(cut(first[name]), cut(second[name]))
            got = cut(np.asarray(updates["dense"][name]))
            np.testing.assert_allclose(got, want, atol=5e-5)
    adam, _ = Optimizer(OptimizerConfig(), SPECS), None
    adam_state = adam.init(params)
    for i in (1, 2):
        want, adam_state = adam.update(random_tree(i), adam_state, params, lr=1.0, weight_decay=0.0)
    for name in ("embedding", "head"):
        np.testing.assert_array_equal(new[name], want[name])


def channels(*widths: int) -> list:
    """Cuts of the last axis into parts of these widths."""
    ends = np.cumsum([0, *widths])
    return [np.s_[..., a:b] for a, b in zip(ends, ends[1:], strict=False)]


NARROW = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "attention.num_attention_heads": 2,
}
HYBRID = {
    "layer_pattern": "[GE][TD][MD]",
    "attention.attention_output_gate": True,
    "moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 6},
    "deltanet.linear_num_key_heads": 2,
    "deltanet.linear_num_value_heads": 4,
    "deltanet.linear_key_head_dim": 3,
    "deltanet.linear_value_head_dim": 5,
    "mamba": {"mamba_num_heads": 2, "mamba_head_dim": 8, "state_size": 4},
}
LATENT = {
    "layer_pattern": "[AD]",
    "mla": {
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
SIGLIP = {
    "layer_pattern": "V,U",
    "vision": {"image_size": 4, "patch_size": 4, "hidden_size": 8, "class_token": False},
    "contrastive": {"projection_dim": 8, "loss": "sigmoid"},
}
PAIR = [np.s_[:, :, 0], np.s_[:, :, 1]]
QUERIES = LATENT | {"mla": LATENT["mla"] | {"q_lora_rank": 6}}
# A parameter, and where each projection lies in it: q and its gate, key and value, gate and up of
# each expert; q, k, v and z, b and a of Gated DeltaNet; z and x, B and C of Mamba-2; the matrices
# of DeepSeek-V2's paper; q, k and v of the pooler of SigLIP.
PROJECTIONS = [
    (HYBRID, "moe.attention.q", channels(4, 4)),
    (HYBRID, "moe.attention.kv", PAIR),
    (HYBRID, "moe.mlp.up", [np.s_[:, e, :, i] for e in (0, 1) for i in (0, 1)]),
    (HYBRID, "deltanet_mlp.deltanet.inner", channels(3, 3, 10, 10)),
    (HYBRID, "deltanet_mlp.deltanet.ba", channels(2, 2)),
    (HYBRID, "mamba_mlp.mamba.inner", PAIR),
    (HYBRID, "mamba_mlp.mamba.bc", PAIR),
    (LATENT, "mla_mlp.attention.q", channels(5, 4)),
    (QUERIES, "mla_mlp.attention.q_b", channels(5, 4)),
    (LATENT, "mla_mlp.attention.kv_a", channels(7, 4)),
    (LATENT, "mla_mlp.attention.kv_b", channels(5, 6)),
    (SIGLIP, "image_pooler.qkv.weight", channels(8, 8, 8)),
]


@pytest.mark.parametrize("model,name,cuts", PROJECTIONS, ids=[name for _, name, _ in PROJECTIONS])
def test_muon_takes_each_projection_for_a_matrix(model, name, cuts):
    cfg = ModelConfig(**nested(NARROW | model))
    spec = flatten_dict(definition_of(cfg).specs)[tuple(name.split("."))]
    gradient = np.random.default_rng(0).standard_normal(spec.shape).astype(np.float32)
    step = muon_direction(jnp.asarray(gradient), spec, 5, "spectral", *[lambda x, _: x] * 2)
    covered = 0
    for cut in cuts:
        wanted, got = gradient[cut], np.asarray(step)[cut]
        covered += got.size
        if spec.is_stacked:  # the first layer is enough
            wanted, got = wanted[0], got[0]
        wanted, got = (x.reshape(len(x), -1) for x in (wanted, got))
        factor = max(wanted.shape) ** 0.5
        np.testing.assert_allclose(got, factor * numpy_newton_schulz(wanted, 5), atol=5e-4)
    assert covered == gradient.size


def test_muon_scales():
    assert update_scale("original", 4, 16) == 2 and update_scale("original", 16, 4) == 1
    assert update_scale("spectral", 4, 16) == 4 == update_scale("spectral", 16, 4)
    assert update_scale("match_adamw", 4, 16) == pytest.approx(0.8)


def test_state_follows_the_parameters_leaf_by_leaf():
    cfg = OptimizerConfig(name="muon", mu_dtype="bfloat16")
    state = Optimizer(cfg, SPECS).init(random_tree(0))
    names = jax.tree.map(lambda s: s.shape, SPECS, **is_spec)
    shapes = flatten_dict(names)
    like = state_like(cfg, SPECS, lambda *_: (), lambda name, _: shapes[name])
    assert jax.tree.map(jnp.shape, state) == like
    assert set(state["nu"]["dense"]) == {"norm"} and "head" in state["nu"]
    assert state["mu"]["head"].dtype == jnp.bfloat16 and state["nu"]["head"].dtype == jnp.float32


def test_muon_on_shards_equals_muon_on_the_whole():
    """Heads cut over two devices inside shard_map; matrices are made whole and cut again."""
    cfg = OptimizerConfig(name="muon")

    def cut(s):
        return PartitionSpec(*("tp" if a == "heads" else None for a in s.axes))

    def gather(x: jax.Array, spec: ParamSpec) -> jax.Array:
        if "heads" not in spec.axes:
            return x
        return jax.lax.all_gather(x, "tp", axis=spec.axes.index("heads"), tiled=True)

    def shard(x: jax.Array, spec: ParamSpec) -> jax.Array:
        if "heads" not in spec.axes:
            return x
        axis = spec.axes.index("heads")
        size = x.shape[axis] // 2
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tp") * size, size, axis)

    params, grads = random_tree(0), random_tree(1)
    optimizer = Optimizer(cfg, SPECS, gather, shard)
    trees = jax.tree.map(cut, SPECS, **is_spec)
    cuts = flatten_dict(trees)
    states = state_like(cfg, SPECS, lambda *_: PartitionSpec(), lambda name, _: cuts[name])

    def step(params: dict, grads: dict) -> tuple[dict, dict]:
        return optimizer.update(grads, optimizer.init(params), params, lr=0.1, weight_decay=0.1)

    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(trees, trees), out_specs=(trees, states), check_vma=False
    )
    new, state = jax.jit(run)(params, grads)
    whole = Optimizer(cfg, SPECS)
    want = whole.update(grads, whole.init(params), params, lr=0.1, weight_decay=0.1)
    assert max_error(new, want[0]) < 1e-6 and max_error(state["mu"], want[1]["mu"]) == 0
