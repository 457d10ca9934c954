"""Experts against transformers': biases, and the clamped activation of gpt-oss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mjax.config import load
from mjax.models.base.context import Context, Kernels
from mjax.models.base.weight import Weight
from mjax.models.moe.experts import ExpertWeights, run_experts
from mjax.models.moe.router import Routing

D, F, E, K, TOKENS = 16, 12, 5, 2, 30


@pytest.mark.parametrize("kernel", ["xla", "loop"])
def test_gpt_oss_experts_equal_transformers_forward_and_backward(kernel):
    keys = [f"model.hidden_size={D}", f"model.moe.num_experts={E}", "model.layer_pattern=E"]
    keys += [f"model.moe.moe_intermediate_size={F}", "model.swiglu_limit=0.7", "data.mock=true"]
    cfg = load(None, [*keys, "model.mlp_bias=true"]).model
    hf = GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, swiglu_limit=0.7)
    hf._experts_implementation = "eager"
    theirs = GptOssExperts(hf)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.tensor(rng.normal(size=parameter.shape) * 0.4))
    x = rng.normal(size=(1, TOKENS, D)).astype(np.float32)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(TOKENS)])
    gates = rng.dirichlet(np.ones(K), TOKENS).astype(np.float32)

    def halves(parameter):  # gate and up take turns in the last axis
        value = parameter.detach().numpy()
        return jnp.asarray(value.reshape(*value.shape[:-1], F, 2).swapaxes(-1, -2))

    def plain(parameter):
        return jnp.asarray(parameter.detach().numpy())

    given = (
        jnp.asarray(x),
        halves(theirs.gate_up_proj),
        plain(theirs.down_proj),
        halves(theirs.gate_up_proj_bias),
        plain(theirs.down_proj_bias),
    )

    def ours(x, up, down, up_bias, down_bias):
        routing = Routing(experts[None], gates[None], jnp.zeros((1, TOKENS, E)), None)
        weights = ExpertWeights(Weight(up), Weight(down), up_bias, down_bias)
        return run_experts(x, routing, weights, cfg, Context(kernels=Kernels(experts=kernel))).y

    y, vjp = jax.vjp(ours, *given)
    leaf = torch.tensor(x[0], requires_grad=True)
    want = theirs(leaf, torch.tensor(experts), torch.tensor(gates))
    np.testing.assert_allclose(y[0], want.detach().numpy(), rtol=2e-5, atol=2e-5)

    want.backward(torch.ones_like(want))
    dx, d_up, d_down, d_up_bias, d_down_bias = vjp(jnp.ones_like(y))
    for got, parameter in [
        (dx[0], leaf),
        (d_up.swapaxes(-1, -2).reshape(E, D, 2 * F), theirs.gate_up_proj),
        (d_down, theirs.down_proj),
        (d_up_bias.swapaxes(-1, -2).reshape(E, 2 * F), theirs.gate_up_proj_bias),
        (d_down_bias, theirs.down_proj_bias),
    ]:
        np.testing.assert_allclose(got, parameter.grad.numpy(), rtol=1e-4, atol=1e-4)
