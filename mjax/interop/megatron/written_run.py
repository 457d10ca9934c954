"""A run of ours as all that Megatron-LM saves of one beside weights: moments of Adam, groups of
parameters, the scheduler's state, arguments and the position in the data.

Invariant: imported again it has the same state and schedule; a key of the optimizer that Megatron
has no counterpart for is refused by name. Source: megatron/core (optimizer/__init__.py,
optimizer/distrib_optimizer.py, optimizer_param_scheduler.py), megatron/training/checkpointing.py.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from mjax.checkpoint.base.source import Index, Source
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.base.stored import WEIGHTS, StoredArrays, read_record
from mjax.config.schema.keys import value_of
from mjax.config.schema.run import Config, OptimizerConfig
from mjax.errors import UserError
from mjax.interop.megatron.optimizer_state import trained_paths
from mjax.interop.megatron.run_arguments import DECAYS, FLAGS
from mjax.optim.schedule import consumed_samples, rates_of_step

_AT_DEFAULT = ("name", "weight_decay_roles", "lr_multipliers")
_LEFT_OUT = ("mesh", "data_cache_path", "fp8_recipe", "fp8_amax_history_len")


@dataclass(frozen=True)
class WrittenRun:
    """The step of a run with config `cfg`.

    mu, nu: the moments. updates: those that the optimizer made. skipped: samples that the schedule
    leaves out. apart: the experts have an optimizer of their own, as where Megatron spreads them
    over devices.
    """

    cfg: Config
    step: int
    mu: Source
    nu: Source
    updates: int
    skipped: int
    apart: bool

    def common(self, model_args: dict) -> dict:
        """Make what is not sharded: optimizer, scheduler, iteration, and all arguments."""
        optimizer = self._optimizer(experts=False)
        if self.apart:
            optimizer = {0: optimizer, 1: self._optimizer(experts=True)}
        return {
            "args": model_args | self._arguments(),
            "iteration": self.step,
            "optimizer": optimizer,
            "opt_param_scheduler": self._scheduler(),
            "content_metadata": {
                "distrib_optim_sharding_type": "fully_reshardable",
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        }

    @property
    def _samples(self) -> int:
        return consumed_samples(self.cfg.train, self.step)

    def _optimizer(self, experts: bool) -> dict:
        """The state of an optimizer without its tensors, for those that are distributed, those that
        are not, and those of fp32 weights: each reads its own entries."""
        groups = [self._group(1.0, experts)]
        if not experts:
            groups.append(self._group(0.0, experts))
        own = {"param_groups": groups, "state": {"common_step": self.updates}}
        return own | {"optimizer": own, "param_state_sharding_type": "fully_reshardable"}

    def _group(self, decay: float, experts: bool) -> dict:
        """The parameters of equal settings."""
        o, schedule = self.cfg.optimizer, self.cfg.schedule
        rates = rates_of_step(self.cfg, self.step, self.skipped)
        return {
            "lr": rates.learning_rate,
            "max_lr": schedule.lr,
            "min_lr": schedule.min_lr,
            "lr_mult": 1.0,
            "weight_decay": decay * rates.weight_decay,
            "wd_mult": decay,
            "betas": (o.b1, o.b2),
            "eps": o.eps,
            "bias_correction": True,
            "step": self.updates,
            "is_expert_parallel": experts,
            "is_decoupled_lr": False,
            "default_config": True,
        }

    def _scheduler(self) -> dict:
        """The state of Megatron's scheduler, whose lengths count samples."""
        o, schedule, train = self.cfg.optimizer, self.cfg.schedule, self.cfg.train
        size = train.global_batch_size
        end = o.weight_decay if o.weight_decay_end is None else o.weight_decay_end
        return {
            "max_lr": schedule.lr,
            "min_lr": schedule.min_lr,
            "lr_decay_style": _styles()[schedule.decay],
            "lr_warmup_steps": schedule.warmup_steps * size,
            "lr_decay_steps": (schedule.decay_steps or train.steps) * size,
            "num_steps": self._samples - self.skipped,
            "start_wd": o.weight_decay,
            "end_wd": end,
            "wd_incr_style": "constant" if end == o.weight_decay else o.weight_decay_style,
            "wd_incr_steps": train.steps * size,
        }

    def _arguments(self) -> dict:
        """The arguments of the run, as `FLAGS` reads them."""
        cfg, found = self.cfg, {}
        for flag in FLAGS:
            value = value_of(cfg, flag.key)
            if value != "auto" and not {flag.group, flag.name} & set(_LEFT_OUT):
                found[flag.name] = value
        scheduler, ramp = self._scheduler(), cfg.train.rampup_batch_size
        return found | {
            "lr_decay_style": scheduler["lr_decay_style"],
            "lr_wsd_decay_iters": cfg.schedule.wsd_decay_steps or None,
            "start_weight_decay": scheduler["start_wd"],
            "end_weight_decay": scheduler["end_wd"],
            "weight_decay_incr_style": scheduler["wd_incr_style"],
            "bf16": cfg.precision.compute == "bfloat16",
            "fp16": cfg.precision.compute == "float16",
            "optimizer": "adam",
            "rampup_batch_size": ramp and [str(number) for number in ramp],
            "consumed_train_samples": self._samples,
            "skipped_train_samples": self.skipped,
            "consumed_valid_samples": 0,
            "no_save_rng": True,
        }


def run_to_write(path: str, apart: bool) -> WrittenRun:
    """The run at `path`, or its step; `UserError` if Megatron-LM cannot go on with it."""
    step = newest_step(Path(path))
    if step is None or (record := read_record(step)).get("contents") == WEIGHTS:
        raise UserError(f"{path} holds no optimizer; give a run, or leave out --with-optimizer")
    try:
        cfg = Config.model_validate(record["config"])
    except ValidationError as e:
        key = ".".join(map(str, e.errors()[0]["loc"]))
        raise UserError(
            f"{step}: its config has {key}, which this mjax does not read; go on for a step first"
        ) from e
    if cfg.lora.rank:
        raise UserError(f"{step}: Megatron-LM has no adapters; leave out --with-optimizer")
    for key in _AT_DEFAULT:
        value = getattr(cfg.optimizer, key)
        if value != OptimizerConfig.model_fields[key].get_default():
            raise UserError(
                f"{step}: Megatron's Adam has no counterpart of optimizer.{key}={value!r}; leave "
                "out --with-optimizer"
            )
    if apart and not cfg.model.moe.num_experts:
        raise UserError(f"--expert-parallel: the model in {path} has no experts; leave it out")
    stored = StoredArrays(step)
    skipped = ("loss_scale", "skipped_samples")
    return WrittenRun(
        cfg,
        record["step"],
        _moments(stored, cfg, "mu"),
        _moments(stored, cfg, "nu"),
        _stored_number(stored, ("opt", "count")),
        _stored_number(stored, skipped) if skipped in stored.paths() else 0,
        apart,
    )


def _moments(stored: StoredArrays, cfg: Config, word: str) -> Source:
    def read(path: Leaf, index: Index) -> np.ndarray:
        place = ("opt", word, *path)
        array = stored.open(place)
        with stored.readable(place):
            return array[index].read().result()

    return Source(cfg.model, read, lambda: None, trained_paths(cfg.model))


def _stored_number(stored: StoredArrays, place: Leaf) -> int:
    with stored.readable(place):
        return int(stored.open(place).read().result())


def _styles() -> dict[str, str]:
    return {ours: theirs for theirs, ours in DECAYS.items()}
