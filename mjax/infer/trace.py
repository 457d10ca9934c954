"""Look inside a decoder: activations by name, kept or replaced on the way.

`trace` runs the blocks one by one instead of scanning them, so each layer has its own names. It is
an ordinary traceable function: jit it, differentiate it, put any JAX code in a hook. Invariant:
without hooks its logits are those of the model. Names, of which a pattern with `*` matches several:

- `embedding`, `final_norm`
- `layers.i.attention`, `layers.i.mlp`: what the branch adds to the residual stream in layer i
- `layers.i`: the stream after layer i
- `inputs.i.NAME`: what the matmul of that name reads in layer i (`ParamSpec.matmul`; of several
  that read the same, the first)
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

import jax

from mjax.config.languages.layer_pattern import stack_index, stack_of
from mjax.errors import UserError
from mjax.models.base.context import Context, Probe, tokens_of
from mjax.models.base.params import split
from mjax.models.decoder import Decoder

Hook = Callable[[jax.Array], jax.Array]


def trace(
    model: Decoder,
    tokens: jax.Array,
    *,
    keep: Iterable[str] = (),
    hooks: dict[str, Hook] | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """tokens int32 [B, S] -> (fp32 logits [B, S, V], activations [B, S, D] whose name matches
    `keep`). `hooks` map names to functions whose result takes the activation's place. Raises
    `UserError` for a name that nothing matches."""
    if model.cfg.architecture.has_streams:
        raise UserError("trace: a model of several streams (encoder-decoder, towers) is not built")
    keep, hooks = tuple(keep), hooks or {}
    kept: dict[str, jax.Array] = {}
    matched: set[str] = set()

    def see(name: str, x: jax.Array) -> jax.Array:
        hits = [p for p in (*hooks, *keep) if fnmatchcase(name, p)]
        matched.update(hits)
        for pattern in hits:
            x = hooks[pattern](x) if pattern in hooks else x
        if any(p in keep for p in hits):
            kept[name] = x
        return x

    ctx, info = Context(), tokens_of(tokens.shape)
    x = see("embedding", model.embed(tokens, info, ctx))
    rope, rows = model.rope(info, ctx), stack_index(model.kinds)
    stacks = {name: split(getattr(model, name)) for name in model.stacks}
    for i, kind in enumerate(model.kinds):
        definition, weights = stacks[stack_of(kind)]
        block = definition.bind(jax.tree.map(lambda w: w[rows[i]], weights))  # noqa: B023
        here = replace(ctx, probe=Probe(see=lambda name, x: see(_activation_name(i, name), x)))  # noqa: B023
        x = block(x, info, here, kind=kind, rope=rope, layer=i).y
        x = see(f"layers.{i}", x)
    x = see("final_norm", model.normed(x))
    unknown = [p for p in (*hooks, *keep) if p not in matched]
    if unknown:
        raise UserError(
            f"trace: nothing is called {unknown[0]!r}; names: embedding, layers.0 to "
            f"layers.{len(model.kinds) - 1} (.attention, .mlp), inputs.0.up and others, final_norm"
        )
    return model.logits(x), kept


def _activation_name(layer: int, name: str) -> str:
    """The name of an activation of a layer, from that within a block."""
    group, _, last = name.rpartition(".")
    return f"{group or 'layers'}.{layer}.{last}"
