"""How a process finds the others, for every launcher, and which GPUs it takes."""

import os
import subprocess
import sys
import textwrap

import pytest

from mjax.errors import UserError
from mjax.sharding.processes.fake_devices import fake_devices
from mjax.sharding.processes.launcher import Processes, find_processes, gpus_of_process
from tests.marks import slow
from tests.processes import free_port, start_process

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-1",
}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "5000"}
HERE = {"JAX_COORDINATOR_ADDRESS": "a:1"}


def test_a_lone_process_starts_nothing():
    assert find_processes({}) is None
    assert find_processes({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None  # sbatch, no srun
    assert find_processes({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


def test_variables_of_jax_and_torchrun():
    env = {**HERE, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert find_processes(env) == Processes("a:1", 2, 1)
    assert find_processes(TORCH) == Processes("a:5000", 4, 3)
    local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert find_processes(TORCH | local) == Processes("a:5001", 4, 3, 2, 1)


def test_slurm_and_open_mpi():
    found = find_processes(SLURM)
    assert found.coordinator.startswith("gpu07:") and found.count == 11
    assert (found.index, found.local_count, found.local_index) == (9, 3, 1)
    other = SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert find_processes(other).coordinator == found.coordinator
    plain = SLURM | {"SLURM_STEP_NODELIST": "alpha,beta"}
    assert find_processes(plain).coordinator.startswith("alpha:")
    inside = find_processes(SLURM | MPI | {"SLURM_JOB_NODELIST": "gpu[07-08]"})
    assert inside.coordinator.startswith("gpu07:") and (inside.count, inside.index) == (16, 9)
    assert find_processes(MPI | HERE) == Processes("a:1", 16, 9, 8, 1)
    one_node = find_processes(MPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"})
    assert one_node.coordinator.startswith("127.0.0.1:")


def test_mpich_and_the_pmi_of_slurm():
    mpich = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    found = find_processes(mpich)
    assert found.coordinator.startswith("127.0.0.1:") and found.count == 2
    assert (found.index, found.local_count, found.local_index) == (1, 2, 1)
    inside = find_processes(SLURM | mpich | {"MPI_LOCALNRANKS": "1", "SLURM_JOB_NODELIST": "a,b"})
    assert inside.coordinator.startswith("a:") and inside.count == 2
    of_slurm = {name: mpich[name] for name in ("PMI_SIZE", "PMI_RANK")}
    assert find_processes(SLURM | of_slurm) == find_processes(SLURM)
    assert find_processes(of_slurm) is None


@pytest.mark.parametrize(
    "env,message",
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES=2 alone"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "set JAX_COORDINATOR_ADDRESS"),
        ({**HERE, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 is not"),
        ({**HERE, "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "'two' is not a number"),
        ({**HERE, **MPI, "JAX_COORDINATOR_ADDRESS": "host"}, "set JAX_COORDINATOR_ADDRESS"),
        (MPI, "16 processes (Open MPI) but no address"),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            "4 processes (MPICH) but no address",
        ),
    ],
)
def test_what_is_missing_is_named(env, message):
    with pytest.raises(UserError) as e:
        find_processes(env)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_processes_of_a_node_share_its_gpus():
    def own(local_count, local_index, visible, **env):
        run = Processes("a:1", 16, 0, local_count, local_index)
        return gpus_of_process(run, {"CUDA_VISIBLE_DEVICES": visible, **env})

    assert own(1, 0, "0,1,2,3,4,5,6,7") is None
    assert own(8, 3, "0,1,2,3,4,5,6,7") == [3]
    assert own(2, 1, "0,1,2,3,4,5,6,7") == [4, 5, 6, 7]
    assert own(8, 3, "3") is None  # the launcher has shown each its own
    assert own(2, 1, "2,3", SLURM_GPUS_PER_TASK="2") is None
    with pytest.raises(UserError, match="cannot share its 8 GPUs evenly"):
        own(3, 0, "0,1,2,3,4,5,6,7")


@slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_processes_end_together_and_one_that_ends_alone_soon(is_shared):
    """Process 0, whose end is that of the coordination service, is the first to know."""
    script = """
        import sys, time
        from mjax.errors import UserError, run_cli
        from mjax.sharding.mesh import start_processes
        from mjax.sharding.processes.agreement import ends_with_others, values_of_all
        import numpy as np
        def main():
            start_processes()
            met = values_of_all(np.ones(1, np.int32), jax.devices())
            me = int(met[0, 0]) - 1 + jax.process_index()
            with ends_with_others():
                time.sleep(2 * me if IS_SHARED else 100 * (1 - me))
                raise UserError("all know")
        import jax
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        run_cli(main)
    """
    script = textwrap.dedent(script).replace("IS_SHARED", str(is_shared))
    env = os.environ | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    env |= {"JAX_NUM_PROCESSES": "2", "XLA_FLAGS": fake_devices(1)}
    runs = [
        start_process(
            [sys.executable, "-c", script],
            env=env | {"JAX_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    ended = runs if is_shared else runs[1:]
    said = [run.communicate(timeout=60)[1] for run in ended]
    assert [run.returncode for run in ended] == [2] * len(ended), said
    assert all(text.endswith("mjax: error: all know\n") for text in said), said
