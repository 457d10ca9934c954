"""Files: new text at once or not at all, and the configs that mjax brings."""

import difflib
import os
from pathlib import Path

from mjax.errors import UserError

PACKAGE = Path(__file__).parent


def replace_text(path: Path, text: str) -> None:
    """Give a file new text at once or, on an `OSError`, leave the old one."""
    new_file = path.with_name(f".{path.name}.tmp")
    try:
        new_file.write_text(text, encoding="utf-8")
        os.replace(new_file, path)
    finally:
        new_file.unlink(missing_ok=True)


CONFIG_FILES = ".yaml", ".yml"  # endings


def config_file(name: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a config: a path from `folder`, or one of mjax's own by its name.

    Names have no suffix: quickstart, models/llama3_8b or llama3_8b. Raises `UserError`.
    """
    path = folder / Path(name).expanduser()
    if path.suffix or path.exists():
        return path
    own, word = own_configs(), Path(name).as_posix()
    short = {file.stem: file for file in own.values()}
    if found := own.get(word, short.get(word)):
        return found
    near = difflib.get_close_matches(word, [*short, *own], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"{name}: no such file, and no config that mjax brings; {hint}it brings "
        f"{', '.join(n for n in own if '/' not in n)}, and more in {configs_folder()}"
    )


def own_configs() -> dict[str, Path]:
    """The configs that mjax brings, by name: quickstart, models/llama3_8b."""
    folder = configs_folder()
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def configs_folder() -> Path:
    """Within the package where it is installed, beside it in a checkout."""
    inside = PACKAGE / "_site" / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"
