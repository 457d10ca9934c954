"""Laws of RETRO: who reads which neighbors, against plain loops; causality; FLOPs; what is refused.

`python -m mjax.prove` has a row of RETRO; `tests/unit/data/test_neighbors.py` is about its data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.trace import trace
from mjax.models import build, definition_of
from mjax.models.base.branch import BranchInputs, Source, branch_class
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part
from mjax.models.retrieval.chunked_attention import beside_neighbors
from mjax.prove import Cell, make_batch, make_companions, make_trainer
from tests.generation import complete
from tests.marks import exhaustive, slow

M, NEIGHBORS, R, S = 4, 2, 8, 16  # of a chunk; of neighbors a chunk, of one; of a row
CHUNKS = S // M
MODEL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "layer_pattern": "[G],[BCD],B,[RD],[GRD]",
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "retro": {"chunk_length": M, "num_neighbors": NEIGHBORS},
}


def make(**more) -> tuple[ModelConfig, nnx.Module]:
    cfg = ModelConfig(**MODEL | more)
    return cfg, build(cfg, nnx.Rngs(0))


def text(seed: int, rows: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, S), 0, 128)


def retrieved(rows: int = 2) -> jax.Array:
    """Neighbors with padding behind some; all of a chunk of row 0 are missing."""
    found = make_companions(rows, CHUNKS * NEIGHBORS, R, 128)
    found[:, ::2, 0] = np.maximum(found[:, ::2, 0], 1)  # a token at least
    found[0, NEIGHBORS : 2 * NEIGHBORS] = -1
    return jnp.asarray(found)


def attend_plainly(q, keys, values, scale):
    """One query [N, H] and keys, values [T, K, H] -> (out [N, H], a function to gradients)."""
    group = len(q) // keys.shape[1]
    k, v = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    scores = np.einsum("nh,tnh->nt", q, k) * scale
    probs = np.exp(scores - scores.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)

    def back(d_out):
        d_probs = np.einsum("nh,tnh->nt", d_out, v)
        d_scores = probs * (d_probs - (probs * d_probs).sum(1, keepdims=True)) * scale
        d_k = np.einsum("nt,nh->tnh", d_scores, q)
        d_v = np.einsum("nt,nh->tnh", probs, d_out)
        by_head = (*keys.shape[:2], group, keys.shape[2])
        parts = d_k.reshape(by_head).sum(2), d_v.reshape(by_head).sum(2)
        return np.einsum("nt,tnh->nh", d_scores, k), *parts

    return np.einsum("nt,tnh->nh", probs, v), back


def reads_of_a_text(tokens: np.ndarray):
    """(row, token, the rows and places of the neighbors' tokens that it attends to)."""
    for row in range(len(tokens)):
        for i in range(S):
            chunk = (i - (M - 1)) // M  # the last chunk that ends at i or before it
            if i < M - 1:
                continue
            seen = []
            for number in range(chunk * NEIGHBORS, (chunk + 1) * NEIGHBORS):
                at = row * CHUNKS * NEIGHBORS + number
                seen += [(at, place) for place in range(R) if tokens[row, number, place] >= 0]
            yield (row, i), seen


def reads_of_neighbors(tokens: np.ndarray):
    """(row of a neighbor, its token, the rows and places of the text that it attends to)."""
    for row in range(len(tokens)):
        for number in range(CHUNKS * NEIGHBORS):
            first = number // NEIGHBORS * M
            seen = [(row, place) for place in range(first, first + M)]
            for i in range(R):
                yield (row * CHUNKS * NEIGHBORS + number, i), seen


@pytest.mark.parametrize("word", ["retrieval", "chunk"])
def test_chunked_attention_equals_plain_loops(word):
    cfg, _ = make()
    neighbors = retrieved()
    both = beside_neighbors(tokens_of((2, S)), neighbors)
    streams = both.of("decoder"), both.of("encoder")
    side, other = streams if word == "retrieval" else streams[::-1]
    inputs = BranchInputs(side, Context(), word, source=Source(None, other))
    branch = branch_class(word)(cfg, 0.02, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    of_queries, of_keys = side.positions.shape, other.positions.shape
    q, d_out = rng.normal(size=(2, *of_queries, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, *of_keys, 2, 8)).astype(np.float32)
    found, vjp = jax.vjp(lambda q, k, v: branch.attend(q, k, v, inputs), q, k, v)
    reads = reads_of_a_text if word == "retrieval" else reads_of_neighbors
    out, d_q, d_k, d_v = (np.zeros(x.shape) for x in (q, q, k, v))
    alone = 0
    for at, seen in reads(np.asarray(neighbors)):
        alone += not seen
        if not seen:
            continue
        places = tuple(np.transpose(seen))
        out[at], back = attend_plainly(q[at], k[places], v[places], 8**-0.5)
        d_q[at], of_k, of_v = back(d_out[at])
        d_k[places] += of_k
        d_v[places] += of_v
    assert alone == (M if word == "retrieval" else 0)  # those of the chunk without neighbors
    for mine, plain in zip((found, *vjp(d_out)), (out, d_q, d_k, d_v), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(mine)[plain == 0], 0)


def test_no_token_reads_a_neighbor_of_a_chunk_that_is_not_over():
    _, model = make()
    run = jax.jit(lambda tokens, neighbors: model(tokens, neighbors=neighbors))
    tokens, neighbors = text(0), retrieved()
    whole = run(tokens, neighbors)
    assert whole.shape == (2, S, 128) and np.isfinite(whole).all()
    for chunk in range(CHUNKS):
        for number in range(chunk * NEIGHBORS, (chunk + 1) * NEIGHBORS):
            other = run(tokens, neighbors.at[:, number].set(7))
            moved = np.abs(other - whole).max((0, 2))
            first = (chunk + 1) * M - 1
            np.testing.assert_array_equal(moved[:first], 0)
            assert (moved[first:] > 1e-5).all()


def test_no_token_reads_one_behind_it_by_way_of_the_neighbors():
    _, model = make()
    run = jax.jit(lambda tokens, neighbors: model(tokens, neighbors=neighbors))
    tokens, neighbors = text(0), retrieved()
    whole = run(tokens, neighbors)
    for column in range(S):
        other = run(tokens.at[:, column].add(1) % 128, neighbors)
        moved = np.abs(other - whole).max((0, 2))
        np.testing.assert_array_equal(moved[:column], 0)
        assert moved[column] > 1e-4


@exhaustive
def test_padding_and_missing_neighbors_count_for_nothing():
    """Layers that read nothing add nothing, whatever they are; their gradients are zero."""
    _, model = make()
    definition, params = nnx.split(model)
    tokens, none = text(0), jnp.full((2, CHUNKS * NEIGHBORS, R), -1)

    def total(params, neighbors):
        return jnp.sum(nnx.merge(definition, params)(tokens, neighbors=neighbors) ** 2)

    gradients = jax.jit(jax.grad(total))(params, none)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))

    def reads_neighbors(path) -> bool:
        return "cross_attention'" in str(path) and "retrieval" in str(path)

    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    of_reading = [g for path, g in leaves if reads_neighbors(path)]
    assert of_reading and all((g == 0).all() for g in of_reading)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, p: p + 1 if reads_neighbors(path) else p, params
    )
    total = jax.jit(total)
    assert total(params, none) == total(moved, none) != total(moved, retrieved())


