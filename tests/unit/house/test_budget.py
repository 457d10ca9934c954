"""mjax stays small and readable: DESIGN section 1's budgets, counted."""

import ast
import functools
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from mjax.config import Config
from tests.marks import slow

PACKAGE = Path(__file__).parents[3] / "mjax"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SOURCES = {p: p.read_text() for p in PACKAGE.rglob("*.py")}


CORE = ("config", "sharding", "models", "objectives", "pipeline", "plan", "optim", "train", "run")
SMALL = 40  # lines of code; an average over fewer says little
SHORT = 6  # lines of code; likewise of a function


def count(text: str) -> tuple[int, int]:
    """(lines with code, tokens in them): without blank lines, comments and docstrings."""
    tokens = tokens_by_line(text)
    return len(tokens), sum(tokens.values())


@functools.cache
def tokens_by_line(text: str) -> dict[int, int]:
    """The tokens that begin on each line with code, by its number.

    Docstrings are those of attributes (PEP 257), too: statements that are a text and no more.
    """
    statements = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr)]
    docs = [e for e in statements if isinstance(getattr(e.value, "value", None), str)]
    said = {line for e in docs for line in range(e.lineno, e.end_lineno + 1)}
    lines = defaultdict(int)
    for token in tokens_of(text):
        if token.type in NO_CODE or token.start[0] in said:
            continue
        lines[token.start[0]] += 1
        for line in range(token.start[0] + 1, token.end[0] + 1):
            lines[line] += 0
    return dict(lines)


@functools.cache
def functions_of(text: str) -> list[tuple[str, int, int]]:
    """Name, first and last line of all functions and methods of a module, inner ones too."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [(node.name, node.lineno, node.end_lineno) for node in found]


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield tokens; an f-string is one, as before Python 3.12, which yields its parts."""
    opened = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            opened.append(token.start)
        start = opened.pop() if kind == "FSTRING_END" else token.start
        if not opened:
            yield token if start == token.start else token._replace(start=start)


def core_files() -> dict[Path, str]:
    """Texts of the core's files, by path within the package."""
    within = {path.relative_to(PACKAGE): text for path, text in SOURCES.items()}
    return {path: text for path, text in within.items() if path.parts[0] in CORE}


# Lines of code of each room when all that is planned is built: docs/design.md, "Budgets".
ROOMS = {
    "config": 4_150,
    "sharding": 970,
    "kernels": 8_860,
    "models objectives": 10_140,
    "pipeline": 850,
    "plan": 2_000,
    "optim": 750,
    "data": 6_530,
    "checkpoint interop convert": 13_350,
    "train run": 5_060,
    "post": 4_880,
    "serve chat": 4_105,
    "infer generate": 4_240,
    "evaluate export bench report prove doctor docs cli errors files json_file __init__": 5_015,
}


@slow
def test_no_room_pays_for_another():
    assert count('"""Doc."""\n\nx = 1  # one\n# two\n') == (1, 3)
    assert count('x = f\'a{y:{z}} {f(y)}\' + f"""{\n1}"""\n') == (2, 5)
    lines = defaultdict(int)
    homes = {name: rooms for rooms in ROOMS for name in rooms.split()}
    for path, text in SOURCES.items():
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines[homes[name]] += count(text)[0]
    over = {rooms: (n, ROOMS[rooms]) for rooms, n in lines.items() if n > ROOMS[rooms]}
    assert lines.keys() == ROOMS.keys() and not over


def test_a_line_of_the_core_has_at_most_11_tokens_on_average():
    dense = {}
    for path, text in core_files().items():
        lines, tokens = count(text)
        if lines > SMALL and tokens / lines > 11:
            dense[str(path)] = round(tokens / lines, 2)
    assert not dense


def dense_functions(text: str) -> dict[str, float]:
    """Tokens a line of the functions that have more than 16, by line and name."""
    tokens = tokens_by_line(text)
    dense = {}
    for name, first, last in functions_of(text):
        lines = [tokens[line] for line in range(first, last + 1) if line in tokens]
        if len(lines) >= SHORT and sum(lines) / len(lines) > 16:
            dense[f"{first} {name}"] = round(sum(lines) / len(lines), 1)
    return dense


@slow
def test_a_line_of_a_function_has_at_most_16_tokens_on_average():
    line = "    x = [a, b, c, d, e, f, g, h]\n"
    assert dense_functions("def f():\n" + 5 * line) == {"1 f": 16.7}
    assert not dense_functions("def f():\n" + 4 * line)
    dense = {}
    for path, text in SOURCES.items():
        if path.relative_to(PACKAGE).parts[0] != "kernels":
            for name, tokens in dense_functions(text).items():
                dense[f"{path}:{name}"] = tokens
    assert not dense


@functools.cache
def names_of(text: str) -> set[str]:
    """The names that a module defines at its top level."""
    statements = ast.parse(text).body
    targets = [target for node in statements for target in getattr(node, "targets", [])]
    names = {node.name for node in statements if hasattr(node, "name")}
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def test_no_name_is_defined_in_two_modules_of_the_core():
    homes = defaultdict(set)
    for path, text in core_files().items():
        for name in names_of(text):
            homes[name].add(str(path))
    homes.pop("log")  # each module's logger
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_at_most_60_names_are_defined_in_two_modules():
    homes = defaultdict(set)
    for path, text in SOURCES.items():
        for name in names_of(text):
            homes[name].add(path)
    twice = {name for name, files in homes.items() if len(files) > 1} - {"log", "main"}
    assert len(twice) <= 60, sorted(twice)


def test_no_lambda_is_given_a_name():
    here = {path.relative_to(PACKAGE.parent): text for path, text in SOURCES.items()}
    assert not [str(path) for path, text in here.items() if "noqa: E731" in text]


def test_files_are_at_most_500_lines():
    sizes = {str(p): len(text.splitlines()) for p, text in SOURCES.items()}
    assert not {p: n for p, n in sizes.items() if n > 500}


def test_functions_are_at_most_60_lines():
    long = {}
    for path, text in SOURCES.items():
        for name, first, last in functions_of(text):
            if last - first >= 60:
                long[f"{path}:{first} {name}"] = last - first + 1
    assert not long


def test_config_has_at_most_432_keys():
    def leaves(group: type[BaseModel]) -> int:
        kinds = [f.annotation for f in group.model_fields.values()]
        nested = [[k for k in (t, *getattr(t, "__args__", ())) if _is_group(k)] for t in kinds]
        return sum(leaves(groups[0]) if groups else 1 for groups in nested)

    assert 100 < leaves(Config) <= 432


def _is_group(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
