"""The exception types that are one line to a user, exit codes, and the wrapper that prints them.

A `UserError` message is one line that says what is wrong, where (file, key), and how to mend it.
`run_cli` turns it into that line on standard error and exit code 2. A `LostProcess` needs nothing
mended: exit code 3. Every other exception is a defect in mjax and keeps its traceback.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

UNREADABLE = (OSError, ValueError)  # what reading a file as text or JSON raises
_IMPORTS = re.compile(r"<frozen |\b(importlib|pkgutil)\b")  # files of frames that only import
START_AGAIN = 3  # exit code: nothing to mend, the same command goes on
INTERRUPTED = 130  # exit code: before the first step, or twice


class Warnings(logging.Handler):
    """Writes warnings to standard error as all lines of mjax are there."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(f"mjax: {record.getMessage()}", file=sys.stderr, flush=True)


class LostProcess(RuntimeError):
    """Another process of the run has died or stays away; the message is one complete line."""


class NonFiniteLoss(RuntimeError):
    """Training met a loss, gradient norm or weight that is not finite; the message is one line."""


class ReplicasDiffer(RuntimeError):
    """Devices that hold the same part of the state hold other bits; the message is one line."""


class UserError(ValueError):
    """Something a user can mend; the message is one complete line."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, cut at 300 letters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def reason(error: BaseException) -> str:
    """The words of an error in one line, without a number or file name."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(words).split())


def line_of(error: BaseException) -> str:
    """ " at FILE:LINE" of the code of a user that raised an error on its import or call.

    "" where it did not come so far. The first frame is that of the caller, who caught it.
    """
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if not _IMPORTS.search(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


@contextmanager
def or_user_error(
    message: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Raise errors of these kinds as a `UserError`; {reason} in its message is what they say."""
    try:
        yield
    except UserError:
        raise
    except kinds as e:
        raise UserError(message.replace("{reason}", reason(e))) from e


def read_numbers(option: str, text: str, kind: type = int) -> list:
    """The numbers that an option of a command line gives with commas. Raises `UserError`."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{option} {text!r}: give {what} with commas, such as 1,64") from None


def program(command: str) -> str:
    """Name a command as the user called it, for usage lines: `mjax X` or `python -m mjax.X`."""
    if sys.argv[0].startswith("mjax "):  # mjax/cli.py sets it so
        return sys.argv[0]
    return f"python -m mjax.{command}"


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main`, exit with its code (None is 0); a `UserError` prints one line and exits 2.

    One process of several that fails exits at once: in good order it would wait minutes for the
    others, and they for its next step. Warnings of mjax are lines on standard error, too.
    """
    logger = logging.getLogger("mjax")
    logger.addHandler(handler := Warnings())
    logger.propagate = False  # or handlers that libraries have set say them again
    try:
        code = main()
    except (UserError, LostProcess) as e:
        kind, code = ("", START_AGAIN) if isinstance(e, LostProcess) else ("error: ", 2)
        print(f"mjax: {kind}{' '.join(str(e).split())}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        code = 1
    except Exception:
        if not _is_one_of_several():
            raise
        traceback.print_exc()
        code = 1
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    if code and _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code or 0)


def _is_one_of_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
