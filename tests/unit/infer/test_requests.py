"""Requests: mistakes of parameters, ids of a vocabulary, and one sample while it is made."""

import numpy as np
import pytest

from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError
from mjax.infer.records import row_rules
from mjax.infer.requests import Answer, SamplingParams, bits_of, text_stream, token_rules
from mjax.infer.sample import Sampling

BYTES = load_tokenizer("byte")
VOCAB = 300
END = BYTES.eod_id

WRONG = {
    "n": [0, -1, 2000, True, "2", 1.5, None],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None, True, [1]],
    "top_k": [-2, 2**31, 10**30, 1.5, "5", True],
    "top_p": [0, -0.1, 1.01, float("nan"), "x"],
    "min_p": [-0.1, 1.01, float("nan")],
    "repetition_penalty": [0, -1.0, float("inf"), float("nan")],
    "presence_penalty": [2.1, -2.1, float("nan"), "x"],
    "frequency_penalty": [2.1, -2.1, float("-inf")],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "max_tokens": [0, -1, 2**31, 1.5, "9", True],
    "min_tokens": [-1, 2**31, 17, None],
    "stop": ["", [""], 5, [5], [None], ["x"] * 65, "x" * 10_001, {"a": 1}],
    "stop_token_ids": [5, [-1], [2**31], ["5"], [1.5], [True], range(1025)],
    "ignore_eos": [1, "yes", None],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [0],
    "detokenize": [0],
    "bad_words": [[""], [5], ["x"] * 65],
    "logit_bias": [5, [1], {-1: 1.0}, {"x": 1.0}, {5: 101}, {5: float("nan")}, {5: "1"}, {None: 1}]
    + [{"9" * 5000: 1.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [5, [], [-1], ["a"]],
    "logprobs": [-1, 21, True, 1.5, "1"],
    "prompt_logprobs": [-1, 21, True],
    "structured": [5, {}, {"regex": ""}, {"regex": "a", "grammar": "b"}, {1: 2}, "a+"],
    "priority": [2**31, "high", 0.5],
    "cache_salt": ["", 5],
    "adapter": ["", 5],
    "guided_json": [{}],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_one_line_with_its_name(name):
    for value in WRONG[name]:
        with pytest.raises(UserError, match=name) as error:
            SamplingParams(**{name: value})
        text = str(error.value)
        assert text.startswith("SamplingParams: ") and "\n" not in text and len(text) < 300
    with pytest.raises(UserError, match=r"^SamplingParams: a.nb: there is no such field$"):
        SamplingParams(**{"a\nb": 1})
    assert WRONG.keys() >= SamplingParams.model_fields.keys()


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"n": 2}, "n=2 .*temperature=0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 .*max_tokens=4"),
        ({"structured": {"regex": "a"}, "min_tokens": 1}, "structured with min_tokens"),
        ({"structured": {"regex": "a"}, "ignore_eos": True}, "structured with ignore_eos"),
        ({"structured": {"regex": "a"}, "allowed_token_ids": [1]}, "structured with allowed"),
        ({"structured": {"regex": "a"}, "bad_words": ["a"]}, "structured with bad_words"),
        ({"stop": "a", "detokenize": False}, "stop with detokenize=False"),
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "allowed_token_ids with bad_words"),
    ],
)
def test_fields_that_contradict_each_other_are_named(fields, names):
    with pytest.raises(UserError, match=names):
        SamplingParams(**fields)


def test_fields_may_come_as_json_has_them():
    params = SamplingParams(stop="x", logit_bias={"5": 1}, top_k=-1, n=2, temperature=1)
    assert params.stop == ("x",) and params.logit_bias == {5: 1.0} and params.max_tokens == 16
    assert params.sampling == Sampling(temperature=1.0)
    assert SamplingParams(max_tokens=None, min_tokens=99).sampling == Sampling()


# ---- ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_one_line(name):
    value = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
    with pytest.raises(UserError, match=f"{name}: 300 is outside the vocabulary of 300"):
        token_rules(SamplingParams(**{name: value}), BYTES, VOCAB)


