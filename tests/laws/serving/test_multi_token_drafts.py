"""Law: what layers of multi-token prediction guess changes when tokens come, not which ones.

Their guesses are those of a plain forward of the whole text, so their caches hold what it says.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.infer.engine import GREEDY, LIMITED, Engine
from mjax.infer.records import Request
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Draws
from mjax.infer.scheduling.pages import PagePool
from mjax.infer.scheduling.scheduler import Limits, Scheduler
from mjax.interop.adapter_stack import with_stack
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.pretrained import Pretrained
from mjax.models.base.context import Context, tokens_of
from tests.adapters import drawn_adapters
from tests.laws.serving.kinds import LENGTH, PAGE, VOCAB, at_rest, with_few_programs
from tests.laws.serving.tiny import served, tiny_engine, tiny_model
from tests.marks import exhaustive, quick, slow

GUESSES, NEW = 3, 40
HEAT = 0.0, 1.0, 0.0, 0.0, 0.7
KINDS = "keys and values", "windows alone", "latent", "experts"


@functools.cache
def model(kind: str, depths: int = 1, share: float = 0.1) -> Pretrained:
    """A model whose depths guess well, the better the less its layers add, a `share` of theirs.

    At 0 a token depends on the one before alone, and depths know it.
    """
    given = tiny_model(kind, num_nextn_predict_layers=depths)

    def changed(path: tuple, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "projection":
            return share * leaf + jnp.stack([jnp.eye(leaf.shape[1]), jnp.zeros(leaf.shape[1:])])
        return share * leaf if name in ("out", "down") else leaf

    params = jax.tree_util.tree_map_with_path(changed, given.params)
    return replace(given, params=params)


def knowing(depths: int = 1) -> Pretrained:
    return model("keys and values", depths, 0.0)


def guessing(
    given: Pretrained, mesh: Mapping[str, int] | None = None, draws: Draws = LIMITED, **options
) -> Engine:
    """An engine of few programs, all of which are compiled."""
    made = tiny_engine(given, mesh, **{"drafts": GUESSES, "drafter": "mtp", **options})
    with_few_programs(made).warm_up([draws])
    return made


@functools.cache
def plain_texts(kind: str, depths: int = 1, **options) -> list[list[int]]:
    made = with_few_programs(tiny_engine(model(kind, depths), **options))
    made.warm_up([LIMITED])
    return texts(served(made, asks()))


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output.outputs[0].token_ids for request in requests]


def asks(
    heat: Sequence[float] = (0.0, 1.0, 0.0, 0.0, 0.7),
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the borders of pages and chunks, greedy and at random; some share pages."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, VOCAB, 2 * PAGE + 3).tolist()
    others = [rng.integers(0, VOCAB, n).tolist() for n in (PAGE - 2, 1)]
    prompts = [first, first[: PAGE + 1], others[0], others[1], first]
    return [
        (prompt, SamplingParams(temperature=t, top_p=1 - t / 4, seed=n, max_tokens=NEW))
        for n, (prompt, t) in enumerate(zip(prompts, heat, strict=True))
    ]


def emptied(given: Engine, pages: int = 40) -> Engine:
    """The engine as if it had been made with pools of so many pages."""
    for number, lane in enumerate(given.lanes):
        given.lanes[number] = Scheduler(given.limits, PagePool(pages, page=PAGE), lane.window)
    given.verified = given.accepted = 0
    return given


Seen = list[tuple[list[int], list[int], int]]  # texts, guesses of what follows, adapters


def served_and_seen(given: Engine, wanted: Sequence) -> tuple[list[Request], Seen]:
    """All requests, served to their ends, and what was guessed of greedy ones."""
    requests = [given.add(prompt, params) for prompt, params in wanted]
    seen: Seen = []
    while given.has_work:
        given.step()
        for sample in given._by_sequence.values():
            sequence = sample.sequence
            if sequence.sampled and sample.answer.params.temperature == 0:
                seen.append((list(sequence.tokens), sample.guesses, sample.adapter))
    at_rest(given)
    return requests, seen


def assert_of_plain_forward(given: Pretrained, seen: Seen) -> None:
    """Tokens, and guesses of one depth as far as a page goes, are those of a whole forward.

    Where a guess lies in a page that the row has not got yet, no cache has what is before it.
    """

    @jax.jit
    def expected(ids: jax.Array, last: jax.Array, slots: jax.Array) -> jax.Array:
        """The token after that at `last` of ids [LENGTH], and guesses of what follows it."""
        module = given.definition.bind(given.params)
        of_rows = given.definition.bind(given.params, slots=slots)
        info = replace(tokens_of((1, LENGTH)), adapters=slots)
        x, _, _ = module.hidden(ids[None], info, Context())
        found = [jnp.argmax(module.logits(x[0, last])).astype(jnp.int32)]
        ahead = jnp.roll(ids, -1)
        for _ in range(GUESSES):
            y = of_rows.predict(1, x, ahead[None], info, Context()).y
            token = jnp.argmax(module.logits(y[0, last])).astype(jnp.int32)
            found.append(token)
            last += 1
            x, ahead = x.at[0, last].set(y[0, last - 1]), ahead.at[last].set(token)
        return jnp.stack(found)

    for text, guesses, adapter in seen:
        last = len(text) - 2
        ids = np.zeros(LENGTH, np.int32)
        ids[: len(text)] = text
        known = 2 + min(PAGE - 1 - last % PAGE, GUESSES - 1)
        wanted = expected(ids, last, np.array([adapter])).tolist()
        assert [text[-1], *guesses][:known] == wanted[:known]


@slow
@pytest.mark.parametrize("kind", quick(KINDS, 0))
def test_tokens_and_guesses_are_those_of_a_plain_forward(kind):
    """In chunks, with prefix hits, and with so few pages that rows lose theirs."""
    given = guessing(model(kind), draws=GREEDY)
    for pages in (40, 6):
        requests, seen = served_and_seen(emptied(given, pages), asks([0.0] * 5))
        assert given.verified > 30 and 10 < given.accepted < 2 * given.verified, given.accepted
        assert_of_plain_forward(model(kind), seen)
        admissions = [request.samples[0].sequence.admissions for request in requests]
        assert (max(admissions) > 1) == (pages == 6) or kind == "windows alone"
        assert requests[-1].output.num_cached_tokens == 2 * PAGE or pages == 6
    assert len(given.runner.compiled) == 8  # as before these requests


@exhaustive
@pytest.mark.parametrize("depths", quick([2, 1, 3]))
def test_layers_that_know_the_next_tokens_save_steps(depths):
    """Of one depth, of fewer than guesses, and of as many; at every temperature."""
    plain = with_few_programs(tiny_engine(knowing(depths)))
    given = guessing(knowing(depths))
    counts = []
    for each in (plain, given):
        requests = [each.add(prompt, params) for prompt, params in asks()]
        steps = 0
        while each.has_work:
            each.step()
            steps += 1
        counts.append((texts(requests), steps))
    (wanted, slow_steps), (found, steps) = counts
    assert found == wanted and steps < 0.4 * slow_steps
    assert given.accepted > 0.9 * GUESSES * given.verified


@slow
@exhaustive
@pytest.mark.parametrize("depths, guesses", [(2, 3), (2, 1), (1, 1)])
def test_depths_and_guesses_of_other_numbers_change_no_token(depths, guesses):
    given = guessing(model("keys and values", depths), drafts=guesses)
    assert texts(served(given, asks())) == plain_texts("keys and values", depths)
    assert given.accepted > 10


MESHES = [
    ("keys and values", {"tp": 2}),
    ("experts", {"dp": 1, "ep": 2, "tp": 2}),
    ("latent", {"dp": 2, "tp": 2}),
]


@exhaustive
@pytest.mark.parametrize("kind, mesh", MESHES)
def test_meshes_guess_as_one_device_does(kind, mesh):
    given = guessing(model(kind), mesh, draws=GREEDY)
    _, seen = served_and_seen(given, asks([0.0] * 5))
    assert_of_plain_forward(model(kind), seen)


FORMS = [{"cache_dtype": "fp8"}, {"weight_dtype": "fp8"}, {"batch_invariant": True}]


@slow
@exhaustive
@pytest.mark.parametrize("options", FORMS)
def test_bits_of_8_and_of_no_company_take_guesses(options):
    given = guessing(knowing(), **options)
    plain = with_few_programs(tiny_engine(knowing(), **options))
    assert texts(served(given, asks())) == texts(served(plain, asks()))
    assert given.accepted > 0.9 * GUESSES * given.verified


RULES = [
    {"structured": {"regex": "(ab|cd){9}e"}},
    {"allowed_token_ids": [5, 6]},
    {"logit_bias": {7: 9.0}},
    {"repetition_penalty": 1.3},
    {"min_tokens": 20, "stop_token_ids": [*range(100)]},
    {"bad_words": ["ab", "q"]},
]


@slow
@exhaustive
def test_rules_and_forms_take_guesses_or_go_without():
    pytest.importorskip("llguidance")
    byte = load_tokenizer("byte")
    wide = tiny_model("keys and values", vocab_size=260, num_nextn_predict_layers=1)
    how = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
    wanted = [([65], SamplingParams(**rule, **how)) for rule in RULES]
    found = []
    for options in ({}, {"drafts": GUESSES, "drafter": "mtp"}):
        options |= {"tokenizer": byte, "eos": (byte.eod_id,)}
        given = with_few_programs(tiny_engine(wide, **options))
        found.append(texts(served(given, wanted)))
    assert found[0] == found[1] and given.verified > 20


@exhaustive
def test_each_row_guesses_with_its_own_adapter(tmp_path):
    base = model("keys and values")
    specs = base.definition.specs
    write_adapter(tmp_path, base.cfg, specs, drawn_adapters(specs))
    stacked = with_stack(base, [tmp_path])
    assert "q_lora" in stacked.params["mtp_1"]["block"]["attention"]
    wanted = [
        (prompt, params.model_copy(update={"adapter": name}))
        for (prompt, params), name in zip(asks([0.0] * 5), [None, "a"] * 3, strict=False)
    ]
    given = guessing(stacked, draws=GREEDY, adapters=["a"])
    _, seen = served_and_seen(given, wanted)
    assert {adapter for *_, adapter in seen} == {0, 1}
    assert_of_plain_forward(stacked, seen)


def test_models_without_such_layers_and_unknown_methods_are_refused():
    plain = tiny_model("keys and values")
    for drafter, drafts, message in (
        ("mtp", 3, "speculative_method=mtp .* model of 0 layers"),
        ("eagle", 3, "speculative_method=eagle: give one of ngram, mtp"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_engine(plain, drafts=drafts, drafter=drafter)
    with pytest.raises(UserError, match="num_speculative_tokens=0"):
        limits = Limits(rows=2, chunk=32, length=80)
        tiny_engine(model("keys and values"), limits=limits, drafter="mtp")
