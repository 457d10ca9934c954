"""Whether what was saved means the same in this run: as weights to start from, as state to go on.

Invariant: every key of the model counts unless it is named here as one that leaves the trained
function as it is, so a new key is compared from its first day.
"""

import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from mjax.checkpoint.base.source import Source
from mjax.checkpoint.base.stored import WEIGHTS
from mjax.config.schema.keys import leaf_keys, value_of
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.models.runtime.buffers import buffer_keys
from mjax.optim.schedule import consumed_samples

# Keys of a model that leave the trained function as it is: a resumed run may change them.
NOT_ARCHITECTURE = frozenset(
    """attention.attention_dropout audio.length_multiple audio.max_audios deltanet.linear_chunk_size
    hidden_dropout initializer_range mamba.chunk_size mamba.time_step_floor mamba.time_step_max
    mamba.time_step_min model_type moe.capacity_factor moe.drop_policy moe.expert_bias_update_rate
    moe.force_balanced moe.router_aux_loss_coef moe.router_aux_loss_over moe.router_aux_loss_type
    moe.router_jitter_noise moe.router_z_loss_coef moe.sinkhorn moe.skip_padding
    scaled_output_init vision.length_multiple vision.max_images""".split()
)

# What may differ from weights to start from -> the keys of a model that say it.
CHANGES = {
    "vocab_size": ("vocab_size", "vocab_multiple"),
    "num_hidden_layers": ("num_hidden_layers", "layer_pattern"),
    "context": (
        "max_position_embeddings",
        "rope.rope_theta",
        "rope.rope_local_theta",
        "rope.rope_scaling",
    ),
    "experts": ("layer_pattern",),
    "heads": ("bert.mlm_head", "bert.num_labels", "num_labels"),
    "towers": ("layer_pattern", "num_hidden_layers"),
}


def require_same_model(cfg: ModelConfig, source: Source, may_differ: Collection[str] = ()) -> None:
    """Raise `UserError` unless the weights of `source` mean the same in the model of `cfg`.

    `may_differ`: keys that are not compared.
    """
    for name in leaf_keys(ModelConfig):
        ours, theirs = value_of(cfg, name), value_of(source.cfg, name)
        if ours != theirs and name not in NOT_ARCHITECTURE and name not in may_differ:
            words = [f", or name {word} in checkpoint.init_changes" for word in CHANGES]
            allowed = [name in keys for keys in CHANGES.values()]
            raise UserError(
                f"{source.name} are of a model with {name}={theirs!r}, but this run "
                f"has model.{name}={ours!r}; set it to {theirs!r}"
                + next(itertools.compress(words, allowed), "")
            )


def keeps_buffers(cfg: Config, meta: dict) -> bool:
    """Whether the buffers of a step with the record `meta` are those of a run of `cfg`."""
    saved, ours = meta["config"], cfg.model_dump(mode="json")
    keys = {*buffer_keys(saved), *buffer_keys(ours)}
    return all(_saved_value(saved, key) == _saved_value(ours, key) for key in keys)


def require_continuation(cfg: Config, meta: dict, folder: Path) -> None:
    """Raise `UserError` unless a run of `cfg` continues the one that saved the step in `folder`.

    `meta` is the record of the step. Model, optimizer state and place in the data must be the same.
    Buffers may start anew (`keeps_buffers`).
    """
    if meta.get("contents") == WEIGHTS:
        raise UserError(
            f"checkpoint {folder} holds weights only; start from them in another run.dir with "
            f"checkpoint.init_from={folder.parent}"
        )
    model = [key for key in leaf_keys(ModelConfig) if key not in NOT_ARCHITECTURE]
    roles = ["muon_roles"] if cfg.optimizer.name == "muon" else []
    optimizer = ["name", "args", "mu_dtype", "nu_dtype", *roles]
    saved, current = meta["config"], cfg.model_dump(mode="json")
    keys = [f"model.{name}" for name in model]
    keys += [f"optimizer.{name}" for name in optimizer]
    keys += [f"lora.{name}" for name in LoraConfig.model_fields]
    keys += ["precision.params", "train.freeze"]
    for key in keys:
        was, ours = _saved_value(saved, key), _saved_value(current, key)
        if was != ours:
            raise UserError(
                f"checkpoint {folder} has {key}={was!r} but this run has {key}={ours!r}; set it "
                f"back to {was!r} or choose another run.dir"
            )
    _require_same_sample(cfg, meta, folder)


def require_same_arrays(
    cfg: Config,
    meta: dict,
    folder: Path,
    saved: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise `UserError` unless the step in `folder` holds the weights of this run, by their shapes.

    Weights that an objective trains beside the model follow from keys of many groups, so those that
    changed are named.
    """
    for name in sorted({*saved, *wanted}):
        was, ours = (list(found.get(name, "")) or "none" for found in (saved, wanted))
        if was != ours:
            raise UserError(
                f"checkpoint {folder} has weights {name}: {was}, this run: {ours}; "
                f"{_changed_keys(cfg, meta)} or choose another run.dir"
            )


def _changed_keys(cfg: Config, meta: dict) -> str:
    """Words that ask for the keys of an objective as they were."""
    saved, current = meta["config"], json.loads(cfg.model_dump_json())
    groups = "train.objective", "distill.", "preference.", "reinforce."
    found = []
    for key in leaf_keys(Config):
        if key.startswith(groups):
            was, ours = _saved_value(saved, key), _saved_value(current, key)
            if was != ours:
                found.append(f"{key} back to {was!r} (now {ours!r})")
    return f"set {', '.join(found)}" if found else "give its teacher and its data as they were"


def _require_same_sample(cfg: Config, meta: dict, folder: Path) -> None:
    """Raise `UserError` unless this run has seen as many samples at the step in `folder`."""
    was, ours = meta["consumed_samples"], consumed_samples(cfg.train, int(folder.name))
    if was == ours:
        return
    saved = meta["config"]["train"]
    raise UserError(
        f"checkpoint {folder} has consumed {was} samples, but with this run's "
        f"train.global_batch_size and train.rampup_batch_size step {folder.name} is sample {ours}; "
        f"set them back (saved: {saved['global_batch_size']}, {saved['rampup_batch_size']}) or "
        "choose another run.dir"
    )


def _saved_value(config: dict, key: str) -> object:
    """The value of a key in a saved config; its default in checkpoints older than the key."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.get(group, {})
    return config[name] if name in config else leaf_keys(Config)[key].get_default()
