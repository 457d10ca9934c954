"""Laws of `precision.fp8_dispatch`: one rounding of tokens on every mesh, and bytes that travel."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mjax.config import load
from mjax.kernels.fp8.block_recipes import Block128, MxFp8
from mjax.kernels.fp8.blocks import FORMATS
from mjax.kernels.fp8.quantize import scale_of
from mjax.kernels.fp8.recipe import Current, Delayed
from mjax.models.base.context import Context, Kernels, Training
from mjax.models.base.weight import Weight
from mjax.models.moe import exchange
from mjax.models.moe.exchange import bytes_of_tokens, gather_rounded, tokens_of_bytes
from mjax.models.moe.experts import ExpertWeights, run_experts
from mjax.models.moe.router import Routing
from mjax.prove import FEATURES, SMALL, Cell, make_batch, make_trainer
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.cpu_collective_order import in_program_order
from tests.laws.training.test_block_recipes import agree
from tests.laws.training.test_fp8 import distance, first_step, one_device
from tests.marks import exhaustive, quick, slow
from tests.unit.models.test_experts_fp8 import far

B, S, D, F, E, K = 4, 8, 256, 128, 8, 2
RNG = np.random.default_rng(0)
EP2, EP4 = Parallel(ep=2), Parallel(ep=4)
CUT, FOLDED = Parallel(ep=2, tp=2), Parallel(ep=2, tp=2, folds_experts=True)
RECIPES = {
    "compute": None,
    "block128": Block128(),
    "blocks of 32": Block128(block=32),
    "mxfp8": MxFp8(),
    "current": Current(),
    "delayed": Delayed(),
}
OF_ROUTE = {"all_to_all": {}, "overflows": {"ROOM": 0.5}, "all_gather": {}}


def rounded(x: np.ndarray) -> np.ndarray:
    """x [.., D], each 1 x 128 in E4M3 by a power of two: as DeepSeek-V3's dispatch has it."""
    blocks = np.asarray(x, np.float32).reshape(-1, 128)
    top = np.abs(blocks).max(1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(448 / np.where(top > 0, top, 448))))
    values = (blocks * scale).astype(ml_dtypes.float8_e4m3fn)
    return (values.astype(np.float32) / scale).reshape(x.shape)


def cfg_of(*keys: str):
    sizes = f"model.hidden_size={D}", f"model.moe.moe_intermediate_size={F}"
    return load(None, [*SMALL, *FEATURES["experts"], *sizes, *keys]).model


def operands(dropped: float = 0.25, biased: bool = False) -> dict:
    """Arrays of the whole batch. Some tokens go to no expert, some lose one; others have two."""
    experts = np.argsort(RNG.random((B, S, E)), -1)[..., :K]
    experts[RNG.random((B, S)) < dropped] = E
    experts[..., 1][RNG.random((B, S)) < dropped] = E
    arrays = {
        "x": RNG.normal(size=(B, S, D)) * np.exp(RNG.normal(size=(B, S, D))),
        "experts": experts.astype(np.int32),
        "gates": RNG.random((B, S, K)),
        "up": RNG.normal(size=(E, D, 2, F)) / 16,
        "down": RNG.normal(size=(E, F, D)) / 12,
        "dy": RNG.normal(size=(B, S, D)),
    }
    if biased:
        arrays |= {"up_bias": RNG.normal(size=(E, 2, F)), "down_bias": RNG.normal(size=(E, D))}
    return {k: jnp.asarray(v, None if k == "experts" else jnp.float32) for k, v in arrays.items()}


def weight(value: jax.Array, name: str, recipe) -> Weight:
    w = Weight(value, name=name, recipe=recipe)
    if recipe is None:
        return w
    scales = jnp.zeros(3)
    if recipe.scales_tensors:
        roles = [(16.0, "e4m3"), (1.0, "e4m3"), (64.0, "e5m2")]
        scales = jnp.stack([scale_of(jnp.float32(a), FORMATS[f].dtype) for a, f in roles])
    return Weight(value, name=name, recipe=recipe, scales=scales)


