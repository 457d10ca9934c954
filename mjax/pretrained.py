"""Weights from anywhere as a model: a Hugging Face folder, an mjax run or checkpoint, Megatron.

`lm = mjax.from_pretrained(path)`; `lm.model` is a Flax NNX module for `jax.jit`, `lm.params` the
same weights as a pytree for `jax.grad`. Invariant: weights go from disk to their shards piece by
piece, never through a whole copy on the host.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from mjax.checkpoint import families
from mjax.checkpoint.hf_bert import heads_in_file, without_heads
from mjax.checkpoint.hf_deepseek import without_missing_predictions
from mjax.checkpoint.hf_t5 import tied_in_file
from mjax.checkpoint.hf_vision import with_new_towers
from mjax.checkpoint.huggingface import hf_source
from mjax.checkpoint.names import heads_apart, names_in
from mjax.checkpoint.safetensors import open_folder
from mjax.checkpoint.side import tokenizer_dir
from mjax.checkpoint.source import Source, arrays
from mjax.checkpoint.steps import newest_step
from mjax.checkpoint.weights import read_weights
from mjax.config.model_schema import ModelConfig
from mjax.config.paths import require_files
from mjax.errors import UserError
from mjax.json_file import read_json
from mjax.models import Definition, definition_of
from mjax.models.decoder import Decoder
from mjax.sharding.mesh import parallel_of
from mjax.sharding.rules import param_partitions
from mjax.sharding.spec import ParamSpec, is_spec


@dataclass(frozen=True)
class Pretrained:
    """A model with weights. `tokenizer_dir`: the folder with its tokenizer files, or None."""

    cfg: ModelConfig
    definition: Definition
    params: dict
    mesh: Mesh | None
    tokenizer_dir: Path | None

    @property
    def model(self) -> Decoder:
        """The NNX module: `jax.jit(lm.model)(tokens)` gives fp32 logits [B, S, V]."""
        return self.definition.bind(self.params)

    def logits(self, params: dict, tokens: jax.Array) -> jax.Array:
        """A function of the weights, for `jax.grad`: int32 [B, S] -> fp32 [B, S, V]."""
        return self.definition.bind(params)(tokens)


def from_pretrained(
    path: str | Path, mesh: Mesh | None = None, dtype: str = "float32"
) -> Pretrained:
    """Load the weights in `path`, as `dtype`, on one device or sharded over `mesh`.

    `path`: a Hugging Face folder (config.json and safetensors), an mjax run or checkpoint folder,
    or a Megatron torch_dist checkpoint. Raises `UserError` where it is none of them or damaged.
    """
    path = Path(path).expanduser()
    source = source_of(path)
    source.check()
    definition = definition_of(source.cfg)
    if mesh is None:
        one = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, definition.specs, is_leaf=is_spec)
    else:
        partitions = param_partitions(definition.specs, parallel_of(mesh))
        shardings = jax.tree.map(lambda p: NamedSharding(mesh, p), partitions)
    params = arrays(source, abstract_params(definition, dtype, shardings))
    return Pretrained(source.cfg, definition, params, mesh, tokenizer_dir(path))


def abstract_params(definition: Definition, dtype: str, shardings: dict) -> dict:
    """`ShapeDtypeStruct`s of all parameters."""

    def abstract(spec: ParamSpec, where: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype(dtype), sharding=where)

    return jax.tree.map(abstract, definition.specs, shardings, is_leaf=is_spec)


def source_of(path: str | Path) -> Source:
    """The weights in `path`, whatever their format; of a run the newest, of a step its own.

    Raises `UserError` if it is none we know.
    """
    require_files(path)
    path = Path(path)
    if (path / "config.json").is_file():
        cfg = families.config_from_hf(without_heads(read_json(path / "config.json")))
        names = open_folder(path)
        cfg = heads_in_file(without_missing_predictions(cfg, names), names)
        cfg = tied_in_file(cfg, names)
        if cfg.tie_word_embeddings:
            found = names_in(cfg, families.slots(cfg, definition_of(cfg).specs), names)
            apart = heads_apart(found, names, cfg)
            cfg = cfg.model_copy(update={"tie_word_embeddings": not apart})
        specs = definition_of(cfg).specs
        exported = found = families.slots(cfg, specs)
        if "vision" in cfg.modalities:
            found = with_new_towers(found, names)
        return hf_source(path, cfg, specs, found, exported=exported)
    if (path / "metadata.json").is_file() or (path / "latest_checkpointed_iteration.txt").is_file():
        from mjax.checkpoint.megatron import megatron_source

        return megatron_source(path)
    step = newest_step(path)
    if step is None:
        raise UserError(
            f"{path}: no weights here: neither config.json (Hugging Face), nor a checkpoint of "
            "mjax, nor metadata.json (Megatron torch_dist); give the folder that holds one"
        )
    return read_weights(step)
