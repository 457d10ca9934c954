"""Law: context parallelism changes nothing, whichever way keys are exchanged.

Loss, norm and every gradient are those of one device for cp 2, 4, 8, alone and with dp and tp (and
sequence parallelism); packed documents, uneven masks, windows, sinks, soft-cap and dropout
included. Below that, the block mathematics against attention in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mjax.errors import UserError
from mjax.kernels.attention import api as kernels
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models.attention.context_parallel import context_attention
from mjax.models.attention.key_exchange import PACKED, WINDOWS, Needs, choose_exchange
from mjax.models.attention.ring import Ring, ring_attention
from mjax.models.attention.zigzag import zigzag
from mjax.models.base.context import Context, Kernels
from mjax.prove import ROWS, Cell, compare, holds, make_batch, make_trainer
from mjax.sharding.collectives import Parallel
from tests.marks import exhaustive, slow

TWO = "model.num_hidden_layers=2"


def cases():
    """Windows in packed documents; a2a_ring, which the proof lacks, oftener."""
    for cp_type in ("ring", "a2a_ring"):
        yield "windows", 1, 4, 2, cp_type
    yield "windows", 1, 8, 1, "a2a_ring"
    yield "tied", 1, 4, 2, "a2a_ring"


def cell(dp: int, cp: int, tp: int, cp_type: str, zero: int = 1) -> tuple[Cell, str]:
    """Two micro-batches of sequences long enough for a zigzag."""
    mesh = {"dp": dp, "cp": cp, "tp": tp}
    group = f"mesh.cp_a2a={2 if cp_type == 'a2a_ring' else 1}"
    return Cell(mesh, zero, 2, cp_type=cp_type), group


@exhaustive
@pytest.mark.parametrize("feature,dp,cp,tp,cp_type", list(cases()))
def test_gradients_equal_one_device(feature, dp, cp, tp, cp_type):
    record = compare(feature, *cell(dp, cp, tp, cp_type), TWO, steps=1)
    assert holds(record), record


@exhaustive
def test_twenty_steps_agree_with_recomputed_blocks():
    record = compare("windows", *cell(1, 4, 2, "a2a_ring"), TWO, "train.remat=attention")
    assert holds(record), record


@exhaustive
def test_evaluation_agrees():
    batch = make_batch(ROWS[0])
    total, count = make_trainer("tied", *cell(1, 4, 2, "ring"), TWO).evaluate(batch)
    one, count1 = make_trainer("tied", Cell(), TWO).evaluate(batch)
    assert float(count) == float(count1)
    assert abs(float(total) - float(one)) <= 1e-5 * float(one)


@slow
def test_auto_is_the_documented_rule():
    assert choose_exchange(4, True, Needs()) == "all_gather"
    assert choose_exchange(8, True, Needs()) == "ring"
    assert choose_exchange(2, False, Needs()) == "ring"
    assert choose_exchange(8, False, Needs(("model.attention.attention_sinks",))) == "all_gather"
    assert choose_exchange(8, False, Needs(permute=False)) == "all_gather"
    for feature in (PACKED, WINDOWS, "model.attention.attention_sinks"):
        # a2a where blocks are fused
        assert choose_exchange(4, True, Needs((feature,), (feature,))) == "a2a"
    assert choose_exchange(8, False, Needs((PACKED, WINDOWS))) == "ring"
    assert choose_exchange(4, True, Needs(("full masks",))) == "all_gather"


@exhaustive
def test_the_rule_s_choice_equals_one_device():
    assert holds(compare("sinks", *cell(1, 8, 1, "auto"), TWO, steps=1))


@pytest.mark.parametrize("mask", ["full", "prefix"])
@pytest.mark.parametrize("cp_type", ["all_gather", "a2a"])
def test_other_masks_equal_one_device(cp_type, mask):
    """Also in packed documents, and with value heads of another size."""
    q, k, v, _ = arrays()
    v = v[..., : H // 2]
    segments, order = documents(), zigzag(S, 4)
    prefix = np.random.default_rng(2).random((B, S)) < 0.3
    columns = np.arange(S, dtype=np.int32)
    call = AttentionCall(SCALE, mask=mask, implementation="xla")
    ctx = Context(Parallel(cp=4), kernels=Kernels(cp_type=cp_type))
    mesh = Mesh(np.array(jax.devices()[:4]), ("cp",), axis_types=(AxisType.Auto,))

    def given(columns, segments, prefix):
        shown = prefix if mask == "prefix" else None
        return AttentionArrays((columns, columns), (segments, segments), prefix=shown)

    def sharded(q, k, v, columns, *facts):
        def attend(q, k, v):
            return context_attention(q, k, v, call, given(columns, *facts), ctx)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(jnp.sin(out))

    def whole(q, k, v):
        return kernels.attention(q, k, v, call, given(columns, segments, prefix))

    spec = P(None, "cp")
    specs = (*[spec] * 3, P("cp"), spec, spec)
    run = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    mine = jax.jit(run)(
        *(x[:, order] for x in (q, k, v)), order, segments[:, order], prefix[:, order]
    )
    out, pull = jax.vjp(whole, q, k, v)
    close(mine, [x[:, order] for x in (out, *pull(jnp.sin(out)))])


# ---- the mathematics ---------------------------------------------------------------------------

B, S, N, K, H = 2, 32, 8, 2, 8
SCALE = H**-0.5


def exact(q, k, v, d_out, segments=None, window=None):
    """(out, lse, d_q, d_k, d_v) of causal attention, float64 numpy."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) * SCALE
    behind = np.arange(S)[:, None] - np.arange(S)
    seen = (behind >= 0) & (behind < (window or S))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])[:, None]
    weights = np.where(seen, np.exp(scores), 0)
    probs = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", probs, v)
    d_probs = np.einsum("bsnh,btnh->bnst", d_out, v)
    delta = np.moveaxis((out * d_out).sum(-1), 1, 2)[..., None]
    d_scores = probs * (d_probs - delta) * SCALE
    d_q = np.einsum("bnst,btnh->bsnh", d_scores, k)
    d_k = np.einsum("bnst,bsnh->btnh", d_scores, q).reshape(B, S, K, N // K, H).sum(3)
    d_v = np.einsum("bnst,bsnh->btnh", probs, d_out).reshape(B, S, K, N // K, H).sum(3)
    return out, np.log(weights.sum(-1)), d_q, d_k, d_v


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def documents():
    return np.cumsum(np.random.default_rng(1).random((B, S)) < 0.1, axis=1).astype(np.int32)


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize("chunk", [1024, 4])
def test_blocks_merge_to_the_whole(chunk, monkeypatch):
    """Blocks of keys: forward merges by lse, backward with the global lse adds up."""
    monkeypatch.setattr(kernels, "QUERY_CHUNK", chunk)
    q, k, v, d_out = arrays()
    segments = documents()
    out, lse, *grads = exact(q, k, v, d_out, segments, window=9)
    columns = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    call = AttentionCall(SCALE, window=9, implementation="xla")
    outs, lses, mine = [], [], []
    for cut in (slice(0, 12), slice(12, 20), slice(20, S)):
        seen = (columns, segments), (columns[:, cut], segments[:, cut])
        block = q, k[:, cut], v[:, cut], seen
        o, z = kernels.block_forward(*block, call, diagonal=False)
        stats = out.astype(np.float32), lse.astype(np.float32), d_out
        outs.append(np.asarray(o))
        lses.append(np.asarray(z, np.float64))
        mine.append(kernels.block_backward(*block, *stats, call, diagonal=False))
    top = np.logaddexp.reduce(lses)
    weights = [np.moveaxis(np.exp(z - top), 1, 2)[..., None] for z in lses]
    merged = sum(o * w for o, w in zip(outs, weights, strict=True))
    d_q, d_k, d_v = zip(*mine, strict=True)
    close([merged, top, sum(d_q)], [out, lse, grads[0]])
    close([np.concatenate(d_k, 1), np.concatenate(d_v, 1)], grads[1:])


@pytest.mark.grid
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("packed,window", [(False, None), (True, None), (True, 9)])
def test_ring_equals_whole_attention(cp, at_once, packed, window):
    """Both transports of the block kernels, as cuDNN runs them, on the XLA blocks."""
    q, k, v, d_out = arrays()
    segments = documents() if packed else None
    mesh = Mesh(np.array(jax.devices()[:cp]), ("cp",), axis_types=(AxisType.Auto,))
    ring = Ring(cp, 1, at_once, AttentionCall(SCALE, window, implementation="xla"))
    order = zigzag(S, cp)
    spec = P(None, "cp")
    columns = np.broadcast_to(order.astype(np.int32), (B, S))
    places = columns, None if segments is None else segments[:, order]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(q, k, v, d_out, places):
        out, transpose = jax.vjp(lambda *x: ring_attention(*x, places, ring), q, k, v)
        return out, *transpose(d_out)

    mine = run(*(x[:, order] for x in (q, k, v, d_out)), places)
    out, _, *grads = exact(q, k, v, d_out, segments, window)
    close(mine, [x[:, order] for x in (out, *grads)])


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_zigzag_deals_every_column_once_and_balances(cp, size):
    order = zigzag(size, cp)
    assert sorted(order) == list(range(size))
    work = order.reshape(cp, -1).sum(1)  # keys seen by a device's queries
    assert len(set(work)) == 1
    assert (np.diff(order.reshape(2 * cp, -1)) == 1).all()


REFUSED = {
    "ring": (dict(sinks=jnp.zeros(4)), "mesh.cp_type=ring lacks model.attention.attention_sinks"),
    "all_gather": (dict(implementation="cudnn", window=4), "set mesh.cp_type=a2a"),
    "a2a": ({}, "deals 4 query heads per tp device out to 8 devices"),
    "a2a_ring": (
        dict(mask="full"),
        "a2a_ring lacks full masks; set mesh.cp_type=all_gather or a2a",
    ),
}


@pytest.mark.parametrize("cp_type", REFUSED)
def test_what_is_not_exact_is_refused(cp_type):
    given, message = REFUSED[cp_type]
    q = jnp.zeros((1, 4, 4, 8))
    columns = jnp.arange(4)
    arrays = AttentionArrays((columns, columns), sinks=given.get("sinks"))
    options = {"implementation": "xla"} | {n: x for n, x in given.items() if n != "sinks"}
    call = AttentionCall(1.0, max_documents=1, **options)
    with pytest.raises(UserError, match=message):
        ctx = Context(Parallel(cp=8), kernels=Kernels(cp_type=cp_type))
        context_attention(q, q, q, call, arrays, ctx)
