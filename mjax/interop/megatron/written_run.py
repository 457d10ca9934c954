"""A run of ours as all that Megatron-LM saves of one beside weights: moments of Adam, groups of
parameters, the scheduler's state, arguments and the position in the data.

Invariant: imported again it has the same state and schedule; a key of the optimizer that Megatron
has no counterpart for is refused by name. Source: megatron/core (optimizer/__init__.py,
optimizer/distrib_optimizer.py, optimizer_param_scheduler.py), megatron/training/checkpointing.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mjax.checkpoint.base.source import Source, flat
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.base.stored import WEIGHTS, StoredArrays, read_record
from mjax.checkpoint.weights import stored_source
from mjax.config.schema.keys import checked, value_of
from mjax.config.schema.run import Config, OptimizerConfig
from mjax.errors import UserError
from mjax.interop.megatron.optimizer_state import trained_paths
from mjax.interop.megatron.run_arguments import DECAYS, FLAGS
from mjax.models import definition_of
from mjax.optim.schedule import consumed_samples, rates_of_step

_AT_DEFAULT = ("name", "weight_decay_roles", "lr_multipliers")
_LEFT_OUT = {"mesh", "data_cache_path", "fp8_recipe", "fp8_amax_history_len"}
_RESHARDABLE = "fully_reshardable"


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
        sharding = {"distrib_optim_sharding_type": _RESHARDABLE, "singleton_local_shards": False}
        return {
            "args": model_args | self._arguments(),
            "iteration": self.step,
            "optimizer": optimizer,
            "opt_param_scheduler": self._scheduler(),
            "content_metadata": sharding | {"chained_optim_avoid_prefix": True},
        }

    @property
    def _samples(self) -> int:
        return consumed_samples(self.cfg.train, self.step)

    def _optimizer(self, experts: bool) -> dict:
        """The state of an optimizer without its tensors, for those that are distributed, those that
        are not, and those of fp32 weights: each reads its own entries."""
        groups = [self._group(decay, experts) for decay in ([1.0] if experts else [1.0, 0.0])]
        own = {"param_groups": groups, "state": {"common_step": self.updates}}
        return own | {"optimizer": own, "param_state_sharding_type": _RESHARDABLE}

    def _group(self, decay: float, experts: bool) -> dict:
        """The settings of parameters; decay: their factor on weight decay."""
        o, s = self.cfg.optimizer, self.cfg.schedule
        rates = rates_of_step(self.cfg, self.step, self.skipped)
        return {
            "lr": rates.learning_rate, "max_lr": s.lr, "min_lr": s.min_lr, "lr_mult": 1.0,
            "weight_decay": decay * rates.weight_decay, "wd_mult": decay,
            "betas": (o.b1, o.b2), "eps": o.eps, "bias_correction": True, "step": self.updates,
            "is_expert_parallel": experts, "is_decoupled_lr": False, "default_config": True,
        }  # fmt: skip

    def _scheduler(self) -> dict:
        """The state of Megatron's scheduler, whose lengths count samples."""
        o, s, size = self.cfg.optimizer, self.cfg.schedule, self.cfg.train.global_batch_size
        end = o.weight_decay if o.weight_decay_end is None else o.weight_decay_end
        steps = self.cfg.train.steps
        return {
            "max_lr": s.lr, "min_lr": s.min_lr, "num_steps": self._samples - self.skipped,
            "lr_decay_style": next(theirs for theirs, ours in DECAYS.items() if ours == s.decay),
            "lr_warmup_steps": s.warmup_steps * size,
            "lr_decay_steps": (s.decay_steps or steps) * size,
            "start_wd": o.weight_decay, "end_wd": end, "wd_incr_steps": steps * size,
            "wd_incr_style": "constant" if end == o.weight_decay else o.weight_decay_style,
        }  # fmt: skip

    def _arguments(self) -> dict:
        """The arguments of the run, as `FLAGS` reads them."""
        cfg, found = self.cfg, {}
        for flag in FLAGS:
            value = value_of(cfg, flag.key)
            if value != "auto" and not {flag.group, flag.name} & _LEFT_OUT:
                found[flag.name] = value
        state, ramp = self._scheduler(), cfg.train.rampup_batch_size
        kind = cfg.precision.compute
        return found | {
            "lr_decay_style": state["lr_decay_style"], "start_weight_decay": state["start_wd"],
            "end_weight_decay": state["end_wd"], "weight_decay_incr_style": state["wd_incr_style"],
            "lr_wsd_decay_iters": cfg.schedule.wsd_decay_steps or None, "optimizer": "adam",
            "bf16": kind == "bfloat16", "fp16": kind == "float16",
            "rampup_batch_size": ramp and [str(number) for number in ramp], "no_save_rng": True,
            "consumed_train_samples": self._samples, "skipped_train_samples": self.skipped,
        }  # fmt: skip


def run_to_write(path: str, apart: bool) -> WrittenRun:
    """The run at `path`, or its step; `UserError` if Megatron-LM cannot go on with it."""
    step = newest_step(Path(path))
    if step is None or (record := read_record(step)).get("contents") == WEIGHTS:
        raise UserError(f"{path} holds no optimizer; give a run, or leave out --with-optimizer")
    wrong = f"{step}: this mjax does not read its config: {{key}}: {{why}}"
    cfg = checked(Config, record["config"], wrong)
    fields = OptimizerConfig.model_fields
    wrong = [key for key in _AT_DEFAULT if value_of(cfg.optimizer, key) != fields[key].default]
    if wrong or cfg.lora.rank:
        key = f"optimizer.{wrong[0]}" if wrong else "lora.rank"
        raise UserError(
            f"{step}: Megatron's Adam has no counterpart of {key}={value_of(cfg, key)!r}; leave "
            "out --with-optimizer"
        )
    if apart and not cfg.model.moe.num_experts:
        raise UserError(f"--expert-parallel: the model in {path} has no experts; leave it out")
    stored, specs = StoredArrays(step), flat(definition_of(cfg.model).specs)
    moments = (stored_source(step, cfg.model, specs, ("opt", word)) for word in ("mu", "nu"))
    mu, nu = (replace(source, has=trained_paths(cfg.model)) for source in moments)
    found = []
    for place in (("opt", "count"), ("loss_scale", "skipped_samples")):
        with stored.readable(place):
            is_there = place in stored.paths()
            found.append(int(stored.open(place).read().result()) if is_there else 0)
    return WrittenRun(cfg, record["step"], mu, nu, *found, apart)
