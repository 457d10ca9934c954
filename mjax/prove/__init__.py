"""Does every feature give the same numbers on every mesh? The runs, and what is compared.

For each feature and mesh a small model in fp32 is trained for 20 steps (AdamW, clipping, a short
schedule) and compared with one device and one micro-batch: loss, gradient norm and every gradient
of the first step, the loss of all of them, and whether devices that hold the same shard hold the
same bits at the end. Packed documents, an uneven loss mask and sequences without a single valid
token included. One compiled step gives all of it: AdamW's first moment after one step is
(1 - b1) times the clipped gradient, Muon's likewise. The law tests run a part of the same table.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.config import load
from mjax.config.languages.layer_pattern import shortest
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.run import Config
from mjax.config.schema.towers import TowerConfig
from mjax.config.schema.vision import VisionConfig
from mjax.data.multimodal.tiles import features_of_images
from mjax.models.base.adapted import is_of_adapter
from mjax.models.towers.image_places import Grid, packed_row
from mjax.models.towers.modalities import MODALITIES, Items, features_of, features_of_tiles
from mjax.models.towers.tiles import padded_features
from mjax.models.towers.vision import image_fields
from mjax.objectives.text_with_items import fields_of_packed, items_of
from mjax.pipeline.storage import canonical, canonical_abstract, from_canonical
from mjax.prove.features import (
    DEEP,
    FEATURES,
    MOST_TP,
    NO_RING,
    NOT_ON_SIX,
    ONE_MICRO_BATCH,
    ROWS,
    SIX,
    SMALL,
    STEPS,
    VOCAB,
)
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

BOUND, CURVE_BOUND = 1e-5, 1e-4

# Height and width of the images of a text that has tiles, of one text after the other.
IMAGE_SIZES: tuple[list[tuple[int, int]], ...] = (
    [],
    [(9, 9)],
    [(5, 9), (9, 9)],
    [(9, 20)],
    [(19, 12)],
)


# Patches of the images and videos of a text that has packed images, of one text after the other.
GRIDS: tuple[list[Grid], ...] = (
    [],
    [Grid(1, 4, 6)],
    [Grid(1, 2, 6), Grid(1, 6, 2)],
    [Grid(2, 4, 2, 1.5)],
    [Grid(1, 4, 2), Grid(1, 2, 2)],
)
# Fields of objectives that make answers out of random tokens.
OF_ANSWERS = {"answer_values", "advantages", "returns"}
VIDEO = 9  # the token of a video's patches


class Cell(NamedTuple):
    """Mesh and settings that a feature is run with; the default is the reference."""

    mesh: dict[str, int] = {}  # axes that are left out have size 1
    zero: int = 0
    micro_batches: int = 1
    rows: int = ROWS[0]
    cp_type: str = "auto"

    def __str__(self) -> str:
        mesh = "·".join(f"{axis}{n}" for axis, n in self.mesh.items() if n > 1) or "one device"
        keys = f", {self.cp_type}" if self.mesh.get("cp", 1) > 1 else ""
        return f"{mesh} (ZeRO {self.zero}, {self.micro_batches} mb{keys})"


def meshes(devices: int) -> list[dict[str, int]]:
    """Every factorization of `devices` into the five axes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = itertools.product(divisors, repeat=len(AXES))
    return [dict(zip(AXES, s, strict=True)) for s in shapes if math.prod(s) == devices]


