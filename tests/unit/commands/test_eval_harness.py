"""The adapter for lm-evaluation-harness scores and continues text as the model itself does.

Where lm_eval is missing, a bare class stands in for its base class `LM`, of which the adapter uses
nothing; the last test runs the harness itself and needs it.
"""

import importlib
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import mjax.interop.pretrained
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.evaluate import __main__ as evaluate
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Sampling
from mjax.infer.small_engine import completed
from mjax.models import build, split
from tests.generation import complete, engine_for
from tests.marks import slow

REAL = importlib.util.find_spec("lm_eval") is not None
CFG = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4},
    initializer_range=0.3,
    max_position_embeddings=48,
)
# A character is a token, whatever it is; 256 ends a text.
LETTERS = Tokenizer(
    257, 256, lambda texts: [[ord(c) for c in t] for t in texts], lambda ids: "".join(map(chr, ids))
)
PAIRS = [
    ("The cat", " sat"),
    ("The cat ", "sat"),
    ("", "alone"),
    (" ", "alone"),
    ("A much longer context, cut on the left, " * 2, "yes"),
    ("no", ""),
    ("one", "x" * 30),
]


@pytest.fixture(scope="module")
def harness():
    """The module mjax.evaluate.harness."""
    if REAL:
        return importlib.import_module("mjax.evaluate.harness")
    stubs = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    stubs["lm_eval.api.model"].LM = type("LM", (), {})
    sys.modules.update(stubs)
    try:
        return importlib.import_module("mjax.evaluate.harness")
    finally:
        for name in [*stubs, "mjax.evaluate.harness"]:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
    )
    return mjax.interop.pretrained.Pretrained(CFG, *split(build(CFG, nnx.Rngs(0))), None, folder)


@pytest.fixture(scope="module")
def adapter(harness, model):
    return harness.HarnessModel(model, LETTERS, batch_size=3, max_length=32)


@pytest.fixture(scope="module")
def direct(model):
    """ids and how many at the end are scored -> (log-probability, greedy), one row at a time."""
    log_p = jax.jit(lambda tokens: jax.nn.log_softmax(model.model(tokens)))

    def score(ids, scored):
        p = np.asarray(log_p(np.asarray([ids[:-1]], np.int32)))[0][len(ids) - 1 - scored :]
        wanted = np.asarray(ids[len(ids) - scored :], int)
        return p[np.arange(scored), wanted].sum(), bool((p.argmax(-1) == wanted).all())

    return score


def requests(*args):
    return [SimpleNamespace(args=a) for a in args]


@slow
def test_loglikelihoods_equal_a_direct_computation(adapter, direct):
    found = adapter.loglikelihood(requests(*PAIRS))
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        spaces = len(context) - len(context.rstrip())
        ids = [256] * (not context.strip()) + [ord(c) for c in context + continuation]
        scored = len(continuation) + spaces
        expected = direct(ids[-33:], scored) if scored else (0.0, True)
        np.testing.assert_allclose(total, expected[0], rtol=1e-5, atol=1e-5)
        assert greedy == expected[1] and isinstance(greedy, bool)
    assert found[0] == pytest.approx(found[1]) and found[2] != found[3]


def test_the_greedy_flag_tells_what_greedy_decoding_makes(adapter, model):
    given = model.definition, model.params, CFG
    made = complete(given, [[ord(c) for c in "The c"]], 8)
    text = LETTERS.decode(made[0].token_ids)
    assert 256 not in made[0].token_ids
    other = text[:-1] + chr((ord(text[-1]) + 1) % 256)
    found = adapter.loglikelihood(requests(("The c", text), ("The c", other)))
    assert [greedy for _, greedy in found] == [True, False]
    np.testing.assert_allclose(found[0][0], sum(made[0].logprobs), rtol=1e-4)


@pytest.mark.parametrize("size", [0, 1, 20, 32, 33, 64, 75])
def test_rolling_scores_every_token_once_with_most_context(adapter, direct, size):
    text = "".join(chr(32 + (i * i) % 90) for i in range(size))
    stream, total, done = [256, *(ord(c) for c in text)], 0.0, 0
    while done < size:  # full windows of 32; the last one reaches back
        end = min(size, done + 32)
        total += direct(stream[max(0, end - 32) : end + 1], end - done)[0]
        done = end
    found = adapter.loglikelihood_rolling(requests((text,), ("other",), (text,)))
    np.testing.assert_allclose([found[0], found[2]], total, rtol=1e-5)
    if REAL and size:
        from lm_eval.utils import get_rolling_token_windows

        tokens = stream[1:]
        theirs = get_rolling_token_windows(tokens, 256, 32, 1)
        rows = [direct([*seen, wanted[-1]], len(wanted))[0] for seen, wanted in theirs]
        np.testing.assert_allclose(found[0], sum(rows), rtol=1e-5)


