"""Laws of upcycling: experts made of a dense MLP compute what it does, whatever its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.checkpoint.base.source import array_source
from mjax.config import load
from mjax.config.schema.model import MoeConfig
from mjax.errors import UserError
from mjax.interop.upcycle import scale_of_down
from mjax.models import definition_of
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import is_spec
from mjax.train import Trainer
from tests.marks import quick, slow

BASE = """data.mock=true data.seq_length=16 model.vocab_size=97 model.hidden_size=32
    model.attention.num_attention_heads=4 model.intermediate_size=48 model.num_hidden_layers=3
    train.global_batch_size=4 train.micro_batch_size=1 precision.compute=float32""".split()
EXPERTS = ["model.moe.num_experts=8", "model.moe.num_experts_per_tok=4"]
HALVES = [*EXPERTS, "model.moe.moe_intermediate_size=24"]
UPCYCLE = "checkpoint.init_changes=[experts]"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 16)), jnp.int32)


def make_trainer(folder, *overrides: str, **mesh: int) -> Trainer:
    sizes = [f"mesh.{axis}={size}" for axis, size in ({"dp": 1} | mesh).items()]
    cfg = load(None, [*BASE, *sizes, f"run.dir={folder}", *overrides])
    return Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: int(np.prod(list(mesh.values())))]))


def dense(*overrides: str):
    """(config, parameters) of a dense model whose biases are random, too."""
    cfg = load(None, [*BASE, *overrides]).model
    rng = np.random.default_rng(3)

    def draw(spec):
        return 0.2 * rng.normal(size=spec.shape).astype(np.float32)

    return cfg, jax.tree.map(draw, definition_of(cfg).specs, is_leaf=is_spec)


def upcycle(tmp_path, weights, *overrides: str, **mesh: int):
    """(trainer with the upcycled weights, what it said)."""
    trainer = make_trainer(tmp_path, *overrides, **mesh)
    return trainer, trainer.load_params(array_source(*weights))


def logits_of(cfg, params) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: definition_of(cfg).bind(p)(TOKENS))(params))


EXACT = {
    "whole": (["model.layer_pattern=E"], EXPERTS),
    "whole, one expert": (["model.layer_pattern=E"], ["model.moe.num_experts=4"]),
    "halves": (["model.layer_pattern=E"], HALVES),
    "quarters": (["model.layer_pattern=E"], [*EXPERTS, "model.moe.moe_intermediate_size=12"]),
    "some layers": (["model.layer_pattern=GEG"], HALVES),
    "windows": (
        ["model.layer_pattern='[LE]GE'", "model.attention.sliding_window=5"],
        HALVES,
    ),
    "plain, biased": (
        ["model.layer_pattern=E", "model.mlp_gated=false", "model.mlp_bias=true"],
        [*HALVES, "model.hidden_act=relu2", "model.moe.router_bias=true"],
    ),
    "sigmoid": (
        ["model.layer_pattern=E"],
        [
            *HALVES,
            "model.moe.scoring_func=sigmoid",
            "model.moe.expert_bias=true",
            "model.moe.n_group=2",
            "model.moe.routed_scaling_factor=2.5",
        ],
    ),
}


@slow
@pytest.mark.parametrize("case", quick(list(EXACT), 2))
def test_the_upcycled_model_computes_what_the_dense_one_does(tmp_path, case):
    pattern, moe = EXACT[case]
    shared = [key for key in (*pattern, *moe) if "moe." not in key and "layer_pattern" not in key]
    before = pattern[0].replace("[LE]", "L").replace("E", "G")
    weights = dense(before, *shared)
    trainer, said = upcycle(tmp_path, weights, *pattern, *moe, UPCYCLE)
    wanted = logits_of(*weights)
    got = logits_of(trainer.cfg.model, trainer.params())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    router = np.asarray(trainer.params()["moe"]["mlp"]["router"])
    parts = 48 // trainer.cfg.model.moe.moe_intermediate_size
    np.testing.assert_array_equal(router[..., ::parts], router[..., parts - 1 :: parts])
    assert len(np.unique(router)) == router.size // parts
    assert "router: drawn from run.seed" in said


def test_without_normalized_gates_it_is_near(tmp_path):
    """The rule of Megatron-LM's moe_router_pre_softmax: exact where all logits are equal."""
    weights = dense("model.layer_pattern=G", "model.initializer_range=1e-6")
    keys = [*HALVES, "model.moe.norm_topk_prob=false", "model.initializer_range=1e-6"]
    trainer, _ = upcycle(tmp_path, weights, "model.layer_pattern=E", *keys, UPCYCLE)
    wanted, got = logits_of(*weights), logits_of(trainer.cfg.model, trainer.params())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    moe = MoeConfig(num_experts=8, num_experts_per_tok=4, norm_topk_prob=False)
    assert scale_of_down(moe, 2) == 8 / 2 * 2 * 2 / 4  # expansion * granularity^2 / top-k


