"""Modules of a user's own that a config names in `run.imports`: mixers in the table of branches."""

import importlib
from collections.abc import Mapping

from mjax.errors import UserError, line_of, reason


def import_modules(config: Mapping) -> None:
    """Import the modules in `run.imports` of a config tree. Raises `UserError` for what fails."""
    run = config.get("run")
    names = run.get("imports") if isinstance(run, Mapping) else None
    for name in names if isinstance(names, list) else ():  # the schema refuses others
        try:
            importlib.import_module(name)
        except Exception as e:  # whatever the code of a user raises
            raise UserError(
                f"run.imports={name!r}: {type(e).__name__}: {reason(e)}{line_of(e)}; mend the "
                "module, or start where Python finds it (PYTHONPATH)"
            ) from e
