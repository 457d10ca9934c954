"""Structured output: whatever is drawn from the masks has the form that was asked for."""

import json
import re

import numpy as np
import pytest

from mjax.data.base.tokenizer import load_tokenizer, train_tokenizer
from mjax.errors import UserError
from mjax.infer.requests import Answer, SamplingParams, Structured, bits_of, token_rules

pytest.importorskip("llguidance")
from mjax.infer.grammar import Grammars  # noqa: E402

VOCAB = 350  # more than any tokenizer here has
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["é", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["bytes", "pairs"])
def grammars(request, tmp_path_factory):
    tokenizer = load_tokenizer("byte")
    if request.param == "pairs":
        text = '{"name": "x", "age": 12, "tags": ["b"]} é ü 日本 yes no'
        folder = tmp_path_factory.mktemp("pairs")
        tokenizer = train_tokenizer([text] * 20, 320, folder / "tokenizer.json")
    return Grammars(tokenizer, VOCAB, [tokenizer.eod_id]), tokenizer


def allowed_by(matcher):
    return np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))


def drawn(grammars, form, seed, **fields):
    """A sample of uniform draws from what the masks allow, to its end."""
    found, tokenizer = grammars
    params = SamplingParams(structured=form, **{"max_tokens": 200} | fields)
    rules = token_rules(params, tokenizer, VOCAB, [tokenizer.eod_id])
    matcher, rng = found.matcher(form), np.random.default_rng(seed)
    made = Answer(params, rules, tokenizer, [65], matcher=matcher)
    assert made.waits
    while made.output.finish_reason is None:
        ids = allowed_by(matcher)
        assert len(ids) and ids.max() < tokenizer.vocab_size, "padded ids are never allowed"
        made.push(int(rng.choice(ids)))
    return made.output


def test_json_has_its_schema(grammars):
    for seed in range(12):
        out = drawn(grammars, Structured(json_schema=PERSON), seed)
        value = json.loads(out.text)
        assert out.finish_reason == "stop" and value.keys() == {"name", "age", "tags"}
        assert len(value["name"]) <= 4 and 0 <= value["age"] <= 99 and type(value["age"]) is int
        assert len(value["tags"]) <= 3 and {*value["tags"]} <= {"é", "b"}
        assert out.text.startswith('{"name": "'), "white space as Python's json has it"


@pytest.mark.parametrize("regex", ["(yes|no){2,4}", r"-?[0-9]{1,3}(\.[0-9]{1,2})?", "é日|ab?c"])
def test_text_matches_its_regex(grammars, regex):
    found = {drawn(grammars, Structured(regex=regex), seed).text for seed in range(10)}
    pairs = grammars[1].vocab_size > 257  # a byte above 127 is no token of known bytes otherwise
    assert all(re.fullmatch(regex, text) for text in found) and (len(found) > 1 or not pairs)


def test_a_grammar_of_rules_is_followed(grammars):
    form = Structured(grammar='start: "(" start ")" | "x"')
    for seed in range(5):
        text = drawn(grammars, form, seed).text
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_guesses_are_looked_at_and_not_taken(grammars):
    found, tokenizer = grammars
    matcher, end = found.matcher(Structured(regex="abcd")), tokenizer.eod_id
    ids = [tokenizer.encode(letter)[0] for letter in "abcd"]
    counts = [matcher.allowed_drafts(given) for given in ([], ids, ids[:2] * 2, ids[1:])]
    assert counts == [0, 4, 2, 0]
    masks = matcher.masks([*ids, end])
    wanted = [bits_of([id], 32 * found._words) for id in [*ids, end, end]]
    np.testing.assert_array_equal(masks, wanted)
    np.testing.assert_array_equal(matcher.mask(), masks[0])
    for id in ids:
        matcher.advance(id)
    assert matcher.is_complete and allowed_by(matcher).tolist() == [end]
    assert not matcher.allowed_drafts([end])


def test_a_matcher_that_gives_up_ends_its_sample(grammars):
    found, tokenizer = grammars
    form = Structured(regex="ab")
    params = SamplingParams(structured=form)
    rules = token_rules(params, tokenizer, VOCAB, [tokenizer.eod_id])
    made = Answer(params, rules, tokenizer, [65], matcher=found.matcher(form))
    made.push(tokenizer.encode("z")[0])
    assert made.output.finish_reason == "error" and "grammar" in made.output.stop_reason


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a"},
        {"regex": "[z-a]"},
        {"json_schema": {"type": "nope"}},
        {"json_schema": {"$ref": "http://example.com/schema"}},
        {"json_schema": {"maximum": float("nan")}},
        {"json_schema": {"const": "x" * 1_000_001}},
        {"json_schema": {"const": {1, 2}}},
        {"grammar": "start: ("},
        {"grammar": "x"},
        {"grammar": "start: start"},
    ],
)
def test_a_form_that_cannot_be_read_is_one_line(grammars, form):
    with pytest.raises(UserError, match="^SamplingParams: structured: ") as error:
        grammars[0].matcher(Structured(**form))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_deep_schema_is_one_line(grammars):
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(UserError, match="structured"):
        grammars[0].matcher(Structured(json_schema=deep))


def test_a_model_without_an_end_is_refused():
    with pytest.raises(UserError, match="no end token"):
        Grammars(load_tokenizer("byte"), VOCAB, [])
