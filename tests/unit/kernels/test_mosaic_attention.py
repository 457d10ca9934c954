"""What our Hopper kernels are given and refuse; the kernels themselves run in tests/gpu."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.errors import UserError
from mjax.kernels.attention import mosaic
from mjax.kernels.attention.api import resolve
from mjax.kernels.base import chooser
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from tests.devices import HOPPER

PLAIN = AttentionCall(scale=1.0)


def _q(dtype=jnp.bfloat16, size=128, length=256):
    return jnp.zeros((1, length, 2, size), dtype)


@pytest.mark.parametrize(
    ("q", "call", "said"),
    [
        (_q(jnp.float32), PLAIN, "precision.compute"),
        (_q(size=96), PLAIN, "model.attention.head_dim=96"),
        (_q(), AttentionCall(1.0, dropout=0.1), "model.attention.attention_dropout"),
        (_q(), AttentionCall(1.0, mask="full"), "full mask"),
    ],
)
def test_refusals_name_the_key(monkeypatch, q, call, said):
    monkeypatch.setattr(chooser, "this_device", lambda: HOPPER)
    mosaic.require_mosaic(_q(), _q(), PLAIN)
    with pytest.raises(UserError, match=said):
        mosaic.require_mosaic(q, q, call)
    assert not mosaic.supports_mosaic(q, q, call)


def test_value_heads_have_the_size_of_the_others(monkeypatch):
    monkeypatch.setattr(chooser, "this_device", lambda: HOPPER)
    with pytest.raises(UserError, match="value heads of size 64"):
        mosaic.require_mosaic(_q(), _q(size=64), PLAIN)
    assert mosaic.supports_mosaic(_q(), _q(), PLAIN) and not mosaic.supports_mosaic(
        _q(), _q(size=64), PLAIN
    )


def test_no_hopper_is_refused():
    with pytest.raises(UserError, match="Hopper"):
        mosaic.require_mosaic(_q(), _q(), PLAIN)


def test_auto_takes_ours_where_cudnn_lacks(monkeypatch):
    monkeypatch.setattr(chooser, "this_device", lambda: HOPPER)
    capped = AttentionCall(scale=1.0, softcap=30.0)

    def chosen(call, q, sinks=None, segments=None):
        columns = jnp.arange(q.shape[1])
        arrays = AttentionArrays((columns, columns), sinks=sinks, segments=segments)
        return resolve(call, q, q, arrays).implementation

    assert chosen(PLAIN, _q()) == "cudnn"
    # Without a bound each token may be a document, for each of which cuDNN keeps a gradient.
    long = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    assert chosen(PLAIN, long) == "cudnn" and chosen(PLAIN, long, segments=2 * (long,)) == "mosaic"
    assert chosen(replace(PLAIN, max_documents=8), long, segments=2 * (long,)) == "cudnn"
    assert chosen(replace(PLAIN, mask="full"), long, segments=2 * (long,)) == "cudnn"
    assert chosen(capped, _q()) == "mosaic"
    assert chosen(PLAIN, _q(), jnp.zeros(2)) == "mosaic"
    assert chosen(capped, _q(jnp.float16)) == "cudnn"  # which then refuses it
    assert chosen(replace(capped, implementation="xla"), _q()) == "xla"


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("length", [128, 200])
def test_intervals_are_the_mask(window, length):
    """[low, own] of a query and [own, high] of a key say what the dense mask says, both ways."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    rng = np.random.default_rng(0)
    segments = np.cumsum(rng.random((2, length)) < 0.05, axis=1).astype(np.int32)
    q = jnp.zeros((2, length, 1, 64), jnp.bfloat16)
    job = mosaic._job(q, q, AttentionCall(1.0, window), segments)
    low, high = (np.asarray(x) for x in mosaic._intervals(job, jnp.asarray(segments)))
    assert low.shape == high.shape == (2, job.queries) and job.queries % 128 == 0
    assert (np.diff(low) >= 0).all() and (np.diff(high) >= 0).all()
    behind = np.arange(length)[:, None] - np.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    seen = seen & (segments[:, :, None] == segments[:, None])
    at = np.arange(length)
    by_low = (at >= low[:, :length, None]) & (behind >= 0)
    by_high = (at[:, None] <= high[:, None, :length]) & (behind >= 0)
    np.testing.assert_array_equal(by_low, seen)
    np.testing.assert_array_equal(by_high, seen)
