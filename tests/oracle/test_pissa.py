"""PiSSA's first adapters and bases against PEFT's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.interop.principal import split_principal

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


@pytest.mark.parametrize("inputs, outputs", [(48, 96), (96, 48)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_and_base_are_those_of_peft(inputs, outputs, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=getattr(torch, dtype))
    weight = linear.weight.detach().float().numpy().T
    config = peft.LoraConfig(
        r=8, lora_alpha=24, init_lora_weights="pissa", target_modules=["0"], lora_dropout=0.0
    )
    layer = peft.get_peft_model(torch.nn.Sequential(linear), config).base_model.model[0]
    a = layer.lora_A["default"].weight.detach().float().numpy().T
    b = layer.lora_B["default"].weight.detach().float().numpy().T
    base = layer.base_layer.weight.detach().float().numpy().T

    ours = jax.jit(split_principal, static_argnums=(1, 2))(jnp.asarray(weight, dtype), 8, 3.0)
    # A singular vector is one of two; its sign here is that of its largest entry.
    signs = np.sign(np.sum(np.asarray(ours[0]) * a, axis=0))
    # PEFT rounds the adapters of a bf16 base to bf16.
    close = {"atol": 1e-5} if dtype == "float32" else {"atol": 1e-5, "rtol": 2**-7}
    np.testing.assert_allclose(ours[0], a * signs, **close)
    np.testing.assert_allclose(ours[1], b * signs[:, None], **close)
    np.testing.assert_allclose(ours[2].astype(jnp.float32), base, **close)
    whole = 3.0 * ours[0] @ ours[1] + ours[2].astype(jnp.float32)
    np.testing.assert_allclose(whole, weight, atol=1e-6 if dtype == "float32" else 1e-3)
