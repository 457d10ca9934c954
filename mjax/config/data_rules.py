"""The rules of `data.` keys on fill-in-the-middle; `validate.py` says how rules are tried."""

from mjax.config.mesh_rules import Rule
from mjax.config.schema import Config, DataConfig

SENTINELS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")


def _fim_keys(c: Config) -> list[str]:
    """The keys of fill-in-the-middle, but for its rate, that are set."""
    default = DataConfig()
    names = [name for name in DataConfig.model_fields if name.startswith("fim_")]
    others = [name for name in names if name != "fim_rate"]
    return [name for name in others if getattr(c.data, name) != getattr(default, name)]


def _missing_sentinels(c: Config) -> list[str]:
    return [name for name in SENTINELS if getattr(c.data, name) is None]


DATA_RULES = (
    Rule(
        "fim_keys_used",
        lambda c: c.data.fim_rate > 0 or not _fim_keys(c),
        lambda c: f"`data.{_fim_keys(c)[0]}` has no effect with `data.fim_rate`",
        "remove it, or set data.fim_rate=0.5 as Megatron does",
    ),
    Rule(
        "fim_sentinels",
        lambda c: c.data.fim_rate == 0 or not _missing_sentinels(c),
        lambda c: f"`data.fim_rate` needs `data.{_missing_sentinels(c)[0]}`",
        "set it to a token of the tokenizer or to an id",
    ),
    Rule(
        "fim_tokenizer",
        lambda c: c.data.fim_rate == 0 or c.data.tokenizer is not None,
        "`data.fim_rate` cuts texts, not tokens, and needs `data.tokenizer`",
        "set data.tokenizer to that of the corpus",
    ),
    Rule(
        "fim_text",
        lambda c: c.data.fim_rate == 0 or not c.data.mock,
        "`data.fim_rate` needs text, and `data.mock` has none",
        "set data.fim_rate=0, or data.paths or data.text",
    ),
    Rule(
        "fim_fragments",
        lambda c: (c.data.fim_split_sample is None) == (c.data.fim_fragment_rate is None),
        "`data.fim_split_sample` and `data.fim_fragment_rate` belong together",
        "set both or neither",
    ),
)
