"""A limit of time on Python code that others wrote, such as a chat template's loops."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that raises `TimeoutError` in this thread if it lasts longer.

    It ends loops of Python code; one call into C, such as a long multiplication, it cannot.
    """
    thread = threading.get_ident()
    lock, is_over = threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                kind = ctypes.py_object(TimeoutError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"it takes more than {seconds:g} s") from None
    finally:
        with lock:
            is_over = True
        timer.cancel()
