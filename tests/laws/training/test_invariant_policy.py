"""Law: with `batch_invariant` a trainer's log-probabilities are its engine's, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.models import build, split
from mjax.models.base.context import Context, Kernels, tokens_of
from mjax.models.runtime.token_blocks import TokenBlocks
from mjax.post import TrainingClient
from mjax.post.reinforce import reinforce_defaults
from mjax.sharding.mesh import make_mesh
from tests.marks import exhaustive, quick, slow

KEYS = """model.vocab_size=257 model.hidden_size=32 model.num_hidden_layers=2
    model.attention.num_attention_heads=4 model.attention.num_key_value_heads=2
    model.intermediate_size=96 model.initializer_range=0.2 data.tokenizer=byte data.seq_length=200
    train.global_batch_size=4 reinforce.max_new_tokens=40 schedule.lr=1e-2
    schedule.warmup_steps=0 schedule.decay=constant""".split()
QWEN3 = ["model.attention.qk_norm=true", "model.tie_word_embeddings=true"]
WINDOWS = ["model.layer_pattern=LG", "model.attention.sliding_window=20"]
WARM = ["reinforce.sampling={temperature: 0.6}", "train.remat=full"]
AGAIN = ["reinforce.updates_per_rollout=2", "reinforce.correction=truncate"]
TWO = ["mesh.dp=2", "mesh.zero=3", "train.micro_batch_size=1"]
CASES = {
    "Llama, fp32": (["precision.compute=float32"], 1),
    "Llama": ([], 1),
    "Qwen3": (QWEN3, 1),
    "Qwen3, warm, remat": (QWEN3 + WARM, 1),
    "windows, biases": (WINDOWS + ["model.attention.attention_bias=true"], 1),
    "two updates": (AGAIN, 1),
    "two devices": (TWO, 2),
}


def config(folder, *keys, engine="rows: 4, chunk: 64, batch_invariant: true"):
    keys = [f"run.dir={folder}", *KEYS, f"reinforce.engine={{{engine}}}", *keys]
    return load(None, keys, reinforce_defaults)


@slow
@pytest.mark.parametrize("name", CASES)
def test_trainer_and_engine_agree_to_the_bit_after_updates_too(tmp_path, name):
    """Groups of answers of unequal length in packed rows, and second turns of some."""
    keys, devices = CASES[name]
    cfg = config(tmp_path, *keys)
    client = TrainingClient(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]))
    rng = np.random.default_rng(0)
    for step in range(3):
        prompts = [rng.integers(0, 256, size).tolist() for size in (3, 17, 90, 70)]
        groups = client.sample(prompts, n=4)
        turns = [answer.ids.tolist() + [7] for answer in groups[0]]
        groups += client.sample(turns)
        answers = [answer for group in groups for answer in group]
        own = client.log_probs(answers)
        for found, answer in zip(own, answers, strict=True):
            sampled = answer.is_sampled
            assert sampled.sum() > 0
            assert found[sampled].tobytes() == answer.log_probs[sampled].tobytes()
        values = {"advantages": rng.normal(size=len(answers))}
        if cfg.reinforce.reads_old:
            values["old_log_probs"] = own
        figures = client.forward_backward(answers, "policy", **values)
        assert figures["sampling/sampling_logp_difference/mean"] == 0
        assert abs(figures["sampling/token_mult_prob_error"] - 1) < 1e-6  # a sum by its count
        assert np.isfinite(client.optim_step()["grad_norm"]), step


@exhaustive
def test_the_gradient_is_that_of_the_plain_forward_up_to_rounding(tmp_path):
    found = []
    for mode in ("true", "false"):
        cfg = config(tmp_path, "precision.compute=float32", engine=f"batch_invariant: {mode}")
        client = TrainingClient(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
        if not found:
            answers = client.sample([[1, 2, 3], [9] * 80], n=3)[0]
        client.forward_backward(answers, "policy", advantages=[1.0, -2.0, 0.5])
        client.optim_step()
        found.append(client.trainer.params())
    for ours, plain in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16"], 0))
def test_the_bits_of_a_document_do_not_depend_on_its_row(dtype):
    small = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "initializer_range": 0.3,
        "attention.num_key_value_heads": 2,
    }
    cfg = ModelConfig(**nested(small))
    definition, params = split(build(cfg, nnx.Rngs(0)))
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    ctx = Context(kernels=Kernels(blocks=TokenBlocks()))

    @jax.jit
    def outputs(tokens, positions, segments):
        info = tokens_of(tokens.shape, positions, segments)
        x = definition.bind(params).activations(tokens, info, ctx)
        return x.astype(jnp.float32)

    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 257, size) for size in (5, 90, 64, 33)]

    def packed(order):
        fields, begins = np.zeros((3, 2, 160), np.int32), {}
        for number, which in enumerate(order):
            row, begin = number % 2, 100 * (number // 2)
            own = documents[which][: 160 - begin]
            begins[which] = row, begin, len(own)
            place = row, slice(begin, begin + len(own))
            fields[0][place], fields[1][place] = own, np.arange(len(own))
            fields[2][place] = number + 1
        x = np.asarray(outputs(*fields))
        return {which: x[r, b : b + n] for which, (r, b, n) in begins.items()}

    first = packed([1, 2, 0, 3])
    for order in ([2, 1, 3, 0], [1, 2, 3, 0], [3, 0, 2, 1]):
        for which, x in packed(order).items():
            size = min(len(x), len(first[which]))
            assert x[:size].tobytes() == first[which][:size].tobytes()


@slow
def test_what_does_not_count_may_be_infinite():
    """Off the mask a token function may give infinities, which no gradient sees."""
    small = {"vocab_size": 65, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = build(ModelConfig(**nested(small)), nnx.Rngs(0))
    x, labels = jax.random.normal(jax.random.key(0), (1, 8, 16)), jnp.arange(8)[None]
    mask = jnp.array([[0.0, 0, 0, 0, 1, 1, 1, 1]])
    fields = {"base": jnp.where(mask == 0, 90.0, -5.0)}

    def far(scores, fields):
        assert scores.log_p.shape == fields["base"].shape == (8,)
        return jnp.exp(fields["base"] - scores.log_p), {}

    def slopes(is_invariant):
        ctx = Context(kernels=Kernels(blocks=TokenBlocks() if is_invariant else None))
        return jax.grad(lambda x: model.head_sums(x, labels, mask, ctx, far, fields)["loss"])(x)

    assert jnp.isfinite(slopes(True)).all()
    np.testing.assert_allclose(slopes(True), slopes(False), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    "keys, words",
    [
        (["model.layer_pattern=M", "model.mamba.mamba_num_heads=4"], "model.layer_pattern='M'"),
        (["mesh.tp=2"], "mesh.tp=2"),
        (["lora.rank=4"], "lora.rank=4"),
        (["reinforce.sampling={top_k: 5}"], "reinforce.sampling="),
        (["reinforce.engine={batch_invariant: true, tp: 2}"], "tp is not built to agree"),
        (["reinforce.engine={batch_invariant: 'false'}"], "batch_invariant is 'false'"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path, keys, words):
    with pytest.raises(UserError, match="leave batch_invariant out|true or false") as error:
        config(tmp_path, *keys)
    assert words in str(error.value)


def test_what_changes_nothing_is_not_refused(tmp_path):
    config(
        tmp_path,
        "reinforce.sampling={temperature: 0.7, top_p: 1, top_k: 0}",
        "reinforce.engine={batch_invariant: true, tp: 1, cache_dtype: null}",
    )
