"""`python -m mjax.generate` and `mjax.evaluate`: what they print, and exact perplexity."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import mjax.interop.pretrained
from mjax import convert
from mjax.checkpoint.base.companion_files import end_ids
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.evaluate import __main__ as evaluate
from mjax.generate import __main__ as command
from mjax.generate.options import image_scale
from mjax.infer import small_engine
from mjax.infer.requests import SamplingParams
from mjax.models import build, split
from mjax.sharding.mesh import parallel_of
from mjax.sharding.rules import param_partitions
from tests.generation import engine_for

CFG = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4},
    initializer_range=0.3,
    max_position_embeddings=64,
)
BYTES = load_tokenizer("byte")
TEXT = "What is scored once is scored exactly, naïve 🙂 or not; " * 2
BASE = ["--ckpt", "X", "--tokenizer", "byte"]


@pytest.fixture(scope="module")
def weights():
    return split(build(CFG, nnx.Rngs(0)))


@pytest.fixture
def model(weights, monkeypatch, tmp_path):
    """What --ckpt gives, whatever its value; its folder has a chat template."""
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 256]}')

    def load(path, mesh=None, dtype="float32"):
        definition, params = weights
        params = jax.tree.map(jnp.copy, params)  # the command frees what it is given
        if mesh is not None:
            places = param_partitions(definition.specs, parallel_of(mesh))
            places = jax.tree.map(lambda p: NamedSharding(mesh, p), places)
            params = jax.device_put(params, places)
        return mjax.interop.pretrained.Pretrained(CFG, definition, params, mesh, tmp_path)

    monkeypatch.setattr(mjax.interop.pretrained, "from_pretrained", load)
    return load("X")


@pytest.fixture(scope="module")
def compiled(weights):
    options = {"tokenizer": BYTES, "eos": (0, 256)}
    return engine_for((*weights, CFG), [[1] * 20] * 2, 16, **options)


@pytest.fixture
def engine(compiled, model, monkeypatch):
    """Stands in for the command's own, to compile once."""
    monkeypatch.setattr(small_engine, "small_engine", lambda *a, **k: compiled)
    return compiled


def test_prompts_files_and_chats_give_what_the_engine_gives(engine, tmp_path, capsys):
    def printed(*argv):
        command.main([*BASE, "--max-new-tokens", "12", *argv])
        return capsys.readouterr().out

    def expected(*prompts):
        ids = [BYTES.encode(p) for p in prompts]
        params = SamplingParams(max_tokens=12)
        return [r.text for r in small_engine.completed(engine, ids, params)]

    assert printed("--prompt", "ab") == expected("ab")[0] + "\n"
    several = printed("--prompt", "ab", "--prompt", "xyz")
    assert several == "== prompt 0\n{}\n== prompt 1\n{}\n".format(*expected("ab", "xyz"))
    chat = printed("--chat", "--system", "Be", "--prompt", "ab")
    assert chat == expected("<s>Be<u>ab<a>")[0] + "\n"
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    assert printed("--prompt-file", str(tmp_path / "p.jsonl")) == expected("<u>ab<a>")[0] + "\n"
    (tmp_path / "p.txt").write_bytes(b"a\r\nb")
    assert printed("--prompt-file", str(tmp_path / "p.txt")) == expected("a\r\nb")[0] + "\n"


@pytest.mark.parametrize("tp", ["1", "2"])
def test_logprobs_are_printed_a_line_a_token(model, compiled, capsys, tp):
    command.main([*BASE, "--max-new-tokens", "9", "--prompt", "ab", "--logprobs", "--tp", tp])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    params = SamplingParams(max_tokens=9)
    (made,) = small_engine.completed(compiled, [BYTES.encode("ab")], params)
    assert [int(r[0]) for r in rows] == made.token_ids
    np.testing.assert_allclose([float(r[1]) for r in rows], made.logprobs, atol=2e-4)
    assert "".join(json.loads(r[2]) for r in rows) == made.text


def test_settings_reach_the_sampler(engine, capsys):
    def printed(*argv):
        command.main([*BASE, "--max-new-tokens", "16", "--prompt", "ab", *argv])
        return capsys.readouterr().out

    hot = ["--temperature", "3"]
    assert printed(*hot) == printed(*hot) != printed(*hot, "--seed", "1")
    assert printed(*hot, "--top-k", "1") == printed() == printed(*hot, "--min-p", "1")
    assert printed(*hot, "--top-p", "1e-9") == printed()
    assert printed("--repetition-penalty", "9e9") != printed()


