"""From YAML files and `a.b=c` overrides to one frozen `Config`.

A file may name others in `base:` (a path or a list, relative to the file), or mjax's own by name
(`files.py: config_file`). Mappings merge deeply:
later ones win, lists and scalars replace. Overrides come last. Invariants: `load` of `dump(cfg)`
gives `cfg` again, and every mistake is one `UserError` line that names the key, the value, what is
expected and the file or override it came from.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mjax.config import yaml_text
from mjax.config.languages.imports import import_modules
from mjax.config.languages.megatron_names import KEY_OF_ARGUMENT
from mjax.config.languages.paths import as_path
from mjax.config.schema.keys import is_group
from mjax.config.schema.run import Config
from mjax.config.schema.sizes import require_sane_patterns, shortened
from mjax.config.validate import validate
from mjax.errors import CommandParser, UserError, or_user_error
from mjax.files import CONFIG_FILES, config_file

# Returns values for keys that a tree of given keys, as yet unchecked, does not set.
Defaults = Callable[[dict], dict]
MOST_LISTED = 12  # keys of a group that one line lists


def load(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    defaults: Defaults | None = None,
) -> Config:
    """The config of a YAML file (None: defaults only) with `a.b=c` overrides, checked.

    `defaults`: the keys that a command sets where neither does.
    Rules that need a device count run later, in `validate(cfg, device_count)`. Raises `UserError`.
    """
    places: dict[str, str] = {}  # of each key, where it was set
    tree = {} if path is None else _read_file(config_file(path), (), places)
    for override in overrides:
        _merge_into(tree, _read_override(override, places))
    if defaults is not None:
        tree = _merge_into(defaults(tree), tree)
    import_modules(tree)
    require_sane_patterns(tree, places)
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
    if isinstance(parser, CommandParser):
        parser.key_of = key_of_name
    about = "config file, or one of mjax's by name: quickstart; without it, the defaults"
    parser.add_argument("--config", type=as_path, metavar="YAML", help=about)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override a config key")
    parser.add_argument("--print-config", action="store_true", help="print the config and exit")
    parser.add_argument("--print-schema", action="store_true", help="print JSON Schema and exit")


def config_from_args(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    defaults: Defaults | None = None,
) -> tuple[argparse.Namespace, Config]:
    """(the arguments, the config) of a command line with the options of `add_config_arguments`.

    Overrides may stand anywhere in it. `defaults` as in `load`. `--print-config` and
    `--print-schema` print and exit with code 0. Raises `UserError`.
    """
    args = parser.parse_intermixed_args(argv)
    if args.print_schema:
        print(json.dumps(json_schema(), indent=2))
        sys.exit(0)
    cfg = load(args.config, args.overrides, defaults)
    if args.print_config:
        print(dump(cfg), end="")
        sys.exit(0)
    if args.config is not None and not any(o.startswith("run.dir=") for o in args.overrides):
        _require_in_place(args.config, cfg)
    return args, cfg


def _require_in_place(file: Path, cfg: Config) -> None:
    """Raise `UserError` for the config.yaml of a run that has another folder as its run.dir."""
    folder, named = file.resolve().parent, Path(cfg.run.dir)
    is_of_run = file.name == "config.yaml" and (folder / "metrics.jsonl").exists()
    if is_of_run and named.resolve() != folder:
        raise UserError(
            f"{file}: the run in this folder was moved or copied, and would train anew in its "
            f"run.dir={str(named)!r}; give run.dir={folder} to go on, or that of a new run"
        )


def _read_file(path: Path, chain: tuple[Path, ...], places: dict[str, str]) -> dict:
    """The keys of a file, merged over those of its bases; `chain` is the files that lead here."""
    trail = " -> ".join(str(p) for p in (*chain, path))
    if path.resolve() in {p.resolve() for p in chain}:
        raise UserError(f"{trail}: the base files form a cycle; remove one `base:`")
    with (
        or_user_error(f"{trail}: cannot read the config file: {{reason}}"),
        or_user_error(f"{trail}: the config file is not UTF-8 text", UnicodeDecodeError),
    ):
        text = path.read_text(encoding="utf-8")
    places_here: dict[str, str] = {}
    tree = yaml_text.read(text, str(path), places_here)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{trail}: must hold a mapping of keys, not {type(tree).__name__}")
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        place = places_here["base"]
        raise UserError(f"{place}: base={bases!r} must be a path or a list of paths")
    merged: dict = {}
    for base in bases:
        file = config_file(base, path.parent)
        _merge_into(merged, _read_file(file, (*chain, path), places))
    places.update(places_here)
    return _merge_into(merged, tree)


def _read_override(override: str, places: dict[str, str]) -> dict:
    """`a.b=c` as {a: {b: c}}."""
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names) or not text.strip():
        is_file = override.endswith(CONFIG_FILES)
        hint = f"a config file is --config {override}" if is_file else "write null for no value"
        raise UserError(f"override {override!r} is not of the form a.b=value; {hint}")
    value: Any = yaml_text.read(text, f"override {override!r}", places, key)
    for i in range(1, len(names)):
        places.setdefault(".".join(names[:i]), places[key])
    for name in reversed(names):
        value = {name: value}
    return value


def _merge_into(into: dict, over: dict) -> dict:
    """`into`, changed: with the entries of `over`, which win."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge_into(into[name], value)
        else:
            into[name] = value
    return into


