"""The rules about fill-in-the-middle: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config


@rule("set it to a token of the tokenizer or to an id")
def fim_sentinels(c: Config) -> Iterator[str]:
    for name in ("fim_prefix_token", "fim_middle_token", "fim_suffix_token"):
        if c.data.fim_rate and getattr(c.data, name) is None:
            yield f"`data.fim_rate` needs `data.{name}`"


@rule("set data.tokenizer to that of the corpus")
def fim_tokenizer(c: Config) -> Iterator[str]:
    if c.data.fim_rate and c.data.tokenizer is None:
        yield "`data.fim_rate` cuts texts, not tokens, and needs `data.tokenizer`"


@rule("set data.fim_rate=0, or data.paths or data.text")
def fim_text(c: Config) -> Iterator[str]:
    if c.data.fim_rate and c.data.mock:
        yield "`data.fim_rate` needs text, and `data.mock` has none"


@rule("set both or neither")
def fim_fragments(c: Config) -> Iterator[str]:
    is_half = (c.data.fim_split_sample is None) != (c.data.fim_fragment_rate is None)
    if c.data.fim_rate and is_half:
        yield "`data.fim_split_sample` and `data.fim_fragment_rate` belong together"


FIM_RULES = rules_of(globals())
