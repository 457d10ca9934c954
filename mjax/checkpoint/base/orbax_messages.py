"""Silence for what orbax and tensorstore print of their own about a failed save.

They write hundreds of lines of tracebacks from background threads; the error that they raise is
reported by mjax in one line. Nothing but those reports is silenced.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator

from mjax.checkpoint.base.digest import TEMPORARY
from mjax.config.schema.sizes import shortened

LONGEST_MESSAGE = 300  # characters of an error that is not one of the system


@contextlib.contextmanager
def quiet_saves() -> Iterator[None]:
    """A context in which failed saves print nothing by themselves.

    Reports of writes that failed after the first come when Python frees them, which may be at the
    end of the process. So the filters for them stay when the context ends.
    """
    logging.getLogger("asyncio").addFilter(_is_no_late_report)
    _silence_late_callbacks()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _silence_late_callbacks() -> None:
    """Silence tensorstore's writes that end after the first has failed and find no event loop."""
    hook = sys.unraisablehook
    if getattr(hook, "__module__", None) == __name__:
        return

    def without_late_callbacks(report: "sys.UnraisableHookArgs") -> None:
        error = report.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(report)

    sys.unraisablehook = without_late_callbacks


def _is_no_late_report(record: logging.LogRecord) -> bool:
    """Whether this is anything but asyncio's word on a failed write that nobody waited for."""
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and TEMPORARY in str(error))


def plain_reason(error: BaseException) -> str:
    """The system's words for what went wrong in a save, else the error's own in one short line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        code = re.search(r"os_error_code='(\d+)'", str(cause))
        if code:
            return os.strerror(int(code[1]))
        cause = cause.__cause__ or cause.__context__
    return shortened(" ".join(str(error).split()) or type(error).__name__, LONGEST_MESSAGE)