def outputs(ctx: Context, cfg, recipe, o: dict) -> dict:
    """y and the gradients of x, gates and both weights, of a device's part of the arrays."""
    scores = jnp.zeros((*o["experts"].shape[:2], E))

    def run(x, gates, up, down, biases):
        weights = ExpertWeights(
            weight(up, "expert_up", recipe), weight(down, "expert_down", recipe), **biases
        )
        routing = Routing(o["experts"], gates, scores, scores)
        return run_experts(x, routing, weights, cfg, ctx).y

    biases = {name: o[name] for name in ("up_bias", "down_bias") if name in o}
    y, vjp = jax.vjp(run, o["x"], o["gates"], o["up"], o["down"], biases)
    dx, d_gates, d_up, d_down, d_biases = vjp(o["dy"])
    return dict(y=y, dx=dx, d_gates=d_gates, d_up=d_up, d_down=d_down, **d_biases)


def context(parallel: Parallel, rounds: bool, way: str = "all_gather", kernel: str = "xla"):
    way = "all_to_all" if way == "overflows" else way
    kernels = Kernels(experts=kernel, expert_exchange=way)
    return Context(
        parallel, kernels=kernels, training=Training(rounds_dispatch=rounds, capacity=True)
    )


def mapped(ctx: Context, cfg, recipe, o: dict):
    """`outputs` on the mesh of a context; its arguments and results are whole arrays."""
    parallel = ctx.parallel
    axes = "ep", "tp"
    sizes = [parallel.size(axis) for axis in axes]
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), axes)
    tokens = P("ep", "tp")
    first = P(("ep", "tp")) if parallel.folds_experts else P("ep")
    last = None if parallel.folds_experts else "tp"
    cuts = {
        "up": P(*first, None, None, last),
        "down": P(*first, last),
        "up_bias": P(*first, None, last),
        "down_bias": first,
    }
    given = {name: cuts.get(name, tokens) for name in o}
    made = dict(y=tokens, dx=tokens, d_gates=tokens, d_up=cuts["up"], d_down=cuts["down"])
    made |= {name: cuts[name] for name in o if name.endswith("bias")}

    def local(o):
        made = outputs(ctx, cfg, recipe, o)
        if "down_bias" in made and not parallel.folds_experts:  # replicated over tp
            made["down_bias"] = parallel.psum(made["down_bias"], "tp")
        return made

    return jax.jit(
        jax.shard_map(
            in_program_order(local), mesh=mesh, in_specs=(given,), out_specs=made, check_vma=False
        )
    )


SKIPS, BIAS = "model.moe.skip_padding=true", "model.mlp_bias=true"
CASES = [
    (EP4, "all_to_all", "compute", "xla", ()),  # in passes
    (FOLDED, "all_to_all", "block128", "xla", ()),
    (CUT, "overflows", "compute", "loop", ()),
    (EP2, "all_gather", "block128", "xla", ()),
    (EP2, "all_to_all", "mxfp8", "xla", ()),
    (EP4, "overflows", "blocks of 32", "xla", ()),
    (FOLDED, "all_gather", "compute", "batched", ("model.moe.capacity_factor=2.0",)),
    (CUT, "all_to_all", "compute", "xla", (SKIPS, BIAS)),
    (LOCAL, "all_gather", "block128", "xla", ()),
]


@slow
@pytest.mark.parametrize("parallel, way, recipe, kernel, keys", quick(CASES, 0))
def test_every_mesh_gives_what_one_device_makes_of_rounded_tokens(
    parallel, way, recipe, kernel, keys, monkeypatch
):
    """The gradient goes straight through the rounding."""
    for name, value in OF_ROUTE[way].items():
        monkeypatch.setattr(exchange, name, value)
    o, cfg = operands(biased=BIAS in keys), cfg_of(*keys)
    rounded_first = o | {"x": jnp.asarray(rounded(np.asarray(o["x"])))}
    want = outputs(context(LOCAL, False, kernel=kernel), cfg, RECIPES[recipe], rounded_first)
    got = mapped(context(parallel, True, way, kernel), cfg, RECIPES[recipe], o)(o)
    for name in want:
        assert far(got[name], want[name]) < (2e-6 if recipe == "compute" else 1e-4), name
    plain = outputs(context(LOCAL, False, kernel=kernel), cfg, RECIPES[recipe], o)
    if recipe == "compute":
        assert 1e-2 < far(got["y"], plain["y"]) < 0.1
    elif recipe == "block128":  # the product reads what came: the bits that it would round to
        assert far(got["y"], plain["y"]) < 1e-6