@slow
@pytest.mark.parametrize("mesh", quick([dict(ep=2, tp=2, pp=2), dict(dp=2, ep=2, tp=2)], 1))
def test_every_mesh_upcycles_alike(tmp_path, mesh):
    weights = dense("model.layer_pattern=G")
    keys = ["model.layer_pattern=GEE", *HALVES, UPCYCLE, "run.seed=5", "mesh.zero=1"]
    alone, said = upcycle(tmp_path / "alone", weights, *keys)
    split, same = upcycle(tmp_path / "split", weights, *keys, **mesh)
    assert said == same
    jax.tree.map(np.testing.assert_array_equal, alone.params(), split.params())
    other, _ = upcycle(tmp_path / "other", weights, *keys, "run.seed=6")
    routers = [t.params()["moe"]["mlp"]["router"] for t in (alone, other)]
    assert not np.array_equal(*routers)


@slow
def test_layers_and_vocabulary_may_change_too(tmp_path):
    weights = dense("model.layer_pattern=G")
    keys = ["model.layer_pattern=EGEE", "model.num_hidden_layers=4", "model.vocab_size=200"]
    changes = "checkpoint.init_changes=[experts,num_hidden_layers,vocab_size]"
    trainer, said = upcycle(tmp_path, weights, *keys, *HALVES, changes)
    ours, theirs = trainer.params(), weights[1]
    np.testing.assert_array_equal(ours["embedding"][:97], theirs["embedding"][:97])
    np.testing.assert_array_equal(ours["dense"]["mlp"]["up"][0], theirs["dense"]["mlp"]["up"][1])
    up, given = ours["moe"]["mlp"]["up"], theirs["dense"]["mlp"]["up"]
    for row, layer in enumerate((0, 2)):
        for expert in range(8):
            columns = slice(24 * (expert % 2), 24 * (expert % 2) + 24)
            np.testing.assert_array_equal(up[row, expert], given[layer][..., columns])
    assert (
        "moe.mlp.up: 8 experts of the MLP's, 2 parts in 4 copies; [2, 8, 32, 2, 24] loaded" in said
    )


REFUSED = {
    "width": (["model.moe.moe_intermediate_size=20"], "moe_intermediate_size=20 does not divide"),
    "top-k": (
        ["model.moe.moe_intermediate_size=24", "model.moe.num_experts_per_tok=3"],
        "num_experts_per_tok=3 must be multiples of the 2 parts",
    ),
    "groups": (
        [
            "model.moe.moe_intermediate_size=12",
            "model.moe.n_group=4",
            "model.moe.topk_group=4",
            "model.moe.group_score_topk=1",
        ],
        "n_group=4 divides the 4 parts",
    ),
    "shared": (
        ["model.moe.moe_intermediate_size=24", "model.moe.shared_expert_intermediate_size=8"],
        "shared experts are not made of an MLP",
    ),
    "other keys": (
        ["model.moe.moe_intermediate_size=24", "model.swiglu_limit=7.0"],
        "swiglu_limit=None, but this run has model.swiglu_limit=7.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, case):
    keys, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        upcycle(tmp_path, dense(), "model.layer_pattern=E", *EXPERTS, *keys, UPCYCLE)


def test_experts_are_made_only_when_asked_for(tmp_path):
    with pytest.raises(UserError, match="layer_pattern='full.mlp', but this run has"):
        upcycle(tmp_path, dense(), "model.layer_pattern=E", *HALVES)
