"""Functions that processes of `Decoders` run in tests: here, where importing them takes no time."""

import os
import signal

import numpy as np


def length(encoded: bytes) -> np.ndarray:
    return np.array(len(encoded))


def end_itself(encoded: bytes) -> np.ndarray:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_4(encoded: bytes) -> np.ndarray:
    os._exit(4)