def test_flops_are_those_of_each_side():
    cfg, _ = make()
    width, ffn, heads, head = 32, 48, 4, 8
    q_and_out, kv, mlp = 2 * width * heads * head, width * 2 * 2 * head, 3 * width * ffn
    share = NEIGHBORS * R / M  # tokens of neighbors for one of the text
    of_neighbors = (
        2 * (q_and_out + kv) + q_and_out + 2 * mlp
    ) + 2 * kv  # keys that two layers read
    of_text = 2 * (q_and_out + kv + mlp) + 2 * q_and_out + kv
    parts = flops_by_part(cfg, S)
    assert parts["matmul"] == pytest.approx(6 * (share * of_neighbors + of_text))
    assert parts["head"] == pytest.approx(6 * width * 128)
    scores = share * (2 * R + M) + 2 * S / 2 + 2 * NEIGHBORS * R
    assert parts["attention"] == pytest.approx(12 * heads * head * scores)


@slow
def test_what_is_missing_is_said():
    cfg, model = make()
    with pytest.raises(UserError, match="neighbors are for RETRO .R., which needs them"):
        model(text(0))
    with pytest.raises(UserError, match="generation with retrieval .R blocks. is not built"):
        complete((definition_of(cfg), split(model)[1], cfg), [[1]], 1)
    with pytest.raises(UserError, match="trace: "):
        trace(model, text(0))
    trainer = make_trainer("retro", Cell())
    batch = make_batch(24)
    with pytest.raises(UserError, match="field 'neighbors' is missing"):
        trainer.step(batch)
    with pytest.raises(UserError, match=r"neighbors has shape .* it must be \(24, 4, 48\)"):
        trainer.step(batch | {"neighbors": np.zeros((24, 4, 8), np.int32)})
    with pytest.raises(UserError, match="neighbors holds id 251, outside model.vocab_size"):
        trainer.step(batch | {"neighbors": np.full((24, 4, 48), 251)})


@slow
def test_neighbors_for_speed_tests_are_those_of_a_row():
    objective = make_trainer("retro", Cell()).objective
    batch = make_batch(4)
    made = objective.make_fields(batch, 1, 5, np.arange(4))["neighbors"]
    assert made.shape == (4, 4, 48)
    np.testing.assert_array_equal(made[1, 0, :16], batch["tokens"][1])
    assert objective.make_fields({"neighbors": made}, 1, 5, np.arange(4)) == {}
