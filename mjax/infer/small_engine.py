"""Engines for a known number of prompts: as small as these need, with few programs to compile.

A small model's engine may also guess tokens for another engine (`DraftModel`).
"""

from collections.abc import Mapping, Sequence

from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE
from mjax.infer.engine import Engine
from mjax.infer.records import Request, RequestSample, bucket, powers_of_two
from mjax.infer.requests import CompletionOutput, SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.weights import mesh_of
from mjax.infer.whole_prompts import PromptItem
from mjax.models.base.params import Definition
from mjax.sharding.collectives import DATA_AXES
from mjax.sharding.mesh import parallel_of

_ROWS, _CHUNK = 256, 2048
_SHARED = "temperature", "top_k", "top_p", "min_p"  # by a text and its guesses
_STRIDE = 0x9E3779B1  # of the seeds of prompts in a batch, so that other seeds give other ones


def small_engine(
    definition: Definition,
    params: dict,
    cfg: ModelConfig,
    lengths: Sequence[int],
    new: int,
    *,
    rows: int = _ROWS,
    **options,
) -> Engine:
    """An engine for prompts of these lengths and up to `new` tokens after each.

    rows: prompts at a time, if there are more; up to 256. options: further ones of `Engine`.
    """
    mesh = mesh_of(params)
    lanes = 1 if mesh is None else parallel_of(mesh).size(*DATA_AXES)
    here = min(-(-len(lengths) // lanes), rows, _ROWS)
    here = powers_of_two(1, here)[-1]
    chunk = min(bucket(sum(lengths)), _CHUNK)
    length = max(lengths) + new
    limits = Limits(here, here + chunk, chunk, length)
    pages = 1 + here * -(-length // PAGE)
    return Engine(definition, params, cfg, limits=limits, pages=pages, fixed_rows=True, **options)


def completed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    items: Sequence[Mapping[str, PromptItem] | None] | None = None,
) -> list[CompletionOutput]:
    """One sample of each prompt.

    params: of each, or of all (`with_own_seeds`). items: of each (`Engine.add`); None: no items.
    """
    each = with_own_seeds(params, len(prompts)) if isinstance(params, SamplingParams) else params
    rows = zip(prompts, each, items or [None] * len(prompts), strict=True)
    requests = [engine.add(ids, own, items=beside) for ids, own, beside in rows]
    while engine.has_work:
        engine.step()
    return [request.output.outputs[0] for request in requests]


def with_own_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts, with a seed of its own if `params` has one.

    So equal prompts have samples of their own.
    """
    if params.seed is None:
        return [params] * count
    seeds = [(params.seed + number * _STRIDE) % 2**32 for number in range(count)]
    return [params.model_copy(update={"seed": seed}) for seed in seeds]


class DraftModel:
    """Guesses of a smaller model of the same vocabulary: `Engine(.., drafter=DraftModel(small))`.

    The small engine should have as many rows, and pages for their texts. Its prefix cache has the
    full pages of a text, so a guess computes no more than the rest of it anew. In models with
    recurrent layers it may be more.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    def propose(self, samples: Sequence[RequestSample], most: int) -> list[list[int]]:
        requests = [self._request(sample, most) for sample in samples]
        while self.engine.has_work:
            self.engine.step()
        return [request.output.outputs[0].token_ids if request else [] for request in requests]

    def _request(self, sample: RequestSample, most: int) -> Request | None:
        """The text with its own noise, so that both models draw equal tokens more often.

        None: the model cannot read the text, as it is too long, say.
        """
        settings = {name: getattr(sample.answer.params, name) for name in _SHARED}
        params = SamplingParams(**settings, seed=sample.seed, max_tokens=most)
        try:
            return self.engine.add(sample.sequence.tokens, params)
        except UserError:
            return None
