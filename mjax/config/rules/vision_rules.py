"""The rules about models that read images: a part of the table of rules (`validate.py`)."""

import math
from collections.abc import Iterator

from mjax.config.languages.layer_pattern import of_tower
from mjax.config.rules.rule import rule, rules_of, set_keys
from mjax.config.schema.run import Config

_OBJECTIVE = "classify_images"
_CONTRASTIVE = "contrastive"


@rule("set train.objective=classify_images and model.vision.patch_size, or write a projector")
def images_are_classified(c: Config) -> Iterator[str]:
    if "vision" in c.model.modalities:
        return
    if c.train.objective == _CONTRASTIVE:
        yield "`train.objective` compares images with texts, but `model.layer_pattern` has none"
    reads_tokens = c.model.architecture.reads_tokens
    if not reads_tokens and c.train.objective in ("next_token", "masked_lm", "classify"):
        yield "`train.objective` reads tokens, but `model.vision.patch_size` cuts images into them"
    if reads_tokens and c.train.objective == _OBJECTIVE:
        yield "`train.objective` reads images, but `model.vision.patch_size` cuts none"


@rule("set model.layer_pattern=B and model.position_embedding=learned")
def towers_see_all_patches(c: Config) -> Iterator[str]:
    if c.model.architecture.reads_tokens:
        return
    if {"mlp"} != c.model.branches - {"bidirectional"}:
        yield "`model.layer_pattern`: an image encoder has layers of bidirectional"
    if c.model.position_embedding != "learned":
        yield "`model.position_embedding` is not built for images"


@rule("write it as 'vision+mlp*24, full+mlp*12' or 'vision+mlp*27, text+mlp*27'")
def compared_towers_stand_apart(c: Config) -> Iterator[str]:
    kinds = c.model.layer_kinds
    if not c.model.architecture.compares:
        return
    texts = {*kinds[sum(map(of_tower, kinds)) :]}
    if texts not in ({"full+mlp"}, {"text+mlp"}) or kinds[0] != "vision+mlp":
        yield (
            "`model.layer_pattern`: without a projector, vision stands before full alone or text "
            "alone"
        )


@rule("leave it out")
def compared_texts_are_plain(c: Config) -> Iterator[str]:
    model = c.model
    if not model.architecture.compares:
        pools = not (model.vision.class_token or "vision" in model.modalities)
        if pools:
            yield (
                "model.vision.class_token is for vision without a projector in "
                "`model.layer_pattern`"
            )
        return
    if (model.contrastive.eos_token_id or 0) >= model.vocab_size:
        yield "`model.contrastive.eos_token_id` is outside `model.vocab_size`"
    if model.contrastive.projection_dim == 0:
        yield "`model.contrastive.projection_dim` is needed to compare images with texts"


@rule("make them equal: no projection follows images that attention pools")
def pooled_images_have_the_width(c: Config) -> Iterator[str]:
    vision, width = c.model.vision, c.model.contrastive.projection_dim
    if c.model.architecture.compares and not vision.class_token and vision.hidden_size != width:
        yield "`model.contrastive.projection_dim` is not `model.vision.hidden_size`"


@rule("set both, such that patches fill an image")
def patches_fill_an_image(c: Config) -> Iterator[str]:
    vision = c.model.vision
    if not vision.patch_size or vision.is_packed:
        return
    if not vision.class_token and min(vision.image_size, c.image_size) >= vision.patch_size:
        return  # SigLIP's patches leave a border out
    if vision.image_size < vision.patch_size or vision.image_size % vision.patch_size:
        yield "`model.vision.image_size` is no multiple of `model.vision.patch_size`"
    elif c.image_size % vision.patch_size:
        yield "`data.images.image_size` is no multiple of `model.vision.patch_size`"


@rule("change either")
def tiles_divide_images(c: Config) -> Iterator[str]:
    vision, side = c.model.vision, c.model.vision.image_size
    if not vision.patch_size:
        return
    for sizes in vision.image_grid_pinpoints:
        if any(size % side for size in sizes):
            yield f"image_grid_pinpoints has {sizes}, no multiple of `model.vision.image_size`"
    if not vision.is_tiled and set_keys(vision, "vision_aspect_ratio"):
        without = "with tile_tags" if vision.is_cut else "without image_grid_pinpoints"
        yield f"`model.vision.vision_aspect_ratio` has no effect {without}"
    if (vision.is_cut or vision.pixel_shuffle) and c.image_size != side:
        yield "`data.images.image_size` is not that of tiles or of a pixel shuffle, the model's"
    if vision.pixel_shuffle and vision.grid() % 2:
        yield f"`model.vision.pixel_shuffle`: a side of {vision.grid()} patches is odd"
    if vision.pixel_shuffle and vision.padded(vision.text_tokens()) % (c.mesh.cp * c.mesh.tp):
        yield "`model.vision.length_multiple`: cp tp does not divide the tokens of a pixel shuffle"


@rule("give one for each tile of the largest of image_grid_pinpoints, and one for the whole view")
def tags_tell_tiles_apart(c: Config) -> Iterator[str]:
    tags, most = c.model.vision.tile_tags, c.model.vision.most_tiles
    if tags and len(tags) != most + 1:
        yield f"model.vision.tile_tags: {len(tags)} for {most} tiles and a whole view"
    if len(set(tags)) < len(tags):
        yield "`model.vision.tile_tags` has a tag twice"


@rule("raise it; what is more is padding, which no patch sees")
def rows_hold_an_image(c: Config) -> Iterator[str]:
    vision = c.model.vision
    if not vision.patch_size or vision.is_packed or c.model.architecture.compares:
        return
    needed = c.model.vision.num_tokens(c.image_size)
    if c.model.modalities:
        needed = c.model.vision.text_tokens(c.image_size)
    if c.data.seq_length < needed:
        yield f"`data.seq_length` is less than the {needed} tokens of an image"


@rule("set it to their number")
def image_classes_given(c: Config) -> Iterator[str]:
    if c.train.objective == _OBJECTIVE and c.model.vision.num_labels < 2:
        yield "`model.vision.num_labels`: classify_images has no classes to tell"


@rule("give one number, or one a channel")
def channels_are_scaled(c: Config) -> Iterator[str]:
    sees = "vision" in c.model.embedded
    for key in ("mean", "std"):
        numbers = getattr(c.data.images, key)
        if sees and len(numbers) not in (1, c.model.vision.num_channels):
            yield f"`data.images.{key}` does not fit `model.vision.num_channels`"
        if not all(map(math.isfinite, numbers)):
            yield f"`data.images.{key}` has a number that is not finite"
    if min(c.data.images.std) <= 0:
        yield "`data.images.std` has a number that is not positive"


VISION_RULES = rules_of(globals())
