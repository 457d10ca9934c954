"""Generation: laws of sampling, cached decoding, batches, stop strings, meshes."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError
from mjax.infer.records import DrawInputs, StepTokens, bucket
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import (
    DrawRows,
    Draws,
    RowRules,
    Sampling,
    TokenCounts,
    draw_tokens,
    draws_of,
    settings_of,
)
from mjax.infer.sampling.limits import within_limits
from mjax.infer.small_engine import completed
from mjax.infer.text import TextStream
from mjax.infer.weights import take_apart
from mjax.models import build, split
from mjax.sharding.mesh import make_mesh, parallel_of
from mjax.sharding.rules import param_partitions
from mjax.sharding.spec import is_spec
from tests.generation import complete, engine_for
from tests.marks import quick, slow
from tests.tiny_mixers import DELTAS, LATENT

SMALL = {
    "vocab_size": 252,
    "vocab_multiple": 4,
    "hidden_size": 32,
    "attention.num_attention_heads": 4,
    "attention.num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
SIZES = {"attention": {"num_key_value_heads": 4}, "intermediate_size": 32}
VARIANTS = {
    "window": {"layer_pattern": "LG", "num_hidden_layers": 3, "attention.sliding_window": 4},
    "softcap": {
        "attention.attn_logit_softcapping": 1.5,
        "attention.num_key_value_heads": 4,
        "attention.qk_norm": True,
    },
    "learned": {
        "position_embedding": "learned",
        "attention.num_key_value_heads": 1,
        "attention.attention_sinks": True,
        "tie_word_embeddings": True,
    },
    "experts": {"layer_pattern": "GE", "moe.num_experts": 4, "moe.moe_intermediate_size": 16},
    "latent": LATENT,
    "states": {
        "layer_pattern": "[MD][M|G]",
        "mamba.mamba_num_heads": 8,
        "mamba.mamba_head_dim": 8,
        "mamba.state_size": 6,
        "mamba.n_groups": 2,
        "mamba.chunk_size": 8,
    },
    "deltas": DELTAS,
    "branches": {"layer_pattern": "[G|D][D]G@1", "num_hidden_layers": 3, "layer_sizes": [SIZES]},
}
PROMPTS = [[3, 5, 7], [*range(20, 36)], [9] * 9]
NEW = 20
# Ids as letters, so that text is legible and a stop string spans tokens.
LETTERS = Tokenizer(252, None, None, lambda ids: "".join(chr(0x4E00 + i) for i in ids))


def made(mesh=None, **kw):
    """(definition, parameters, config) of a small model."""
    cfg = ModelConfig(**nested({**SMALL, **kw}))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    if mesh is not None:
        places = param_partitions(definition.specs, parallel_of(mesh))

        def put(p, place):
            return jax.device_put(p, NamedSharding(mesh, place))

        params = jax.tree.map(put, params, places)
    return definition, params, cfg


def run_on(engine, prompts=PROMPTS, **fields):
    """The outputs of `NEW` tokens after prompts."""
    return completed(engine, prompts, SamplingParams(max_tokens=NEW, **fields))


@pytest.fixture(scope="module")
def plain():
    return engine_for(made(), PROMPTS, NEW, tokenizer=LETTERS)


@pytest.fixture(scope="module")
def greedy(plain):
    return run_on(plain)


# ---- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(VARIANTS))  # laws/serving has its sister
def test_a_batch_equals_running_every_whole_prefix(name):
    definition, params, cfg = made(**VARIANTS[name])
    rows = complete((definition, params, cfg), PROMPTS, NEW)
    texts = np.zeros((len(PROMPTS), 16 + NEW), np.int32)  # padded on the right: causal
    for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        texts[i, : len(prompt) + NEW] = prompt + row.token_ids
    logits = jax.jit(lambda p, t: definition.bind(p)(t))(params, texts)
    for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        own = logits[i, len(prompt) - 1 : len(prompt) - 1 + NEW]
        np.testing.assert_array_equal(row.token_ids, own.argmax(-1))
        scored = jax.nn.log_softmax(own)[np.arange(NEW), np.asarray(row.token_ids)]
        np.testing.assert_allclose(row.logprobs, scored, atol=2e-5)
    assert len({tuple(r.token_ids) for r in rows}) == len(rows), "equal rows prove nothing"


def test_a_row_does_not_depend_on_its_batch(plain, greedy):
    for i, prompt in enumerate(PROMPTS):
        assert run_on(plain, [prompt])[0].token_ids == greedy[i].token_ids
    hot = {"temperature": 1.5, "top_p": 0.9, "seed": 0}
    alone = run_on(plain, PROMPTS[:1], **hot)[0].token_ids
    assert alone == run_on(plain, **hot)[0].token_ids != greedy[0].token_ids


@slow
@pytest.mark.parametrize("tp", quick([2, 4], 0))  # 4: more devices than kv heads
def test_tokens_are_equal_under_tp(tp, plain, greedy):
    mesh = make_mesh(MeshConfig(dp=1, tp=tp), jax.devices()[:tp])
    engine = engine_for(made(mesh), PROMPTS, NEW)
    for row, alone in zip(run_on(engine), greedy, strict=True):
        assert row.token_ids == alone.token_ids
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=2e-4)
    cache = only_activations_move(engine).keys
    assert cache.shape[1] == max(2, tp) and cache.sharding.shard_shape(cache.shape)[1] == 1
    hot = {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 5}
    drawn = [row.token_ids for row in run_on(engine, **hot)]
    assert drawn == [row.token_ids for row in run_on(plain, **hot)]


KINDS = [("window", 4), ("softcap", 4), ("learned", 2), ("experts", 2), ("branches", 2)]
KINDS += [("latent", 4), ("states", 2), ("states", 4)]


@pytest.mark.parametrize("name, tp", quick(KINDS))
def test_every_kind_of_layer_continues_under_tp(name, tp):
    mesh = make_mesh(MeshConfig(dp=1, tp=tp), jax.devices()[:tp])
    alone = complete(made(**VARIANTS[name]), PROMPTS, NEW)
    spread = complete(made(mesh, **VARIANTS[name]), PROMPTS, NEW)
    for row, one in zip(spread, alone, strict=True):
        assert row.token_ids == one.token_ids
        np.testing.assert_allclose(row.logprobs, one.logprobs, atol=2e-5)


@slow
def test_a_step_sends_no_latents_over_tp():
    mesh = make_mesh(MeshConfig(dp=1, tp=2), jax.devices()[:2])
    cache = only_activations_move(engine_for(made(mesh, **VARIANTS["latent"]), PROMPTS, NEW))
    assert cache.latents.shape == (5, 64, 16) and cache.latents.sharding.is_fully_replicated


def only_activations_move(engine):
    """A step sends nothing of the size of a table, a layer or a cache; the first layer's cache."""
    records = engine.runner.records.empty(engine.limits.rows)
    runner, tokens = engine.runner, StepTokens()
    outputs = engine.programs.abstract_outputs(tokens, records)
    draw = runner.draw_program(DrawInputs(tokens, records, RowRules(), Draws()), outputs)
    text = runner.forward_program(tokens, records).as_text() + draw.as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{kinds})\(", text)
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    assert len(sizes) >= 4, "embedding, attention, MLP and logits talk over tp"
    assert max(sizes) <= 4 * 252, "four rows of activations or logits"
    return engine.programs.empty().caches[0]["attention"]


def test_few_programs_are_compiled(plain):
    engine, first = plain, len(plain.runner.compiled)
    kinds = {"repetition_penalty": 2.0}, {}, {"temperature": 0.5, "top_k": 3}
    for kind in kinds:
        run_on(engine, [[1]], **kind)
    before = len(engine.runner.compiled)
    assert 0 < before - first <= 2 * len(kinds)
    for length in (2, 7, 16):
        run_on(engine, [[1] * length], repetition_penalty=1 + length)
        run_on(engine, [[1] * length], temperature=length, top_p=1 / length)
    assert len(engine.runner.compiled) == before
    assert [bucket(n) for n in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, 64]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_layer_has_arrays_of_its_own_and_memory_one_copy_if_donated(tp, dtype):
    mesh = make_mesh(MeshConfig(dp=1, tp=tp), jax.devices()[:tp]) if tp > 1 else None
    definition, params, _ = made(mesh, **VARIANTS["experts"])
    kept = take_apart(definition.specs, params, jnp.dtype(dtype))

    def check(spec, old, new):
        if spec.axes[:1] != ("layers",):
            assert new.sharding == old.sharding and (new is old) == (dtype == "float32")
            return
        for i, row in enumerate(new):
            np.testing.assert_array_equal(row, old[i].astype(dtype))
            local = row.sharding.shard_shape(row.shape)
            assert local == old.sharding.shard_shape(old.shape)[1:]

    jax.tree.map(check, definition.specs, params, kept, is_leaf=is_spec)
    given = jax.tree.map(lambda p: p + 0, params)
    taken = take_apart(definition.specs, given, jnp.dtype(dtype), donate=True)
    jax.tree.map(np.testing.assert_array_equal, kept, taken)
    left = {id(p) for p in jax.tree.leaves(taken)}
    assert all(p.is_deleted() != (id(p) in left) for p in jax.tree.leaves(given))


# ---- ends --------------------------------------------------------------------------------------


def test_rows_end_at_eos_and_the_batch_when_all_have(greedy, monkeypatch):
    eos = {greedy[0].token_ids[3], greedy[1].token_ids[1], greedy[2].token_ids[5]}
    engine = engine_for(made(), PROMPTS, NEW, tokenizer=LETTERS, eos=sorted(eos))
    steps, launch = [], engine.runner._forward
    monkeypatch.setattr(engine.runner, "_forward", lambda *a: steps.append(1) or launch(*a))
    rows = run_on(engine)
    for row, whole in zip(rows, greedy, strict=True):
        end = next(i for i, token in enumerate(whole.token_ids) if token in eos)
        assert row.token_ids == whole.token_ids[: end + 1] and row.finish_reason == "stop"
        assert row.text == whole.text[:end] and row.stop_reason is None
    assert len(steps) == max(len(r.token_ids) for r in rows) + 1 < NEW, "one of prefill"
    assert all(r.finish_reason == "length" and len(r.token_ids) == NEW for r in greedy)
    assert run_on(engine, ignore_eos=True) == greedy


def test_text_is_cut_before_a_stop_string_that_spans_tokens(plain, greedy):
    stop = greedy[1].text[6:9]
    assert greedy[1].text.find(stop) == 6 and stop not in greedy[0].text
    rows = run_on(plain, stop=[stop, "never"])
    assert rows[1].text == greedy[1].text[:6] and rows[1].finish_reason == "stop"
    assert rows[1].token_ids == greedy[1].token_ids[:9] and rows[1].stop_reason == stop
    assert rows[0] == greedy[0] and rows[2] == greedy[2]


def test_tokens_are_streamed_in_order_as_they_are_made(plain, greedy):
    requests = [plain.add(prompt, SamplingParams(max_tokens=NEW)) for prompt in PROMPTS]
    updates = []
    while plain.has_work:
        updates += plain.step()
    rows = [requests.index(update.request) for update in updates]
    assert rows == [*range(len(PROMPTS))] * NEW
    for row, whole in enumerate(greedy):
        found = [update.text for update, at in zip(updates, rows, strict=True) if at == row]
        assert "".join(found) == whole.text and found[0]
    assert whole.text == LETTERS.decode(whole.token_ids)


def test_streamed_text_has_whole_characters_only():
    tokenizer = load_tokenizer("byte")
    text = "naïve 🙂 日本"
    stream = TextStream(tokenizer.decode, tokenizer.encode("x"), ["本語"])
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert not any("\ufffd" in p for p in pieces) and "🙂" in pieces and "ï" in pieces
    assert pieces[-1] == "" and stream.close() == "本", "could still become the stop string"
    broken = TextStream(tokenizer.decode, [], [])
    assert broken.push(0xF0) == "" and broken.close() == "\ufffd"


def test_stop_strings_agree_with_searching_the_whole_text():
    rng = np.random.default_rng(0)

    def decode(ids):
        return "".join(["a", "b", "ab", "aab"][i] for i in ids)

    cuts = 0
    for _ in range(300):
        ids = rng.integers(0, 4, 12).tolist()
        stops = ["".join(rng.choice(["a", "b"], rng.integers(2, 6))) for _ in range(2)]
        stream = TextStream(decode, [], stops)
        pieces = []
        for i in ids:
            pieces.append(stream.push(i))
            if stream.stopped:
                break
        whole = decode(ids[: len(pieces)])
        ends = [at for at in map(whole.find, stops) if at >= 0]
        assert stream.stopped == bool(ends)
        assert "".join(pieces) + stream.close() == whole[: min(ends, default=None)]
        cuts += stream.stopped
    assert 50 < cuts < 300


def spoken(specials: str) -> Tokenizer:
    """Letters as ids, of which decoding leaves out `specials`; each is called <|letter|>."""

    def decode(ids):
        return "".join(chr(i) for i in ids if chr(i) not in specials)

    def decode_whole(ids):
        return "".join(f"<|{chr(i)}|>" if chr(i) in specials else chr(i) for i in ids)

    return Tokenizer(256, None, None, decode, decode_whole=decode_whole)


@pytest.mark.parametrize(
    "stop, text, finish",
    [
        (["<|x|>"], "ab", "stop"),
        (["b<|x|>c"], "a", "stop"),
        (["<|x|>c"], "ab", "stop"),
        (["|>c<|"], "ab", "stop"),
        (["<|x|>d", "<|y|>e"], "abcd", ""),
        (["bc"], "abcd", ""),
        ([], "abcd", ""),
    ],
)
def test_a_stop_string_may_hold_special_tokens_which_are_not_shown(stop, text, finish):
    """abxcyd, of which x and y are special: their own texts stop, but are in no text."""
    tokenizer = spoken("xy")
    stream = TextStream(tokenizer.decode, [], stop, tokenizer.special_text)
    pieces = []
    for letter in "abxcyd":
        pieces.append(stream.push(ord(letter)))
        if stream.stopped:
            break
    assert "".join(pieces) + stream.close() == text
    assert stream.stopped == (finish == "stop")


def test_special_tokens_of_files_stop(tmp_path):
    import tokenizers
    from tokenizers import decoders, models

    pieces = {piece: i for i, piece in enumerate(["<s>", "▁", "▁a", "<|end|>"])}
    inner = tokenizers.Tokenizer(models.WordLevel(pieces, "<s>"))
    inner.add_special_tokens(["<s>", "<|end|>"])
    inner.decoder = decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert [loaded.special_text(i) for i in range(5)] == ["<s>", "", "", "<|end|>", ""]
    pieces = Tokenizer(
        4, 2, None, lambda ids: "", piece_of=["<s>", "▁", "</s>", "<|e|>"].__getitem__
    )
    assert [pieces.special_text(i) for i in range(5)] == ["<s>", "", "</s>", "<|e|>", ""]


def test_a_row_ends_at_a_special_token_that_is_asked_for(greedy):
    ids = greedy[1].token_ids
    specials = chr(ids[5])
    at = ids.index(ids[5])
    engine = engine_for(made(), PROMPTS, NEW, tokenizer=spoken(specials))
    row = run_on(engine, stop=[f"<|{specials}|>"])[1]
    assert row.finish_reason == "stop" and row.token_ids == ids[: at + 1]
    assert row.text == "".join(map(chr, ids[:at]))


@pytest.mark.parametrize(
    "prompts,new,options,message",
    [
        ([[], [1]], 4, {}, "a prompt of 0 tokens: give one or more"),
        ([[1], [1] * 61], 4, {}, "a prompt of 61 tokens and up to 4 new ones are more than 64"),
        ([[1] * 64], 4, {}, "a prompt of 64 tokens leaves no room for a new one within 64"),
        ([[252]], 4, {}, r"give one or more ids in \[0, 252\)"),
        ([[1]], 0, {}, "max_tokens=0: "),
        ([[1]], 4, {"stop": [""]}, "stop.*: "),
        ([[1]], 4, {"stop": ["x"]}, "stop needs a tokenizer"),
    ],
)
def test_what_cannot_be_continued_is_one_line(prompts, new, options, message):
    with pytest.raises(UserError, match=message) as refused:
        complete(made(), prompts, new, **options)
    assert "\n" not in str(refused.value)


# ---- sampling ----------------------------------------------------------------------------------

ROWS, VOCAB = 6, 97


@pytest.fixture(scope="module")
def logits():
    return 3 * jax.random.normal(jax.random.key(1), (ROWS, VOCAB))


def run(logits, seed=0, seen=None, **kw):
    return run_rows(logits, [Sampling(**kw)] * len(logits), seed, seen)


def run_rows(logits, rows, seed=0, seen=None):
    size = len(logits)
    seen = jnp.zeros(logits.shape, bool) if seen is None else seen
    counts = TokenCounts(seen, jnp.zeros(logits.shape, jnp.int32))
    streams = np.full(size, seed, np.uint32), np.arange(size, dtype=np.int32)
    every = DrawRows(settings_of(rows), *streams, np.zeros(size, np.int32), counts)
    drawn = jax.jit(draw_tokens, static_argnames="draws")(logits, every, draws_of(rows))
    return drawn.token, drawn.logprob


def kept(logits, **kw):
    settings = settings_of([Sampling(**kw)] * len(logits))
    return np.asarray(within_limits(logits, np.ones((len(logits), 1), np.float32), settings))


def test_greedy_is_the_argmax_and_the_limit_of_low_temperature(logits):
    best = logits.argmax(-1)
    np.testing.assert_array_equal(run(logits)[0], best)
    np.testing.assert_array_equal(run(logits, temperature=1e-6)[0], best)
    np.testing.assert_array_equal(run(logits, temperature=9.0, top_k=1)[0], best)
    assert (run(logits, temperature=9.0)[0] != best).any()
    for temperature in (1e-36, 2e-38, 1.2e-38, 1e-38, 1e-45, 1e-300):
        np.testing.assert_array_equal(run(logits, temperature=temperature)[0], best)
        limits = run(logits, temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)
        np.testing.assert_array_equal(limits[0], best)


def test_equal_logits_are_drawn_alike_at_the_least_temperature(logits):
    equal = jnp.full((400, 5), 7.0).at[:, 3].set(6.0)
    drawn = np.asarray(run(equal, temperature=2e-38)[0])
    assert set(drawn.tolist()) == {0, 1, 2, 4}


def test_the_least_repetition_penalty_makes_no_infinity(logits):
    seen = jnp.zeros(logits.shape, bool).at[:, [2, 5]].set(True)
    z = jnp.abs(logits).at[:, 5].set(0.0)
    for penalty in (1e-38, 1e-45):
        found = run(z, seen=seen, repetition_penalty=penalty, temperature=1.0)
        np.testing.assert_array_equal(found[0], 2)
        assert np.isfinite(found[1]).all()


def test_a_batch_does_what_one_of_its_rows_needs():
    hot, limited_ = Sampling(temperature=1.5), Sampling(temperature=1.5, top_k=2)
    assert draws_of([Sampling(), Sampling(top_k=2)]) == Draws(), "temperature 0 draws nothing"
    assert draws_of([Sampling(), hot]) == Draws(random=True)
    assert draws_of([hot, limited_, Sampling()]) == Draws(random=True, limited=True)


def test_logprobs_are_the_models_own(logits):
    token, logprob = run(logits, temperature=2.0, top_k=5, repetition_penalty=1.3)
    rows = jnp.arange(ROWS)
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[rows, token], rtol=1e-5)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    probs, keep = np.asarray(jax.nn.softmax(logits), np.float64), kept(logits, top_p=p)
    for row, inside in zip(probs, keep, strict=True):
        assert row[inside].sum() >= p - 1e-6
        assert row[inside].sum() - row[inside].min() < p + 1e-6
        assert row[inside].min() > row[~inside].max()


