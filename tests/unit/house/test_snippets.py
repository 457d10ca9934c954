"""Law: Python of documents and of the cookbook calls what exists, with the arguments it takes."""

import ast
import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *(p for f in ("docs", "cookbook") for p in (ROOT / f).rglob("*.md"))]
BLOCKS = r"^```python\n(.*?)^```", r"<<'?END'?[^\n]*\n(.*?)^END$"


def snippets() -> dict[str, str]:
    """Python by a name for a file: blocks of pages, programs within commands, notebooks, files."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(b for way in BLOCKS for b in re.findall(way, text, 16 | 8)):
            found[f"{page.stem}_{number}"] = block
    for book in (*(ROOT / "cookbook").glob("*.ipynb"), *(ROOT / "docs").rglob("*.ipynb")):
        cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found[f"{book.stem}_notebook"] = "\n".join(code)
    for file in (ROOT / "cookbook").glob("*.py"):
        found[f"{file.stem}_file"] = file.read_text(encoding="utf-8")
    return {re.sub(r"\W", "_", name): text for name, text in found.items()}


def wrong_calls(texts: dict[str, str], folder: Path) -> list[str]:
    """What mypy says of arguments and attributes that do not exist."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    files = [str(folder / f"{name}.py") for name in texts]
    # A copy of the repository's cache, if there is one: one that is shared would name our files.
    shared, cache = ROOT / ".mypy_cache", folder / "cache"
    with suppress(OSError, shutil.Error):  # there is none, or another mypy is writing it
        shutil.copytree(shared, cache)
    options = "--config-file", "pyproject.toml", "--cache-dir", str(cache)
    command = [sys.executable, "-m", "mypy", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    kinds = "[call-arg]", "[attr-defined]"
    ours = [line for line in done.stdout.splitlines() if line.startswith(str(folder))]
    return [line for line in ours if line.endswith(kinds)]


def test_snippets_are_found_and_parse():
    texts = snippets()
    assert len(texts) > 30 and "images_file" in texts and "research_notebook" in texts
    for name, text in texts.items():
        assert ast.parse(text) is not None, name


@slow
def test_snippets_call_what_exists(tmp_path):
    pytest.importorskip("mypy")
    broken = "from mjax.errors import first_line\nfirst_line(1, 2)\n"
    found = wrong_calls(snippets() | {"broken": broken}, tmp_path)
    assert [Path(line.split(":")[0]).stem for line in found] == ["broken"], found
