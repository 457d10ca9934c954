"""Processes of a server: a parent without JAX, an engine for each replica, workers that speak HTTP.

The parent takes the port before anything is loaded, and starts the others as children. On SIGTERM
or SIGINT workers take nothing new and finish what runs, within a time; a second signal ends all at
once. A child that ends unasked, or an engine that makes no step, ends the server. Invariant: no
child outlives the parent, however that ends.
"""

import asyncio
import ctypes
import dataclasses
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from mjax.errors import INTERRUPTED, UserError, or_user_error, run_cli
from mjax.run.faults.supervisor import SET_DEATH_SIGNAL, what_became
from mjax.serve.options import ServeOptions, tell

_LOOK = 0.1  # seconds between two looks at the children
_GRACE = 5.0  # seconds that a child has to end in once it has nothing to do
_PULSE = 8  # bytes
_UNTAKEN = 60_000  # ms after which a connection ends whose other side takes nothing of what is sent


class Pulse:
    """The time of a child's last turn, in a file that the parent reads; 0: it is not ready."""

    def __init__(self, file: Path):
        file.touch()
        with open(file, "r+b") as opened:
            opened.truncate(_PULSE)
            memory = mmap.mmap(opened.fileno(), _PULSE)
        self._time = memoryview(memory).cast("d")  # one store: no reader sees half of it

    def beat(self) -> None:
        """Write the time of now."""
        self._time[0] = time.monotonic()

    @property
    def last(self) -> float:
        return self._time[0]


def pulse_of(home: Path, role: str, number: int) -> Pulse:
    """The pulse of a child, in a file that its parent finds, too."""
    return Pulse(home / f"{role}{number}.pulse")


