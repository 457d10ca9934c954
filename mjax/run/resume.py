"""Starts a run at its newest checkpoint, from given weights or at step 0."""

from mjax.checkpoint.base.companion_files import identify_text
from mjax.config.languages.difference import differences
from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.train.trainer import Trainer

# Keys that say how and where a run proceeds, not what it computes.
SILENT_KEYS = ("run.dir", "log.", "checkpoint.")


def resume(trainer: Trainer) -> str:
    """Restore the newest checkpoint if checkpoint.resume allows it; returns a line that says so."""
    cfg, store, checkpoints = trainer.cfg, trainer.store, trainer.checkpoints
    checkpoints.fetch_mirror()
    if cfg.checkpoint.resume != "never":
        if checkpoints.latest_step() is not None:
            step = trainer.restore()
            return f"resumed from {checkpoints.source.directory / str(step)}"
        if cfg.checkpoint.resume == "require":
            raise UserError(
                f"checkpoint.resume=require, but {store.directory} holds no checkpoint; set "
                "checkpoint.resume=auto to start at step 0"
            )
    return begin(trainer)


def begin(trainer: Trainer) -> str:
    """Load the weights that the config starts from, if any; returns lines that say so."""
    sources = trainer.checkpoints.start_sources()
    if not sources:
        return "starting at step 0"
    loaded = trainer.load_params(*sources.values())
    return f"starting at step 0 from the weights in {' and '.join(sources)}\n{loaded}"


def restored_record(trainer: Trainer) -> dict:
    """The record of the checkpoint that was restored, {} for a new run."""
    source = trainer.checkpoints.source or trainer.store
    return source.read_meta(trainer.step_number) if trainer.step_number else {}


def changes(trainer: Trainer) -> str:
    """A line on what this run has otherwise than its checkpoint: keys, the text; or ""."""
    cfg, record = trainer.cfg, restored_record(trainer)
    ours, defaults = cfg.model_dump(mode="json"), Config().model_dump(mode="json")
    found = differences(record["config"], ours, defaults)
    found = [line for line in found if not line.startswith(SILENT_KEYS)]
    before, now = record.get("text_digests", {}).get("text"), identify_text(cfg).get("text")
    if before is not None and before != now:
        found.append("data.text, which holds another text")
    if not found:
        return ""
    return f"changed since step {trainer.step_number}: {', '.join(found)}"
