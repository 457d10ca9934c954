"""Images with classes, for `train.objective=classify_images`.

An image is decoded when a batch asks for it. Invariant: sample n is a pure function of (files,
settings, seed, n): epoch e is a shuffle of the split's images by RandomState(seed + e), and images
are dealt to splits in an order of their names. An image that cannot be decoded counts in no loss;
it is named in the log, once.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from mjax.config.schema.run import Config
from mjax.data.corpus.gpt import FieldArrays
from mjax.data.multimodal.readers import ImageReader, NamesOfSamples, Skipped
from mjax.data.multimodal.sources import IMAGES, Sample, samples_of
from mjax.data.sentences.labelled import part_of_split, shuffled
from mjax.errors import UserError
from mjax.models.towers.vision import fields_of_rows


class ImageDataset:
    """`size` samples (None: an epoch): an image each, of `cfg.image_size` pixels a side.

    `batch(indices)` gives `patches` (fp32 [B, S, C*P*P]), `segment_ids`, `positions` (int32
    [B, S]) and `row_label` (int32 [B], -1 where an image cannot be decoded). Raises `UserError`
    for a source that cannot be read or has no image in the split.
    """

    max_documents, padded = 2, True  # the image, and padding

    def __init__(
        self, path: str, split: str, split_fractions: Sequence[float], size: int | None, cfg: Config
    ):
        self.cfg = cfg
        samples = sorted(samples_of(path, ["label"]), key=_digest_of_sample)
        source = f"data.images: {path}"
        self.samples = part_of_split(samples, split_fractions, split, source, "images")
        self.size = len(self.samples) if size is None else size
        classes = cfg.model.vision.num_labels
        for sample in samples:
            label = sample.facts["label"]
            if type(label) is not int or not 0 <= label < classes:
                raise UserError(
                    f"{sample.name}: class {label} is none of model.vision.num_labels={classes}"
                )
            if len(sample.items.get(IMAGES, ())) != 1:
                raise UserError(
                    f"{sample.name}: a class, but not one image under image; leave it out"
                )
        self.skipped = Skipped(path, split, len(self.samples), self.size)
        self.reader = ImageReader(cfg, self.skipped)

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked."""
        cfg = self.cfg
        vision = cfg.model.vision
        chosen = self._chosen(indices)
        images = [sample.items[IMAGES][0] for sample in chosen]
        patches = np.zeros((len(chosen), cfg.data.seq_length, vision.numbers), np.float32)
        is_good = self.reader.read(images, patches)
        self.skipped.judge(list(map(_name_of_sample, chosen)), is_good)
        labels = np.array([sample.facts["label"] for sample in chosen], np.int32)
        tokens = vision.num_tokens(cfg.image_size)
        fields = fields_of_rows(patches, tokens)
        fields["row_label"] = np.where(is_good, labels, np.int32(-1))
        return fields

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The files of samples `indices`, with what is wrong with them, if anything."""
        return [self.skipped.described(_name_of_sample(sample)) for sample in self._chosen(indices)]

    def _chosen(self, indices: Sequence[int] | np.ndarray) -> list[Sample]:
        numbers = shuffled(indices, len(self.samples), self.cfg.run.seed)
        return [self.samples[number] for number in numbers]


def _name_of_sample(sample: Sample) -> NamesOfSamples:
    return sample.name, sample.items[IMAGES][0].name


def _digest_of_sample(sample: Sample) -> bytes:
    return hashlib.blake2b(sample.name.encode(), digest_size=16).digest()
