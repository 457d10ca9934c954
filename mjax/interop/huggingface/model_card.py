"""The model card of an export: README.md, with metadata for the hub and the facts of the run.

Facts are those that the step records. Invariant: names of folders of this machine do not leave it,
only the last part of a path does.
"""

from pathlib import Path
from typing import Any

import yaml

import mjax
from mjax.checkpoint.base.hub import hub_name, model_folder
from mjax.checkpoint.base.steps import HELD_OUT_LOSS, newest_step, run_of
from mjax.checkpoint.base.stored import WEIGHTS, read_record
from mjax.config.schema.model import ModelConfig
from mjax.models import definition_of
from mjax.sharding.spec import count_parameters

CARD, CARD_OF_BASE = "README.md", "BASE_README.md"
# Keys of a run that its card names.
_SETTINGS = tuple(
    """optimizer.name schedule.lr train.global_batch_size data.seq_length precision.compute
    precision.fp8 lora.rank""".split()
)


def with_card(
    files: dict[str, bytes], cfg: ModelConfig, ckpt: str | Path, license: str | None
) -> dict[str, bytes]:
    """The files of an export of the weights in `ckpt`, with a model card.

    A card that came with weights which no run has changed stays. A run gets its own, and the card
    of its base another name. license: the hub's word for it; None: unknown.
    """
    step = newest_step(model_folder(ckpt))
    record = {} if step is None else read_record(step)
    is_run = bool(record) and record.get("contents") != WEIGHTS
    if CARD in files and not is_run and license is None:
        return files
    kept = {CARD_OF_BASE: files[CARD]} if CARD in files else {}
    name = hub_name(ckpt)
    title = run_of(Path(ckpt)).absolute().name if name is None else name.repo
    return files | kept | {CARD: _body(title, cfg, record if is_run else {}, license).encode()}


def _body(title: str, cfg: ModelConfig, record: dict, license: str | None) -> str:
    base = _base_of_record(record)
    metadata: dict[str, Any] = {"library_name": "transformers", "license": license or "unknown"}
    if base is not None and hub_name(base) is not None:
        metadata["base_model"] = hub_name(base).repo
    if cfg.architecture.generates and cfg.architecture.reads == ("tokens",):
        metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = ["mjax", *([cfg.model_type] if cfg.model_type else [])]
    facts = _facts(cfg, record, base)
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    front = yaml.safe_dump(metadata, sort_keys=False)
    about = "A model trained with mjax." if record else "Weights converted by mjax."
    return f"---\n{front}---\n\n# {title}\n\n{about}\n\n| | |\n|---|---|\n{rows}\n"


def _facts(cfg: ModelConfig, record: dict, base: str | None) -> dict[str, Any]:
    count = count_parameters(definition_of(cfg).specs)
    facts: dict[str, Any] = {"family": cfg.model_type, "parameters": f"{count:,}"}
    if base is not None:
        facts["base model"] = base if hub_name(base) else Path(base).name
    if record:
        facts["step"] = f"{record['step']:,}"
        length = _said(record, "data.seq_length")
        samples = record["consumed_samples"]
        facts["tokens seen, padding included"] = f"{samples * length:,}"
        facts["data"] = ", ".join(_data_of(record)) or None
        facts["held-out loss"] = record.get(HELD_OUT_LOSS)
        facts |= {f"`{key}`": _said(record, key) for key in _SETTINGS}
    facts["mjax"] = record.get("versions", {}).get("mjax", mjax.__version__)
    return {name: value for name, value in facts.items() if value not in (None, "none", 0)}


def _base_of_record(record: dict) -> str | None:
    return record.get("base", {}).get("from") or _said(record, "checkpoint.init_from")


def _data_of(record: dict) -> list[str]:
    """Names of the files that a run read."""
    given = [corpus["path"] for corpus in record.get("data") or []]
    for key in ("data.text", "data.conversations.path", "data.images.path"):
        value = _said(record, key)
        given += [value] if isinstance(value, str) else value or []
    names = dict.fromkeys(Path(path).name for path in given)
    return list(names) or (["mock data"] if _said(record, "data.mock") else [])


def _said(record: dict, key: str) -> Any:
    """The value of a key of the config of a run, or None."""
    found: Any = record.get("config", {})
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
