"""Finds the weights in a folder, whatever their format: Hugging Face's, mjax's own, Megatron's.

A run with adapters and a folder of PEFT hold adapters alone. Their weights are those of their base,
which they name, with the adapters merged.
"""

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from mjax.checkpoint.base.hub import hub_name, model_folder
from mjax.checkpoint.base.source import Source
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.weights import read_config, read_weights
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.files import CONFIG_FILES
from mjax.interop.adapted_source import adapted_source, base_of_run, has_adapters, named_base
from mjax.interop.coded.scaled import open_weights
from mjax.interop.huggingface.families.engine import config_of_folder, slots
from mjax.interop.huggingface.families.table import FAMILIES
from mjax.interop.huggingface.families.unread_keys import text_of
from mjax.interop.huggingface.files import hf_source
from mjax.interop.huggingface.names import heads_apart, names_in
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG, read_adapter_config
from mjax.json_file import read_json
from mjax.models import definition_of


def source_of(path: str | Path, wanted: ModelConfig | None = None, text: bool = False) -> Source:
    """The weights in `path`, whatever their format; of a run the newest, of a step its own.

    A string may also name a model of the hub (`checkpoint/base/hub.py`). `wanted`: the model to
    fill. Towers and prediction layers that it lacks are kept aside for an export. `text`: towers
    are not wanted. Raises `UserError` if it is none we know.
    """
    found = _source_in(folder_with_weights(path), wanted, text)
    return replace(found, name=f"the weights in {path}")


def _source_in(path: Path, wanted: ModelConfig | None, text: bool) -> Source:
    """The weights in a folder, as `source_of` gives them."""
    if (path / ADAPTER_CONFIG).is_file() and not any(path.glob("model*.safetensors")):
        base = source_of(named_base(path, read_adapter_config(path).base), wanted, text)
        return adapted_source(path, base)
    if (path / "config.json").is_file():
        cfg = _described_in(path / "config.json", wanted, text)
        tensors = open_weights(path)
        family = FAMILIES[cfg.model_type]
        cfg = family.mend(cfg, tensors)
        predictions = 0 if cfg.modalities else (wanted or cfg).num_nextn_predict_layers
        has_more = predictions < cfg.num_nextn_predict_layers and not family.repeats_in_predictions
        if has_more:
            cfg = cfg.model_copy(update={"num_nextn_predict_layers": predictions})
        if cfg.tie_word_embeddings:
            found = names_in(cfg, slots(cfg, definition_of(cfg).specs), tensors)
            apart = heads_apart(found, tensors, cfg)
            cfg = cfg.model_copy(update={"tie_word_embeddings": not apart})
        specs = definition_of(cfg).specs
        exported = slots(cfg, specs)
        found = family.renamed_in(exported, tensors)
        return hf_source(path, cfg, specs, found, has_more, exported)
    if (path / "metadata.json").is_file() or (path / "latest_checkpointed_iteration.txt").is_file():
        from mjax.interop.megatron.parameters import megatron_source

        return megatron_source(path)
    step = newest_step(path)
    if path.suffix in CONFIG_FILES and path.is_file():
        raise UserError(f"{path}: a config file has no weights; --load-format dummy draws some")
    if step is None:
        raise UserError(
            f"{path}: no weights here: neither config.json (Hugging Face), nor a checkpoint of "
            "mjax, nor metadata.json (Megatron torch_dist); give the folder that holds one"
        )
    if has_adapters(step):
        base = source_of(named_base(step, base_of_run(step)), read_config(step))
        return adapted_source(step, base)
    return read_weights(step)


def _described_in(config_json: Path, wanted: ModelConfig | None, text: bool = False) -> ModelConfig:
    """The model that a config.json describes, as far as `source_of` wants it."""
    config = read_json(config_json)
    alone = text or (wanted is not None and not wanted.modalities)
    return config_of_folder(text_of(config) if alone else config)


def described_on_hub(path: str | Path, wanted: ModelConfig) -> Source | None:
    """A model of the hub as its config.json describes it, which is fetched without the weights.

    None for all other paths. Keys that its tensors decide are as in `wanted`.
    """
    config = model_folder(path) / "config.json" if hub_name(path) is not None else None
    if config is None or not config.is_file():
        return None
    cfg = _described_in(config, wanted)
    predictions = min(cfg.num_nextn_predict_layers, wanted.num_nextn_predict_layers)
    heads = {name: getattr(wanted.bert, name) for name in ("mlm_head", "num_labels")}
    decided = {
        "tie_word_embeddings": wanted.tie_word_embeddings,
        "num_nextn_predict_layers": predictions,
        "bert": cfg.bert.model_copy(update=heads),
    }

    def read(path: tuple[str, ...], index: tuple[slice, ...]) -> NoReturn:
        raise AssertionError("the weights are not fetched")

    found = cfg.model_copy(update=decided)
    return Source(found, read, lambda: None, name=f"the weights in {path}")


def config_in(path: str | Path) -> ModelConfig:
    """The config of the model in `path`, whose weights may be missing, or of a config file."""
    folder = model_folder(path)
    if folder.suffix in CONFIG_FILES and folder.is_file():
        return load(folder).model
    if (folder / "config.json").is_file():
        return config_of_folder(read_json(folder / "config.json"))
    return source_of(path).cfg


def folder_with_weights(path: str | Path) -> Path:
    """The folder that `path` means; weights of the hub come after a config.json that is read."""
    config = model_folder(path) / "config.json"
    if hub_name(path) is not None and config.is_file():
        config_of_folder(read_json(config))
    return model_folder(path, weights=True)
