"""Prompts that a model reads whole: beside images and sounds, or by an encoder.

Such a request has a program of prefill to itself, with these inputs beside the tokens. An encoder
reads the prompt, and what follows is its decoder's, which begins with a token of its own.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.towers import TowerConfig
from mjax.errors import UserError
from mjax.infer.checks import require_decoder
from mjax.infer.records import holding
from mjax.models.towers.image_places import PLACES, TIME_AXES, PackedImages
from mjax.models.towers.tiles import CORNERS, PADDING, Tiled

# Of one text: [I, H, W, C], `Tiled` or `PackedImages` without a first axis; [I, F, M] of sounds.
PromptItem = np.ndarray | Tiled | PackedImages


def require_generator(cfg: ModelConfig) -> None:
    """Raise `UserError` for a model that continues no text."""
    if not cfg.architecture.reads_target:
        require_decoder(cfg)
    elif cfg.decoder_start_token_id is None:
        raise UserError(
            "model.decoder_start_token_id: generation begins with it; give the id that the model "
            "was trained with"
        )


def whole_inputs(
    cfg: ModelConfig, prompt: Sequence[int], items: Mapping[str, PromptItem], sizes: Sequence[int]
) -> dict[str, jax.typing.ArrayLike] | None:
    """The inputs of `Decoder.extend` beside a prompt, [1, ..] each; None: it is no whole one.

    sizes: rising lengths, to one of which an encoder's source is filled up.
    Raises `UserError` for items that the prompt does not go with.
    """
    check_items(cfg, prompt, items)
    if cfg.architecture.reads_target:
        size = holding(sizes, len(prompt))
        source, real = np.zeros((2, 1, size), np.int32)
        source[0, : len(prompt)], real[0, : len(prompt)] = prompt, 1
        return {"source": source, "real": real}
    if not items:
        return None
    # A sample that is preempted is computed anew, and may have made tokens of items itself.
    count = np.array([len(prompt)], np.int32)
    given = dict(items)
    if isinstance(given.get("vision"), PackedImages):
        given["vision"] = _filled_up(given["vision"], holding(sizes, len(prompt)))
    return {
        "given": jax.tree.map(lambda array: np.asarray(array)[None], given),
        "count": count,
    }


def _filled_up(images: PackedImages, size: int) -> PackedImages:
    """Packed images for a text of `size` tokens, of which the last are none of theirs."""
    more = size - len(images.features)
    features = np.pad(images.features, (0, more), constant_values=-1)
    return images._replace(features=features, axes=np.pad(images.axes, ((0, more), (0, 0))))


def position_shift(inputs: Mapping | None) -> int:
    """The number that positions after a prompt have above its tokens: images take fewer or more."""
    images = (inputs or {}).get("given", {}).get("vision")
    if not isinstance(images, PackedImages):
        return 0
    count = int(inputs["count"][0])
    return int(images.axes[0, :count].max(initial=-1)) + 1 - count


def largest_inputs(cfg: ModelConfig, size: int) -> dict | None:
    """Shapes of the most that goes with a prompt of `size` tokens (`whole_inputs`); None: nothing.

    A text has as many items as the model's config says; a prompt may have more or larger ones.
    """

    def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *sizes), dtype)

    if cfg.architecture.reads_target:
        return dict.fromkeys(("source", "real"), shape(size, dtype="int32"))
    given = {}
    for name in cfg.modalities:
        tower = cfg.tower(name)
        if tower.is_packed:
            length = tower.row_length()
            facts = shape(size, dtype="int32"), shape(size, TIME_AXES, dtype="int32")
            places = shape(length, PLACES, dtype="int32")
            given[name] = PackedImages(shape(length, tower.numbers), places, *facts)
            continue
        given[name] = shape(tower.max_items, *tower.item_shape)
        if tower.is_tiled:
            corners = shape(size, CORNERS, dtype="int32")
            given[name] = Tiled(given[name], corners, shape(size, CORNERS))
    return {"given": given, "count": shape(dtype="int32")} if given else None


def check_items(cfg: ModelConfig, prompt: Sequence[int], items: Mapping[str, PromptItem]) -> None:
    """Raise `UserError` unless each item has its tokens in the prompt."""
    for name in items:
        if name not in cfg.modalities:
            mark = cfg.tower(name).mark
            raise UserError(f"generate: {mark} is given, but the model has no tower for it")
    for name in cfg.modalities:
        tower = cfg.tower(name)
        found, given, size = items.get(name), 0, None
        if tower.is_packed:
            _check_packed(prompt, found, tower)
            continue
        if found is not None:
            given, size = (found.pixels if tower.is_tiled else found).shape[:2]
        count, each = list(prompt).count(tower.token_id), tower.text_tokens(size)
        if tower.is_tiled and given:
            given, each = 1, (found.corners[:, 0] != PADDING).sum()
        if count > given * each or count % max(each, 1):
            raise UserError(
                f"generate: a prompt has {count} tokens {tower.token_id}, and {given} {tower.mark} "
                f"of {each} tokens are given; give each its tokens"
            )


def _check_packed(prompt: Sequence[int], images: PromptItem | None, vision: TowerConfig) -> None:
    """Raise `UserError` unless packed images are those of the prompt."""
    stands = np.isin(prompt, [vision.image_token_id, vision.video_token_id])
    if images is None and not stands.any():
        return
    if not isinstance(images, PackedImages) or len(images.features) != len(prompt):
        raise UserError(
            f"generate: a prompt of {len(prompt)} tokens, of which {stands.sum()} stand for "
            "images: give `PackedImages` that were made for it (`packed_row`)"
        )
    if ((images.features >= 0) != stands).any():
        raise UserError("generate: the images were packed for another prompt; pack them for this")