def cells(devices: int, feature: str) -> Iterator[Cell]:
    """A feature's row: every mesh. ZeRO stage, micro-batches and the exchange of keys take turns
    along it, beginning elsewhere for each feature."""
    if devices % 3 == 0 and feature in NOT_ON_SIX:
        return
    ways = ("all_gather", "a2a") if feature in NO_RING else ("all_gather", "a2a", "ring")
    period = len(shortest(load(None, [*SMALL, *FEATURES[feature]]).model.layer_kinds))
    for i, mesh in enumerate(meshes(devices), list(FEATURES).index(feature)):
        if mesh["tp"] > MOST_TP.get(feature, devices):
            continue
        stages = (0, 1, 3) if mesh["pp"] > 1 else (0, 1, 2, 3)
        parts = mesh["dp"] * mesh["ep"]
        most = 1 if feature in ONE_MICRO_BATCH else 8
        fits = [(m, r) for m in range(1, most + 1) for r in ROWS if r % (m * parts) == 0]
        heads = 2 if feature == "odd widths" else 8
        way = ways[i % len(ways)]
        layers = layers_for(mesh, feature)
        odd = mesh["pp"] > 1 and layers // mesh["pp"] % period
        uneven = layers % mesh["pp"] or odd  # where a ring is refused
        if (way == "a2a" and heads // mesh["tp"] % mesh["cp"]) or (way == "ring" and uneven):
            way = ways[0]
        yield Cell(mesh, stages[i % len(stages)], *fits[5 * i % len(fits)], way)


def make_batch(
    rows: int,
    seed: int = 0,
    width: int = 16,
    vocab: int = VOCAB,
    target: int | None = None,
) -> dict:
    """Packed documents, an uneven loss mask, an eighth of the rows without a valid token.

    The fields of all objectives; a third of the rows has no class. `target` is the length of those
    of a decoder beside an encoder, which alone has labels then.
    """
    rng = np.random.default_rng(seed)
    shape = rows, width
    segments = np.cumsum(rng.random(shape) < 0.15, axis=1).astype(np.int32) + 1
    mask = (rng.random(shape) < rng.random((rows, 1))).astype(np.float32)
    mask[: rows // 8] = 0
    new = np.diff(segments, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(new, np.arange(width), 0), axis=1)
    batch = {
        "tokens": rng.integers(0, vocab, shape).astype(np.int32),
        "labels": rng.integers(0, vocab, shape).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": segments,
        "positions": (np.arange(width) - starts).astype(np.int32),
        "token_types": rng.integers(0, 2, shape).astype(np.int32),
        "row_label": rng.integers(-1, 2, rows).astype(np.int32),
    }
    if target is None:
        return batch
    of_target = make_batch(rows, seed + 1, target, vocab)
    names = {"decoder_tokens": "tokens", "decoder_segment_ids": "segment_ids"}
    names |= {"labels": "labels", "loss_mask": "loss_mask"}
    return batch | {name: of_target[other] for name, other in names.items()}


def make_companions(rows: int, count: int, length: int, vocab: int = VOCAB) -> np.ndarray:
    """int32 [rows, count, length]: texts of random lengths, a quarter of them empty, then -1."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, vocab, (rows, count, length)).astype(np.int32)
    ends = rng.integers(-length // 3, length + 1, (rows, count, 1))
    return np.where(np.arange(length) < ends, tokens, -1)


def make_images(cfg: Config, rows: int, width: int) -> dict:
    """The fields of random images, one a row of `width` columns."""
    vision, size = cfg.model.vision, cfg.image_size
    shape = rows, size, size, vision.num_channels
    images = np.random.default_rng(3).normal(size=shape)
    return image_fields(images, vision, width)


def with_items(cfg: Config, batch: dict) -> dict:
    """The fields of no, one or two random items of each modality in a text.

    Their places differ from row to row. Items of several modalities take turns. If images and
    texts are compared, each text has an image, and its end stands in some place.
    """
    tokens = batch["tokens"].copy()
    towers = {name: (cfg.model.tower(name), items_of(cfg, name)) for name in cfg.model.modalities}
    placeholders = [tower.token_id for tower, _ in towers.values()]
    tokens[np.isin(tokens, placeholders)] = 8
    rng = np.random.default_rng(3)
    fields = {}
    for name, (tower, items) in towers.items():
        fields[MODALITIES[name].field] = _random_items(tower, items, len(tokens), rng)
    if cfg.model.architecture.compares:
        rows = np.arange(len(tokens))
        ends = rows * 5 % tokens.shape[1]
        tokens[rows, ends] = cfg.model.contrastive.eos_token_id or 0
        return {"tokens": tokens} | fields
    if cfg.model.vision.is_packed:
        return with_packed(cfg.model.vision, tokens, batch["segment_ids"].copy())
    if cfg.model.vision.is_tiled:
        _, items = towers["vision"]
        return with_tiles(cfg.model.vision, tokens, items, fields)
    _place_items(tokens, towers, fields)
    for name, (tower, items) in towers.items():
        fields[f"{name}_features"] = features_of(tokens, tower, items)
    return {"tokens": tokens} | fields


def _random_items(
    tower: TowerConfig, items: Items, rows: int, rng: np.random.Generator
) -> np.ndarray:
    """Random numbers of the items of `rows` rows; zero before and after the tokens of an item."""
    shape = rows, items.count, items.length, tower.numbers
    field = rng.normal(size=shape)
    length = tower.num_tokens(items.size)
    field[:, :, : tower.leading] = 0
    field[:, :, length:] = 0
    return field.astype(np.float32)


def _place_items(
    tokens: np.ndarray, towers: dict[str, tuple[TowerConfig, Items]], fields: dict
) -> None:
    """Write the places of items into texts, modalities in turns; clear items that have none."""
    rows = np.arange(len(tokens))
    columns = np.arange(tokens.shape[1])
    first = rows % 3
    most = max(items.count for _, items in towers.values())
    for number in range(most):
        for turn, (name, (tower, items)) in enumerate(towers.items()):
            has_item = (rows + turn) % 4 > number
            length = tower.text_tokens(items.size)
            place = columns - first[:, None]
            is_inside = (place >= 0) & (place < length)
            tokens[has_item[:, None] & is_inside] = tower.token_id
            fields[MODALITIES[name].field][~has_item, number] = 0
            first = first + length + 1


def with_packed(vision: VisionConfig, tokens: np.ndarray, documents: np.ndarray) -> dict:
    """The fields of texts with no image, one of some size, or two, and with a video."""
    rng, rows = np.random.default_rng(3), []
    tokens[tokens == VIDEO] = 8
    for row, ids in enumerate(tokens):
        place, grids = row % 2, GRIDS[row % len(GRIDS)]
        for grid in grids:
            is_one = grid.frames == 1
            ids[place : place + grid.tokens] = vision.image_token_id if is_one else VIDEO
            documents[row, place : place + grid.tokens] = documents[row, place]
            place += grid.tokens + 1
        images = [(rng.normal(size=(grid.patches, vision.numbers)), grid) for grid in grids]
        rows.append(packed_row(ids, images, vision, documents[row]))
    return fields_of_packed(rows) | {"tokens": tokens, "segment_ids": documents}


def with_tiles(vision: VisionConfig, tokens: np.ndarray, items: Items, fields: dict) -> dict:
    """The fields of texts with no image, one of some size, or two."""
    texts = []
    for row in range(len(tokens)):
        sizes = IMAGE_SIZES[row % len(IMAGE_SIZES)]
        texts.append(features_of_images(sizes, vision))
    for row, images in enumerate(texts):
        tiles = 0
        place = row % 3
        for image in images:
            end = place + len(image.corners)
            assert end <= tokens.shape[1], "data.seq_length holds the images"
            tokens[row, place:end] = vision.image_token_id
            tiles = image.corners.max() // vision.text_tokens() + 1
            place = end + 1
        fields["patches"][row, tiles:] = 0
    features, weights = features_of_tiles(tokens, vision, items, *padded_features(texts))
    of_tiles = {"vision_features": features, "vision_weights": weights}
    return {"tokens": tokens} | fields | of_tiles


def make_trainer(feature: str, cell: Cell, *overrides: str) -> Trainer:
    """A trainer of `feature` at step 0 on the first devices."""
    mesh = dict.fromkeys(AXES, 1) | cell.mesh
    size = cell.rows // (mesh["dp"] * mesh["ep"]) // cell.micro_batches
    keys = {f"mesh.{axis}": n for axis, n in mesh.items()}
    keys |= {"mesh.zero": cell.zero, "mesh.cp_type": cell.cp_type}
    keys |= {"train.global_batch_size": cell.rows, "train.micro_batch_size": size}
    given = [f"{key}={value}" for key, value in keys.items()]
    cut = f"mesh.expert_tp={mesh['tp']}"  # unless the feature folds them
    cfg = load(None, [*SMALL, cut, *FEATURES[feature], *given, *overrides])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: math.prod(mesh.values())]))
    trainer.init()
    if cfg.lora.rank:
        fill_adapters(trainer)
    return trainer


def fill_adapters(trainer: Trainer) -> None:
    """Start with adapters of which no part is zero, so that all have gradients on every mesh."""
    flat = flatten_dict(jax.device_get(trainer.params()))
    for number, (path, array) in enumerate(sorted(flat.items())):
        if is_of_adapter(path) and path[-1] in "ab":
            rng = np.random.default_rng(number)
            flat[path] = 0.1 * rng.standard_normal(array.shape, np.float32)
    begun = unflatten_dict(flat)
    stored = trainer.abstract_state()["params"]
    wanted = canonical_abstract(trainer.storage, stored)
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), begun, wanted)
    trainer.start(from_canonical(trainer.storage, placed, stored))


class Numbers(NamedTuple):
    """Results of a run: loss, norm and gradients of the first step; losses; replicas identical."""

    first: dict
    curve: np.ndarray
    replicas: bool


def measure(trainer: Trainer, steps: int = STEPS) -> Numbers:
    """Train from step 0 on one batch, whose loss falls the faster and shows the more."""
    rows, width = trainer.cfg.train.global_batch_size, trainer.cfg.data.seq_length
    batch = make_batch(rows, width=width, target=trainer.cfg.data.target_length)
    companions = trainer.cfg.model.companions(width)
    if companions is not None:
        batch[companions.field] = make_companions(rows, companions.count, companions.length)
    if not trainer.cfg.model.architecture.reads_tokens:
        batch |= make_images(trainer.cfg, rows, width)
    if trainer.cfg.model.modalities:
        batch |= with_items(trainer.cfg, batch)
    if not OF_ANSWERS.isdisjoint(trainer.objective.fields):
        batch |= trainer.objective.make_fields(batch, 0, 0, np.arange(rows))
    first = trainer.step(batch)
    moment = canonical(trainer.storage, trainer.state["opt"]["mu"])
    others = "tokens", "finite", "accepted", "gathered_share"  # the last depends on the mesh
    first = {name: value for name, value in first.items() if name not in others}
    first = jax.tree.map(np.asarray, {**first, "gradients": moment})
    losses = [first["loss"], *(trainer.step(batch)["loss"] for _ in range(1, steps))]
    return Numbers(first, np.array(losses, np.float64), replicas_identical(trainer.state))


def replicas_identical(state: dict) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits."""
    for leaf in jax.tree.leaves(state):
        seen: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if seen.setdefault(str(shard.index), bits) != bits:
                return False
    return True


def deviation(mine: object, one: object) -> float:
    """Largest |a - b| over the largest |b| of any leaf of two trees."""

    def leaf(a, b):
        a = np.asarray(a, np.float64)
        b = np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        largest = np.abs(b).max()
        difference = np.abs(a - b).max()
        return float(difference / max(largest, 1e-30))

    deviations = jax.tree.map(leaf, mine, one)
    return max(jax.tree.leaves(deviations))


@functools.cache
def one_device(feature: str, rows: int, steps: int, *overrides: str) -> Numbers:
    """The reference: one device, one micro-batch."""
    return measure(make_trainer(feature, Cell(rows=rows), *overrides), steps)


def layers_for(mesh: dict[str, int], feature: str) -> int:
    """Enough for every stage to have one."""
    long = mesh.get("pp", 1) > 4
    return (5, 11)[long] if feature == "uneven layers" else (4, 8)[long]


def sizes_for(mesh: dict[str, int], feature: str) -> list[str]:
    """Overrides that make every axis of 6 devices divide what it cuts, and fill long pipelines."""
    layers = layers_for(mesh, feature)
    deep = []
    if mesh.get("pp", 1) > 4:
        deep = [f"model.num_hidden_layers={layers}", *DEEP.get(feature, [])]
    if math.prod(mesh.values()) % 3:
        return deep
    six = SIX[{"muon": 1, "odd widths": 2}.get(feature, 0) :]  # those two have sizes of their own
    experts = ["model.moe.num_experts=6"] if "model.moe.num_experts=8" in FEATURES[feature] else []
    return [*deep, *six, *experts]


def compare(feature: str, cell: Cell, *overrides: str, steps: int = STEPS) -> dict:
    """One cell of the table: its largest deviations from one device, and the replicas. The
    reference takes those `overrides` that are not about the mesh."""
    sizes = sizes_for(cell.mesh, feature)
    mine = measure(make_trainer(feature, cell, *sizes, *overrides), steps)
    common = (o for o in overrides if not o.startswith("mesh."))
    one = one_device(feature, cell.rows, steps, *sizes, *common)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(one.first["gradients"])), feature
    return {
        "gradient": deviation(mine.first, one.first),
        "curve": float(np.abs(mine.curve / one.curve - 1).max()),
        "replicas": mine.replicas,
    }


def holds(record: dict) -> bool:
    """False for NaN, too."""
    return record["gradient"] <= BOUND and record["curve"] <= CURVE_BOUND and record["replicas"]
