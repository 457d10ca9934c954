"""The models of `kinds.py` as users load them, and small engines of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.infer.engine import Engine
from mjax.infer.records import Request
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.pretrained import Pretrained
from mjax.models import build, definition_of, split
from tests.laws.serving.kinds import KINDS, LENGTH, SMALL, at_rest, on_mesh


def tiny_model(kind: str, **sizes: object) -> Pretrained:
    cfg = ModelConfig(**nested({**SMALL, **KINDS[kind], **sizes}))
    _, params = split(build(cfg, nnx.Rngs(0)))
    return Pretrained(cfg, definition_of(cfg), params, None, None)


def write_hugging_face(model: Pretrained, folder: Path) -> Path:
    """The folder, which has the model as Hugging Face keeps it."""
    cfg, specs = model.cfg, model.definition.specs
    config = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    read = array_source(cfg, model.params).read
    export(read, cfg, specs, slots(cfg, specs), folder, "float32", extras=config)
    return folder


def tiny_engine(model: Pretrained, mesh: Mapping[str, int] | None = None, **options) -> Engine:
    params = on_mesh(model.definition, model.params, mesh) if mesh else model.params
    limits = Limits(rows=2, chunk=options.pop("chunk", 32), length=LENGTH)
    given = {"limits": limits, "pages": 40, "dtype": "float32"} | options
    return Engine(model.definition, params, model.cfg, **given)


def served(given: Engine, asks: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Request]:
    requests = [given.add(prompt, params) for prompt, params in asks]
    while given.has_work:
        given.step()
    at_rest(given)
    return requests
