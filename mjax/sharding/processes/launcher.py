"""Which processes make up a run, as the environment variables of their launcher say.

Launchers say how many processes there are, which one this is, and where the first one listens.
JAX's own detection is not used: it takes one GPU of a process that may have several. Nothing here
needs jax, so that a supervisor may ask, too.
"""

import glob
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from mjax.errors import UserError

# Launcher -> variables with: all processes, number of this one, those on this node, number there.
# mpirun inside a Slurm job shows both; MPI is then the one that counts.
LAUNCHERS = {
    "JAX_*": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "", ""),
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    # Intel MPI, too. Slurm's own PMI shows the first two, but these have the last one.
    "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "Slurm": (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_LOCALID",
    ),
}


@dataclass(frozen=True)
class Processes:
    """How many processes make up the run, and which is this one; `coordinator` is HOST:PORT."""

    coordinator: str
    count: int
    index: int
    local_count: int = 1
    local_index: int = 0


def launcher_variables(
    env: Mapping[str, str],
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> dict[str, str]:
    """`env` with what a command line says about the processes, which goes before it."""
    given = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": num_processes,
        "JAX_PROCESS_ID": process_id,
    }
    return {**env, **{name: str(value) for name, value in given.items() if value is not None}}


def find_processes(env: Mapping[str, str]) -> Processes | None:
    """The processes of the run by the launcher's variables in `env`; None for a lone process.

    Raises `UserError` where variables are missing or contradict each other.
    """
    partial = [n for n in LAUNCHERS["JAX_*"][:2] if n in env]
    if len(partial) == 1:
        raise UserError(
            f"{partial[0]}={env[partial[0]]} alone does not say which process this is; set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        )
    launcher = _launcher(env)
    if launcher is None:
        return None
    names = LAUNCHERS[launcher]
    count, index, local_index = (_number(env, n) for n in (names[0], names[1], names[3]))
    if not 0 <= index < count:
        raise UserError(f"{names[1]}={index} is not one of {names[0]}={count} processes; mend it")
    if launcher == "Slurm":
        nodes = _tasks_per_node(env.get(names[2], "1"))
        local_count = nodes[_number(env, "SLURM_NODEID")]
    else:
        local_count = _number(env, names[2], 1)
    if count == 1:
        return None
    coordinator = env.get("JAX_COORDINATOR_ADDRESS") or _coordinator(env, launcher, local_count)
    if not coordinator or not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(
            f"{count} processes ({launcher}) but no address of the first, {coordinator!r}; set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT"
        )
    return Processes(coordinator, count, index, local_count, local_index)


def gpus_of_process(run: Processes, env: Mapping[str, str]) -> list[int] | None:
    """The numbers of this process's GPUs among those that are visible; None: all of them.

    Processes of one node share its GPUs evenly, unless the launcher shows each process only some.
    """
    visible = [g for g in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    gpus = len(visible or glob.glob("/dev/nvidia[0-9]*"))
    bound = "SLURM_GPUS_PER_TASK" in env or "JAX_LOCAL_DEVICE_IDS" in env
    if run.local_count == 1 or bound or gpus < run.local_count:
        return None
    if gpus % run.local_count:
        raise UserError(
            f"{run.local_count} processes on this node cannot share its {gpus} GPUs evenly; start "
            "one a node or one a GPU, or set JAX_LOCAL_DEVICE_IDS for each"
        )
    each = gpus // run.local_count
    return list(range(run.local_index * each, (run.local_index + 1) * each))


def _launcher(env: Mapping[str, str]) -> str | None:
    """The launcher whose variables are set."""
    for launcher, names in LAUNCHERS.items():
        needed = names if launcher == "MPICH" else names[:2]
        if all(name in env for name in needed):
            return launcher
    return None


def _coordinator(env: Mapping[str, str], launcher: str, local_count: int) -> str | None:
    """HOST:PORT of the first process, which all processes of the run work out alike."""
    if launcher == "torchrun" and "MASTER_ADDR" in env:
        taken = "TORCHELASTIC_RUN_ID" in env  # torchrun itself listens on MASTER_PORT
        return f"{env['MASTER_ADDR']}:{_number(env, 'MASTER_PORT') + taken}"
    of_job = ("SLURM_JOB_ID", "SLURM_STEP_ID") if launcher == "Slurm" else ("PMIX_NAMESPACE",)
    job = "/".join(env.get(name, "") for name in of_job)
    port = 61440 + zlib.crc32(job.encode()) % 4096
    is_mpi = launcher in ("Open MPI", "MPICH")
    if is_mpi and _number(env, LAUNCHERS[launcher][0]) == local_count:
        return f"127.0.0.1:{port}"
    nodes = env.get("SLURM_STEP_NODELIST") if launcher == "Slurm" else env.get("SLURM_JOB_NODELIST")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes or "")  # node[07-09,12],other
    return f"{first[1]}{first[2] or ''}:{port}" if first else None


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's '4(x2),3' -> [4, 4, 3]."""
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(","))
    return [int(m[1]) for m in parts for _ in range(int(m[2] or 1))]


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name}={text!r} is not a number; mend it")
    return int(text)