def test_what_needs_a_tokenizer_says_so():
    for name in ("stop", "bad_words"):
        with pytest.raises(UserError, match=f"{name} needs a tokenizer"):
            token_rules(SamplingParams(**{name: "x"}), None, VOCAB)
    only_ends = SamplingParams(allowed_token_ids=[END], min_tokens=1)
    with pytest.raises(UserError, match="allowed_token_ids are all end tokens"):
        token_rules(only_ends, BYTES, VOCAB, [END])


def test_bits_are_ids():
    ids = [0, 31, 32, 63, 64, 299]
    bits = bits_of(ids, VOCAB)
    assert bits.shape == (10,) and bits.dtype == np.uint32
    np.testing.assert_array_equal(
        np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")), ids
    )


# ---- a sample ----------------------------------------------------------------------------------


def answer(text=b"", tokenizer=BYTES, **fields):
    """A sample that was given the bytes of a text, and the pieces that came out."""
    params = SamplingParams(**{"max_tokens": 100} | fields)
    made = Answer(params, token_rules(params, tokenizer, VOCAB, [END]), tokenizer, [65, 66])
    pieces = [made.push(token, -1.0, -0.5, {7: -0.1}, version=3) for token in text]
    assert "".join(pieces) == made.output.text
    return made


def ended(made):
    out = made.output
    assert len(out.token_ids) == len(out.logprobs) == len(out.weight_versions)
    return out.text, len(out.token_ids), out.finish_reason, out.stop_reason


def test_a_sample_ends_at_ends_stops_and_its_length():
    assert ended(answer(b"abc")) == ("abc", 3, None, None)
    assert ended(answer([97, END, 98])) == ("a", 2, "stop", None)
    assert ended(answer([97, END, 98], ignore_eos=True)) == ("ab", 3, None, None)
    assert ended(answer(b"abc", stop_token_ids=[98])) == ("a", 2, "stop", 98)
    keeps = {"include_stop_str_in_output": True}
    assert ended(answer(b"abc", stop_token_ids=[98], **keeps)) == ("ab", 2, "stop", 98)
    assert ended(answer(b"abcd", stop=["bc", "zz"])) == ("a", 3, "stop", "bc")
    assert ended(answer(b"abcd", stop=["bc"], **keeps)) == ("abc", 3, "stop", "bc")
    assert ended(answer(b"abcd", max_tokens=2)) == ("ab", 2, "length", None)
    assert ended(answer(b"abcd", max_tokens=2, stop="bcd")) == ("ab", 2, "length", None)
    assert ended(answer(b"abcd", max_tokens=2, stop="b")) == ("a", 2, "stop", "b")
    assert ended(answer("é".encode()[:1], max_tokens=1)) == ("\ufffd", 1, "length", None)
    made = answer(b"ab", stop="bcd")
    assert made.output.text == "a" and made.finish("abort") == "b" and made.finish("length") == ""
    assert ended(made) == ("ab", 2, "abort", None) and made.push(99) == ""


def test_nothing_ends_a_sample_before_min_tokens():
    text = [97, 98, 97, 98, 97, 98]
    assert ended(answer(text, stop="ab", min_tokens=3)) == ("ab", 4, "stop", "ab")
    assert ended(answer(text, stop="ba", min_tokens=3)) == ("a", 3, "stop", "ba")
    assert ended(answer(text, stop_token_ids=[97], min_tokens=2)) == ("ab", 3, "stop", 97)
    made = answer(b"ab", stop_token_ids=[97], min_tokens=4)
    assert sorted(made.banned()) == sorted(made.banned(flying=1)) == [97, END]
    assert made.banned(flying=2) == [] and not made.waits


def test_log_probs_come_as_asked():
    out = answer(b"ab", logprobs=1).output
    assert out.top_logprobs == [{7: -0.1, 97: -1.0}, {7: -0.1, 98: -1.0}]
    assert answer(b"a", logprobs=0).output.top_logprobs == [{97: -1.0}]
    assert out.logprobs == [-1.0, -1.0] and out.processed_logprobs == [-0.5, -0.5]
    assert out.weight_versions == [3, 3] and answer(b"ab").output.top_logprobs is None


