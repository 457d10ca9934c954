"""Guesses of a smaller model of the same vocabulary, which has an engine of its own.

`Engine(.., drafts=4, drafter=DraftModel(small))`. The small engine's prefix cache has the full
pages of each text, so a guess computes no more than the rest of it anew. Models with recurrent
layers have no such cache.
"""

from collections.abc import Sequence

from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.infer.records import Request, Sample
from mjax.infer.requests import SamplingParams

_SHARED = "temperature", "top_k", "top_p", "min_p"


class DraftModel:
    """A `Drafter` by an engine, which should have as many rows and pages for their texts."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def propose(self, samples: Sequence[Sample], most: int) -> list[list[int]]:
        requests = [self._request(sample, most) for sample in samples]
        while self.engine.has_work:
            self.engine.step()
        return [request.output.outputs[0].token_ids if request else [] for request in requests]

    def _request(self, sample: Sample, most: int) -> Request | None:
        """The text with its own noise, so that both models draw equal tokens more often.

        None: the model cannot read the text, as it is too long, say.
        """
        settings = {name: getattr(sample.answer.params, name) for name in _SHARED}
        params = SamplingParams(**settings, seed=sample.seed, max_tokens=most)
        try:
            return self.engine.add(sample.tokens.tokens, params)
        except UserError:
            return None
