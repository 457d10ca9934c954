"""NF4 against bitsandbytes on CPUs: every code, every rounded magnitude, every value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.nf4 import values as nf4

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes.functional")


def rounded_there(weight, offset: np.ndarray):
    """bitsandbytes' (codes, state) of a torch weight [out, in], with the mean taken from us.

    Its own mean may differ from ours in the last bit, by the order of its sum. Magnitudes are
    rounded by the rule that bitsandbytes has for GPUs and for devices without kernels. Its CPU
    kernel reads a table of 65,536 entries in its place, which misses the nearest level at times.
    """
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    mean = state.absmax.mean().item()
    assert abs(mean - offset) <= 4 * np.spacing(np.float32(mean))
    offset = torch.tensor(float(offset))
    rule = torch.ops.bitsandbytes.quantize_blockwise.default
    default = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    levels = bnb.create_dynamic_map()
    bits, scales = rule.redispatch(default, state.absmax - offset, levels, 256)
    nested = bnb.QuantState(absmax=scales, code=levels, blocksize=256, dtype=torch.float32)
    state = bnb.QuantState(
        absmax=bits,
        shape=state.shape,
        code=state.code,
        blocksize=64,
        quant_type="nf4",
        dtype=state.dtype,
        offset=offset,
        state2=nested,
    )
    return codes, state


def drawn(*shape: int, dtype: str = "float32"):
    """A weight as torch's [.., out, in] and as ours [.., in, out], outliers among its values."""
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))
    there = torch.tensor(x, dtype=getattr(torch, dtype))
    here = jnp.asarray(there.float().numpy()).astype(dtype)
    return there, jnp.swapaxes(here, -1, -2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("out, width", [(256, 512), (37, 192), (3, 64), (384, 11008 // 43 * 4)])
def test_every_value_is_that_of_bitsandbytes(out, width, dtype):
    there, here = drawn(out, width, dtype=dtype)
    ours = jax.jit(nf4.quantize, static_argnums=(1, 2))(here, 0, 1)
    codes, state = rounded_there(there, np.asarray(ours.offset))

    np.testing.assert_array_equal(ours.codes.T.reshape(-1), codes.numpy().reshape(-1))
    np.testing.assert_array_equal(ours.absmax.T.reshape(-1), state.absmax.numpy())
    np.testing.assert_array_equal(ours.scales, state.state2.absmax.numpy())
    values = jax.jit(nf4.dequantize, static_argnums=1)(ours, jnp.dtype(dtype))
    expected = bnb.dequantize_4bit(codes, state, quant_type="nf4")
    np.testing.assert_array_equal(values.T.astype(jnp.float32), expected.float().numpy())
