"""`Rule`: what a config must fulfil across its keys; the tables of rules are made of them.

A rule is a function under `@rule(remedy)`. It yields what is wrong with a config, the worst first,
and nothing where the config is fine. A `group.key` in backticks is printed with its value.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mjax.config.schema.base import Group
from mjax.config.schema.keys import value_of
from mjax.config.schema.run import Config


@dataclass(frozen=True)
class Rule:
    """`problems(cfg)` yields what is wrong; the error is 'the first problem; remedy'.

    With `every_size` it holds for layers with the sizes of each entry of model.layer_sizes, too.
    """

    name: str
    problems: Callable[[Config], Iterator[str]]
    remedy: str
    every_size: bool = False

    def error(self, cfg: Config) -> str | None:
        """The line that a user sees; None where the config is fine."""
        for problem in self.problems(cfg):
            return self._line(cfg, problem)
        for number, model in enumerate(cfg.model.sizes[1:] if self.every_size else [], 1):
            sized = cfg.model_copy(update={"model": model})
            for problem in self.problems(sized):
                line = self._line(sized, problem)
                return f"layers marked '@{number}' in model.layer_pattern: {line}"
        return None

    def _line(self, cfg: Config, problem: str) -> str:
        def with_value(match: re.Match) -> str:
            return f"{match[1]}={value_of(cfg, match[1])!r}"

        return f"{re.sub('`([a-z0-9_.]+)`', with_value, problem)}; {self.remedy}"


def rule(remedy: str, every_size: bool = False) -> Callable[..., Rule]:
    """Make a rule of the function that follows, under its name."""

    def made(problems: Callable[[Config], Iterator[str]]) -> Rule:
        return Rule(problems.__name__, problems, remedy, every_size)

    return made


def set_keys(group: Group, *names: str) -> list[str]:
    """Returns the names, among `names`, of a group's keys that differ from their default."""
    fields = type(group).model_fields
    return [name for name in names if getattr(group, name) != fields[name].get_default()]


def rules_of(module: dict[str, object]) -> tuple[Rule, ...]:
    """The rules among the names of a module (`globals()`), in the order in which they stand.

    A tuple counts as what is in it.
    """
    named = (value if isinstance(value, tuple) else (value,) for value in module.values())
    return tuple(value for values in named for value in values if isinstance(value, Rule))
