"""The fields of a batch: their dtypes and axes, those that layers read, and the lengths of axes.

A batch is a dictionary of arrays by the name of a field. An objective names its own fields.
"""

from dataclasses import dataclass

import jax
import numpy as np

from mjax.config.schema.run import Config
from mjax.models.towers.image_places import PLACES, TIME_AXES
from mjax.models.towers.modalities import MODALITIES
from mjax.models.towers.tiles import CORNERS

# The fields of an objective, of the layers, and the place of each token (`train/batch.py`).
Batch = dict[str, jax.Array]

# The same on the host, before it is placed on the mesh.
HostBatch = dict[str, np.ndarray]

# fp32 scalars by name: sums or shares of losses and statistics, or their counts.
Scalars = dict[str, jax.Array]


@dataclass(frozen=True)
class BatchField:
    """One array of a batch.

    axes: logical axes (`sharding/rules.py`): "batch" first, then "seq", or "target" of what an
        encoder-decoder's decoder reads, if it has one. "neighbors", "retrieved": of each row, those
        of all chunks, and the tokens of one. "images", "image_tokens" and "sounds", "sound_tokens":
        likewise. "pixels", "mels": the numbers that such a token is embedded from. "corners": of a
        token, the features that it is made of (`models/towers/tiles.py`). "places", "axes": of a
        patch, and of a token of a text with packed images (`models/towers/image_places.py`).
    pad: the value in rows that fill up a batch. They count in no loss.
    is_computed: a batch may be given without it. Then a role computes it on the devices
        (`post/base/roles.py`).
    """

    dtype: type
    axes: tuple[str, ...] = ("batch", "seq")
    pad: float = 0
    is_computed: bool = False


# The fields that layers read. They are part of every batch, whatever the objective.
LAYER_FIELDS = {
    "segment_ids": BatchField(np.int32),
    "positions": BatchField(np.int32),
}


# A field that layers read where an objective has it: the segment that a token's own continues
# (`Tokens.prefixes`); 0: none.
SHARED_FIELDS = {"prefix_ids": BatchField(np.int32)}

# A field that layers read where an objective has it: the experts that a sampler chose
# (`Tokens.experts`); -1: none is known.
REPLAY_FIELDS = {
    "experts": BatchField(np.int16, ("batch", "seq", "expert_layers", "chosen"), pad=-1),
}

# The fields with the columns of tokens along axes that only some batches have, by axis.
FURTHER_COLUMNS = {
    "target": "decoder_columns",
    "retrieved": "neighbor_columns",
}
FURTHER_COLUMNS |= {modality.axes[1]: modality.columns for modality in MODALITIES.values()}


def further_lengths(cfg: Config) -> dict[str, int | None]:
    """The lengths of the axes of a batch besides its rows and the columns of a row."""
    lengths = {"pixels": cfg.model.vision.numbers, "corners": CORNERS}
    lengths |= {"places": PLACES, "axes": TIME_AXES}
    companions = cfg.model.companions(cfg.data.seq_length)
    if companions is not None:
        sizes = companions.count, companions.length
        lengths |= dict(zip(companions.axes, sizes, strict=True))
    for name in cfg.model.modalities:
        tower = cfg.model.tower(name)
        length = tower.row_length(cfg.item_size(name))
        sizes = tower.max_items, length, tower.numbers
        lengths |= dict(zip(MODALITIES[name].axes, sizes, strict=True))
    return lengths | {"target": cfg.data.target_length}
