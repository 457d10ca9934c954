"""The rules of the house (docs/design.md, "Rooms"): where files lie and what may import what.

A room is a folder or file of the package. Rooms import in one direction. Within a room, files at
its top import its folders and not the reverse; what folders stand on is `base`. `__init__` and
`__main__` are faces, which only collect what others import.
"""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[3] / "mjax"
ROOMS = (
    "errors json_file files config sharding kernels models objectives pipeline optim plan data "
    "checkpoint interop infer doctor evaluate train run post generate export serve chat convert "
    "report bench prove docs cli"
).split()
FACES = ("__init__", "__main__")
MOST_FILES = 16


class Import(NamedTuple):
    """A file of the package and what it imports: paths within the package, without suffixes."""

    importer: Path
    imported: Path

    @property
    def within_a_room(self) -> bool:
        return self.importer.parts[0] == self.imported.parts[0] and len(self.importer.parts) > 1

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def folder_of(path: Path) -> Path:
    return path if (PACKAGE / path).is_dir() else path.parent


def imports(tree: ast.AST) -> Iterator[Path]:
    """The modules of mjax that a file imports, also within functions."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mjax":
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.startswith("mjax.")]
        for name in names:
            path = Path(*name.split(".")[1:])
            exists = (PACKAGE / path).is_dir() or (PACKAGE / path).with_suffix(".py").is_file()
            yield path if exists else path.parent


@functools.cache
def all_imports() -> list[Import]:
    """All imports between modules of the package; those of faces are left out."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        if file.stem not in FACES:
            importer = file.relative_to(PACKAGE).with_suffix("")
            found += [Import(importer, path) for path in set(imports(ast.parse(file.read_text())))]
    return [each for each in found if each.imported != Path(".")]


def test_rooms_import_in_one_direction():
    assert len(all_imports()) > 1000
    place = {room: number for number, room in enumerate(ROOMS)}
    against = [i for i in all_imports() if place[i.imported.parts[0]] > place[i.importer.parts[0]]]
    assert not list(map(str, against))


def test_every_room_has_its_place():
    code = (path for path in PACKAGE.iterdir() if path.suffix in ("", ".py"))  # not py.typed
    rooms = {path.stem for path in code if path.name[0] != "_"}
    assert rooms == set(ROOMS)


def test_folders_do_not_import_what_lies_above_them():
    against = []
    for each in filter(lambda i: i.within_a_room, all_imports()):
        home, other = folder_of(each.importer), folder_of(each.imported)
        if other != home and home.is_relative_to(other):
            against.append(str(each))
    assert not against


def test_base_imports_no_other_folder_of_its_room():
    against = []
    for each in filter(lambda i: i.within_a_room and "base" in i.importer.parts, all_imports()):
        if folder_of(each.imported) != folder_of(each.importer):
            against.append(str(each))
    assert not against


def test_no_folders_of_a_room_import_each_other():
    edges = defaultdict(set)
    for each in filter(lambda i: i.within_a_room, all_imports()):
        home, other = folder_of(each.importer), folder_of(each.imported)
        if home != other:
            edges[home].add(other)

    def circle(folder: Path, seen: tuple[Path, ...]) -> tuple[Path, ...] | None:
        if folder in seen:
            return (*seen[seen.index(folder) :], folder)
        found = (circle(other, (*seen, folder)) for other in sorted(edges[folder]))
        return next(filter(None, found), None)

    circles = [circle(folder, ()) for folder in sorted(edges)]
    assert not [" -> ".join(map(str, each)) for each in circles if each]


def test_folders_hold_at_most_16_files():
    counts = Counter(file.parent for file in PACKAGE.rglob("*.py"))
    assert not {str(folder): n for folder, n in counts.items() if n > MOST_FILES}


def test_no_two_files_of_a_room_bear_one_name():
    homes = defaultdict(list)
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        if path.stem not in FACES:
            homes[path.parts[0], path.stem].append(str(path))
    assert not [paths for paths in homes.values() if len(paths) > 1]
