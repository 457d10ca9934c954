"""Laws of encoder-decoders: who sees what, packed documents, FLOPs, generation, the kernel's bias.

`python -m mjax.prove` has a row of T5, and `tests/oracle/test_t5.py` compares with transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.trace import trace
from mjax.kernels.attention.api import attention
from mjax.kernels.attention.relative_bias import buckets
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.models import build, definition_of
from mjax.models.base.params import split
from mjax.models.flops import flops_by_part
from mjax.prove import Cell, deviation, make_batch, make_trainer
from mjax.train import Trainer
from mjax.train.batch import most_documents, only_padding_follows, promises_of
from tests.generation import made_ids
from tests.marks import exhaustive, quick, slow

MODEL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "layer_pattern": "B*2, [GXD]*3",
    "intermediate_size": 48,
    "position_embedding": "relative",
    "relative": {"num_buckets": 8, "max_distance": 12},
    "initializer_range": 0.2,
    "decoder_start_token_id": 3,
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
}


def make(**more) -> tuple[ModelConfig, nnx.Module]:
    cfg = ModelConfig(**MODEL | more)
    return cfg, build(cfg, nnx.Rngs(0))


def rows(seed: int, length: int, count: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (count, length), 4, 128)


def changed(tokens: jax.Array, column: int) -> jax.Array:
    return tokens.at[:, column].set(3)


@slow
def test_a_decoder_sees_the_whole_source_and_no_token_ahead():
    _, model = make()
    logits = jax.jit(lambda source, target: model(source, target=target))
    source, target = rows(0, 12), rows(1, 9)
    whole = logits(source, target)
    assert whole.shape == (2, 9, 128) and whole.dtype == jnp.float32
    ahead = logits(source, changed(target, 5))
    np.testing.assert_array_equal(ahead[:, :5], whole[:, :5])
    assert (np.abs(ahead[:, 5:] - whole[:, 5:]).max((0, 2)) > 1e-4).all()
    for column in (0, 11):  # of the encoder, whose tokens see both ways
        other = logits(changed(source, column), target)
        assert (np.abs(other - whole).max((0, 2)) > 1e-5).all()


@pytest.mark.parametrize("positions", quick(["relative", "rope"]))
def test_a_packed_row_equals_its_documents_apart(positions):
    _, model = make(position_embedding=positions)
    sources, targets = [rows(0, 7), rows(1, 5)], [rows(2, 4), rows(3, 6)]

    def number(parts) -> jax.Array:
        """Segments 1, 2 of two documents, and padding behind them."""
        sizes = [part.shape[1] for part in parts]
        return jnp.asarray([[1] * sizes[0] + [2] * sizes[1] + [0] * 2] * 2, jnp.int32)

    padding = jnp.full((2, 2), 9)
    packed = model(
        jnp.concatenate([*sources, padding], 1),
        segments=number(sources),
        target=jnp.concatenate([*targets, padding], 1),
        target_segments=number(targets),
    )
    first = targets[0].shape[1]
    parts = packed[:, :first], packed[:, first:-2]
    for source, target, part in zip(sources, targets, parts, strict=True):
        alone = model(source, target=target)
        np.testing.assert_allclose(part, alone, atol=2e-5)
    assert np.isfinite(packed).all()


@slow
def test_flops_are_those_of_each_side():
    cfg, _ = make()
    width, ffn, heads, head, seq, target = 32, 48, 4, 8, 20, 10
    projections = width * head * (2 * heads + 2 * 2)  # q and o, k and v
    encoder = 2 * (projections + 3 * width * ffn)
    cross_kv = width * head * 2 * 2
    decoder = 3 * (2 * projections - cross_kv + 3 * width * ffn)
    share = target / seq
    parts = flops_by_part(cfg, seq, target_length=target)
    assert parts["matmul"] == pytest.approx(6 * (encoder + 3 * cross_kv + share * decoder))
    assert parts["head"] == pytest.approx(6 * width * 128 * share)
    scores = 2 * seq + 3 * share * (target / 2 + seq)
    assert parts["attention"] == pytest.approx(12 * heads * head * scores)


@slow
@pytest.mark.parametrize("tp", quick([1, 2], 1))
def test_greedy_tokens_are_those_of_whole_passes(tp):
    from mjax.config.rules.mesh_rules import AXES
    from mjax.config.schema.run import MeshConfig
    from mjax.sharding.mesh import make_mesh, parallel_of
    from mjax.sharding.rules import param_partitions

    cfg, model = make()
    definition, params = definition_of(cfg), split(model)[1]
    if tp > 1:
        mesh = make_mesh(MeshConfig(**dict.fromkeys(AXES, 1) | {"tp": tp}), jax.devices()[:tp])
        cuts = param_partitions(definition.specs, parallel_of(mesh))
        params = jax.tree.map(
            lambda p, cut: jax.device_put(p, jax.NamedSharding(mesh, cut)), params, cuts
        )
    prompts = [rows(0, 11, 1)[0].tolist(), rows(1, 5, 1)[0].tolist()]
    made = made_ids((definition, params, cfg), prompts, 20)
    whole = jax.jit(lambda source, target: model(source, target=target)[0].argmax(-1))
    for prompt, row in zip(prompts, made, strict=True):
        target = jnp.asarray([[3, *row[:-1]]])  # what each step read
        assert row == whole(jnp.asarray([prompt]), target).tolist()
    assert len({token for row in made for token in row}) > 2


@slow
def test_what_is_missing_is_said():
    cfg, model = make(decoder_start_token_id=None)
    with pytest.raises(UserError, match="model.decoder_start_token_id: generation begins"):
        made_ids((definition_of(cfg), split(model)[1], cfg), [[1]], 1)
    with pytest.raises(UserError, match="target is for encoder-decoders, which need it"):
        model(rows(0, 8))
    with pytest.raises(UserError, match="target is for encoder-decoders, which need it"):
        make(layer_pattern="G", position_embedding="rope")[1](rows(0, 8), target=rows(1, 8))
    with pytest.raises(UserError, match="trace: a model of several streams"):
        trace(model, rows(0, 8))
    trainer = make_trainer("t5", Cell())
    batch = make_batch(24, target=48)
    with pytest.raises(UserError, match=r"decoder_tokens has shape \(24, 40\); it must be"):
        trainer.step(batch | {"decoder_tokens": batch["decoder_tokens"][:, :40]})
    batch["decoder_tokens"][3, 4] = 251
    with pytest.raises(UserError, match="decoder_tokens holds id 251, outside model.vocab_size"):
        trainer.step(batch)
    with pytest.raises(UserError, match="cp_type='ring' cannot run with model.position_emb"):
        make_trainer("t5", Cell({"cp": 2}, cp_type="ring")).step(make_batch(24, target=48))


@exhaustive
def test_recomputing_changes_nothing_beyond_rounding():
    batch = make_batch(24, target=48)
    where = Cell({"pp": 2}, 0, 2)
    found = []
    for policy in ("full", "none"):
        trainer = make_trainer("t5", where, f"train.remat={policy}")
        found.append(jax.device_get(trainer.grads(batch)))
    assert deviation(*found) <= 1e-6


@exhaustive
def test_fp8_stays_near():
    batch = make_batch(24, target=48)
    losses = []
    for more in ([], ["precision.fp8=current"]):
        trainer = make_trainer("t5", Cell({"dp": 2, "tp": 2}, 1, 2), *more)
        losses.append([float(trainer.step(batch)["loss"]) for _ in range(3)])
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.03)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_bias_is_the_same_a_chunk_of_queries_at_a_time(mask):
    """2048 queries go in two chunks. The reference looks the biases up one by one."""
    length, slots, heads, size = 2048, 48, 2, 8
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(heads, 8), *((1, n, heads, size) for n in (length, slots, slots))]
    inputs = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    columns = jnp.arange(length), 1000 + jnp.arange(slots)
    call = AttentionCall(scale=1.0, mask=mask, max_distance=20, implementation="xla")

    def fast(table, q, k, v):
        return attention(q, k, v, call, AttentionArrays(columns, relative=table))

    distance = columns[1][None, :] - columns[0][:, None]
    lookup = jnp.asarray(buckets(8, 20, mask == "full"))[jnp.clip(distance, -20, 20) + 20]

    def plain(table, q, k, v):
        scores = jnp.einsum("bshd,bthd->bhst", q, k) + table[:, lookup]
        if mask == "causal":
            scores = jnp.where(distance <= 0, scores, -1e30)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)

    def squares(function):
        return jax.jit(jax.value_and_grad(lambda *inputs: jnp.sum(function(*inputs) ** 2)))

    (mine, d_mine), (reference, d_reference) = squares(fast)(*inputs), squares(plain)(*inputs)
    np.testing.assert_allclose(mine, reference, rtol=1e-5)
    bound = 1e-4 * np.abs(d_reference).max()
    np.testing.assert_allclose(d_mine, d_reference, atol=bound)


@slow
def test_a_stream_gives_each_step_other_spans():
    objective = make_trainer("t5", Cell(), "data.seq_length=64").objective
    tokens = np.random.default_rng(0).integers(2, 200, (4, 60)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    made = [objective.make_fields(batch, 1, step, np.arange(4)) for step in (5, 5, 6)]
    np.testing.assert_array_equal(made[0]["tokens"], made[1]["tokens"])
    assert (made[0]["labels"] != made[2]["labels"]).any()
    assert objective.make_fields(made[0], 1, 5, np.arange(4)) == {}


def test_documents_are_bounded_on_both_sides():
    """Fused attention is compiled for a bound, and would pass over documents beyond it."""
    encoder, decoder = np.array([[1, 1, 2, 2], [1, 1, 1, 1]]), np.array([[1, 2, 0], [1, 1, 0]])
    assert most_documents({"segment_ids": encoder}) == 2
    assert most_documents({"segment_ids": encoder, "decoder_segment_ids": decoder}) == 3


@pytest.mark.parametrize(
    "ids,padded", [([1, 1, 1], True), ([1, 1, 0], True), ([1, 2, 2], False), ([1, 2, 0], True)]
)
def test_padding_behind_a_document_is_known(ids, padded):
    whole = np.ones((1, 3), np.int32)
    for batch in ({"segment_ids": [ids]}, {"segment_ids": whole, "decoder_segment_ids": [ids]}):
        batch = {name: np.asarray(field) for name, field in batch.items()}
        assert only_padding_follows(batch) == padded
        cfg = load(None, ["train.attention=cudnn", "data.mock=true"])
        programs = Trainer(cfg, devices=jax.devices()[:1]).programs
        programs.bound_documents(promises_of(batch))
        assert programs.program(8).model.ctx.documents.padded == (ids == [1, 1, 0])
