"""A job of two processes is found by the variables of each launcher, and trains as one process."""

import os
import subprocess
import sys

import pytest

from mjax.sharding.processes.fake_devices import fake_devices
from tests.laws.run.test_failures import losses
from tests.marks import exhaustive, slow
from tests.processes import free_port, start_process
from tests.tiny import TINY

KEYS = [*TINY, "train.micro_batch_size=1", "train.steps=2"]


def torchrun(port, i):
    local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(i), "MASTER_ADDR": "127.0.0.1"}
    return {"WORLD_SIZE": "2", "RANK": str(i), "MASTER_PORT": str(port), **local}


def open_mpi(port, i):
    world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(i)}
    local = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(i)}
    return {**world, **local, "PMIX_NAMESPACE": f"prterun-{port}"}


def mpich(port, i):
    local = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": str(i)}
    return {"PMI_SIZE": "2", "PMI_RANK": str(i), **local, "PMIX_NAMESPACE": f"mpich-{port}"}


def slurm(port, i):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    place = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_NODEID": "0"}
    of_job = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return step | place | of_job


def job_set(port, i):
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(i),
    }


def start(folder, variables, devices):
    command = [sys.executable, "-m", "mjax.train", *KEYS, f"run.dir={folder}"]
    env = os.environ | {"XLA_FLAGS": fake_devices(devices)} | variables
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return start_process(command, env=env, **pipe)


@slow
@exhaustive
@pytest.mark.parametrize("launcher", [torchrun, open_mpi, mpich, slurm, job_set])
def test_two_processes_of_a_launcher_train_as_one(tmp_path, launcher):
    port = free_port()
    running = [start(tmp_path / "two", launcher(port, i), 1) for i in range(2)]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert "2 x cpu (dp=2)" in said[0] and "step 2/2" in said[0] and "step" not in said[1]
    alone = start(tmp_path / "one", {}, 2)
    assert alone.communicate(timeout=300) and alone.returncode == 0
    two, one = (dict(losses(tmp_path / name)) for name in ("two", "one"))
    assert len(two) == 2 and two == pytest.approx(one, rel=1e-5)
