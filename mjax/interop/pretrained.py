"""Weights from anywhere as a model: a Hugging Face folder, an mjax run or checkpoint, Megatron.

`lm = mjax.from_pretrained(path)`; `lm.model` is a Flax NNX module for `jax.jit`, `lm.params` the
same weights as a pytree for `jax.grad`. Invariant: weights go from disk to their shards piece by
piece, never through a whole copy on the host.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mjax.checkpoint.base.companion_files import tokenizer_dir
from mjax.checkpoint.base.source import arrays, layers_source
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.sources import source_of
from mjax.models import Definition, definition_of
from mjax.models.base.context import Context, Training, tokens_of
from mjax.models.base.streams import decoder_of
from mjax.models.decoder import Decoder
from mjax.pipeline.storage import sharded_by_stages
from mjax.sharding.spec import ParamSpec, is_spec


@dataclass(frozen=True)
class Pretrained:
    """A model with weights. `tokenizer_dir`: the folder with its tokenizer files, or None."""

    cfg: ModelConfig
    definition: Definition
    params: dict
    mesh: Mesh | None
    tokenizer_dir: Path | None

    def __repr__(self) -> str:
        """A line: all weights would fill pages of a notebook."""
        layers, count = self.cfg.num_hidden_layers, sum(map(jnp.size, jax.tree.leaves(self.params)))
        return f"Pretrained({self.cfg.model_type}, {layers} layers, {count:,} parameters)"

    @property
    def model(self) -> Decoder:
        """The NNX module: `jax.jit(lm.model)(tokens)` gives fp32 logits [B, S, V]."""
        return self.definition.bind(self.params)

    def logits(self, params: dict, tokens: jax.Array) -> jax.Array:
        """A function of the weights, for `jax.grad`: int32 [B, S] -> fp32 [B, S, V]."""
        return self.definition.bind(params)(tokens)

    def token_log_probs(
        self,
        params: dict,
        tokens: jax.Array,
        labels: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        *,
        temperature: float = 1.0,
    ) -> jax.Array:
        """The log-probability of each label after the tokens up to its place, fp32 [B, S].

        All arrays are int32 [B, S]. A packed row's `segments` number its documents, and `positions`
        restart in each. Logits, divided by `temperature`, exist for a chunk of tokens at a time,
        and are computed anew for the gradient by `params`. Raises `UserError` for a model that is
        not a decoder of text alone.
        """
        architecture = self.cfg.architecture
        if not architecture.generates or architecture.reads != ("tokens",):
            raise UserError(
                f"model.layer_pattern={self.cfg.layer_pattern}: token_log_probs is for decoders of "
                "text alone; take the logits of other models"
            )
        model = self.definition.bind(params)
        ctx = Context(training=Training(temperature=temperature))
        info = tokens_of(tokens.shape, positions, segments)
        x, _, _ = model.layers(model.embed(tokens, info, ctx), info, ctx)
        return model.token_scores(decoder_of(x), labels, ctx).log_p


def from_pretrained(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    *,
    apart: bool = False,
    text: bool = False,
) -> Pretrained:
    """Load the weights in `path`, as `dtype`, on one device or sharded over `mesh`.

    `apart`: a stack of layers [L, ..] is a list of L arrays, as engines keep weights.

    `path`: a Hugging Face folder (config.json and safetensors), an mjax run or checkpoint folder,
    a Megatron torch_dist checkpoint, or as a string the name of a model on the Hugging Face hub.
    `text`: of Qwen3.5's files with a tower, the text alone. Raises `UserError` where it is none of
    them or damaged.
    """
    source = source_of(path, text=text)
    source.check()
    definition = definition_of(source.cfg)
    abstract = placed_params(definition, dtype, mesh, apart)
    params = arrays(layers_source(source) if apart else source, abstract)
    return Pretrained(source.cfg, definition, params, mesh, tokenizer_dir(path))


def placed_params(definition: Definition, dtype: str, mesh: Mesh | None, apart: bool) -> dict:
    """`abstract_params` on the first device or over a mesh, stacks as lists of layers if apart."""
    if mesh is None:
        one = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, definition.specs, is_leaf=is_spec)
    else:
        on_mesh = partial(sharded_by_stages, mesh=mesh)
        shardings = jax.tree.map(on_mesh, definition.specs, is_leaf=is_spec)
    abstract = abstract_params(definition, dtype, shardings)
    if apart:
        abstract = jax.tree.map(_layers_apart, definition.specs, abstract, is_leaf=is_spec)
    return abstract


def abstract_params(definition: Definition, dtype: str, shardings: dict) -> dict:
    """`ShapeDtypeStruct`s of all parameters."""

    def abstract(spec: ParamSpec, where: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype(dtype), sharding=where)

    return jax.tree.map(abstract, definition.specs, shardings, is_leaf=is_spec)


def _layers_apart(spec: ParamSpec, stack: jax.ShapeDtypeStruct) -> object:
    """A stack as a list of its layers; another parameter as it is."""
    if not spec.is_stacked:
        return stack
    where = stack.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
    layer = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=where)
    return [layer] * stack.shape[0]
