"""An environment that does what none should. It imports little, so its processes start soon."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mjax.post.environments.environment import Turn


class Rude:
    """Does in a step what its state says; its prompts are its process's number."""

    def __init__(self, chat, start="well", reset="well"):
        self.reset_as = reset
        self._do(start)

    def reset(self, seed, index):
        self._do(self.reset_as)
        return Turn((os.getpid(),), "well")

    def step(self, state, ids):
        self._do(state)
        return Turn((), None, 1.0, {}, "answered")

    def _do(self, what):
        word, _, rest = what.partition(" ")
        if word == "hang":
            if rest:
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
                Path(rest).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(100)
        if word == "wait":
            time.sleep(float(rest))
        if word == "print":
            print("a line " * 1000, flush=True)
            os.write(1, b"\0" * 1000)
        if word == "raise":
            raise ValueError("not today")
        if word == "exit":
            sys.exit(3)
        if word == "die":
            os._exit(3)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "once":  # a process dies at its first prompt, and the next one does not
            if not Path(rest).exists():
                Path(rest).touch()
                os._exit(4)
