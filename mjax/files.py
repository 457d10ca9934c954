"""Writing files so that a reader meets the old text or the new one, whole."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Give a file new text at once or, on an `OSError`, leave the old one."""
    new_file = path.with_name(f".{path.name}.tmp")
    try:
        new_file.write_text(text, encoding="utf-8")
        os.replace(new_file, path)
    finally:
        new_file.unlink(missing_ok=True)
