"""mjax: large-scale transformer training on NVIDIA GPUs in JAX and Flax.

Dimension letters used in every module: B batch, S sequence, T key sequence, D hidden, N query
heads, K kv heads, G query heads per kv head, H head size, F ffn, V vocabulary, L layers, M
micro-batches, E experts, C capacity, P pipeline stages. A suffix such as ``q_BSNH`` names the
dimensions of an array where that helps the reader.
"""

import importlib
import os

__version__ = "0.1.0"


def _host_gib() -> int:
    """Memory of this machine, or of this container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            sizes.append(int(f.read()))
    except (OSError, ValueError):  # no container, or no limit
        pass
    return min(sizes) >> 30


# XLA pins at most 64 GiB of the host for moments and activations that wait there, unless told
# otherwise before its devices start. It pins on demand, in steps that double: hence not all.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, _host_gib() * 3 // 4)))


_HOMES = {
    "from_pretrained": "mjax.interop.pretrained",
    "LLM": "mjax.infer.llm",
    "SamplingParams": "mjax.infer.requests",
}


def __getattr__(name):
    """`mjax.from_pretrained` and others, on use: importing mjax must not start jax."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mjax' has no attribute {name!r}")


def __dir__():
    """Names for completion in a notebook."""
    return [*globals(), *_HOMES]
