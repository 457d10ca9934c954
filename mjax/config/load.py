"""From YAML files and `a.b=c` overrides to one frozen `Config`.

A file may name others in `base:` (a path or a list, relative to the file); mappings merge deeply,
later wins, lists and scalars replace. Overrides come last. Invariants: `load` of `dump(cfg)` gives
`cfg` again, and every mistake is one `UserError` line that names the key, the value, what is
expected and the file or override it came from.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError

from mjax.config import yaml_text
from mjax.config.schema import Config
from mjax.config.validate import validate
from mjax.errors import UserError


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file (None: defaults only), apply `a.b=c` overrides, check all but the devices.

    Rules that need a device count run later, in `validate(cfg, device_count)`. Raises `UserError`.
    """
    places: dict[str, str] = {}
    tree = {} if path is None else _read_file(Path(path), (), places)
    for override in overrides:
        _merge_into(tree, _read_override(override, places))
    try:
        cfg = Config.model_validate(tree)
    except ValidationError as e:
        raise UserError(_explain(e, places)) from None
    validate(cfg)
    return cfg


def dump(cfg: Config) -> str:
    """The resolved config as YAML that `load` reads back to an equal `Config`."""
    return yaml_text.write(cfg.model_dump())


def json_schema() -> dict:
    """JSON Schema of a config file, for editors."""
    schema = Config.model_json_schema()
    text = {"type": "string"}
    schema["properties"]["base"] = {
        "anyOf": [text, {"type": "array", "items": text}],
        "description": "Config files that this one extends, relative to it; later ones win.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config X [a.b=c ...] --print-config --print-schema` to a command line."""
    parser.add_argument("--config", metavar="YAML", help="config file; without it, the defaults")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a config key")
    parser.add_argument("--print-config", action="store_true", help="print the config and exit")
    parser.add_argument("--print-schema", action="store_true", help="print JSON Schema and exit")


def config_from_args(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, Config]:
    """Parse a command line made by `add_config_arguments`; overrides may stand anywhere in it.

    `--print-config` and `--print-schema` print and exit with code 0. Raises `UserError`.
    """
    args = parser.parse_intermixed_args(argv)
    if args.print_schema:
        print(json.dumps(json_schema(), indent=2))
        sys.exit(0)
    cfg = load(args.config, args.overrides)
    if args.print_config:
        print(dump(cfg), end="")
        sys.exit(0)
    return args, cfg


def _read_file(path: Path, chain: tuple[Path, ...], places: dict[str, str]) -> dict:
    """The file merged over its bases; `chain` is the files that lead here."""
    trail = " -> ".join(str(p) for p in (*chain, path))
    if path.resolve() in {p.resolve() for p in chain}:
        raise UserError(f"{trail}: the base files form a cycle; remove one `base:`")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{trail}: cannot read the config file: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{trail}: the config file is not UTF-8 text") from None
    here: dict[str, str] = {}
    tree = yaml_text.read(text, str(path), here)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{trail}: must hold a mapping of keys, not {type(tree).__name__}")
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise UserError(f"{here['base']}: base={bases!r} must be a path or a list of paths")
    merged: dict = {}
    for base in bases:
        _merge_into(merged, _read_file(path.parent / base, (*chain, path), places))
    places.update(here)
    return _merge_into(merged, tree)


def _read_override(override: str, places: dict[str, str]) -> dict:
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names) or not text.strip():
        raise UserError(
            f"override {override!r} is not of the form a.b=value; write null for no value"
        )
    value = yaml_text.read(text, f"override {override!r}", places, key)
    for i in range(1, len(names)):
        places.setdefault(".".join(names[:i]), places[key])
    for name in reversed(names):
        value = {name: value}
    return value


def _merge_into(into: dict, over: dict) -> dict:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge_into(into[name], value)
        else:
            into[name] = value
    return into


def _explain(error: ValidationError, places: dict[str, str]) -> str:
    """One line for the first wrong key, with all that would have been accepted there."""
    problems: dict[str, list[dict]] = {}
    # A misspelled required key is both unknown and missing: the first is what the user wrote.
    for e in sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden"):
        problems.setdefault(_dotted(e["loc"]), []).append(e)
    key, errors = next(iter(problems.items()))
    first = errors[0]
    if first["type"] == "extra_forbidden":
        what = f"{key}: unknown key{_suggestion(first['loc'])}"
    elif first["type"] == "missing":
        what = f"{key}: missing; set it"
    elif first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        what = f"{key}={first['input']!r}: must be a group of keys"
    else:
        expected = " or ".join(e["msg"].removeprefix("Input should be ") for e in errors)
        what = f"{key}={first['input']!r}: must be {expected}"
    while key and key not in places:  # an element or a missing key is where its parent is
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    at = f" ({places[key]})" if key in places else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return what + at + more


def _groups() -> dict[str, type[BaseModel]]:
    """Dotted name -> group, the root as ""."""
    found: dict[str, type[BaseModel]] = {"": Config}
    pending = [("", Config)]
    while pending:
        prefix, group = pending.pop()
        for name, field in group.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found[prefix + name] = kind
                    pending.append((f"{prefix}{name}.", kind))
    return found


def _dotted(loc: tuple[str | int, ...]) -> str:
    """A pydantic location as a config key; the tags of union members are dropped."""
    groups = _groups()
    key = ""
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif key in groups:
            key = f"{key}.{part}" if key else part
        elif _is_dict(key):
            return f"{key}.{part}"
        else:
            break
    return key


def _is_dict(key: str) -> bool:
    group, _, name = key.rpartition(".")
    field = _groups()[group].model_fields.get(name)
    return field is not None and getattr(field.annotation, "__origin__", None) is dict


def _suggestion(loc: tuple[str | int, ...]) -> str:
    """The nearest key of the same group; failing that, the nearest anywhere."""
    groups = _groups()
    *parents, name = (str(part) for part in loc)
    home = ".".join(parents)
    everywhere = {
        n: f"{g}.{n}" if g else n for g, kind in groups.items() for n in kind.model_fields
    }
    near = difflib.get_close_matches(name, groups[home].model_fields, n=1)
    if name in everywhere:  # right key, wrong group
        return f"; did you mean {everywhere[name]}?"
    if near:
        return f"; did you mean {home}.{near[0]}?" if home else f"; did you mean {near[0]}?"
    far = difflib.get_close_matches(name, everywhere, n=1)
    return f"; did you mean {everywhere[far[0]]}?" if far else "; --print-schema lists all keys"
