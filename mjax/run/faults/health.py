"""The examination of a job's machines before it begins, by `run.doctor`."""

from pathlib import Path

import jax
import jax.numpy as jnp

from mjax.config.schema.run import Config
from mjax.doctor.examination import examine_machine
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.models.base.adapted import specs_of_run
from mjax.sharding.spec import count_parameters, trained_only


def require_healthy_machines(cfg: Config) -> None:
    """Print what the devices can do; every process calls it.

    Raises `UserError` in all of them if a GPU is slow, a checkpoint does not fit on the disk or a
    known clash is found.
    """
    found = examine_machine(Path(cfg.run.dir), checkpoint_gb(cfg))
    if found.problems:
        raise UserError("run.doctor: " + "; ".join(found.problems))
    if jax.process_index() == 0:
        print(f"mjax: doctor: {found.summary()}", flush=True)


def checkpoint_gb(cfg: Config) -> float:
    """The size of a checkpoint: weights, and the moments of those that are trained."""
    specs = specs_of_run(definition_of(cfg.model).specs, cfg.lora, cfg.precision.compute)
    trained = trained_only(specs, specs)
    weights = trained if cfg.lora.rank else specs
    moments = [cfg.optimizer.mu_dtype, cfg.optimizer.nu_dtype]
    kept = moments if cfg.optimizer.name == "adamw" else moments[:1]
    size = count_parameters(weights) * jnp.dtype(cfg.precision.params).itemsize
    size += count_parameters(trained) * sum(jnp.dtype(moment).itemsize for moment in kept)
    return size / 1e9