def test_top_k_and_min_p_keep_what_they_say(logits):
    assert (kept(logits, top_k=7).sum(-1) == 7).all()
    assert kept(logits, top_k=1000).all() and kept(logits).all()
    probs = np.asarray(jax.nn.softmax(logits))
    bound = 0.1 * probs.max(-1, keepdims=True)
    np.testing.assert_array_equal(kept(logits, min_p=0.1), probs >= bound)


def test_draws_follow_the_limited_distribution(logits):
    many = jnp.repeat(logits[:1], 4000, 0)
    drawn = np.bincount(run(many, temperature=1.7, top_k=5)[0], minlength=VOCAB) / len(many)
    left = np.where(kept(logits, top_k=5), logits / 1.7, -np.inf)
    np.testing.assert_allclose(drawn, jax.nn.softmax(left)[0], atol=0.03)


def test_repetition_penalty_formula(logits):
    seen = jax.random.bernoulli(jax.random.key(2), 0.5, logits.shape)
    z, s = np.asarray(logits), np.asarray(seen)
    expected = np.where(s, np.where(z > 0, z / 4, z * 4), z).argmax(-1)
    np.testing.assert_array_equal(run(logits, seen=seen, repetition_penalty=4.0)[0], expected)
    assert (expected != z.argmax(-1)).any()