def _explain(error: ValidationError, places: dict[str, str]) -> str:
    """One line for the first wrong key, with all that would have been accepted there."""
    problems: dict[str, list] = {}
    # A misspelled required key is both unknown and missing: the first is what the user wrote.
    for e in sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden"):
        problems.setdefault(_dotted(e["loc"]), []).append(e)
    key, errors = next(iter(problems.items()))
    first = errors[0]
    if first["type"] == "extra_forbidden":
        line = f"{key}: unknown key{_suggestion(first['loc'])}"
    elif first["type"] == "missing":
        line = f"{key}: missing; set it"
    elif first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        line = f"{key}={shortened(repr(first['input']))}: must be a group of keys"
        if key in _groups():
            line += f", such as {key}.{next(iter(_groups()[key].model_fields))}"
    else:
        expected = " or ".join(_expectation(e["msg"]) for e in errors)
        line = f"{key}={shortened(repr(first['input']))}: must be {expected}"
    while key and key not in places:  # an element or a missing key is where its parent is
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    if key in places:
        line += f" ({places[key]})"
    if len(problems) > 1:
        line += f" (and {len(problems) - 1} more)"
    return line


def _expectation(message: str) -> str:
    """The value that pydantic wants, in its words."""
    words = message.removeprefix("Input should be ").removeprefix("Value error, must be ")
    return words.replace("a valid list", "a list, as [a, b]")


def _groups(group: type[BaseModel] = Config, home: str = "") -> dict[str, type[BaseModel]]:
    """A group of keys and those in it by their dotted names; that of the root is ""."""
    found = {home: group}
    for name, field in group.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if is_group(kind):
                found |= _groups(kind, f"{home}.{name}" if home else name)
    return found


def _dotted(loc: tuple[str | int, ...]) -> str:
    """The config key of a pydantic location, without the tags of union members."""
    key = ""
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif re.sub(r"\[\d+\]", "", key) in _groups():
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
    """The hint for an unknown key: the nearest key of its group or the groups in it; failing that,
    of any group, or all of its group if they are few."""
    *parents, name = (part for part in loc if isinstance(part, str))
    home = ".".join(parents)
    own = list(_groups()[home].model_fields) if home in _groups() else []
    if near := difflib.get_close_matches(name, own, n=1, cutoff=0.85):
        return f"; did you mean {home}.{near[0]}?" if home else f"; did you mean {near[0]}?"
    anywhere = _names_below("")
    if key := key_of_name(name):  # right key, wrong group, or Megatron's
        return f"; did you mean {key}?"
    for known, cutoff in ((_names_below(home), 0.6), (anywhere, 0.75)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {known[near[0]]}?"
    if home and 0 < len(own) <= MOST_LISTED:
        return f"; {home} has {', '.join(own)}"
    return "; --print-schema lists all keys"


def key_of_name(name: str) -> str | None:
    """The key that a bare name means, or an argument of Megatron's; dashes are underscores."""
    bare = name.strip("-").replace("-", "_")
    key = _names_below("").get(bare)
    return key if key and key not in _groups() else KEY_OF_ARGUMENT.get(bare)


def _names_below(home: str) -> dict[str, str]:
    """Bare name -> key of all keys of a group and the groups in it, the outermost of a name."""
    found: dict[str, str] = {}
    for group, kind in sorted(_groups().items(), key=lambda item: item[0].count(".")):
        if f"{group}.".startswith(f"{home}." if home else ""):
            for name in kind.model_fields:
                found.setdefault(name, f"{group}.{name}" if group else name)
    return found
