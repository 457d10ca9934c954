"""The exception types that are one line to a user, exit codes, and what prints them.

A `UserError` message is one line that says what is wrong, where (file, key), and how to mend it.
`run_cli` turns it into that line on standard error and exit code 2. A `LostProcess` needs nothing
mended: exit code 3. Every other exception is a defect in mjax and keeps its traceback.
"""

import argparse
import difflib
import errno
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

UNREADABLE = (OSError, ValueError)  # what reading a file as text or JSON raises
_IMPORTS = re.compile(r"<frozen |\b(importlib|pkgutil)\b")  # files of frames that only import
_DROPS_INTERRUPTS = re.compile(_IMPORTS.pattern + r"|\bxla_bridge\b")  # files, too
START_AGAIN = 3  # exit code: nothing to mend, the same command goes on
INTERRUPTED = 130  # exit code: before the first step, or twice
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # no room: of a disk, a user, a file
NOT_SAID = "None", "False", "", "[]", argparse.SUPPRESS  # defaults that a reader expects


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
    what = "whole numbers" if kind is int else "numbers"
    with or_user_error(f"{option} {text!r}: give {what} with commas, such as 1,64", ValueError):
        numbers = [kind(number) for number in text.split(",")]
    return numbers


def at_least(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from `least` on. Another is a line, and exit code 2."""

    def number(text: str) -> int:
        with suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least {least}")

    return number


def program(command: str) -> str:
    """Name a command as the user called it, for usage lines: `mjax X` or `python -m mjax.X`."""
    if sys.argv[0].startswith("mjax "):  # mjax/cli.py sets it so
        return sys.argv[0]
    return f"python -m mjax.{command}"


class _Help(argparse.HelpFormatter):
    """Says the default of each option, and leaves tables and lists of a text as they are."""

    def _get_help_string(self, action: argparse.Action) -> str:
        said, default = action.help or "", action.default
        known = "default" in said or f"({default})" in said
        if known or action.nargs == 0 or str(default) in NOT_SAID:
            return said
        return f"{said} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        for place, part in enumerate(parts):
            if not re.search(r"^(  |- )|\S {3}", part, re.M):
                parts[place] = super()._fill_text(part, width, indent)
        return "\n\n".join(parts)


class CommandParser(argparse.ArgumentParser):
    """A parser named as the user called the command, such as "post.sft".

    key_of: returns the config key that an unknown option means, where the command takes keys.
    """

    key_of: Callable[[str], str | None] = staticmethod(lambda option: None)

    def __init__(self, command: str = "", **keys: Any):
        keys.setdefault("prog", program(command))  # a subcommand brings its own
        super().__init__(formatter_class=_Help, **keys)

    def error(self, message: str) -> NoReturn:
        """Print one line, with the nearest option where one is unknown, and exit with 2."""
        inner = [
            a.choices or {} for a in self._actions if isinstance(a, argparse._SubParsersAction)
        ]
        parsers = [self, *(parser for choices in inner for parser in choices.values())]
        actions = [action for parser in parsers for action in parser._actions]
        options = [name for action in actions for name in action.option_strings]
        unknown = re.match(r"unrecognized arguments: (-[\w-]+)", message)
        is_key = "." in message.partition(": -")[2].partition("=")[0]
        near = difflib.get_close_matches(unknown[1], options, 1) if unknown and not is_key else []
        takes_keys = any(action.metavar == "a.b=c" for action in self._actions)
        hint = f"see {self.prog} --help" + ("; keys are a.b=c, without dashes" * takes_keys)
        hint = f"did you mean {near[0]}?" if near else hint
        if unknown and (key := self.key_of(unknown[1])):
            hint = f"set {key}=.., without dashes"
        self.exit(2, f"mjax: error: {self.prog}: {message}; {hint}\n")


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main`, exit with its code (None is 0); a `UserError` prints one line and exits 2.

    One process of several that fails alone exits at once: in good order it would wait minutes for
    the others, and they for its next step. Warnings of mjax are lines on standard error, too.
    Ctrl-C is a line and exit code 130, wherever it comes.
    """
    logger = logging.getLogger("mjax")
    before = logger.handlers, logger.propagate, sys.unraisablehook
    logger.handlers, logger.propagate = [Warnings()], False  # or those of libraries say them again
    sys.unraisablehook = _send_interrupts_again
    is_main = threading.current_thread() is threading.main_thread()  # others have no handlers
    is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = main()
        with suppress(ValueError):  # closed
            print(end="", flush=True)
    except BrokenPipeError:
        code = 1
    except (KeyboardInterrupt, Exception) as e:
        line, code = _end_of(e)
        if not line and not _is_one_of_several():
            raise
        with suppress(OSError, ValueError):
            said = f"mjax: {' '.join(line.split())}" if line else traceback.format_exc()
            print(said, file=sys.stderr, flush=True)
    finally:
        _drop_unwritten(sys.stdout)
        _drop_unwritten(sys.stderr)
        logger.handlers, logger.propagate, sys.unraisablehook = before
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if code and _is_one_of_several():
        os._exit(code)
    sys.exit(code or 0)


def _drop_unwritten(file: TextIO, more: str = "") -> bool:
    """Let output that cannot be written go nowhere, or Python would fail at it again at its end.

    Returns whether there was any, with `more` at its end; a closed file has none.
    """
    try:
        print(end=more, file=file, flush=True)
    except ValueError:
        return False
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, and again when an import or the start of jax is left.

    Within these it may be lost: a plugin of jax then counts as broken, a module as not installed.
    Until then jax logs nothing, or it would say so.
    """
    caller = None
    while frame and frame.f_code is not run_cli.__code__:
        if _DROPS_INTERRUPTS.search(frame.f_code.co_filename):
            caller = frame.f_back
        frame = frame.f_back
    if caller:
        logging.disable()
        caller.f_trace = _raise_again  # at the caller's next line, or error
        sys.settrace(lambda *_: None)  # without one, Python calls no `f_trace`
    raise KeyboardInterrupt


def _raise_again(*_: Any) -> NoReturn:
    """A trace function; Python removes one that raises."""
    logging.disable(logging.NOTSET)
    raise KeyboardInterrupt


def _send_interrupts_again(ignored: Any) -> None:
    """`sys.unraisablehook`: Python drops Ctrl-C within a callback, as jax has one for gc."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(ignored)
    # Once the callback has ended; a true signal, for it ends what waits.
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def _is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C has caused an error.

    A module in C whose import Ctrl-C has ended says `ImportError`, which may become a `UserError`.
    """
    if not isinstance(error, KeyboardInterrupt | ImportError | SystemError | UserError):
        return False
    causes: list[BaseException] = [error]
    for cause in causes:  # grows
        causes += [e for e in (cause.__cause__, cause.__context__) if e and e not in causes]
    return any(isinstance(cause, KeyboardInterrupt) for cause in causes)


def _end_of(error: BaseException) -> tuple[str, int]:
    """(the line that an error ends with, the exit code); a defect has no line."""
    if _is_interrupt(error):
        return "interrupted", INTERRUPTED
    if isinstance(error, LostProcess):
        return str(error), START_AGAIN
    is_full = isinstance(error, OSError) and error.errno in FULL  # some file; is it this one?
    if is_full and _drop_unwritten(sys.stdout, "\n"):
        return f"error: the output: {reason(error)}; make room", 2
    return (f"error: {error}", 2) if isinstance(error, UserError) else ("", 1)


def _is_one_of_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
