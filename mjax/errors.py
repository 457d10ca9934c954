"""The one exception type for mistakes a user can mend, and the wrapper that prints it.

A `UserError` message is one line that says what is wrong, where (file, key), and how to mend it.
`run_cli` turns it into that line on standard error and exit code 2; every other exception is a
defect in mjax and keeps its traceback.
"""

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something a user can mend; the message is one complete line."""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main`, exit with its code (None is 0); a `UserError` prints one line and exits 2."""
    try:
        code = main()
    except UserError as e:
        line = " ".join(str(e).split())
        print(f"mjax: error: {line}", file=sys.stderr, flush=True)
        code = 2
    except BrokenPipeError:
        code = 1
    sys.exit(code or 0)
