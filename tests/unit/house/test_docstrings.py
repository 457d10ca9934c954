"""A stranger reads each docstring once: no sentence hangs on another by its first word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.marks import slow

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "mjax"
FILES = re.compile(r"`([\w/]+\.py)`")
OF_MEGATRON = (
    "megatron/core/",
    "_dataset.py",
    "pretrain_",
    "_scheduler.py",
    "num_microbatches_calculator.py",
)
FIRST_WORDS = re.compile(r"(Of|What|Whose|Those|That|Who|Where)\b")
BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each text that stands alone: docstrings, those of attributes too."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def hanging(text: str) -> list[str]:
    """The sentences of a docstring whose first word is not a verb or a noun phrase of its own."""
    sentences = BETWEEN_SENTENCES.split(" ".join(text.split()))
    return [sentence for sentence in sentences if FIRST_WORDS.match(sentence)]


def test_a_sentence_that_hangs_is_found():
    assert not hanging("Returns x [B, S].\n\nWhatever is asked. Its shape is that of y.")
    assert hanging("Of x.\n\n    Reads y. Where\n    z is 0, x is too.") == [
        "Of x.",
        "Where z is 0, x is too.",
    ]
    tree = ast.parse('"""A."""\nclass B:\n    """B."""\n    c: int\n    """What c is."""\n')
    assert [text for _, text in docstrings(tree)] == ["A.", "B.", "What c is."]


@slow
def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        within = path.relative_to(PACKAGE)
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            found += [f"{within}:{line}: {sentence}" for sentence in hanging(text)]
    assert not found, "\n".join(found)


@slow
def test_files_that_docstrings_name_exist():
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("*/**/*.py")]
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            for name in FILES.findall(text):
                is_ours = not any(part in name for part in OF_MEGATRON)
                if is_ours and not any(file.endswith(f"/{name}") for file in files):
                    missing.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not missing
