"""The critic of PPO: a second trainer on the mesh of the policy, which learns the values of tokens.

It starts from the policy's start weights with a head of zeros, or from a reward model. Invariants:
the values of a phase are those before its first update; a step of the policy follows one of the
critic on the same rows, so the checkpoint of a step has both.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mjax.config.schema.run import Config
from mjax.errors import NonFiniteLoss, UserError
from mjax.interop.adapters_of_run import joined_trees, without_adapters
from mjax.interop.sources import source_of
from mjax.objectives.fields import HostBatch
from mjax.post.base.roles import require_no_pipeline, rows_of_process, values_in_order
from mjax.post.policy.values import VALUES
from mjax.train.trainer import Trainer

_OWN_HEAD = "score"  # the parameter of `model.num_labels`


@dataclass(frozen=True)
class Critic:
    """A critic and what a phase of rollouts asks of it."""

    trainer: Trainer

    def values(self, batch: HostBatch) -> np.ndarray:
        """The value at each token of packed rollouts, fp32 [B, S]."""
        trainer = self.trainer
        blank = np.zeros(batch["tokens"].shape, np.float32)
        given = batch | {"values": blank, "returns": blank}
        placed = trainer.place(rows_of_process(trainer, given))
        return values_in_order(placed, trainer.run_placed(VALUES, placed, trainer.weights()))

    def update(self, batch: HostBatch) -> dict[str, float]:
        """One step on rollouts with values and returns; its figures.

        Raises `NonFiniteLoss` where they are no numbers.
        """
        found = jax.device_get(self.trainer.step(rows_of_process(self.trainer, batch)))
        if not found["finite"] and not found.get("skipped", False):
            raise NonFiniteLoss(
                f"step {self.trainer.step_number}: the critic has the loss {found['loss']} and the "
                f"gradient norm {found['grad_norm']}; start again to resume from the last "
                "checkpoint, with a lower reinforce.critic_lr if it recurs"
            )
        names = {name: name for name in found if "/" in name}
        names |= {"value/loss": "loss", "value/grad_norm": "grad_norm"}
        figures = {name: float(found[given]) for name, given in names.items()}
        variance = figures["return/squared"] - figures["return/mean"] ** 2
        bias = figures["return/mean"] - figures["value/mean"]
        if variance > 0:
            left = figures["value/error"] - bias**2
            figures["value/explained_variance"] = 1 - left / variance
        return figures

    def record(self) -> dict:
        """The facts that a checkpoint keeps beside the state, as JSON."""
        return {"base": self.trainer.checkpoints.base}


def critic_of(policy: Trainer, record: dict) -> Critic:
    """The critic of a policy's run, at its start or as the checkpoint of the policy's step has it.

    record: what `Critic.record` gave for that checkpoint.
    """
    require_no_pipeline(policy, "the critic of reinforce.loss_type=ppo")
    trainer = Trainer(critic_run(policy.cfg), policy.mesh)
    checkpoints, step = trainer.checkpoints, policy.step_number
    if step == 0:
        trainer.start(start_params(trainer))
    else:
        state = checkpoints.restore_critic(policy.store, step)
        if trainer.cfg.lora.rank:
            base = without_adapters(start_params(trainer))
            if record["base"] != checkpoints.base:
                raise UserError(
                    "the critic's adapters were trained on other weights than those that it starts "
                    "from now; set reinforce.critic and checkpoint.init_from back"
                )
            state |= {"params": joined_trees(base, state["params"])}
        trainer.go_on_from(state, step)
    policy.checkpoints.critic = trainer.stored_state
    return Critic(trainer)


def critic_run(cfg: Config) -> Config:
    """The config of a critic beside the policy of `cfg`; adapters are its own, drawn anew."""
    schedule, rate = cfg.schedule, cfg.reinforce.critic_lr
    scale = rate / schedule.lr if schedule.lr else 0.0
    rates = {name: scale * getattr(schedule, name) for name in ("min_lr", "warmup_init_lr")}
    changes = {*cfg.checkpoint.init_changes, "heads"}
    lora: dict[str, Any] = {}
    if cfg.lora.rank:
        lora = {"trained": [*cfg.lora.trained, _OWN_HEAD]}
    if cfg.lora.starts_from is not None:
        lora["init"] = "zero"
    return cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update={"num_labels": 1}),
            "train": cfg.train.model_copy(update={"objective": "value"}),
            "schedule": schedule.model_copy(update={"lr": rate, **rates}),
            "checkpoint": cfg.checkpoint.model_copy(update={"init_changes": sorted(changes)}),
            "lora": cfg.lora.model_copy(update=lora),
        }
    )


def start_params(trainer: Trainer) -> dict:
    """Stored parameters of a critic at step 0; its head is 0 unless weights have one."""
    checkpoints, folder = trainer.checkpoints, trainer.cfg.reinforce.critic
    if folder is None:
        sources = list(checkpoints.start_sources().values())
    else:
        sources = [source_of(folder)]
    params = checkpoints.load_weights(*sources)[0] if sources else checkpoints.draw()
    if any(source.cfg.num_labels for source in sources):
        return params
    return params | {_OWN_HEAD: jax.tree.map(lambda array: array * 0, params[_OWN_HEAD])}