@pytest.mark.parametrize(
    "argv,message",
    [
        ([], "nothing to continue"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2.0"),
        (["--prompt-file", "none.txt"], "none.txt"),
        (["--prompt", "a", "--tp", "9"], "--tp 9: there are 8 devices"),
        (["--prompt", "a", "--tp", "3"], "=4 is not divisible over 3 devices of tp"),
        (
            ["--prompt", "a", "--max-new-tokens", "64"],
            "1 tokens and up to 64 new ones are more than 64",
        ),
    ],
)
def test_mistakes_are_one_line(model, argv, message):
    with pytest.raises(UserError, match=message):
        command.main([*BASE, *argv])


def test_end_ids_come_from_the_model_before_the_tokenizer(tmp_path):
    assert end_ids(None, BYTES) == end_ids(tmp_path, BYTES) == (256,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert list(end_ids(tmp_path, BYTES)) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert list(end_ids(tmp_path, BYTES)) == [0, 9]


def test_prefix_is_what_the_tokenizers_own_template_puts_first(tmp_path):
    from tokenizers import Tokenizer, models, processors

    inner = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "</s>": 2}, unk_token="<s>"))
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).prefix == ()
    ends = [("<s>", 0), ("</s>", 2)]
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.prefix == (0,) and loaded.encode("a") == [1]


# ---- perplexity --------------------------------------------------------------------------------


@pytest.mark.parametrize("length,stride,tp", [(10, 10, 1), (10, 3, 2), (16, 1, 1), (64, 64, 2)])
def test_perplexity_equals_a_direct_computation(model, tmp_path, capsys, length, stride, tp):
    ids = [256, *BYTES.encode(TEXT)]
    log_p = jax.jit(lambda t: jax.nn.log_softmax(model.model(t)))
    total, done = 0.0, 0  # every target in turn, by the last window that could first hold it
    while done < len(ids) - 1:
        end = min(len(ids) - 1, done + (stride if done else length))
        begin = max(0, end - length)
        scores = np.asarray(log_p(np.asarray([ids[begin:end]])), np.float64)[0]
        for at in range(done, end):
            total -= scores[at - begin, ids[at + 1]]
        done = end
    path = tmp_path / "text"
    path.write_text(TEXT)
    sizes = ["--seq-length", str(length), "--stride", str(stride), "--tp", str(tp)]
    evaluate.main(["perplexity", *BASE, "--file", str(path), *sizes])
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == len(TEXT.encode())
    assert found["nll_per_token"] == pytest.approx(total / found["tokens"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / found["tokens"]), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(TEXT.encode()))


def test_perplexity_counts_the_bytes_of_a_file_as_they_are(model, tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"a\r\nb\rc\n")
    evaluate.main(["perplexity", *BASE, "--file", str(tmp_path / "text"), "--seq-length", "10"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 7


def test_windows_score_every_token_once_with_as_much_context_as_there_is():
    for targets in range(1, 40):
        for length in range(1, targets + 1):
            for stride in {1, length // 2 + 1, length}:
                scored = []
                for begin, first, end in evaluate.windows(targets, length, stride):
                    assert end - begin == length and first >= begin
                    assert first == 0 or first - begin >= length - stride
                    scored += range(first, end)
                assert scored == list(range(targets))


@pytest.mark.parametrize("sizes", [(65, 10), (10, 11), (10, 0)])
def test_sizes_that_do_not_fit_are_one_line(model, sizes):
    with pytest.raises(UserError, match=f"--seq-length {sizes[0]} --stride {sizes[1]}"):
        evaluate.score(model, [1, 2, 3], *sizes)


def test_images_are_scaled_as_the_run_or_the_publisher_says(tmp_path):
    assert image_scale(tmp_path / "x") == (None, None)
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert image_scale(tmp_path) == tuple(said.values())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | {"do_normalize": False}))
    assert image_scale(tmp_path) == (None, None)
    step = tmp_path / "run" / "checkpoints" / "4"
    (step / "state").mkdir(parents=True)
    (step / "meta").mkdir()
    record = {"config": {"data": {"images": {"mean": [0.25], "std": [0.75]}}}}
    (step / "meta" / "metadata").write_text(json.dumps(record))
    for path in (tmp_path / "run", step.parent, step):
        assert image_scale(path) == ([0.25], [0.75])


def test_the_model_part_of_a_run_is_what_training_from_it_needs(tmp_path, monkeypatch, capsys):
    definition, params = split(build(CFG, nnx.Rngs(0)))
    write_weights(tmp_path / "ckpt", array_source(CFG, params), definition.specs)
    monkeypatch.setattr("sys.argv", ["convert", "config", "--ckpt", str(tmp_path / "ckpt")])
    assert convert.main() == 0
    (tmp_path / "own.yaml").write_text("data: {mock: true}\n" + capsys.readouterr().out)
    assert load(tmp_path / "own.yaml", ["data.seq_length=64"]).model == CFG
