"""Attention in E4M3 in plain JAX: against numpy's fp64 with another library's roundings."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.attention.api import attention
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.kernels.base.chooser import Device, choose
from tests.marks import slow

B, S, N, K, H = 2, 256, 4, 2, 128
SCALE = H**-0.5
HOPPER = Device("gpu", hopper=True)


def operands(dtype: str = "float32", spread: float = 1.0) -> list[jax.Array]:
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, S, n, H)) * spread for n in (N, K, K, N)]
    return [jnp.asarray(x, dtype) for x in arrays]


def run(q, k, v, d_out, mask: str = "causal", **options) -> list[np.ndarray]:
    """out and the gradients of q, k, v."""
    call = AttentionCall(SCALE, mask=mask, max_documents=1, eight_bits=True, **options)
    columns = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])

    @jax.jit
    def both(q, k, v):
        out, back = jax.vjp(lambda *x: attention(*x, call, AttentionArrays(columns)), q, k, v)
        return out, *back(d_out)

    return [np.asarray(x, np.float64) for x in both(q, k, v)]


def rounded(x: np.ndarray, scale: float) -> np.ndarray:
    return (x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / scale


def scale_of_tensor(x: np.ndarray) -> float:
    return 2.0 ** np.floor(np.log2(448 / np.abs(x).max()))


def in_fp64(q, k, v, d_out, mask: str, rounds: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """([out and gradients], the bound on an error of out) of attention in fp64.

    rounds: the operands, weights and output are rounded. Weights err by 2**-4 of themselves or
    2**-18 of the largest, the output by 2**-4 of itself or 2**-10 of its scale.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    of_out = scale_of_tensor(v) / 2
    if rounds:
        q, k, v = (rounded(x, scale_of_tensor(x)) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) * SCALE
    if mask == "causal":
        scores = np.where(np.tri(S, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    probs = weights / total
    exact = np.einsum("bnst,btnh->bsnh", probs, v)
    used = rounded(weights, 256.0) / total if rounds else probs
    out = np.einsum("bnst,btnh->bsnh", used, v)
    of_weights = np.maximum(probs / 16, 2.0**-18 / total * (weights > 0))
    bound = np.einsum("bnst,btnh->bsnh", of_weights, np.abs(v))
    bound += np.maximum((np.abs(exact) + bound) / 16, 2.0**-10 / of_out)
    if rounds:
        out = rounded(out, of_out)
    delta = np.moveaxis((out * d_out).sum(-1), 1, 2)[..., None]
    d_scores = probs * (np.einsum("bsnh,btnh->bnst", d_out, v) - delta) * SCALE
    d_q = np.einsum("bnst,btnh->bsnh", d_scores, k)
    d_k = np.einsum("bnst,bsnh->btnh", d_scores, q)
    d_v = np.einsum("bnst,bsnh->btnh", probs, d_out)
    d_k, d_v = (x.reshape(B, S, K, -1, H).sum(3) for x in (d_k, d_v))
    assert np.all(np.abs(out - exact) <= bound)
    return [out, d_q, d_k, d_v], bound


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_emulation_is_fp64_with_the_roundings(mask):
    """But for numbers that fp32 puts on the other side of a tie, whose share is small."""
    inputs = operands()
    found = run(*inputs, mask=mask)
    wanted, bound = in_fp64(*inputs, mask, rounds=True)
    differs = np.abs(found[0] - wanted[0]) > 1e-5 * np.abs(wanted[0])
    assert differs.mean() < 1e-3 and np.all(np.abs(found[0] - wanted[0]) <= bound)
    assert max(map(distance, found, wanted)) < 1e-3
    assert distance(found[3], wanted[3]) < 1e-6, "d_v needs nothing that is rounded anew"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_beside_fp64(dtype):
    inputs = operands(dtype)
    found, (wanted, _) = run(*inputs), in_fp64(*inputs, "causal", rounds=False)
    errors = [distance(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)]
    assert 0.02 < min(errors) and max(errors) < 0.07, errors


@slow
def test_a_part_rounds_as_the_whole():
    """Rows and heads of a device have maxima of their own, here in binades of their own."""
    inputs = operands()
    sizes = jnp.repeat(jnp.asarray([[1, 0.3], [0.5, 0.1]]), N // K, 1)
    for i, x in enumerate(inputs[:3]):
        inputs[i] = x * sizes[:, :: N // x.shape[2]][:, None, :, None]
    whole = run(*inputs)
    for row in range(B):
        for head in range(K):
            places = [np.s_[row : row + 1, :, n * head : n * (head + 1)] for n in (2, 1, 1, 2)]
            part = run(*(x[place] for x, place in zip(inputs, places, strict=True)))
            for mine, theirs, i in zip(part, whole, (3, 0, 1, 2), strict=True):
                assert distance(mine, theirs[places[i]]) < 1e-3


def test_what_is_no_number_is_seen_and_zeros_are_zeros():
    q, k, v, d_out = operands()
    for broken in (np.nan, np.inf):
        assert np.isnan(run(q.at[0, 0, 0, 0].set(broken), k, v, d_out)[0]).any()
    assert all(np.all(x == 0) for x in run(0 * q, 0 * k, 0 * v, 0 * d_out))


OF_CALLS = {
    "masks of documents": {"max_documents": 0},
    "a full mask": None,
    "a cross mask": {"mask": "cross"},
    "windows": {"window": 8},
    "soft-caps": {"softcap": 30.0},
    "train.attention=mosaic": {"implementation": "mosaic"},
}
OF_SHAPES = {
    "heads other than 128": {"shape": (1, 256, 4, 64)},
    "times 128 tokens": {"shape": (1, 200, 4, 128)},
    "precision.compute=float32": {"dtype": "float32"},
    "this GPU": {"device": Device("gpu")},
    "sinks": {"sinks": True},
    "biases": {"relative": True},
    "or cp": {"by_blocks": True},
}


def chosen(options: dict | None = None, **facts):
    call = AttentionCall(SCALE, **{"max_documents": 1, "eight_bits": True, **(options or {})})
    given = {"dtype": "bfloat16", "shape": (1, 256, 4, 128), "device": HOPPER, "call": call}
    return choose(call.op, **(given | facts))


@pytest.mark.parametrize("words", [*OF_CALLS, *OF_SHAPES])
def test_what_cudnn_lacks_is_refused(words):
    if words == "a full mask":
        padded = {"mask": "full", "max_documents": 2, "padded": True}
        with pytest.raises(UserError, match="lacks masks of documents"):
            chosen(padded)
        return
    with pytest.raises(UserError, match="precision.fp8_attention: .* lacks") as refused:
        chosen(OF_CALLS.get(words), **OF_SHAPES.get(words, {}))
    assert words in str(refused.value)


def test_the_kernel_is_hoppers_and_cpus_emulate():
    assert chosen().name == "cudnn"
    assert chosen({"max_documents": 2, "padded": True}).name == "cudnn"
    assert chosen({"mask": "full"}).name == "cudnn"
    assert chosen({"implementation": "xla"}).name == "xla"
    assert chosen(device=Device("cpu"), dtype="float32").name == "xla"
