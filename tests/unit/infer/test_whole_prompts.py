"""Prompts with images, and those of encoder-decoders, on an engine that has other work."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.rules.mesh_rules import AXES
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import MeshConfig
from mjax.data.multimodal.pictures import packed_prompt
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.small_engine import completed
from mjax.infer.whole_prompts import largest_inputs, whole_inputs
from mjax.models import build, split
from mjax.models.towers.image_places import Grid
from mjax.pipeline.storage import sharded_by_stages
from mjax.sharding.mesh import make_mesh
from mjax.sharding.spec import is_spec
from tests.generation import complete
from tests.laws.models import test_encoder_decoder as laws_of_t5
from tests.laws.models import test_llava as laws_of_llava
from tests.laws.models import test_qwen_vl as laws_of_qwen_vl
from tests.marks import quick, slow

IMAGE, NEW = 257, 140
# Models of the laws of training, with weights that make tokens vary.
LLAVA = [
    *laws_of_llava.LLAVA,
    "model.initializer_range=0.3",
    "model.max_position_embeddings=256",
    "data.seq_length=64",
    "data.mock=true",
]
T5 = laws_of_t5.MODEL | {
    "num_hidden_layers": 3,
    "layer_pattern": "B, [GXD]*2",
    "initializer_range": 0.3,
}


def llava():
    """A model that reads images: (model, prompts, items of each)."""
    cfg = load(None, LLAVA).model
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    prompts = [[5, *[IMAGE] * 4, 3, 4, *[IMAGE] * 4, 9], [*[IMAGE] * 4, 7], [1, 2, 3]]
    items = [{"vision": images}, {"vision": images[1:]}, None]
    return (*split(build(cfg, nnx.Rngs(0))), cfg), prompts, items


def encoder_decoder():
    """A model whose encoder reads prompts."""
    cfg = ModelConfig(**T5)
    prompts = [[*range(4, 15)], [9, 8, 7], [*range(50, 120)]]
    return (*split(build(cfg, nnx.Rngs(0))), cfg), prompts, [None] * 3


def qwen_vl():
    """A model of packed images, whose positions go on from the largest: likewise."""
    keys = [*laws_of_qwen_vl.QWEN_VL, "model.initializer_range=0.3", "data.mock=true"]
    cfg = load(None, [*keys, "model.max_position_embeddings=256"]).model
    rng, grids = np.random.default_rng(0), [Grid(1, 4, 8), Grid(1, 6, 2)]
    cut = [(rng.normal(size=(g.patches, cfg.vision.numbers)), g) for g in grids]
    texts = [([5, IMAGE, 3, 4, IMAGE, 9], cut), ([IMAGE, 7], cut[1:]), ([1, 2, 3], [])]
    pairs = [packed_prompt(ids, own, cfg.vision) for ids, own in texts]
    items = [{"vision": images} for _, images in pairs]
    model = *split(build(cfg, nnx.Rngs(0))), cfg
    return model, [ids for ids, _ in pairs], [*items[:2], None]


def spread(model, sizes):
    """The model on a mesh."""
    definition, params, cfg = model
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(MeshConfig(**dict.fromkeys(AXES, 1) | sizes), devices)
    on_mesh = functools.partial(sharded_by_stages, mesh=mesh)
    places = jax.tree.map(on_mesh, definition.specs, is_leaf=is_spec)
    return definition, jax.device_put(params, places), cfg


CASES = [(llava, {}), (encoder_decoder, {}), (llava, {"dp": 2, "tp": 2})]
CASES += [(encoder_decoder, {"dp": 2, "tp": 2}), (qwen_vl, {}), (qwen_vl, {"dp": 2, "tp": 2})]
CASES += [(encoder_decoder, {"pp": 2}), (llava, {"pp": 2})]


@slow
@pytest.mark.parametrize("kind, sizes", quick(CASES, 0))
def test_company_and_preemption_change_no_token(kind, sizes):
    """Each row alone, then all in a pool that has pages for two."""
    model, prompts, items = kind()
    limits = Limits(rows=3, chunk=16, length=192)
    options = {"dtype": "float32", "limits": limits, "pages": 5, "fixed_rows": True}
    engine = Engine(*model, **options)
    each = [SamplingParams(max_tokens=NEW, temperature=0.9, seed=1)] * 3
    want = [
        completed(engine, [prompt], [params], [beside])[0]
        for prompt, params, beside in zip(prompts, each, items, strict=True)
    ]
    if sizes:
        engine = Engine(*spread(model, sizes), **options)
    found = completed(engine, prompts * 2, each * 2, items * 2)
    for row, alone in zip(found, want * 2, strict=True):
        assert row.token_ids == alone.token_ids
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=1e-4)
    assert len({tuple(row.token_ids) for row in found}) == 3
    assert (
        all(lane.pool.cached == lane.pool.used == 0 for lane in engine.lanes)
        or kind is not encoder_decoder
    )
    if not sizes:
        assert engine.runner.prefills > 9, "some were preempted and computed anew"


@pytest.mark.parametrize("kind", [llava, encoder_decoder])
def test_memory_is_kept_for_the_largest_whole_prompt(kind):
    """Its shapes are those of a prompt with all items that a text has."""
    (_, _, cfg), prompts, items = kind()
    prompt = prompts[0] if kind is llava else [1] * 48
    found = whole_inputs(cfg, prompt, items[0] or {}, [16, 48])
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), found)
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), largest_inputs(cfg, 48))
    assert shapes == wanted


@slow
def test_pages_leave_room_for_images(monkeypatch):
    stats = {"bytes_limit": 2**28, "bytes_in_use": 0}
    monkeypatch.setattr("mjax.infer.step_runner.memory_of", lambda params: stats)
    model, _, _ = llava()
    options = {"dtype": "float32", "limits": Limits(rows=2, chunk=16, length=192)}
    pages = Engine(*model, **options).programs.sizes.pages
    monkeypatch.setattr("mjax.infer.step_runner.largest_inputs", lambda cfg, size: None)
    assert pages < Engine(*model, **options).programs.sizes.pages


@slow
def test_penalties_of_an_encoder_decoder_count_what_its_decoder_made():
    model, prompts, _ = encoder_decoder()
    rows = complete(model, prompts, 20, repetition_penalty=1e6)
    assert all(len(set(row.token_ids)) == 20 and 3 not in row.token_ids for row in rows)
    assert set(rows[2].token_ids) & set(prompts[2]), "the encoder's tokens do not count"


def test_what_does_not_go_together_is_one_line():
    model, _, _ = llava()
    images = {"vision": np.zeros((1, 8, 8, 3), np.float32)}
    with pytest.raises(UserError, match="a prompt has 8 tokens 257, and 1 <image> of 4 tokens"):
        complete(model, [[IMAGE] * 8], 2, images)
    with pytest.raises(UserError, match="<audio> is given, but the model has no tower for it"):
        complete(model, [[1]], 2, {"audio": np.zeros((1, 4, 2), np.float32)})
    model, _, _ = encoder_decoder()
    engine = Engine(*model, dtype="float32", limits=Limits(rows=1, length=32), pages=4)
    with pytest.raises(UserError, match="a prompt of 33 tokens .* 32, the longest text here"):
        engine.add([1] * 33)
    with pytest.raises(UserError, match="a prompt of 1 tokens and up to 32 new ones"):
        engine.add([1] * 32, SamplingParams(max_tokens=32))
