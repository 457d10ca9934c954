"""Python code in strings and in docs names what exists: a move leaves none of it behind.

Linters do not see an import in a program that a test starts, nor one in a page of docs.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMPORTS = re.compile(r"from (mjax(?:\.\w+)*) import \(?([\w, ]+)")


def folders_of_text() -> list[Path]:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("mjax/**/*.md")]
    pages += ROOT.glob("cookbook/*.*")
    folders = ("mjax", "tests", "tools", "benchmarks")
    return pages + [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]


def missing(module: str, names: list[str]) -> list[str]:
    """Those of `names` that are neither modules below `module` nor words of its file."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return [module]
    text = file.read_text()
    found = [p.stem for p in place.glob("*")] if place.is_dir() else []
    return [n for n in names if n not in found and not re.search(rf"\b{n}\b", text)]


def test_what_code_in_text_imports_exists():
    wrong = []
    for file in folders_of_text():
        for module, listed in IMPORTS.findall(file.read_text()):
            names = [name.split()[0] for name in listed.split(",") if name.strip()]
            wrong += [f"{file.relative_to(ROOT)}: {module}: {n}" for n in missing(module, names)]
    assert not wrong, "\n".join(wrong)
