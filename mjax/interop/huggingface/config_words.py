"""A config.json in the words of the one that was imported: its keys, their spelling and order.

Families read several words for one meaning (`gelu_new`, `rope_parameters`), and keys that say
nothing of the function. An export keeps those of the import for all that a run did not change.
Invariant: what is written reads as the exported model, or is written in the family's own words.
"""

from collections.abc import Collection, Mapping

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf, config_to_hf
from mjax.interop.huggingface.families.unread_keys import FOREIGN, MEANINGLESS, text_of

# Keys that are kept whatever a run changed.
KEPT = MEANINGLESS.union(FOREIGN)
# What an export says of itself.
OWN = frozenset(("architectures", "model_type", "quantization_config", "compression_config"))
DTYPE_KEYS = ("dtype", "torch_dtype")


def in_words_of(imported: Mapping, exported: dict, dtype: str) -> dict:
    """`exported`, a config.json as its family writes it, as `imported` would say it.

    `dtype` is that of its weights.
    """
    config = _in_imported_words(imported, exported)
    labels = config.get("id2label")
    if labels and exported.get("num_labels") not in (None, len(labels)):
        config = _without_keys(config, ("id2label", "label2id"))
    named = [name for name in DTYPE_KEYS if name in config] or DTYPE_KEYS
    config = _with_dtype(config, dtype) | dict.fromkeys(named, dtype)
    order = [*imported, *config]
    return {key: config[key] for key in order if key in config}


def around_text(imported: Mapping, exported: dict, dtype: str) -> dict:
    """`imported`, the config.json of a model with towers, around the text `exported`.

    The text is in its words, as `in_words_of` has them, without what `text_of` adds.
    """
    old = imported["text_config"]
    text = text_of(dict(imported))
    words = in_words_of(text, exported, dtype)
    own = {key: old[key] for key in (*OWN, *DTYPE_KEYS) if key in old}
    for key, value in _without_keys(words, OWN.union(DTYPE_KEYS)).items():
        if key in old or text.get(key) != value:
            own[key] = value
    order = [*old, *own]
    said = {key: own[key] for key in order if key in own}
    config = _without_keys(imported, ("quantization_config", "compression_config"))
    config["text_config"] = said
    if "quantization_config" in exported:
        config["quantization_config"] = exported["quantization_config"]
    return _with_dtype(config, dtype)


def _in_imported_words(imported: Mapping, exported: dict) -> dict:
    """The export in the words of `imported` if they say the same, else in the family's."""
    old = _without_keys(imported, OWN)
    own = {key: exported[key] for key in OWN & exported.keys()}
    if imported.get("model_type") == exported["model_type"]:
        before = _model_read(own | old)
        if before is not None:
            words = own | _overlaid(old, config_to_hf(before), _without_keys(exported, OWN))
            if _model_read(words) == _model_read(exported):
                return words
    kept = {key: value for key, value in old.items() if key in KEPT}
    return kept | exported


def _without_keys(config: Mapping, keys: Collection[str]) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def _model_read(config: dict) -> ModelConfig | None:
    """The model of a config.json; None where no family reads it and writes it again."""
    try:
        model = config_from_hf(dict(config))
        config_to_hf(model)
    except UserError:
        return None
    return model.model_copy(update={"layer_pattern": ", ".join(model.layer_kinds)})


def _overlaid(old: dict, base: dict, new: dict) -> dict:
    """`old` with what `new` changes of `base`, which are both in the family's words.

    A change of what `old` says in other words puts the family's in the place of all such.
    """
    changed = {key for key in new if key not in base or new[key] != base[key]}
    stays = {key for key in old if key in new or key not in base}
    if changed - old.keys():
        stays &= new.keys() | KEPT
        changed |= new.keys() - old.keys()
    out = {key: value for key, value in old.items() if key in stays}
    for key in sorted(changed):
        parts = old.get(key), base.get(key), new[key]
        is_section = all(isinstance(part, dict) for part in parts)
        out[key] = _overlaid(*parts) if is_section else new[key]
    return out


def _with_dtype(config: dict, dtype: str) -> dict:
    """The config with `dtype` wherever a part of it names one."""
    sections = {k: _with_dtype(v, dtype) for k, v in config.items() if isinstance(v, dict)}
    named = [key for key in DTYPE_KEYS if isinstance(config.get(key), str)]
    return config | sections | dict.fromkeys(named, dtype)