def exchanged(parallel: Parallel, rounds: bool, way: str) -> Counter:
    """How often a compiled layer makes each exchange of tokens, by (what, dtype, elements)."""
    o, cfg = operands(), cfg_of()
    text = mapped(context(parallel, rounds, way), cfg, None, o).lower(o).compile().as_text()
    found = Counter()
    for made, what in re.findall(r"= (.*) (all-to-all|all-gather|reduce-scatter)\(", text):
        shapes = re.findall(r"(\w+)\[([\d,]+)\]", made)
        elements = sum(math.prod(map(int, shape.split(","))) for _, shape in shapes)
        if elements > 2 * B * S * K:  # no routing is so large
            found[what, shapes[0][0], elements] += 1
    return found


@pytest.mark.parametrize("parallel, way", quick([(EP4, "all_to_all"), (CUT, "all_gather")], 0))
def test_only_the_dispatch_travels_as_bytes(parallel, way):
    """A byte a value and one for each 128, in place of a number; over tp, too."""
    before, after = (exchanged(parallel, rounds, way) for rounds in (False, True))
    left, new = before - after, after - before
    assert set(left.values()) == {1} and len(left) == 2
    assert {what for what, _, _ in left} == {"all-gather", way.replace("_", "-")}
    assert new == {(what, "u8", n * 129 // 128): 1 for what, _, n in left}
    assert {dtype for _, dtype, _ in before} == {"f32"} and before.total() == after.total()


KEY, WIDE = "precision.fp8_dispatch=true", "model.hidden_size=128"
MESHES = [
    (Cell({"ep": 2, "tp": 2}, 1, 2), "folded experts", "train.expert_exchange=all_to_all"),
    (Cell({"ep": 4, "cp": 2}, 3, 1), "experts", "train.remat=full"),
]


@exhaustive
@pytest.mark.parametrize("cell, feature, key", MESHES)
def test_training_agrees_on_meshes(cell, feature, key):
    """Weights that differ by 1e-7 give gradients that differ by 5e-4 on one device, too: a value
    goes over the border between two numbers. Without the key they differ by 1e-6."""
    want = one_device("none", KEY, WIDE, feature="experts")
    agree(first_step("none", cell, KEY, WIDE, key, feature=feature), want, 1e-3)
    exact = one_device("none", WIDE, feature="experts")
    assert 1e-2 < distance(want[1], exact[1]) < 0.2


@exhaustive
def test_evaluation_rounds_unless_it_is_to_be_exact():
    batch = make_batch(24)
    exact, rounded, apart = (
        float(make_trainer("experts", Cell(), WIDE, *keys).evaluate(batch)[0])
        for keys in ((), (KEY,), (KEY, "precision.fp8_evaluation=false"))
    )
    assert apart == exact != rounded


# ---- rows that nobody may read -------------------------------------------------------------------

FORMS = [
    ("compute", False, "xla", LOCAL, ()),
    ("compute", True, "xla", EP4, ()),  # in passes
    ("compute", True, "batched", LOCAL, ("model.moe.capacity_factor=2.0",)),
    ("compute", False, "loop", CUT, ()),
    ("compute", True, "loop", LOCAL, (BIAS,)),
    ("block128", True, "xla", FOLDED, ()),
    ("mxfp8", False, "xla", LOCAL, ()),
    ("current", False, "xla", LOCAL, ()),
    ("delayed", False, "xla", LOCAL, ()),
    ("delayed", False, "xla", EP2, (BIAS,)),
]


@pytest.mark.parametrize("recipe, rounds, kernel, parallel, keys", quick(FORMS, 0))
def test_what_padding_holds_reaches_nothing(recipe, rounds, kernel, parallel, keys, monkeypatch):
    """Tokens without an expert and their cotangents are NaN; so is what fills up an all-to-all."""
    value = RECIPES[recipe]
    o, cfg = operands(biased=BIAS in keys), cfg_of(SKIPS, *keys)
    nowhere = (o["experts"] == E).all(-1, keepdims=True)
    assert 0 < nowhere.sum() < nowhere.size
    run = mapped(context(parallel, rounds, "all_to_all", kernel), cfg, value, o)
    clean = run(o)
    monkeypatch.setattr(Parallel, "all_to_all", poisoned(Parallel.all_to_all))
    bad = {name: jnp.where(nowhere, jnp.nan, o[name]) for name in ("x", "dy")}
    got = mapped(context(parallel, rounds, "all_to_all", kernel), cfg, value, o)(o | bad)
    for name, want in clean.items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)
    for name in ("y", "dx"):
        assert not np.asarray(got[name])[np.asarray(nowhere)[..., 0]].any()


def poisoned(all_to_all):
    """The exchange, whose rows of zeros, which nobody sent, are NaN, or its byte."""

    def exchange_poison(self, x, *how):
        poison = 0x7F if x.dtype == jnp.uint8 else jnp.nan
        return all_to_all(self, jnp.where((x == 0).all(-1, keepdims=True), poison, x), *how)

    return exchange_poison


# ---- what travels, bit for bit -------------------------------------------------------------------


def test_a_token_and_its_bytes_are_the_same():
    """Also where a block is tiny, huge, zero or no number; what did not come is zero."""
    x = RNG.normal(size=(6, D))
    x[:, 128:] *= np.exp2([[-110], [120], [100], [20], [-20], [1]])
    x = jnp.asarray(x, jnp.bfloat16).at[0, :128].set(0).at[1, 3].set(jnp.nan).at[2, 7].set(jnp.inf)
    made = exchange.DISPATCHED.round_rows(x)
    bits = bytes_of_tokens(made)
    assert bits.dtype == jnp.uint8 and bits.shape == (6, D + D // 128)
    again = tokens_of_bytes(bits, D, x.dtype)
    np.testing.assert_array_equal(again.values.view(np.uint8), made.values.view(np.uint8))
    np.testing.assert_array_equal(again.factors, made.factors)
    assert (again.block, again.wide) == (made.block, made.wide)
    numbers = np.asarray(again.numbers(), np.float32)
    assert np.isnan(numbers[1, :128]).all() and np.isnan(numbers[2, :128]).all()
    finite = np.isfinite(np.asarray(x, np.float32)).reshape(-1, 128).all(1)
    blocks = np.asarray(x, np.float32).reshape(-1, 128)[finite]
    np.testing.assert_array_equal(numbers.reshape(-1, 128)[finite], rounded(blocks))
    nothing = tokens_of_bytes(jnp.zeros_like(bits), D, x.dtype).numbers()
    assert not np.asarray(nothing).any()


# Recipes that the key is not refused with read the numbers that came.
@pytest.mark.parametrize("recipe", [Block128(), Block128(block=4), MxFp8()])
def test_rounding_in_smaller_blocks_of_powers_changes_no_number(recipe):
    x = jnp.float32(RNG.normal(size=(64, D)) * np.exp(3 * RNG.normal(size=(64, D))))
    numbers = exchange.DISPATCHED.round_rows(x).numbers()
    again, _ = recipe.round_experts(numbers, None, "input", (D, F), turned=False)
    np.testing.assert_array_equal(again, numbers)
    assert not np.array_equal(numbers, x)


def test_the_gradient_goes_straight_through():
    x, d = (jnp.float32(RNG.normal(size=(2, 4, D))) for _ in "xd")
    (numbers, _), vjp = jax.vjp(lambda x: gather_rounded(LOCAL, x, None), x)
    (dx,) = vjp((d.reshape(-1, D), jax.tree.map(jnp.zeros_like, _)))
    np.testing.assert_array_equal(numbers, rounded(np.asarray(x)).reshape(-1, D))
    np.testing.assert_array_equal(dx, d)
