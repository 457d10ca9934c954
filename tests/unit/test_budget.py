"""mjax stays small: DESIGN section 1's budgets, counted."""

import ast
import io
import tokenize
from pathlib import Path

from pydantic import BaseModel

from mjax.config import Config

PACKAGE = Path(__file__).parents[2] / "mjax"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SOURCES = {p: p.read_text() for p in PACKAGE.rglob("*.py")}


def code_lines(text: str) -> int:
    """Lines with code: neither blank, nor comments, nor docstrings."""
    nodes = [
        n for n in ast.walk(ast.parse(text)) if hasattr(n, "body") and isinstance(n.body, list)
    ]
    first = [n.body[0] for n in nodes if n.body and isinstance(n.body[0], ast.Expr)]
    docs = [e for e in first if isinstance(getattr(e.value, "value", None), str)]
    said = {line for e in docs for line in range(e.lineno, e.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in NO_CODE]
    return len({line for span in spans for line in span} - said)


def test_package_is_at_most_15k_lines_of_code():
    assert code_lines('"""Doc."""\n\nx = 1  # one\n# two\n') == 1
    assert 0 < sum(code_lines(text) for text in SOURCES.values()) <= 15_000


def test_files_are_at_most_500_lines():
    sizes = {str(p): len(text.splitlines()) for p, text in SOURCES.items()}
    assert not {p: n for p, n in sizes.items() if n > 500}


def test_functions_are_at_most_60_lines():
    long = {}
    for path, text in SOURCES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 60:
                    long[f"{path}:{node.lineno} {node.name}"] = lines
    assert not long


def test_config_has_at_most_200_keys():
    def leaves(group: type[BaseModel]) -> int:
        kinds = [f.annotation for f in group.model_fields.values()]
        nested = [[k for k in (t, *getattr(t, "__args__", ())) if _is_group(k)] for t in kinds]
        return sum(leaves(groups[0]) if groups else 1 for groups in nested)

    assert 100 < leaves(Config) <= 200


def _is_group(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
