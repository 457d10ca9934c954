"""Token functions and log-probabilities against whole logits in fp64, differentiated by JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mjax.errors import UserError
from mjax.kernels.base import chooser
from mjax.kernels.base.chooser import Device, choose
from mjax.kernels.loss import cross_entropy as ce
from mjax.kernels.loss import rows as kernel
from mjax.kernels.loss.cross_entropy import cross_entropy, token_sums
from mjax.kernels.loss.log_probs import of_each_token, sequence_sums, token_scores
from mjax.kernels.loss.rows import LossTile, Terms, rows
from mjax.kernels.loss.token_functions import DynamicFineTuning, TokenScores, negative_log_prob
from mjax.sharding.collectives import LOCAL, Parallel
from tests.clipped_ratio import ClippedRatio
from tests.devices import GPU, choose_for
from tests.marks import quick, slow
from tests.triton_interpreter import interpret

TP2 = Parallel(tp=2)


@dataclasses.dataclass(frozen=True)
class WithEntropy:
    """A policy gradient with an entropy bonus, which the gradient follows."""

    reads_entropy = True
    bonus: float = 0.1

    def __call__(self, scores, fields):
        loss = -fields["advantage"] * scores.log_p - self.bonus * scores.entropy**2
        return loss, {"entropy": scores.entropy}


FUNCTIONS = [negative_log_prob, DynamicFineTuning(), ClippedRatio(0.3, 0.1), WithEntropy()]
NAMES = ["nll", "dft", "clipped", "entropy"]
PLAIN = {"temperature": 0.7}
ALL = {"temperature": 1.6, "softcap": 5.0}


def draw(tokens=37, vocab=251, padded=256, width=12, dtype=jnp.float64):
    """x, w with poisoned padding, bias, labels, weights of which some are 0, fields."""
    rng = np.random.default_rng(tokens)
    x, w = (jnp.asarray(rng.normal(size=(n, width)), dtype) for n in (tokens, padded))
    w = w.at[vocab:].set(1e3)
    bias = jnp.asarray(rng.normal(size=padded), dtype)
    labels = jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)
    mask = jnp.asarray(rng.random(tokens) * (rng.random(tokens) < 0.7), dtype)
    log_p = whole(x, w, bias, labels, Terms(vocab)).log_p
    old = jnp.asarray(log_p + 0.5 * rng.normal(size=tokens), dtype)
    advantage = jnp.asarray(rng.normal(size=tokens), dtype).at[::5].set(0)
    return x, w, bias, labels, mask, {"old_log_prob": old, "advantage": advantage}


def whole(x, w, bias, labels, terms):
    """Scores from whole logits."""
    z = (x @ w.T + bias)[:, : terms.vocab_size]
    if terms.softcap is not None:
        z = terms.softcap * jnp.tanh(z / terms.softcap)
    log_p = jax.nn.log_softmax(z / terms.temperature)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return TokenScores(jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0], entropy)


def reference_loss(function, terms, labels, mask, fields, x, w, bias):
    """(the loss, statistics) in plain formulas, not by the functions themselves."""
    log_p, entropy = whole(x, w, bias, labels, terms)
    advantage, sg = fields["advantage"], jax.lax.stop_gradient
    ratio = jnp.exp(log_p - fields["old_log_prob"])
    if isinstance(function, DynamicFineTuning):
        found = -sg(jnp.exp(log_p)) * log_p, {"nll": -log_p}
    elif isinstance(function, ClippedRatio):
        low, high = 1 - function.low, 1 + function.high
        clipped = jnp.clip(ratio, low, high) * advantage
        statistic = {"clipped": (ratio * advantage > clipped).astype(x.dtype)}
        found = -jnp.minimum(ratio * advantage, clipped), statistic
    elif isinstance(function, WithEntropy):
        found = -advantage * log_p - function.bonus * entropy**2, {"entropy": entropy}
    else:
        found = -log_p, {}
    return (found[0] * mask).sum(), {name: (a * mask).sum() for name, a in found[1].items()}


def with_gradients(function, *inputs):
    return jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(*inputs)


def assert_close(got, expected, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def chunked_loss(function, terms, labels, mask, fields, x, w, bias, **more):
    more = {"terms": terms, "parallel": LOCAL, "chunk": 8, "bias": bias} | more
    sums = token_sums(x, w, labels, mask, function, fields, **more)
    return sums.pop("loss"), sums


@pytest.mark.parametrize("kind", quick([ALL, PLAIN], 0), ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_sums_and_gradients_equal_whole_logits(function, kind):
    terms = Terms(251, **kind)
    with jax.enable_x64(True):
        *inputs, labels, mask, fields = draw()
        given = function, terms, labels, mask, fields
        expected = with_gradients(functools.partial(reference_loss, *given), *inputs)
        few = isinstance(function, DynamicFineTuning)
        ours = functools.partial(chunked_loss, *given, few=few)
        assert_close(with_gradients(ours, *inputs), expected, 1e-10)
    narrow = [a.astype(jnp.float32) for a in (*inputs, mask)]
    fields = {name: a.astype(jnp.float32) for name, a in fields.items()}
    ours = functools.partial(chunked_loss, function, terms, labels, narrow.pop(), fields)
    assert_close(with_gradients(ours, *narrow), expected, 1e-5)


@slow
def test_the_default_is_next_token_training():
    """With and without a function; a temperature alone needs none."""
    x, w, bias, labels, mask, _ = draw(dtype=jnp.float32)
    more = {"bias": bias, "parallel": LOCAL, "chunk": 8}

    def loss(x, function, terms):
        return token_sums(x, w, labels, mask, function, terms=terms, **more)["loss"]

    for terms in (Terms(251), Terms(251, temperature=0.5)):
        default, named = (jax.value_and_grad(loss)(x, f, terms) for f in (None, negative_log_prob))
        assert_close(default, named, 1e-6)
        plain = cross_entropy(x, w, labels, mask, terms=terms, **more)
        np.testing.assert_allclose(plain, default[0], rtol=1e-6)


def test_what_the_mask_hides_adds_nothing():
    """Not even where its ratio is infinite."""
    x, w, bias, labels, mask, fields = draw(dtype=jnp.float32)
    hidden = mask == 0
    assert hidden.any()
    wild = jnp.where(hidden, -1e9, fields["old_log_prob"])
    found = []
    for old in (fields["old_log_prob"], wild):
        given = ClippedRatio(), Terms(251), labels, mask, fields | {"old_log_prob": old}
        found.append(with_gradients(functools.partial(chunked_loss, *given), x, w, bias))
    jax.tree.map(np.testing.assert_array_equal, *found)


def on_tp2(function, *inputs):
    """A function (x, w, bias) -> pytree equal on tp devices, of shards of w and bias."""
    cut = PartitionSpec("tp")
    mesh = Mesh(jax.devices()[:2], ("tp",))
    whole = PartitionSpec()
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(whole, cut, cut),
        out_specs=(whole, (whole, cut, cut)),
        check_vma=False,
    )
    return jax.jit(mapped)(*inputs)


@pytest.mark.parametrize("function", FUNCTIONS[1:], ids=NAMES[1:])
def test_two_devices_share_the_vocabulary(function):
    terms = Terms(251, **ALL)
    with jax.enable_x64(True):
        x, w, bias, labels, mask, fields = draw()
        given = function, terms, labels, mask, fields

        def share(x, w, bias):
            loss, statistics = chunked_loss(*given, x, w, bias, parallel=TP2)
            return loss / 2, statistics  # both devices compute it

        def on_device(x, w, bias):
            (loss, statistics), (d_x, d_w, d_bias) = jax.value_and_grad(
                share, (0, 1, 2), has_aux=True
            )(x, w, bias)
            return (2 * loss, statistics), (TP2.psum(d_x, "tp"), d_w, d_bias)

        expected = with_gradients(functools.partial(reference_loss, *given), x, w, bias)
        assert_close(on_tp2(on_device, x, w, bias), expected, 1e-10)


def pairs_of(scores, fields):
    """Some function of all scores, with unlike cotangents."""
    entropy = 0 if scores.entropy is None else jnp.sin(scores.entropy)
    values = jnp.tanh(scores.log_p + 5) * fields["advantage"] + entropy
    return values.sum(), scores


@pytest.mark.parametrize(
    "entropy, kind", quick([(True, ALL), (False, PLAIN), (True, {})], 0, 1), ids=str
)
def test_token_scores_equal_whole_logits(entropy, kind):
    terms = Terms(251, **kind)
    with jax.enable_x64(True):
        *inputs, labels, _, fields = draw()

        def theirs(x, w, bias):
            scores = whole(x, w, bias, labels, terms)
            return pairs_of(scores if entropy else scores._replace(entropy=None), fields)

        def ours(x, w, bias, parallel=LOCAL):
            more = {"terms": terms, "parallel": parallel, "chunk": 8, "bias": bias}
            return pairs_of(token_scores(x, w, labels, entropy=entropy, **more), fields)

        expected = with_gradients(theirs, *inputs)
        assert_close(with_gradients(ours, *inputs), expected, 1e-10)

        def on_device(x, w, bias):
            def share(*inputs):
                loss, scores = ours(*inputs, parallel=TP2)
                return loss / 2, scores

            found, (d_x, d_w, d_bias) = jax.value_and_grad(share, (0, 1, 2), has_aux=True)(
                x, w, bias
            )
            return (2 * found[0], found[1]), (TP2.psum(d_x, "tp"), d_w, d_bias)

        assert_close(on_tp2(on_device, *inputs), expected, 1e-10)
    narrow = [a.astype(jnp.float32) for a in inputs]
    fields = {name: a.astype(jnp.float32) for name, a in fields.items()}
    assert_close(with_gradients(ours, *narrow), expected, 1e-5)


def test_sums_over_documents_under_context_parallelism():
    """Documents that lie on both cp devices, of unequal lengths; gradients too."""
    segments = jnp.asarray([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 2]], jnp.int32)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    columns = np.array([0, 1, 6, 7, 2, 3, 4, 5])  # zigzag: each device has both ends of a piece
    expected = np.zeros((2, 4), np.float32)
    np.add.at(expected, (np.arange(2)[:, None], segments), values)
    cp2 = Parallel(cp=2)

    def loss(values, segments, parallel, most):
        sums = sequence_sums(values, segments, parallel=parallel, most=most)
        again = of_each_token(sums, segments, values.shape[1])
        return (sums**2).sum() / parallel.cp, (sums, again)

    local = jax.value_and_grad(loss, has_aux=True)(values, segments, LOCAL, 4)
    np.testing.assert_allclose(local[0][1][0], expected, rtol=1e-6)
    assert sequence_sums(values, segments, parallel=LOCAL).shape == (2, 9)
    one = sequence_sums(values, None, parallel=LOCAL)
    np.testing.assert_allclose(one, values.sum(1, keepdims=True), rtol=1e-6)

    def on_device(values, segments):
        (share, (sums, again)), gradient = jax.value_and_grad(loss, has_aux=True)(
            values, segments, cp2, 4
        )
        return cp2.psum(share, "cp"), sums, again, gradient

    cut, whole = PartitionSpec(None, "cp"), PartitionSpec()
    mapped = jax.shard_map(
        on_device,
        mesh=Mesh(jax.devices()[:2], ("cp",)),
        in_specs=(cut, cut),
        out_specs=(whole, whole, cut, cut),
        check_vma=False,
    )
    total, sums, again, gradient = jax.jit(mapped)(values[:, columns], segments[:, columns])
    (expected_total, (expected_sums, expected_again)), expected_gradient = local
    found = total, sums, again, gradient
    reference = (
        expected_total,
        expected_sums,
        expected_again[:, columns],
        expected_gradient[:, columns],
    )
    assert_close(found, reference, 1e-6)


@pytest.mark.parametrize("kind", quick([ALL, PLAIN], 0), ids=str)
@pytest.mark.parametrize("function", FUNCTIONS[:3], ids=NAMES[:3])
def test_our_kernel_runs_with_a_function(function, kind, monkeypatch):
    """Its gradient is that of -log p; slopes scale rows of x and of d_x."""
    *inputs, labels, mask, fields = draw(tokens=21, dtype=jnp.float32)
    given = function, Terms(251, **kind), labels, mask, fields
    expected = with_gradients(functools.partial(chunked_loss, *given), *inputs)
    choose_for(monkeypatch, GPU, "loss_rows")
    names = interpret(monkeypatch)
    monkeypatch.setitem(chooser.FEWEST, "loss_rows", 1)
    monkeypatch.setattr(chooser, "ALIGNED", 1)
    tile = LossTile(warps=1, loads=2, programs=3)
    monkeypatch.setattr(kernel, "rows", functools.partial(rows, tile=tile))
    monkeypatch.setattr(ce, "_TILE", 4)
    monkeypatch.setattr(ce, "_PART_ELEMENTS", 1)
    assert_close(with_gradients(functools.partial(chunked_loss, *given), *inputs), expected, 3e-6)
    assert "loss_rows" in names


def test_our_kernel_declines_by_name():
    gpu, shape = Device("gpu"), (16384, 151936)

    def choice(function, dtype=jnp.bfloat16):
        why = ce.unknown_to_kernel(function, dtype)
        return choose("loss_rows", jnp.float32, shape, gpu, tp=1, unknown=why)

    assert choice(ClippedRatio()).name == "triton"
    assert choice(WithEntropy()) == ("xla", "the token function WithEntropy reads the entropy")
    assert "in fp16" in choice(DynamicFineTuning(), jnp.float16).why


def test_terms_of_the_usual_loss_are_refused():
    x, w, bias, labels, mask, _ = draw(dtype=jnp.float32)
    with pytest.raises(UserError, match=r"DynamicFineTuning .* set both to 0"):
        chunked_loss(DynamicFineTuning(), Terms(251, z_loss=0.1), labels, mask, {}, x, w, bias)
