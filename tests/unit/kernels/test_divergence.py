"""Divergences of a student from a teacher against whole logits in fp64, differentiated by JAX."""

import jax
import jax.numpy as jnp
import pytest

from mjax.kernels.loss.divergence import Divergence, LogitSource, divergence_sums, stored_divergence
from mjax.kernels.loss.log_probs import token_scores
from mjax.kernels.loss.rows import Terms
from mjax.sharding.collectives import LOCAL
from tests.marks import exhaustive, quick
from tests.unit.kernels.test_token_functions import TP2, assert_close, draw, on_tp2, with_gradients

VOCAB = 251
KINDS = [
    Divergence(0.3, 1.6, 0.25),
    Divergence(0.0),
    Divergence(1.0, 0.7),
    Divergence(0.5, 2.0, 1.0),
]


def log_softmax(x, w, bias, softcap, temperature):
    z = (x @ w.T + bias)[:, :VOCAB]
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return jax.nn.log_softmax(z / temperature)


def divergence_of(log_q, log_p, beta):
    """The formula of GKD, by probabilities and not by their logarithms."""
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if beta in (0, 1):
        a, b = (p, q) if beta == 0 else (q, p)
        return (a * jnp.log(a / b)).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * jnp.log(p / m) + (1 - beta) * q * jnp.log(q / m)).sum(-1)


def reference(kind, teacher, labels, mask, x, w, bias):
    log_p = log_softmax(*teacher, None, kind.temperature)
    found = divergence_of(log_softmax(x, w, bias, 5.0, kind.temperature), log_p, kind.beta)
    one = log_softmax(x, w, bias, 5.0, 1.0)
    nll = -jnp.take_along_axis(one, labels[:, None], 1)[:, 0]
    loss = (1 - kind.label_weight) * kind.temperature**2 * found + kind.label_weight * nll
    return (loss * mask).sum(), {"divergence": (found * mask).sum(), "nll": (nll * mask).sum()}


def ours(kind, teacher, labels, mask, x, w, bias, parallel=LOCAL):
    terms = {"terms": Terms(VOCAB, softcap=5.0), "teacher_terms": Terms(VOCAB)}
    student, teacher = LogitSource(x, w, bias), LogitSource(*teacher)
    more = terms | {"parallel": parallel, "chunk": 8}
    sums = divergence_sums(student, teacher, labels, mask, kind, **more)
    return sums.pop("loss"), sums


def drawn():
    """The student's arrays, the teacher's of another width, labels and mask."""
    *student, labels, mask, _ = draw()
    teacher = draw(width=20)[:3]
    return student, (teacher[0], teacher[1].at[VOCAB:].set(-7), teacher[2]), labels, mask


@pytest.mark.parametrize("kind", quick(KINDS, 0), ids=str)
def test_sums_and_gradients_equal_whole_logits_on_one_and_two_devices(kind):
    with jax.enable_x64(True):
        student, teacher, labels, mask = drawn()
        given = kind, teacher, labels, mask
        expected = with_gradients(lambda *a: reference(*given, *a), *student)
        assert_close(with_gradients(lambda *a: ours(*given, *a), *student), expected, 1e-10)

        def on_device(x, w, bias):
            here = jax.lax.axis_index("tp") * len(w)
            mine = [jax.lax.dynamic_slice_in_dim(a, here, len(w)) for a in teacher[1:]]

            def share(*student):
                loss, figures = ours(kind, (teacher[0], *mine), labels, mask, *student, TP2)
                return loss / 2, figures  # both devices compute it

            found, (d_x, *others) = jax.value_and_grad(share, (0, 1, 2), has_aux=True)(x, w, bias)
            return (2 * found[0], found[1]), (TP2.psum(d_x, "tp"), *others)

        assert_close(on_tp2(on_device, *student), expected, 1e-10)


def test_equal_models_diverge_by_nothing_and_move_nothing():
    *student, labels, mask, _ = draw(dtype=jnp.float32)

    def of(beta):
        def loss(x):
            source = LogitSource(x, *student[1:])
            terms = {"terms": Terms(VOCAB), "teacher_terms": Terms(VOCAB)}
            more = terms | {"parallel": LOCAL}
            same = LogitSource(*student)
            return divergence_sums(source, same, labels, mask, Divergence(beta), **more)["loss"]

        return jax.value_and_grad(loss)(student[0])

    for beta in (0.0, 0.5, 1.0):
        loss, gradient = of(beta)
        assert abs(loss) < 1e-5 and jnp.abs(gradient).max() < 1e-4


@exhaustive
@pytest.mark.parametrize("beta", quick([0.4, 0.0, 1.0]))
def test_stored_probabilities_are_one_outcome_less_exact(beta):
    """All of the vocabulary gives the divergence, a part of it less; gradients through K labels."""
    with jax.enable_x64(True):
        student, teacher, labels, mask = drawn()
        log_p = log_softmax(*teacher, None, 1.0)

        def loss(x, w, bias, most, parallel=LOCAL):
            best, ids = jax.lax.top_k(log_p, most)
            more = {"terms": Terms(VOCAB, softcap=5.0), "parallel": parallel, "chunk": 8}
            scores = token_scores(x, w, ids, bias=bias, **more)
            return (stored_divergence(scores.log_p, best, beta) * mask).sum(), ids

        def whole(x, w, bias):
            log_q = log_softmax(x, w, bias, 5.0, 1.0)
            return (divergence_of(log_q, log_p, beta) * mask).sum(), None

        def by_hand(x, w, bias):
            best, ids = jax.lax.top_k(log_p, 9)
            log_q = jnp.take_along_axis(log_softmax(x, w, bias, 5.0, 1.0), ids, 1)
            return (stored_divergence(log_q, best, beta) * mask).sum(), ids

        all_of_it = with_gradients(lambda *a: loss(*a, VOCAB), *student)
        exact = with_gradients(whole, *student)
        assert_close(all_of_it[0][0], exact[0][0], 1e-4)
        part = with_gradients(lambda *a: loss(*a, 9), *student)
        assert_close(part, with_gradients(by_hand, *student), 1e-10)
        assert part[0][0] < exact[0][0]

        def on_device(x, w, bias):
            def share(*student):
                found, ids = loss(*student, 9, TP2)
                return found / 2, ids

            found, (d_x, *others) = jax.value_and_grad(share, (0, 1, 2), has_aux=True)(x, w, bias)
            return (2 * found[0], found[1]), (TP2.psum(d_x, "tp"), *others)

        assert_close(on_tp2(on_device, *student), part, 1e-10)
