"""mjax: large-scale transformer training on NVIDIA GPUs in JAX and Flax.

Dimension letters used in every module: B batch, S sequence, T key sequence, D hidden, N query
heads, K kv heads, G query heads per kv head, H head size, F ffn, V vocabulary, L layers, M
micro-batches, E experts, C capacity, P pipeline stages. A suffix such as ``q_BSNH`` names the
dimensions of an array where that helps the reader.
"""

__version__ = "0.1.0"


def from_pretrained(path, mesh=None, dtype="float32"):
    """`mjax.pretrained.from_pretrained`: a model with the weights in `path`, from any format."""
    from mjax.pretrained import from_pretrained  # on use: importing mjax must not start jax

    return from_pretrained(path, mesh, dtype)
