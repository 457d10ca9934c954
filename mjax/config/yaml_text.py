"""YAML as mjax reads and writes it: YAML 1.2 scalars, no duplicate keys, `${ENV}` that works.

PyYAML follows YAML 1.1, where 3e-4 is a string, `no` is false and 1:30 is ninety. Here the scalar
types are those of the YAML 1.2 core schema, without octal and infinities. `${NAME}` and
`${NAME:-default}` are replaced in every value. An empty variable counts as unset for `:-`, as in a
shell. An unquoted value that is nothing but one interpolation is then read as YAML, so numbers and
lists work; quotes keep it a string. `$${` is a literal `${`. Invariant: `write(x)` reads back as
`x`. Every problem is a `UserError` that names the file, the line and the key.
"""

import itertools
import os
import re

import yaml

from mjax.errors import UserError, or_user_error

_SCALARS = [  # tag, pattern, possible first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict = {}


for _kind in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _regexp = re.compile(f"(?:{_pattern})$")
        _chars = ["" if c == "\0" else c for c in _first]
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _chars)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
_Dumper.add_representer(str, lambda d, s: d.represent_str(s.replace("${", "$${")))
_Dumper.add_representer(
    list, lambda d, x: d.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True)
)

LONGEST_TEXT = 4_000_000  # characters of a config
MOST_VALUES = 100_000  # values in a config; aliases of aliases multiply them

_ENV = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^}]*))?\}|\$\{")


def read(text: str, source: str, places: dict[str, str], key: str = "") -> object:
    """The value of a YAML document; `key` is its place in the config ("" for a whole file).

    Adds to `places`, for each dotted key found, where it was set: `source:line` for a file, just
    `source` for a one-line value. Raises `UserError` for anything malformed.
    """
    lines = not key
    if len(text) > LONGEST_TEXT:
        raise UserError(f"{source}: longer than {LONGEST_TEXT:,} characters; is it a config?")
    try:
        return _construct(text, source, places, key)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        at = f"{source}:{mark.line + 1}" if mark and lines else source
        hint = "" if lines else "; quote the value if it is text"
        raise UserError(f"{at}: not valid YAML: {e.problem or e.context}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        if isinstance(e, UserError):
            raise
        why = "nested too deeply" if isinstance(e, RecursionError) else " ".join(str(e).split())
        raise UserError(f"{source}: not valid YAML: {why}") from None


def _construct(text: str, source: str, places: dict[str, str], key: str) -> object:
    """The value of a document, as `read` says, with the errors of YAML as they come."""
    loader = _Loader(text)
    lines = not key

    def where(node: yaml.Node) -> str:
        return f"{source}:{node.start_mark.line + 1}" if lines else source

    visits = itertools.count(1)

    def value(node: yaml.Node, key: str) -> object:
        if next(visits) > MOST_VALUES:
            raise UserError(
                f"{where(node)}: more than {MOST_VALUES:,} values, counting each that an alias "
                "repeats; remove aliases (*name)"
            )
        places[key] = where(node)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            mapping: dict[str, object] = {}
            for name_node, child in node.value:
                name = loader.construct_object(name_node)
                child_key = f"{key}.{name}" if key else str(name)
                if key and type(name) is int:  # a step
                    name = str(name)
                if not isinstance(name, str):
                    raise UserError(f"{where(name_node)}: the key {name!r} must be text; quote it")
                if name in mapping:
                    raise UserError(f"{where(name_node)}: {child_key} is set twice; remove one")
                mapping[name] = value(child, child_key)
            return mapping
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [value(child, f"{key}[{i}]") for i, child in enumerate(node.value)]
        raw = loader.construct_object(node)
        if not isinstance(raw, str):
            return raw
        expanded = _expand(raw, key, where(node))
        interpolation = _ENV.fullmatch(raw)
        if node.style or interpolation is None or not interpolation["name"]:
            return expanded
        wrong = f"{where(node)}: {key}: {raw} is {expanded!r}, which is not valid YAML; mend it"
        with or_user_error(wrong, (yaml.YAMLError, RecursionError)):
            return _without_aliases(yaml.load(expanded, _Loader), expanded)

    root = loader.get_single_node()
    return None if root is None else value(root, key)


def write(tree: dict) -> str:
    """A tree as YAML text: blocks in the tree's order, lists in one line; it reads back equal."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=100_000, allow_unicode=True)


def _without_aliases(value: object, text: str) -> object:
    """`value`, read from `text`; raises `YAMLError` if it may repeat parts of itself."""
    if isinstance(value, (dict, list)) and "*" in text:
        raise yaml.YAMLError("aliases are not allowed here")
    return value


def _expand(text: str, key: str, where: str) -> str:
    """`text` with its environment variables replaced."""

    def replace(match: re.Match) -> str:
        if match[0] == "$${":
            return "${"
        name, default = match["name"], match["default"]
        if not name:
            raise UserError(
                f"{where}: {key}: malformed interpolation in {text!r}; write ${{NAME}}, "
                "${NAME:-default}, or $${ for a literal"
            )
        found = os.environ.get(name)
        if found is None and default is None:
            raise UserError(
                f"{where}: {key}: environment variable {name} is not set; "
                f"set it or write ${{{name}:-default}}"
            )
        return str(default if default is not None and not found else found)

    return _ENV.sub(replace, text)