def test_repetition_penalty_counts_prompt_and_text_but_not_padding(plain, greedy):
    huge = run_on(plain, repetition_penalty=1e6)
    for prompt, row in zip(PROMPTS, huge, strict=True):
        assert len(set(row.token_ids)) == NEW and not set(row.token_ids) & set(prompt)
    assert any(len(set(row.token_ids)) < NEW for row in greedy)
    alone = run_on(plain, [PROMPTS[1]], repetition_penalty=1e6)
    assert alone[0].token_ids == huge[1].token_ids


def test_draws_repeat_with_the_seed_and_change_with_it(plain):
    first, again, other = (run_on(plain, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert first == again
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))
    same = run_on(plain, [PROMPTS[0]] * 3, temperature=2.0, seed=0)
    assert same[0].token_ids != same[1].token_ids


def test_a_row_depends_on_its_own_settings_alone(logits):
    top_k, top_p = {"top_k": 4}, {"top_p": 0.5}
    mixed = [Sampling(), *(Sampling(temperature=3.0, **limit) for limit in ({}, top_k, top_p))]
    many = jnp.tile(logits, (20, 1))
    rows = [mixed[i % 4] for i in range(len(many))]
    token = np.asarray(run_rows(many, rows)[0])
    for i, settings in enumerate(mixed):
        alone = np.asarray(run_rows(many, [settings] * len(many))[0])
        np.testing.assert_array_equal(token[i::4], alone[i::4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_wrong_settings_are_one_line(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        dataclasses.replace(Sampling(), **wrong)
