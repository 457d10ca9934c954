"""A run of Megatron-LM as a run folder of ours, which resumes with the next sample."""

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.new_folder import new_folder
from mjax.checkpoint.weights import StatePart, write_step
from mjax.config.load import dump
from mjax.config.schema.keys import checked
from mjax.config.schema.run import Config
from mjax.errors import UserError, or_user_error
from mjax.interop.megatron.optimizer_state import iteration_of, optimizer_state
from mjax.interop.megatron.parameters import megatron_source, opened_model
from mjax.interop.megatron.run_arguments import run_config, schedule_of_state, skipped_by
from mjax.interop.megatron.saved_arguments import Args
from mjax.interop.megatron.stored.torch_dist import TorchDist
from mjax.models import definition_of
from mjax.optim.schedule import consumed_samples

log = logging.getLogger(__name__)


def config_of_run(folder: str | Path) -> tuple[dict, list[str]]:
    """(the config of the run that saved a checkpoint, lines on what has no key)."""
    store, cfg = opened_model(folder)
    with _other_types(store):
        args, where = vars(store.arguments()), store.where_common
        groups, lines = run_config(args, where)
        if state := store.common.get("opt_param_scheduler"):
            lines += schedule_of_state(state, Args(args, where), groups)
    model = cfg.model_dump(exclude_none=True, exclude_defaults=True)
    return {"model": model} | groups, lines


def _other_types(store: TorchDist) -> AbstractContextManager:
    wrong = "an argument or the scheduler's state is of another type than Megatron's"
    kinds = TypeError, ValueError, AttributeError, LookupError, ArithmeticError
    return or_user_error(f"{store.where_common}: {wrong}: {{reason}}", kinds)


def import_run(folder: Path, out: Path) -> str:
    """Write the run folder `out` with a checkpoint of weights and optimizer; returns a line.

    Warns of what the arguments say that has no key.
    """
    (store, _), model = opened_model(folder), megatron_source(folder)
    model.check()
    state = optimizer_state(store, model.cfg, model)
    state.mu.check()
    groups, lines = config_of_run(folder)
    if lost := [line for line in lines if line.startswith("opt_param_scheduler")]:
        raise UserError(f"{store.where_common}: {lost[0]}; import without --with-optimizer")
    groups["run"] = groups.get("run", {}) | {"dir": str(out)}
    cfg = checked(Config, groups, f"{store.where_common}: the arguments give {{key}}: {{why}}")
    step = iteration_of(store)
    samples = consumed_samples(cfg.train, step)
    with _other_types(store):
        scheduler = store.common.get("opt_param_scheduler") or {}
        skipped = skipped_by(vars(store.arguments()), scheduler, samples, store.where_common)
    specs = definition_of(model.cfg).specs
    parts = {("params",): StatePart(state.masters, specs, np.dtype(cfg.precision.params))}
    moments = (state.mu, cfg.optimizer.mu_dtype), (state.nu, cfg.optimizer.nu_dtype)
    for word, (source, kind) in zip(("mu", "nu"), moments, strict=True):
        parts["opt", word] = StatePart(source, specs, np.dtype(kind))
    record = {"config": cfg.model_dump(mode="json"), "consumed_samples": samples}
    record |= {"held_out_loss": None, "data": [], "text_digests": {}}
    numbers = {("step",): step, ("opt", "count"): state.steps}
    if cfg.precision.compute == "float16":  # the scale itself starts anew
        scale = {"growth_tracker": 0, "hysteresis_tracker": cfg.precision.hysteresis}
        scale |= {"scale": np.float32(cfg.precision.initial_loss_scale), "skipped_samples": skipped}
        numbers |= {("loss_scale", name): value for name, value in scale.items()}
    with new_folder(out) as temporary:
        write_step(temporary / "checkpoints" / str(step), parts, record, None, numbers)
        (temporary / "config.yaml").write_text(dump(cfg), encoding="utf-8")
    for line in lines:
        log.warning("%s: %s", store.where_common, line)
    return f"{out}: step {step}, {samples:,} samples; mjax train --config {out}/config.yaml goes on"
