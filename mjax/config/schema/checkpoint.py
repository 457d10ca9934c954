"""The keys of group `checkpoint`: what is saved, where, and what a run starts from."""

from typing import Literal

from pydantic import Field

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group

InitChange = Literal["vocab_size", "num_hidden_layers", "context", "experts", "heads", "towers"]


class CheckpointConfig(Group):
    """Orbax checkpoints under run.dir/checkpoints."""

    interval: int | None = Field(None, ge=1)
    """Steps between saves; None: only at end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep steps divisible by this."""
    keep_best: int = Field(0, ge=0)
    """Also keep this many of lowest held-out loss."""
    digests: bool = True
    """Make and check digests of all files; false: damage is loaded unseen."""
    async_save: bool = True
    max_failed_saves: int | None = Field(3, ge=1)
    """Failed saves in a row that end the run; None: it goes on."""
    local_dir: PathText | None = None
    """Folder of a fast disk or in memory (/dev/shm) for saves in between."""
    local_interval: int | None = Field(None, ge=1)
    """Steps between saves there."""
    resume: Literal["auto", "never", "require"] = "auto"
    mirror: str | None = None
    """Address (s3://BUCKET/RUN, gs://BUCKET/RUN) that every save is copied to, and resumed from
    where run.dir has nothing newer.
    """
    hf: bool = False
    """Also write weights in Hugging Face's format to run.dir/hf/STEP after each save."""
    init_from: PathText | None = None
    """Start step 0 from the weights in this Hugging Face, mjax or Megatron folder."""
    init_changes: list[InitChange] = []
    """In what the model may differ from those weights; what they lack is drawn. context:
    max_position_embeddings and the rope_* keys (docs/train/checkpoints.md); experts: it has experts
    where they have MLPs (docs/models/moe.md); heads: of model.bert (docs/models/encoders.md),
    or model.num_labels; towers: it reads images or sounds (docs/models/multimodal.md).
    """
    init_audio: PathText | None = None
    """Start the tower of sounds from the encoder in this Whisper folder, after init_from."""
