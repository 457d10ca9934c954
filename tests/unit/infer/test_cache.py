"""Laws of caches: rows of different lengths, empty slots that nobody reads, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.run import MeshConfig
from mjax.infer.caches.contiguous import KVCache, empty_cache, extend, last_real, real_first
from mjax.models.base.context import Context, tokens_of
from mjax.sharding.mesh import make_mesh
from tests.generation import complete
from tests.marks import quick, slow
from tests.unit.infer.test_generate import NEW, PROMPTS, VARIANTS, made

VARIANTS = VARIANTS | {"contiguous": {"layer_pattern": "LG", "attention.sliding_window": 4}}
VARIANTS |= {
    "kv heads of several query heads' devices": {
        "attention.num_attention_heads": 12,
        "attention.num_key_value_heads": 3,
        "attention.head_dim": 8,
    },
    "groups of several heads' devices": VARIANTS["states"]
    | {"layer_pattern": "[MD]*2", "mamba.mamba_num_heads": 12, "mamba.n_groups": 4},
}
KINDS = ("states", "contiguous", "latent", "deltas")
LENGTHS = (11, 3, 7)
SLOTS = 20


def texts():
    return np.random.default_rng(0).integers(1, 250, (3, max(LENGTHS)), np.int32)


def blocks(ids, sizes):
    """The rows of `ids` cut into blocks of their own lengths: (ids [B, 4], count [B]) each."""
    done = np.zeros(3, int)
    for size in sizes:
        count = np.clip(np.minimum(size, np.array(LENGTHS) - done), 0, 4)
        block = np.full((3, 4), 9, np.int32)  # what follows a row's own means nothing
        for row in range(3):
            block[row, : count[row]] = ids[row, done[row] : done[row] + count[row]]
        yield block, count.astype(np.int32), done.copy()
        done = done + count
    assert (done == LENGTHS).all()


@pytest.mark.parametrize("kind", quick(KINDS))
def test_rows_grow_by_lengths_of_their_own(kind):
    """Blocks in which rows add 0 to 4 tokens give the activations of each row's whole text."""
    definition, params, cfg = made(**VARIANTS[kind])
    ids = texts()
    run = jax.jit(lambda p, *args: extend(definition.bind(p), *args))
    cache = empty_cache(cfg, 3, SLOTS, jnp.float32)
    # What no token has written is finite and no more; another number would be seen.
    cache = KVCache(jax.tree.map(lambda x: unread(kind, x), cache.layers), cache.lengths)
    steps = ([4, 1, 3], [1, 2, 0], [3, 0, 4], [1, 0, 0], [2, 0, 0])
    found = np.zeros((3, max(LENGTHS), 32), np.float32)
    for block, count, done in blocks(ids, steps):
        x, cache = run(params, cache, block, count)
        for row in range(3):
            at = slice(done[row], done[row] + count[row])
            found[row, at] = x[row, : count[row]]
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    info = tokens_of(ids.shape)
    whole = jax.jit(lambda p, t: definition.bind(p).hidden(t, info, Context())[0])(params, ids)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :length], whole[row, :length], atol=2e-5)


def unread(kind, x):
    """Slots that a row has not written; a state begins with zeros."""
    return x if kind in ("states", "deltas") else x + 7


@slow
@pytest.mark.parametrize("kind", quick(KINDS, 0))
def test_padding_on_either_side_gives_the_same(kind):
    definition, params, cfg = made(**VARIANTS[kind])
    ids = texts()
    left, right, real = np.full((3, 3, 16), 9, np.int32)
    real[:] = 0
    for row, length in enumerate(LENGTHS):
        left[row, 16 - length :] = right[row, :length] = ids[row, :length]
        real[row, 16 - length :] = 1

    @jax.jit
    def last(params, ids, real):
        ids, count = real_first(ids, real)
        cache = empty_cache(cfg, 3, SLOTS, jnp.float32)
        x, cache = extend(definition.bind(params), cache, ids, count)
        return last_real(x, count), cache.lengths

    both = last(params, left, real), last(params, right, real[:, ::-1])
    jax.tree.map(np.testing.assert_array_equal, *both)
    np.testing.assert_array_equal(both[0][1], LENGTHS)


MESHES = [
    ("experts", {"ep": 2, "tp": 2}, 4),
    ("experts", {"dp": 2, "ep": 2}, 4),
    ("experts", {"ep": 4}, 3),
    ("contiguous", {"dp": 2, "pp": 2, "cp": 2}, 4),
    ("states", {"dp": 2, "tp": 4}, 4),
    ("deltas", {"tp": 4}, 3),
    ("latent", {"dp": 4, "tp": 2}, 4),
    ("kv heads of several query heads' devices", {"tp": 2}, 3),
    ("groups of several heads' devices", {"tp": 3}, 3),
]


@pytest.mark.parametrize("kind, sizes, rows", quick(MESHES))
def test_every_mesh_continues_as_one_device_does(kind, sizes, rows):
    """Rows that dp and ep divide, and rows that they do not; pp and cp repeat the work."""
    mesh = MeshConfig(**dict.fromkeys(AXES, 1) | sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    prompts = [*PROMPTS, [4, 4, 2]][:rows]
    spread = made(make_mesh(mesh, devices), **VARIANTS[kind])
    hot = {"temperature": 0.7, "top_k": 50, "seed": 0} if rows == 4 else {}
    want = complete(made(**VARIANTS[kind]), prompts, NEW, **hot)
    for row, one in zip(complete(spread, prompts, NEW, **hot), want, strict=True):
        assert row.token_ids == one.token_ids
        np.testing.assert_allclose(row.logprobs, one.logprobs, atol=2e-5)
