"""The keys that differ between two configs, as `a.b 1 -> 2`, for people to read."""

import json
from collections.abc import Iterator, Mapping

LONGEST_VALUE = 48  # characters of a value that is shown


def differences(before: Mapping, after: Mapping, defaults: Mapping) -> list[str]:
    """One `a.b old -> new` for each key of `after` that `before` has with another value.

    All are nested groups of keys as `Config.model_dump(mode="json")` gives them. A key that
    `before` lacks, because an older mjax wrote it, counts as its default.
    """
    default, was = dict(keys_and_values(defaults)), dict(keys_and_values(before))
    found = []
    for key, now in keys_and_values(after):
        old = was.get(key, default.get(key))
        if old != now:
            found.append(f"{key} {shown(old)} -> {shown(now)}")
    return found


def keys_and_values(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted keys of nested groups and their values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from keys_and_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: object) -> str:
    """A value as text, cut in the middle where it is long."""
    text = value if isinstance(value, str) else json.dumps(value)
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}...{text[-half:]}"
