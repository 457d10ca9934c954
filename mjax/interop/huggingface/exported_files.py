"""The files beside the weights of an export: config.json, tokenizer, what was imported with them.

Invariant: a config.json is in the words of the one that was imported, if there was one.
"""

import json
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.companion_files import UNREAD, read_side_files, tokenizer_dir
from mjax.checkpoint.base.safetensors import pack, said_in, unpack
from mjax.checkpoint.base.source import flat
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.interop.huggingface.config_words import around_text, in_words_of
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf, slots
from mjax.interop.huggingface.families.unread_keys import text_of
from mjax.interop.huggingface.files import TABLES
from mjax.interop.huggingface.float8 import quantization_config
from mjax.interop.huggingface.names import in_form
from mjax.models import definition_of


def side_files(
    cfg: ModelConfig, ckpt: str | Path, dtype: str, unread: dict[str, bytes] | None = None
) -> dict[str, bytes]:
    """Name -> content of what an exported folder holds besides weights: a config.json in the words
    of the one that was imported, and all that lay beside its weights. `unread` as in `Source`."""
    tokenizer = tokenizer_dir(ckpt)
    found = read_side_files(ckpt) | (unread or {})
    config = config_to_hf(cfg)
    old = json.loads(found.pop("config.json", b"{}"))
    kept, form = _unread_of_export(found.pop(UNREAD, pack({})), old, cfg)
    if kept or form:
        found[UNREAD] = pack(kept, form)
    if dtype.startswith("float8"):
        specs, linear = definition_of(cfg).specs, [name for name, t in kept.items() if t.ndim == 2]
        places = in_form(slots(cfg, specs), form)
        layout = quantization_config(cfg, places, flat(specs), dtype, linear)
        config["quantization_config"], dtype = layout, "bfloat16"
    said = around_text if "prefixes" in form else in_words_of
    config = said(old, config, dtype)
    words = json.dumps(config).encode() + found.get("generation_config.json", b"")
    if tokenizer is not None and b'"eos_token_id"' not in words:
        config["eos_token_id"] = load_tokenizer(tokenizer).eod_id
    ids = {k: v for k, v in config.items() if k.endswith("token_id") and v is not None}
    found.setdefault("generation_config.json", _json({"_from_model_config": True, **ids}))
    if "tokenizer.json" in found:
        fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
        fast |= {"model_max_length": cfg.max_position_embeddings}
        found.setdefault("tokenizer_config.json", _json(fast))
    return found | {"config.json": _json(config)}


def _unread_of_export(
    content: bytes, config: dict, cfg: ModelConfig
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(tensors that were kept aside at import and still belong to the model, the file's form).

    `config` is what was imported. Tables of positions go with those that they were made for.
    """
    unread, form = unpack(content), said_in(content)
    config = config if cfg.modalities else text_of(config)
    if not (unread or form) or config.get("model_type") != cfg.model_type:
        return {}, {}
    positions = ((of.rope, of.max_position_embeddings) for of in (config_from_hf(config), cfg))
    same = len(set(map(str, positions))) == 1
    kept = {name: tensor for name, tensor in unread.items() if same or not TABLES.search(name)}
    return kept, form


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
