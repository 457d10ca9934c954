"""AdamW of rows of stacks: equal to that of whole stacks, in plain JAX and by the Triton kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.config.schema.run import OptimizerConfig
from mjax.kernels.elementwise import adam
from mjax.optim.build import Optimizer
from mjax.plan.execution import DeviceFacts, decide_execution
from mjax.sharding.spec import ParamSpec
from tests.devices import GPU, choose_for
from tests.triton_interpreter import interpret

SHAPE = (3, 5, 7)  # fills no program
SPECS = {"w": ParamSpec(SHAPE, ("layers", "embed", "mlp"), "matrix")}
FACTS = {"lr": jnp.float32(0.1), "weight_decay": jnp.float32(0.2), "scale": jnp.float32(0.3)}


def drawn(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def updated(gradient, keep=True, steps=2, **options):
    """(parameter, mu, nu) after some steps by one gradient, a stack or a list of its rows."""
    optimizer = Optimizer(OptimizerConfig(**options), SPECS)
    params = {"w": drawn(*SHAPE)}
    state = optimizer.init(params)
    for _ in range(steps):
        grads = {"w": gradient}
        params, state = optimizer.update(grads, state, params, keep=jnp.asarray(keep), **FACTS)
    return params["w"], state["mu"]["w"], state["nu"]["w"]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("options", [{}, {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}])
def test_rows_are_updated_as_their_stack(monkeypatch, by_kernel, options):
    stack = drawn(*SHAPE, seed=1)
    want = updated(stack, **options)
    used = []
    if by_kernel:
        choose_for(monkeypatch, GPU, "adam_row")
        used = interpret(monkeypatch)
        monkeypatch.setattr(adam, "BLOCK", 16)
    got = updated(list(stack), **options)
    assert used == ["update_row"] * 6 * by_kernel
    for a, e in zip(got, want, strict=True):
        assert a.dtype == e.dtype
        a, e = (np.asarray(x, np.float64) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=2e-6 if not options else 8e-3, atol=1e-7)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_step_that_is_not_kept_changes_no_bit(monkeypatch, by_kernel):
    """Whatever the gradient is: such a step may be one whose gradients are not finite."""
    if by_kernel:
        choose_for(monkeypatch, GPU, "adam_row")
        interpret(monkeypatch)
    got = updated([jnp.full(SHAPE[1:], jnp.nan)] * SHAPE[0], keep=False)
    np.testing.assert_array_equal(got[0], drawn(*SHAPE))
    assert not np.any(got[1]) and not np.any(got[2])


def test_gradients_in_bf16_are_widened_before_they_are_scaled():
    rows = [drawn(*SHAPE[1:], seed=i, dtype="bfloat16") for i in range(3)]
    got = updated(rows)
    want = updated(jnp.stack(rows).astype(jnp.float32))
    for a, e in zip(got, want, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("keys", "devices", "apart"),
    [
        ([], DeviceFacts(), True),
        ([], DeviceFacts(updates_rows=False), False),
        ([], DeviceFacts(on_cpu=True), False),
        (["train.unroll=0"], DeviceFacts(on_cpu=True), True),
        (["optimizer.name=muon"], DeviceFacts(), False),
        (["optimizer.offload=true"], DeviceFacts(), False),
        (["precision.params=bfloat16", "optimizer.stochastic_rounding=true"], DeviceFacts(), False),
        (["precision.compute=float16"], DeviceFacts(), False),
        (["mesh.pp=2"], DeviceFacts(), False),
    ],
)
def test_who_updates_rows(keys, devices, apart):
    cfg = load(None, ["data.mock=true", *keys])
    sizes = mesh_sizes(cfg.mesh, 2)
    assert decide_execution(cfg, sizes, devices).gradients_apart is apart
