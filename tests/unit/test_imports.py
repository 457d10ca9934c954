"""Imports go one way: a room of the package imports only from rooms that stand before it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mjax"
ROOMS = (
    "errors json_file files config sharding kernels models pipeline optim plan data checkpoint "
    "pretrained infer train convert export generate eval_harness evaluate report bench prove"
).split()


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("mjax.") else module


def imports(path: Path) -> list[str]:
    """Modules of mjax that a file imports, also within functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "mjax":
            found += [f"mjax.{name.name}" for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mjax."):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.startswith("mjax.")]
    return found


def test_imports_go_one_way():
    against = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # the package's own front door
        for module in map(room_of, imports(path)):
            if module in ROOMS and ROOMS.index(module) > ROOMS.index(room):
                against.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not against


def test_every_room_has_its_place():
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[0] != "_"}
    assert rooms == set(ROOMS)