class Server:
    """The parent. `run` serves until it is asked to stop and returns the exit code."""

    def __init__(self, options: ServeOptions):
        self.options = options
        self._asked = 0  # signals to stop
        self._engines: list[subprocess.Popen] = []
        self._workers: list[subprocess.Popen] = []

    def run(self) -> int:
        """Serve. Raises `UserError` where the port cannot be had."""
        listener = listening_socket(self.options.host, self.options.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        with tempfile.TemporaryDirectory(prefix="mjax-") as home, listener:
            self._home = Path(home)
            replicas, workers = range(self.options.replicas), range(self.options.workers)
            self._engine_pulses = [pulse_of(self._home, "engine", number) for number in replicas]
            self._worker_pulses = [pulse_of(self._home, "worker", number) for number in workers]
            port = listener.getsockname()[1]
            for number in replicas:
                self._engines.append(self._start("engine", number))
            for number in workers:
                self._workers.append(self._start("worker", number, listener))
            listener.close()  # where workers have closed it nobody gets in
            tell(f"loading {self.options.name} and compiling its programs")
            try:
                return self._watch(port)
            finally:
                self._kill()

    def _ask(self, *_: object) -> None:
        self._asked += 1

    def _start(
        self, role: str, number: int, listener: socket.socket | None = None
    ) -> subprocess.Popen:
        """A child, which reads its task from standard input and inherits the listening socket."""
        passed = () if listener is None else (listener.fileno(),)
        child = subprocess.Popen(
            [sys.executable, "-m", "mjax.serve.processes"],
            stdin=subprocess.PIPE,
            pass_fds=passed,
            process_group=0,  # signals of a terminal are for the parent
            env=self._environment(role, number),
        )
        task = {
            "role": role,
            "number": number,
            "home": str(self._home),
            "parent": os.getpid(),
            "listener": passed[0] if passed else -1,
            "options": dataclasses.asdict(self.options),
        }
        child.stdin.write(json.dumps(task).encode())
        child.stdin.close()
        return child

    def _environment(self, role: str, number: int) -> dict[str, str]:
        """The environment of a child: a worker has no GPU, a replica those of its own."""
        environment = dict(os.environ)
        if role == "worker":
            environment["JAX_PLATFORMS"] = "cpu"
            if self.options.workers > 1:
                metrics = self._home / "metrics"
                metrics.mkdir(exist_ok=True)
                environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        elif self.options.replicas > 1:
            sizes = "tensor_parallel_size", "pipeline_parallel_size"
            size = math.prod(self.options.engine.get(name, 1) for name in sizes)
            environment["CUDA_VISIBLE_DEVICES"] = own_devices(environment, number, size)
        return environment

    # ---- a life ----------------------------------------------------------------------------------

    def _watch(self, port: int) -> int:
        """Look after the children until one ends, or a signal asks to stop."""
        is_ready = False
        while not self._asked:
            code = self._fallen()
            if code is not None:
                return code
            pulses = *self._engine_pulses, *self._worker_pulses
            if not is_ready and all(pulse.last for pulse in pulses):
                is_ready = True
                host = self.options.host
                where = f"[{host}]" if ":" in host else host
                tell(f"{self.options.name} is served at http://{where}:{port}")
            if self._is_stuck():
                return 1
            time.sleep(_LOOK)
        return self._drain()

    def _fallen(self) -> int | None:
        """The exit code of the server if a child has ended."""
        for role, children in (("engine", self._engines), ("worker", self._workers)):
            for number, child in enumerate(children):
                if child.poll() is None:
                    continue
                if child.returncode == 2:  # it has said what a user can mend
                    return 2
                became = what_became(child.returncode)
                tell(f"{role} {number} {became}: the server ends")
                return 1
        return None

    def _is_stuck(self) -> bool:
        """Whether an engine has made no turn for too long."""
        limit = self.options.stuck_seconds
        for number, pulse in enumerate(self._engine_pulses):
            last = pulse.last
            if limit and last and time.monotonic() - last > limit:
                tell(f"engine {number} has made no step for {limit:g} s: the server ends")
                return True
        return False

    def _drain(self) -> int:
        """Let workers finish what runs; then end the engines. A second signal ends all at once."""
        tell("asked to stop: what runs may end, and nothing new is taken")
        _signal_all(self._workers)
        if self._ended(self._workers, self.options.shutdown_seconds + _GRACE):
            _signal_all(self._engines)
            self._ended(self._engines, _GRACE)
        return INTERRUPTED if self._asked > 1 else 0

    def _ended(self, children: list[subprocess.Popen], seconds: float) -> bool:
        """Wait for children to end; False: they have not in time, or must at once."""
        until = time.monotonic() + seconds
        while any(child.poll() is None for child in children):
            if self._asked > 1 or time.monotonic() > until:
                return False
            time.sleep(_LOOK / 5)
        return True

    def _kill(self) -> None:
        for child in (*self._workers, *self._engines):
            if child.poll() is None:
                child.kill()
        for child in (*self._workers, *self._engines):
            child.wait()


def _signal_all(children: list[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address. Raises `UserError` where that cannot be."""
    if not 0 <= port < 2**16:
        raise UserError(f"--host {host} --port {port}: there is no such port; give 0 to 65535")
    wrong = f"--host {host} --port {port}: {{reason}}; give another"
    with or_user_error(wrong, (OSError, OverflowError, UnicodeError)):
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN)
        made.bind(address)
    return made


def own_devices(environment: dict[str, str], number: int, size: int) -> str:
    """The GPUs of a replica, as CUDA_VISIBLE_DEVICES has them."""
    first, given = number * size, environment.get("CUDA_VISIBLE_DEVICES")
    if not given:
        return ",".join(map(str, range(first, first + size)))
    devices = given.split(",")
    if first + size > len(devices):
        raise UserError(
            f"--data-parallel-size: replica {number} has no {size} of the {len(devices)} devices "
            f"in CUDA_VISIBLE_DEVICES={given}; start fewer"
        )
    return ",".join(devices[first : first + size])


# ---- children ------------------------------------------------------------------------------------


def main() -> None:
    """Run as a child of `Server`, whose task stands on standard input."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    task = json.loads(sys.stdin.buffer.read())
    if os.getppid() != task["parent"]:  # it died before the kernel was told
        os._exit(1)
    options = ServeOptions(**task["options"])
    if task["role"] == "engine":
        run_cli(lambda: run_engine(options, Path(task["home"]), task["number"]))
    else:
        run_cli(lambda: run_worker(options, Path(task["home"]), task["number"], task["listener"]))


def run_engine(options: ServeOptions, home: Path, number: int) -> None:
    """Load the model and serve it to workers until SIGTERM."""
    from mjax.serve.engine_server import EngineServer
    from mjax.serve.loading import ServedModel

    def end(*_: object) -> NoReturn:
        os._exit(0)

    signal.signal(signal.SIGTERM, end)  # nothing is in flight that anyone waits for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pulse = pulse_of(home, "engine", number)
    model = ServedModel(options)
    address = f"ipc://{home}/engine{number}"
    server = EngineServer(address, model.engine, model.facts, pulse.beat)
    model.add_commands(server)
    freeze_heap()
    server.run()


def freeze_heap() -> None:
    """Let the garbage collector pass over what is there since the start, which never goes."""
    import gc

    gc.collect()
    gc.freeze()


def run_worker(options: ServeOptions, home: Path, worker: int, listener: int) -> None:
    """Speak HTTP until SIGTERM, then until what runs has ended."""
    import uvicorn
    import uvloop

    from mjax.serve.late_app import LateApp

    addresses = [f"ipc://{home}/engine{number}" for number in range(options.replicas)]
    config = uvicorn.Config(
        LateApp(addresses, options, pulse_of(home, "worker", worker).beat),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(int(options.shutdown_seconds), 1),
    )
    server = uvicorn.Server(config)
    sockets = [socket.socket(fileno=listener)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=sockets))


if __name__ == "__main__":
    main()
