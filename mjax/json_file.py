"""Reading a JSON object that others wrote. Invariant: damage is one line that names the file."""

import json
from pathlib import Path

from mjax.errors import UserError, or_user_error

LARGEST = 512 * 2**20  # bytes; the largest tokenizers have 50 MB


def parse_json(text: str | bytes) -> object:
    """Parse with `json.loads`; raises `ValueError` also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(file: Path, missing: dict | None = None) -> dict:
    """The object in `file`; `missing`, where given, if there is no such file."""
    if missing is not None and not file.is_file():
        return missing
    unread = f"{file}: {{reason}}; give the folder that holds it"
    damaged = f"{file}: not JSON ({{reason}}); mend it or copy it again"
    with or_user_error(unread), or_user_error(damaged, ValueError):
        if file.stat().st_size > LARGEST:
            raise UserError(f"{file}: larger than {LARGEST >> 20} MiB; give the file that is meant")
        found = parse_json(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise UserError(f"{file}: not a JSON object; mend it or copy it again")
    return found
