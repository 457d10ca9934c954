"""Reading a JSON object that others wrote. Invariant: damage is one line that names the file."""

import json
from pathlib import Path

from mjax.errors import UserError


def read_json(file: Path, missing: dict | None = None) -> dict:
    """The object in `file`; `missing`, where given, if there is no such file."""
    if missing is not None and not file.is_file():
        return missing
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}; give the folder that holds it") from None
    except ValueError as e:
        raise UserError(f"{file}: not JSON ({e}); mend it or copy it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: not a JSON object; mend it or copy it again")
    return found
