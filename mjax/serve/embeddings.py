"""Texts as vectors: what the last layer gives after the final norm, over a text or of one token.

Decoders and encoders have a program of their own for it, at sizes that are powers of two.
Invariant: a text's vector does not depend on what runs beside it, nor on its padding.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.caches.contiguous import empty_cache, extend, last_real
from mjax.infer.records import bucket, powers_of_two
from mjax.infer.weights import Form, partitions_apart
from mjax.models.base.adapted import has_slots
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.params import Definition
from mjax.sharding.collectives import LOCAL, Parallel
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import param_partitions

POOLINGS = "mean", "last", "first"
_TOKENS, _ROWS = 2**14, 32  # of a batch at most


@dataclass(frozen=True, eq=False)
class Embedder:
    """The vectors of texts by a model; `form`: of rounded weights, as the engine has them.

    length: tokens of the longest text, at most the model's.
    """

    definition: Definition
    cfg: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype
    length: int
    form: Form | None = None

    def __post_init__(self) -> None:
        architecture = self.cfg.architecture
        if architecture.reads_target or not architecture.reads_tokens:
            raise UserError(
                f"model.layer_pattern={self.cfg.layer_pattern}: embeddings are of decoders and "
                "encoders of text; take the activations of other models"
            )

    def embed(
        self, params: dict, prompts: Sequence[Sequence[int]], pooling: str, slot: int = 0
    ) -> np.ndarray:
        """The vector of each text, fp32 [N, D]: the mean of its tokens', the last one's, the first.

        params: of a decoder as `take_apart` gives them, of an encoder as they are loaded.
        slot: of the adapter, 0: none. Raises `UserError` for ids that are not the model's.
        """
        self._check(prompts, pooling)
        found = np.zeros((len(prompts), self.cfg.hidden_size), np.float32)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        while order:
            length = bucket(len(prompts[order[0]]))
            most = max(min(_TOKENS // length, _ROWS), 1)
            rows = [i for i in order[:most] if len(prompts[i]) <= length]
            order = order[len(rows) :]
            count = powers_of_two(1, len(rows))[-1]
            ids, counts = np.zeros((count, length), np.int32), np.ones(count, np.int32)
            for place, i in enumerate(rows):
                ids[place, : len(prompts[i])] = prompts[i]
                counts[place] = len(prompts[i])
            slots = np.full(count, slot, np.int32)
            vectors = self._program(params, ids, counts, slots)[pooling]
            found[rows] = np.asarray(vectors)[: len(rows)]
        return found

    def _check(self, prompts: Sequence[Sequence[int]], pooling: str) -> None:
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling}: give one of {', '.join(POOLINGS)}")
        for prompt in prompts:
            if not 1 <= len(prompt) <= self.length:
                raise UserError(
                    f"a text of {len(prompt)} tokens: give 1 to {self.length}, the longest here"
                )
            if min(prompt) < 0 or max(prompt) >= self.cfg.vocab_size:
                raise UserError(f"a text has ids that are not in [0, {self.cfg.vocab_size})")

    @functools.cached_property
    def _program(self) -> Callable[..., dict[str, jax.Array]]:
        return jax.jit(self._on_mesh)

    def _on_mesh(self, params: dict, *given: jax.Array) -> dict[str, jax.Array]:
        if self.mesh is None:
            return self._vectors(LOCAL, params, *given)
        parallel = replace(parallel_of(self.mesh), pp=1, cp=1, cuts_sequence=False)
        specs = self.definition.specs
        if self.cfg.architecture.generates:
            weights = partitions_apart(specs, parallel, self.form)
        else:
            weights = param_partitions(specs, parallel)
        function = functools.partial(self._vectors, parallel)
        partitions = weights, *[PartitionSpec()] * len(given)
        return on_shards(function, self.mesh, partitions, PartitionSpec())(params, *given)

    def _vectors(
        self, parallel: Parallel, params: dict, ids: jax.Array, count: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        """fp32 [B, D] by pooling, of ids [B, S], of which the first `count` [B] are a text."""
        model = self.definition.bind(params, parallel)
        rows, length = ids.shape
        if self.cfg.architecture.generates:
            cache = empty_cache(self.cfg, rows, length, self.dtype, parallel)
            adapters = slots if has_slots(self.definition.specs) else None
            x, _ = extend(model, cache, ids, count, parallel=parallel, adapters=adapters)
        else:
            place = jnp.arange(length)
            real = (place < count[:, None]).astype(jnp.int32)
            positions = jnp.minimum(place, count[:, None] - 1)
            info = tokens_of(ids.shape, positions, real)
            x, _, _ = model.hidden(ids, info, Context(parallel))
        x = x.astype(jnp.float32)
        is_real = jnp.arange(length) < count[:, None]
        mean = jnp.where(is_real[..., None], x, 0).sum(1) / count[:, None]
        return {"mean": mean, "last": last_real(x, count), "first": x[:, 0]}
