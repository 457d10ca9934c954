"""The weights that two streams have besides their layers (T5, arXiv 1910.10683; RETRO).

They belong to the edges of the model: ZeRO gathers them once a step, and FP8 leaves them alone.
Layers get them with their activations (`models/base/streams.py`).
"""

import jax.numpy as jnp
from flax import nnx

from mjax.config.languages.layer_pattern import BRANCHES
from mjax.config.schema.model import ModelConfig
from mjax.models.base.norm import Norm
from mjax.models.base.params import declare, normal
from mjax.models.base.streams import SharedWeights
from mjax.sharding.spec import ParamSpec


class Joint(nnx.Module):
    """The norms of what one stream reads of the other, and biases of attention by distance.

    The biases are one table [buckets, N] for each kind of branch that knows positions. All layers
    of its side share it.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        both_read = "chunk" in cfg.branches
        has_norm = cfg.norm_placement != "post_residual" and not cfg.modalities

        def norm(side: str) -> Norm:
            return Norm(cfg, (cfg.hidden_size,), ("embed",), f"model.{side}_norm", rngs)

        self.encoder_norm = norm("encoder") if has_norm else None
        self.decoder_norm = norm("decoder") if has_norm and both_read else None
        self.names: dict[str, str] = {}  # of the tables, by the words of their branches
        if cfg.position_embedding == "relative":
            knowing = [word for word in sorted(cfg.branches) if BRANCHES[word].rotary]
            self.names = {word: f"relative_{BRANCHES[word].letter}" for word in knowing}
        for word, name in self.names.items():
            table = ParamSpec(
                shape=(cfg.relative.num_buckets, cfg.attention.num_attention_heads),
                axes=(None, "heads"),
                role="embedding",
                hf=(f"model.relative_bias.{BRANCHES[word].letter}.weight",),
            )
            setattr(self, name, declare(rngs, table, normal(cfg.initializer_range)))

    def weights(self) -> SharedWeights:
        """The weights as layers read them, fp32."""
        norms = []
        for norm in (self.encoder_norm, self.decoder_norm):
            norms.append(None if norm is None else norm.weights())
        relative = {}
        for word, name in self.names.items():
            table = getattr(self, name)[...]
            relative[word] = table.astype(jnp.float32).T
        return SharedWeights(*norms, relative)
