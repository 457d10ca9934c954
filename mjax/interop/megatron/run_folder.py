"""A run of Megatron-LM as a run folder of ours, which resumes with the next sample."""

from pathlib import Path

import numpy as np

from mjax.checkpoint.store import new_folder
from mjax.checkpoint.weights import StatePart, write_step
from mjax.config.load import dump
from mjax.config.schema.run import Config
from mjax.errors import UserError, or_user_error
from mjax.interop.megatron.optimizer_state import iteration_of, optimizer_state
from mjax.interop.megatron.parameters import config_of_store, megatron_source
from mjax.interop.megatron.run_arguments import run_config, schedule_of_state, skipped_by
from mjax.interop.megatron.saved_arguments import Args
from mjax.interop.megatron.torch_dist import TorchDist, open_torch_dist
from mjax.models import definition_of
from mjax.optim.build import state_like
from mjax.optim.schedule import consumed_samples


def config_of_run(folder: str | Path) -> tuple[dict, list[str]]:
    """(the config of the run that saved a checkpoint, lines on what has no key)."""
    store = open_torch_dist(folder)
    cfg = config_of_store(store)
    with or_user_error(
        f"{store.where_common}: an argument is of another type than Megatron's: {{reason}}",
        (TypeError, ValueError, AttributeError, LookupError),
    ):
        groups, lines = run_config(vars(store.arguments()), store.where_common)
        lines += _schedule(store, groups)
    model = cfg.model_dump(exclude_none=True, exclude_defaults=True)
    return {"model": model} | groups, lines


def _schedule(store: TorchDist, groups: dict) -> list[str]:
    """Let the state of the scheduler, if there is one, go before arguments in a config."""
    args = Args(vars(store.arguments()), store.where_common)
    state = store.common.get("opt_param_scheduler")
    return schedule_of_state(state, args, groups) if state else []


def import_run(folder: Path, out: Path) -> str:
    """Write the run folder `out` with a checkpoint of weights and optimizer; returns a line."""
    store, model = open_torch_dist(folder), megatron_source(folder)
    model.check()
    state = optimizer_state(store, model.cfg, model)
    state.mu.check()
    groups, _ = config_of_run(folder)
    groups["run"] = groups.get("run", {}) | {"dir": str(out)}
    cfg = _validated_config(groups, store.where_common)
    step = iteration_of(store)
    samples = consumed_samples(cfg.train, step)
    scheduler = store.common.get("opt_param_scheduler") or {}
    if lines := _schedule(store, groups):
        raise UserError(f"{store.where_common}: {lines[0]}; import without --with-optimizer")
    skipped = skipped_by(vars(store.arguments()), scheduler, samples, store.where_common)
    specs = definition_of(model.cfg).specs
    dtypes = {}
    tree = state_like(cfg.optimizer, specs, lambda first, kind: None, lambda name, kept: kept)
    for word in ("mu", "nu"):
        dtypes[word] = cfg.optimizer.mu_dtype if word == "mu" else cfg.optimizer.nu_dtype
    parts = {("params",): StatePart(state.masters, specs, _dtype(cfg.precision.params))}
    for word, source in (("mu", state.mu), ("nu", state.nu)):
        parts["opt", word] = StatePart(source, _like(specs, tree[word]), _dtype(dtypes[word]))
    record = {
        "config": cfg.model_dump(mode="json"),
        "consumed_samples": samples,
        "held_out_loss": None,
        "data": [],
        "text_digests": {},
    }
    numbers = {("step",): step, ("opt", "count"): state.steps}
    if cfg.precision.compute == "float16":  # the scale itself starts anew
        scale = {"growth_tracker": 0, "hysteresis_tracker": cfg.precision.hysteresis}
        scale |= {"scale": np.float32(cfg.precision.initial_loss_scale), "skipped_samples": skipped}
        numbers |= {("loss_scale", name): value for name, value in scale.items()}
    with new_folder(out) as temporary:
        write_step(temporary / "checkpoints" / str(step), parts, record, None, numbers)
        (temporary / "config.yaml").write_text(dump(cfg), encoding="utf-8")
    return f"{out}: step {step}, {samples:,} samples; goes on with config {out}/config.yaml"


def _validated_config(groups: dict, where: str) -> Config:
    from pydantic import ValidationError

    try:
        return Config.model_validate(groups)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{where}: the arguments give {key}: {first['msg']}") from e


def _dtype(name: str):
    import jax.numpy as jnp

    return jnp.dtype(name)


def _like(specs: dict, tree: dict) -> dict:
    """The specs of the parameters in `tree`."""
    return {
        name: _like(specs[name], value) if isinstance(value, dict) else specs[name]
        for name, value in tree.items()
    }
