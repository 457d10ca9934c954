"""The norm's own kernels against fp64, in Triton's interpreter; when they are called; on a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.kernels.base import chooser
from mjax.kernels.elementwise import norm as kernel
from mjax.kernels.elementwise.norm import NormFacts, NormTile, fused_norm, norm_tile_of
from mjax.models import build, split
from mjax.prove import Cell, deviation, make_trainer, measure
from tests.devices import GPU, choose_for
from tests.marks import exhaustive
from tests.triton_interpreter import interpret

EPS = 1e-5


def plain(x, gain, bias):
    """In the inputs' dtype."""
    z = x if bias is None else x - x.mean(-1, keepdims=True)
    y = z / jnp.sqrt((z * z).mean(-1, keepdims=True) + EPS) * gain
    return y if bias is None else y + bias


def draw(lead, width, dtype, layernorm):
    """x, dy and a stream's gradient, gain and bias; x has a mean, and rows of very unlike size."""
    rng = np.random.default_rng(width)
    x, dy, stream = (jnp.asarray(rng.normal(size=(*lead, width)), dtype) for _ in range(3))
    x = ((x + 2) * jnp.asarray(10.0 ** rng.integers(-2, 3, (*lead, 1)), dtype)).astype(dtype)
    gain, bias = (jnp.asarray(rng.normal(size=width), jnp.float32) for _ in range(2))
    return x, dy, stream, gain, bias if layernorm else None


# Rows that fill no tile, tiles and steps that go past the last row, widths that are no power of 2.
CASES = [
    ((37,), 64, NormTile(4, 4, 3)),
    ((2, 19), 251, NormTile(1, 4, 5)),
    ((5, 3, 4), 128, NormTile(8, 1, 4)),
    ((9,), 768, NormTile(2, 8, 64)),
    ((3,), 1600, norm_tile_of(1600)),
    ((2,), 16384, norm_tile_of(16384)),
]


# dtype, LayerNorm, with a stream's gradient
KINDS = [("float32", 0, 1), ("float32", 1, 0), ("bfloat16", 0, 0), ("bfloat16", 1, 1)]
KINDS += [("float16", 0, 1), ("float16", 1, 0)]


@pytest.mark.grid
@pytest.mark.parametrize("dtype, layernorm, fork", KINDS)
@pytest.mark.parametrize("lead, width, tile", CASES)
def test_forward_and_backward_equal_fp64(monkeypatch, lead, width, tile, dtype, layernorm, fork):
    ran = interpret(monkeypatch)
    x, dy, stream, gain, bias = draw(lead, width, dtype, layernorm)
    how = NormFacts(EPS, tile, bool(fork))
    out, pull = jax.vjp(functools.partial(fused_norm, how), x, gain, bias)
    dx, *rest = pull((dy, stream) if fork else dy)
    got = (out[0] if fork else out, dx, *rest)
    assert ("norm_forward" in ran) == bool(layernorm)
    if fork:
        assert bool((out[1] == x).all())
    with jax.enable_x64(True):
        y, pull = jax.vjp(plain, *(a if a is None else a.astype(float) for a in (x, gain, bias)))
        dx, *rest = pull(dy.astype(float))
        dx = dx + fork * stream.astype(float)
        expected = jax.tree.map(np.asarray, (y, dx, *rest))
    ulp = float(jnp.finfo(dtype).eps)
    assert (got[3] is None) == (expected[3] is None) == (not layernorm)
    for a, e, bound in zip(got[: 3 + layernorm], expected, (ulp, ulp, 0, 0), strict=False):
        assert e.dtype == np.float64 and a.shape == e.shape
        assert a.dtype == (x.dtype if bound else jnp.float32)
        size = np.abs(e).max(-1, keepdims=True)  # of each row
        assert (np.abs(np.asarray(a, np.float64) - e) <= (bound + 3e-6) * size).all()


@pytest.mark.parametrize(
    "lead, width, dtype", [((2, 19), 251, "float32"), ((5, 64), 128, "bfloat16")]
)
def test_measured_rows_are_the_reference_and_its_maximum(monkeypatch, lead, width, dtype):
    """As a fork, whose stream takes its gradient; a value that is no number is the maximum."""
    x, dy, stream, gain, _ = draw(lead, width, dtype, False)

    def of(how):
        return jax.vjp(functools.partial(fused_norm, how), x, gain, None)

    ran = interpret(monkeypatch)
    tile = NormTile(4, 4, 3)
    (y, kept, amax), pull = of(NormFacts(EPS, tile, fork=True, measured=True))
    assert ran == ["rmsnorm_forward"]
    got = pull((dy, stream, jnp.zeros_like(amax)))
    (want, _), pull = of(NormFacts(EPS, tile, fork=True))
    assert np.array_equal(kept, x) and amax == jnp.max(jnp.abs(y)).astype(jnp.float32)
    np.testing.assert_allclose(
        np.float32(y), np.float32(want), rtol=float(jnp.finfo(dtype).eps), atol=1e-6
    )
    for a, e in zip(got[:2], pull((dy, stream))[:2], strict=True):
        assert np.array_equal(a, e)
    x = x.at[(0,) * x.ndim].set(jnp.nan)
    assert not np.isfinite(of(NormFacts(EPS, tile, fork=True, measured=True))[0][2])


