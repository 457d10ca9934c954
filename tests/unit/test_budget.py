"""mjax stays small: DESIGN section 1's budgets, counted."""

import ast
from pathlib import Path

from pydantic import BaseModel

from mjax.config import Config

PACKAGE = Path(__file__).parents[2] / "mjax"
SOURCES = {p: p.read_text() for p in PACKAGE.rglob("*.py")}


def test_package_is_at_most_15k_lines():
    assert 0 < sum(len(text.splitlines()) for text in SOURCES.values()) <= 15_000


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