def test_bad_words_are_banned_where_they_would_end():
    made = answer(b"xab", bad_words=["abc", "q", "bd"])
    assert sorted(made.banned()) == sorted([99, 100, 113]) and made.waits
    assert answer(b"xa", bad_words=["abc"]).banned() == []
    assert answer(b"b", bad_words=["abc", "q"]).banned() == [113]
    assert not answer(bad_words=["q"]).waits
    # A word after a space is another token, as in vocabularies of byte pairs.
    words = {"bad": [5], " bad": [6], "worse": [7, 8], " worse": [9]}
    pairs = Tokenizer(VOCAB, END, lambda texts: [words[t] for t in texts], lambda ids: "")
    found = token_rules(SamplingParams(bad_words=["bad", "worse"]), pairs, VOCAB).bad_words
    assert found == ((5,), (6,), (7, 8))


def test_special_tokens_are_shown_if_asked():
    def decode(ids):
        return "".join(chr(i) for i in ids if i != 42)

    def whole(ids):
        return "".join("<|x|>" if i == 42 else chr(i) for i in ids)

    tokenizer = Tokenizer(VOCAB, END, None, decode, decode_whole=whole)
    text = [97, 42, 98]
    assert answer(text, tokenizer).output.text == "ab"
    assert answer(text, tokenizer, skip_special_tokens=False).output.text == "a<|x|>b"
    shown = {"stop": "x|>b", "skip_special_tokens": False}
    assert answer(text, tokenizer, **shown).output.text == "a<|"
    assert answer(text, None).output.text == ""


def test_text_is_exact_with_any_stops():
    """Against a search of the whole text after each token."""
    rng, cuts = np.random.default_rng(0), 0

    def decode(ids):
        return "".join(["a", "b", "ab", "aab"][i] for i in ids)

    tokenizer = Tokenizer(4, None, None, decode)
    for _ in range(200):
        ids = rng.integers(0, 4, 12).tolist()
        stops = ["".join(rng.choice(["a", "b"], rng.integers(2, 6))) for _ in range(2)]
        keep, least = bool(rng.random() < 0.5), int(rng.integers(0, 5))
        params = SamplingParams(stop=stops, include_stop_str_in_output=keep, min_tokens=least)
        stream, text = text_stream(params, tokenizer, []), ""
        for made, id in enumerate(ids, 1):
            text += stream.push(id, made >= least)
            if stream.stopped:
                break
        text += stream.close()
        before = len(decode(ids[: max(made, least) - 1])) if made > 1 else 0
        assert stream.stopped or text == decode(ids)
        if stream.stopped:
            end = len(text) if keep else len(text) + len(stream.stopped_by)
            assert decode(ids[:made]).startswith(text) and end <= len(decode(ids[:made]))
            assert decode(ids)[:end].endswith(stream.stopped_by)
            assert end > before or made <= least, "it was complete before"
            cuts += 1
    assert 30 < cuts < 200


def test_rows_of_rules_stand_apart():
    biased, limited = answer(logit_bias={5: 2.0, 9: -1.0}), answer(allowed_token_ids=[3])
    answers = [biased, None, limited, answer(b"b", bad_words=["ba"], min_tokens=2)]
    rules = row_rules(answers, [0, 0, 0, 0], VOCAB)
    assert rules.bias_ids.shape == rules.bias_values.shape == rules.banned.shape == (4, 16)
    assert rules.bias_ids[0, :3].tolist() == [5, 9, -1] and (rules.bias_ids[1:] == -1).all()
    assert rules.bias_values[0, :3].tolist() == [2, -1, 0]
    assert (rules.allowed[[0, 1, 3]] == 2**32 - 1).all() and rules.allowed[2, 0] == 8
    assert rules.banned[3, :3].tolist() == [END, 97, -1] and (rules.banned[:3] == -1).all()
    assert row_rules(answers, [0, 0, 0, 1], VOCAB).banned[3, 0] == 97
    assert row_rules([answer(), None], [0, 0], VOCAB) == type(rules)()
    wide = answer(logit_bias=dict.fromkeys(range(100), 1.0))
    assert row_rules([wide], [0], VOCAB).bias_ids.shape == (1, 256)
