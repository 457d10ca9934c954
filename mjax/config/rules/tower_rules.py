"""The rules about texts with images and sounds: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    PROJECTORS,
    branches_of_model,
    modality_of,
    of_tower,
)
from mjax.config.rules.rule import rule, rules_of, set_keys
from mjax.config.schema.run import Config
from mjax.config.schema.towers import TowerConfig

# The sizes that a tower needs, besides those of all towers.
_NEEDED = {"vision": "patch_size", "audio": "max_source_positions"}


def towers_of(c: Config) -> Iterator[tuple[str, TowerConfig]]:
    """Each modality of a model and its group."""
    for modality in c.model.modalities:
        yield modality, c.model.tower(modality)


@rule("write it as 'vision+mlp*23, projector, full+mlp*32'; of sounds: audio, audio_projector")
def towers_stand_before_projectors(c: Config) -> Iterator[str]:
    kinds = c.model.layer_kinds
    items = [kind for kind in kinds if modality_of(kind)]
    if not items or c.model.architecture.compares or c.model.vision.is_packed:
        return
    last = max(place for place, kind in enumerate(kinds) if modality_of(kind))
    text = branches_of_model(kinds[last + 1 :])
    is_text = {BRANCHES[word].mask for word in text} == {"causal"}
    in_order = last + 1 == len(items)
    for modality in {modality_of(kind) for kind in items}:
        towers = [of_tower(kind) for kind in items if modality_of(kind) == modality]
        in_order &= len(towers) > 1 and towers == [True] * (len(towers) - 1) + [False]
    known = {"vision+mlp", "audio+mlp", "audio_projector"} | PROJECTORS
    of_items = [kind for kind in items if kind not in known]
    if of_items or not (in_order and is_text):
        yield (
            "`model.layer_pattern`: a text with items has the layers of each tower, one projector "
            "after them, and then causal layers"
        )


@rule("write it as 'vision_2d+mlp*27, patch_merger, full+mlp, deep_merger, full+mlp*35'")
def packed_towers_stand_before_mergers(c: Config) -> Iterator[str]:
    kinds, vision = c.model.layer_kinds, c.model.vision
    named = {"patch_merger", "deep_merger", "vision_2d", "vision_window"} & c.model.branches
    if not vision.is_packed or not named:
        if named:
            yield f"`model.vision.max_patches` is needed for {min(named)}"
        return
    depth = sum(map(of_tower, kinds))
    text = branches_of_model(kinds[depth + 1 :]) - {"deep_merger"}
    in_order = {*kinds[:depth]} <= {"vision_2d+mlp", "vision_window+mlp"}
    in_order &= kinds[depth : depth + 1] == ("patch_merger",) and "patch_merger" not in text
    if not in_order or {BRANCHES[word].mask for word in text} != {"causal"}:
        yield (
            "`model.layer_pattern`: packed images have layers of vision_2d or vision_window, "
            "one patch_merger after them, and then causal layers"
        )
    deep = vision.deepstack_visual_indexes
    if len(deep) != kinds.count("deep_merger") or deep != sorted({*deep} & {*range(depth)}):
        yield "`model.vision.deepstack_visual_indexes`: a deep_merger each, rising, in the tower"


@rule("change either")
def packed_images_have_sizes(c: Config) -> Iterator[str]:
    vision, sections = c.model.vision, c.model.rope.mrope_section
    pairs = c.model.rotary_dim("full") // 2
    if sections and (len(sections) != 3 or sum(sections) != pairs):
        yield f"`model.rope.mrope_section` is not three numbers of {pairs} channel pairs in all"
    if not vision.is_packed:
        return
    if not sections:
        yield "`model.rope.mrope_section` is needed for packed images"
    if vision.head_dim % 4:
        yield f"`model.vision.hidden_size`: heads of {vision.head_dim} channels, no multiple of 4"
    if vision.min_pixels > vision.max_pixels:
        yield "`model.vision.min_pixels` is above `model.vision.max_pixels`"
    has_windows = "vision_window" in c.model.branches
    if vision.window_size % (2 * vision.patch_size or 1) or has_windows > vision.window_size:
        yield "`model.vision.window_size` is no multiple of two patches"
    if c.mesh.towers:
        yield "`mesh.towers` is not built for packed images (`model.vision.max_patches`)"
    cuts = 4 * c.mesh.tp * (1 if c.mesh.cp == 1 else 2 * c.mesh.cp)
    if vision.row_length() % cuts:
        yield f"`model.vision.length_multiple`: {vision.row_length()} patches a row over {cuts}"


@rule("set it (docs/models/multimodal.md)")
def towers_have_sizes(c: Config) -> Iterator[str]:
    for modality, tower in towers_of(c):
        token = f"{tower.item}_token_id"
        for name in (_NEEDED[modality], "hidden_size", "intermediate_size"):
            if getattr(tower, name) == 0:
                yield f"`model.{modality}.{name}` is needed for a tower"
        if tower.token_id is None and not c.model.architecture.compares:
            yield f"`model.{modality}.{token}` is needed for a tower"


@rule("change either")
def towers_divide(c: Config) -> Iterator[str]:
    for modality, tower in towers_of(c):
        tp, cp = c.mesh.of_tower(modality).values()
        of, heads = f"model.{modality}", tower.num_attention_heads
        if tower.hidden_size % heads:
            yield f"`{of}.hidden_size` is not divisible by `{of}.num_attention_heads`"
        if (tower.token_id or 0) >= c.model.vocab_size:
            yield f"`{of}.{tower.item}_token_id` is outside `model.vocab_size`"
        for name in ("num_attention_heads", "intermediate_size"):
            if getattr(tower, name) % tp:
                yield f"`{of}.{name}` is not divisible by `mesh.tp`"
        cuts = tp if c.mesh.cp == 1 else 2 * c.mesh.cp * tp  # a batch is cut over the mesh's cp
        if tower.row_length(c.item_size(modality)) % cuts:
            yield f"`{of}.length_multiple` is not divisible by `mesh.tp`, or with cp by 2 cp tp"
        if "a2a" in c.mesh.cp_type and heads // tp % cp:
            yield f"`{of}.num_attention_heads` over tp is not divisible by `mesh.cp` for a2a"
        if c.model.hidden_size % tp and not c.model.architecture.compares:
            yield "`model.hidden_size`, of a projector, is not divisible by `mesh.tp`"


@rule("leave it out, or write 1")
def towers_have_mesh_sizes(c: Config) -> Iterator[str]:
    for modality, sizes in c.mesh.towers.items():
        if modality not in c.model.modalities or c.model.architecture.compares:
            yield f"`mesh.towers`: no projector reads a tower called {modality} in this model"
        for axis, size in sizes.items():
            if size not in (1, getattr(c.mesh, axis)):
                yield f"`mesh.towers`: sizes between 1 and `mesh.{axis}` are not built"


@rule("give each a token of its own")
def towers_have_tokens_of_their_own(c: Config) -> Iterator[str]:
    ids = [tower.token_id for _, tower in towers_of(c)]
    if len(set(ids)) < len(ids):
        yield "`model.vision.image_token_id` and `model.audio.audio_token_id` are the same"


@rule("set data.images.path to texts with their images and sounds, and data.tokenizer")
def texts_with_items_given(c: Config) -> Iterator[str]:
    has_tokenizer = not (c.data.tokenizer or "train:").startswith("train:")
    is_given = c.data.images.path is not None and has_tokenizer
    if c.model.modalities and not c.data.mock and not is_given:
        yield "`model.layer_pattern` has a tower, but the data no items or no `data.tokenizer`"


@rule("leave it out")
def rows_can_be_packed(c: Config) -> Iterator[str]:
    if not c.data.images.packed:
        return
    if not c.model.modalities or c.model.architecture.compares:
        yield "`data.images.packed` has no meaning without texts that hold items"
    elif c.model.vision.is_cut:
        yield "`data.images.packed` does not go with tiles: what an image costs is known once read"


@rule("raise it, or leave the mock data out")
def mock_rows_hold_an_item_of_each(c: Config) -> Iterator[str]:
    needed = 0
    for name, tower in towers_of(c):
        if not tower.is_packed:
            needed += tower.text_tokens(c.item_size(name)) + tower.is_tiled  # a row's end
    if c.data.mock and needed > c.data.seq_length and not c.model.architecture.compares:
        yield f"`data.seq_length` is less than the {needed} tokens of an item of each modality"


@rule("set train.objective to that")
def towers_have_one_objective(c: Config) -> Iterator[str]:
    wanted = c.model.architecture.default_objective
    if c.model.modalities and c.train.objective != wanted:
        yield f"`train.objective` is not {wanted}, which `model.layer_pattern` with a tower is for"


@rule("set it back to its default")
def towers_lack(c: Config) -> Iterator[str]:
    model = c.model
    if not model.modalities:
        return
    if not c.data.document_mask:
        yield "`data.document_mask` keeps an item's padding out of sight"
    for key in ("residual_multiplier", "layer_sizes"):
        if set_keys(model, key):
            yield f"`model.{key}` is not built beside towers"
    if model.norm_placement == "post_residual":
        yield "`model.norm_placement` is not built beside towers"
    if model.position_embedding not in ("rope", "none") and not model.architecture.compares:
        yield "`model.position_embedding` is not built beside towers"


TOWER_RULES = rules_of(globals())