@slow
def test_generation_stops_at_strings_and_keeps_the_order(adapter, model):
    contexts = ["ab", "a long context " * 4, "xyz", "q", "The cat", ""]
    ids = [[ord(c) for c in text][-20:] or [256] for text in contexts]
    options = {"tokenizer": LETTERS, "eos": (256,)}
    engine = engine_for((model.definition, model.params, CFG), ids, 12, **options)
    free = [row.text for row in completed(engine, ids, SamplingParams(max_tokens=12))]
    plain = {"until": [], "max_gen_toks": 12}
    assert adapter.generate_until(requests(*((c, plain) for c in contexts))) == free
    stop = free[2][4:6]
    until = {"until": stop, "max_gen_toks": 12, "do_sample": False, "temperature": 5.0}
    mixed = requests(("ab", plain), ("xyz", until), ("q", {**until, "until": [stop, free[3][3]]}))
    found = adapter.generate_until(mixed)
    assert found[:2] == [free[0], free[2][: free[2].index(stop)]]
    assert found[2] == free[3][: free[3].index(free[3][3])]


def test_settings_are_read_or_refused(harness, adapter):
    assert harness.settings({}) == (256, (), Sampling())
    given = {"do_sample": True, "top_p": 0.5, "until": ["a", ""], "max_new_tokens": 3}
    assert harness.settings(given) == (3, ("a",), Sampling(temperature=1.0, top_p=0.5))
    with pytest.raises(UserError, match="'num_beams' of a task"):
        harness.settings({"num_beams": 4})
    with pytest.raises(UserError, match="max_gen_toks=32 leaves no room in 32"):
        adapter.generate_until(requests(("a", {"max_gen_toks": 32})))
    with pytest.raises(UserError, match="continuation of 33 tokens"):
        adapter.loglikelihood(requests(("a", "b" * 33)))
    with pytest.raises(UserError, match="--seq-length 49"):
        harness.HarnessModel(adapter._model, LETTERS, max_length=49)


def test_chats_go_through_the_models_template(adapter):
    pytest.importorskip("jinja2")
    text = adapter.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<u>hi<a>" and "message" in adapter.chat_template(True)


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)
    with pytest.raises(UserError, match=r"install mjax\[lm-eval\]"):
        evaluate.main(["harness", "--ckpt", "X", "--tasks", "none"])
    sys.modules.pop("mjax.evaluate.harness", None)


@pytest.mark.skipif(not REAL, reason="needs mjax[lm-eval]")
def test_the_harness_itself_runs(model, direct, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mjax.generate.options, "load_tokenizer", lambda spec: LETTERS)
    monkeypatch.setattr(mjax.interop.pretrained, "from_pretrained", lambda *a, **k: model)
    documents = [{"q": f"Q{i}", "choices": ["yes", "no!"], "gold": i % 2} for i in range(5)]
    (tmp_path / "d.json").write_text("\n".join(map(json.dumps, documents)))
    shared = f"dataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/d.json\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: my_choice\n{shared}test_split: train\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}:'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "ppl.yaml").write_text(
        f"task: my_words\n{shared}test_split: train\noutput_type: loglikelihood_rolling\n"
        "doc_to_text: ''\ndoc_to_target: '{{q}}'\nmetric_list:\n  - metric: word_perplexity\n"
    )
    argv = ["--ckpt", "X", "--tokenizer", "x", "--include-path", str(tmp_path)]
    evaluate.main(["harness", *argv, "--tasks", "my_choice,my_words"])
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{") :])
    right, nll = 0, 0.0
    for d in documents:
        scores = [direct([ord(c) for c in f"{d['q']}: {c}"], len(c) + 1)[0] for c in d["choices"]]
        right += int(np.argmax(scores)) == d["gold"]
        nll -= direct([256, *(ord(c) for c in d["q"])], len(d["q"]))[0]
    assert found["my_choice"]["acc,none"] == pytest.approx(right / 5)
    assert found["my_words"]["word_perplexity,none"] == pytest.approx(np.exp(nll / 5), rel=1e-4)
