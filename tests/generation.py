"""What a model makes of prompts, on an engine of their size."""

from mjax.infer.requests import CompletionOutput, SamplingParams
from mjax.infer.small_engine import completed, small_engine


def engine_for(model, prompts, new, dtype="float32", **options):
    """An engine for prompts of a model, (definition, parameters, config)."""
    lengths = [len(prompt) for prompt in prompts]
    return small_engine(*model, lengths, new, dtype=dtype, **options)


def complete(model, prompts, new, items=None, dtype="float32", **fields) -> list[CompletionOutput]:
    """The texts of `new` tokens after prompts, which all have the same items.

    `fields` are those of `SamplingParams`.
    """
    params = SamplingParams(max_tokens=new, **fields)
    engine = engine_for(model, prompts, new, dtype)
    return completed(engine, prompts, params, [items] * len(prompts))


def made_ids(model, prompts, new, items=None, **fields) -> list[list[int]]:
    """The tokens of `complete`."""
    return [row.token_ids for row in complete(model, prompts, new, items, **fields)]
