"""The one exception type for mistakes a user can mend, and the wrapper that prints it.

A `UserError` message is one line that says what is wrong, where (file, key), and how to mend it.
`run_cli` turns it into that line on standard error and exit code 2; every other exception is a
defect in mjax and keeps its traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable


class UserError(ValueError):
    """Something a user can mend; the message is one complete line."""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main`, exit with its code (None is 0); a `UserError` prints one line and exits 2.

    One process of several that fails exits at once: in good order it would wait minutes for the
    others, and they for its next step.
    """
    try:
        code = main()
    except UserError as e:
        line = " ".join(str(e).split())
        print(f"mjax: error: {line}", file=sys.stderr, flush=True)
        code = 2
    except BrokenPipeError:
        code = 1
    except Exception:
        if not _is_one_of_several():
            raise
        traceback.print_exc()
        code = 1
    if code and _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code or 0)


def _is_one_of_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