def test_parts_add_up_and_none_is_left_unwritten(monkeypatch):
    """More programs than tiles of rows are not started; each writes its part, all finite."""
    interpret(monkeypatch)
    x, dy, _, gain, _ = draw((7,), 64, "float32", True)
    how = NormFacts(EPS, NormTile(2, 4, 100))
    dx, parts = kernel.norm_gradients(how, x, gain, dy, bias=True)
    assert dx.shape == x.shape and parts.shape == (4, 2, 64)
    np.testing.assert_allclose(parts[:, 1].sum(0), dy.sum(0), rtol=1e-5, atol=1e-6)


@pytest.fixture
def on(monkeypatch):
    """The kernel for every norm, in the interpreter."""
    choose_for(monkeypatch, GPU, "norm")
    monkeypatch.setitem(chooser.FEWEST, "norm", 1)
    interpret(monkeypatch)


def test_only_what_pays_and_fits_takes_it(on, monkeypatch):
    def shaped(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    assert kernel.supports_norm(shaped(4, 4096)) and kernel.supports_norm(
        shaped(3, 251, dtype="float32")
    )
    assert not kernel.supports_norm(shaped(4, 4097)) and kernel.supports_norm(
        shaped(4, 16384), shaped(16384)
    )
    assert kernel.supports_norm(shaped(2**19, 4095)) and not kernel.supports_norm(
        shaped(2**19, 4096)
    )
    monkeypatch.setitem(chooser.FEWEST, "norm", 1025)
    assert not kernel.supports_norm(shaped(1, 1024)) and kernel.supports_norm(shaped(2, 1024))
    monkeypatch.undo()
    assert not kernel.supports_norm(shaped(2**14, 2**10)), "there is no GPU here"


def test_only_a_backward_calls_it(on):
    """What is exported or generates text is a forward; and each norm is one call, not more."""
    tiny = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "qk_norm": True}
    cfg = ModelConfig(**tiny, attention=heads, norm_placement="sandwich")
    definition, params = split(build(cfg, nnx.Rngs(0)))
    ids = jnp.zeros((2, 8), jnp.int32)

    def forward(params):
        return definition.bind(params)(ids).sum()

    def count(f):
        return len(re.findall(r"\bpure_callback\[", str(jax.make_jaxpr(f)(params))))

    assert count(forward) == 0
    assert count(jax.grad(forward)) == 2 + 2 + 2 + 1  # before and after, q and k, final


BIASED = ["model.norm_placement=pre", "model.mlp_bias=true", "model.attention.attention_bias=true"]


@exhaustive
@pytest.mark.parametrize("biased", [False, True])
def test_a_step_on_a_mesh_is_what_it_was(biased, request):
    """In the manual region, scanned and recomputed, rows split over tp and dp: norms before and
    after, of q and of k, zero-centered, against XLA's backward on one device. `biased`: those
    before alone, and branches with biases."""
    extra = ["train.remat=dots", "model.norm=layernorm", "model.num_hidden_layers=2"]
    extra += [*BIASED, "model.attention.attention_out_bias=true"] if biased else []
    before = measure(make_trainer("windows", Cell(), *extra), 1).first
    request.getfixturevalue("on")
    mesh = Cell({"tp": 2, "dp": 2}, 1, 2)
    assert deviation(measure(make_trainer("windows", mesh, *extra), 1).first, before) < 1e-5


@exhaustive
@pytest.mark.parametrize(
    "more", [(), pytest.param(("mesh.tp_overlap=always",), marks=pytest.mark.exhaustive)]
)
def test_current_scaling_reads_the_maximum_that_norms_find(monkeypatch, more):
    """Over tp, each device's norm having measured its own rows, in one piece or in several."""
    keys = "precision.fp8=current", "train.remat=dots", *more
    before = measure(make_trainer("dense", Cell(), *keys), 1).first
    choose_for(monkeypatch, GPU, "norm")
    monkeypatch.setitem(chooser.FEWEST, "norm", 1)
    ran = interpret(monkeypatch)
    mesh = make_trainer("dense", Cell({"tp": 2}, 0, 1), *keys)
    assert deviation(measure(mesh, 1).first, before) < 1e-5
    assert "rmsnorm_forward" in ran
