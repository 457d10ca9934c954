"""A layer: residual branches in order, each normed; the unit that stacks and pipelines are made of.

`config/languages/layer_pattern.py` says which branches a kind of layer has. Invariant: what a layer
draws for dropout depends on its number in the model and on the place of a token, not on where it
runs.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import BRANCHES, branch_groups
from mjax.config.schema.model import ModelConfig
from mjax.kernels.elementwise.norm import NormFork
from mjax.models.base.branch import BranchInputs, BranchOutput, LayerCache, Rope, branch_class
from mjax.models.base.context import Context, Tokens, scaled
from mjax.models.base.dropout import dropout
from mjax.models.base.norm import Norm
from mjax.models.base.stream_of_layer import run_on_stream
from mjax.models.base.streams import Activation, Streams

FIRST_SALT = 1  # of the first layer's draws of dropout; 0 is the embedding's


class Block(nnx.Module):
    """One layer: residual branches, each normed. It serves all kinds of layers in one stack.

    Norms and branches are attributes, named by the table of branches
    (`config/languages/layer_pattern.py`).
    """

    def __init__(self, cfg: ModelConfig, kind: str, rngs: nnx.Rngs):
        cfg = cfg.of_layer(kind)
        self.cfg = cfg
        out_std = cfg.initializer_range
        if cfg.scaled_output_init:
            out_std = out_std * (2 * cfg.num_hidden_layers) ** -0.5
        norm = functools.partial(Norm, cfg, (cfg.hidden_size,), ("embed",), rngs=rngs)
        before = cfg.norm_placement in ("pre", "sandwich")
        after = cfg.norm_placement in ("post", "sandwich", "post_residual")
        for i, group in enumerate(branch_groups(kind)):
            name, normed = BRANCHES[group[0]].name, BRANCHES[group[0]].normed
            first, last = _norm_names(i, after)
            setattr(self, f"{name}_norm", norm(first) if before and normed else None)
            for word in group:
                module = branch_class(word)(cfg, out_std, rngs)
                setattr(self, BRANCHES[word].name, module)
            for word in group[1:] if cfg.parallel_norms else ():
                setattr(self, f"{BRANCHES[word].name}_norm", norm(_norm_names(1, after)[0]))
            setattr(self, f"{name}_post_norm", norm(last) if after and normed else None)

    def __call__(
        self,
        x: Activation,
        tokens: Tokens,
        ctx: Context,
        *,
        kind: str,
        rope: Rope,
        layer: jax.Array | int = 0,
        cache: LayerCache | None = None,
    ) -> BranchOutput:
        """The new x [B, S/tp, D], this device's shares of statistics, the new cache.

        `layer` is the number of the layer in the model, which dropout is keyed by. A cache has an
        entry for each branch, by its name. A layer changes only its own stream, if present.
        """
        inputs = BranchInputs(tokens, ctx, "", rope, layer=layer)
        run = functools.partial(self._run, kind, cache)
        if isinstance(x, Streams):
            return run_on_stream(run, x, inputs, kind, self.cfg)
        return run(x, inputs)

    def _run(
        self, kind: str, cache: LayerCache | None, x: jax.Array, inputs: BranchInputs
    ) -> BranchOutput:
        """The branches of one stream; those of `inputs` get their own words and salts."""
        cfg, ctx = self.cfg, inputs.ctx
        norms_stream = cfg.norm_placement == "post_residual"
        statistics: dict[str, jax.Array] = {}
        new_cache = {}
        for i, group in enumerate(branch_groups(kind)):
            name, salts = BRANCHES[group[0]].name, _salts(inputs.layer, i)
            norm, post_norm = getattr(self, f"{name}_norm"), getattr(self, f"{name}_post_norm")
            forked = NormFork(x, x)
            if norm is not None:
                forked = norm.fork(x, ctx.kernels.measures_norms)
            h, x, _ = forked  # for a branch; the stream
            outputs = []
            for word in group:
                branch = BRANCHES[word].name
                of_branch = replace(inputs, word=word, salt=salts.inside, norm=forked)
                held = None if cache is None else cache[branch]
                own = None if branch == name else getattr(self, f"{branch}_norm", None)
                read = h if own is None else own(x)
                output = getattr(self, branch)(read, of_branch, held)
                outputs.append(output.y)
                statistics |= output.statistics
                new_cache[branch] = output.cache
            h = functools.reduce(jnp.add, outputs)
            if post_norm is not None and not norms_stream:
                h = post_norm(h)
            h = scaled(h, cfg.residual_multiplier)
            h = ctx.tap(name, h)
            x = x + dropout(h, cfg.hidden_dropout, inputs.tokens, ctx, salts.output)
            if norms_stream and post_norm is not None:
                x = post_norm(x)
        return BranchOutput(x, statistics, None if cache is None else new_cache)


def _norm_names(i: int, both: bool) -> tuple[str, str]:
    """Hugging Face's names of the norms before and after branch i, in Llama's and Gemma's words.

    `both`: of a model that also has norms after its branches.
    """
    if i == 0:
        return "input_layernorm", "post_attention_layernorm"
    suffix = "" if i == 1 else f"_{i}"
    before = "pre_feedforward_layernorm" if both else "post_attention_layernorm"
    return before + suffix, "post_feedforward_layernorm" + suffix


class Salts(NamedTuple):
    """The keys of the draws of dropout within a branch, and of its output."""

    inside: jax.Array | int
    output: jax.Array | int


def _salts(layer: jax.Array | int, branch: int) -> Salts:
    """Different for every layer and branch; three numbers a layer serve the first two branches."""
    first = FIRST_SALT + 3 * layer
    further, second = divmod(branch, 2)
    return Salts(first + (branch << 26), first + 1 + second + (further << 24))
