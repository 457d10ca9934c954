"""The batches of `mjax reinforce`: rollouts of the policy, and the roles that rate their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from mjax.config.schema.reinforce import ReinforceConfig
from mjax.config.schema.run import Config
from mjax.data.base.chat_ids import answer_ends
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer, require_vocabulary
from mjax.infer.requests import SamplingParams
from mjax.objectives.fields import HostBatch
from mjax.post.base.role_programs import kind_of_tokens, placed_log_probs
from mjax.post.base.roles import Role, reference_of, rows_of_process, values_in_order
from mjax.post.environments.chat_tokens import template_beside
from mjax.post.environments.workers import EnvironmentWorkers
from mjax.post.policy.critic import Critic, critic_of
from mjax.post.rollouts.batches import RolloutStream, Scorer
from mjax.post.rollouts.collector import Collector, DrawingPlan
from mjax.post.rollouts.figures import environment_figures
from mjax.post.rollouts.policy_engine import PolicyEngine
from mjax.run.batches import RunBatches
from mjax.run.monitor.metrics import Record
from mjax.train.trainer import Trainer


def reinforce_batches(trainer: Trainer, record: dict) -> RunBatches:
    """The batches of a run on rollouts, which goes on from the record of a checkpoint."""
    setup, saved = RolloutSetup(trainer), record.get("batches", {})
    is_ppo = trainer.cfg.reinforce.loss_type == "ppo"
    critic = critic_of(trainer, saved.get("critic", {})) if is_ppo else None
    stream = RolloutStream(
        trainer=trainer,
        collector=setup.collector(),
        tokenizer=setup.tokenizer,
        score=setup.scorer(critic),
        critic=critic,
    )
    stream.go_on(saved)
    return RunBatches(
        stream,
        record_at=stream.record_at,
        is_live=True,
        figures_at=stream.figures_at,
        line_at=stream.line_at,
        measure=setup.held_out_reward if trainer.cfg.train.eval_interval else None,
    )


@dataclass(frozen=True)
class RolloutSetup:
    """The parts that rollouts of a run are drawn with, from its config.

    They are tokenizer, sampling settings, engine, environments, and roles that score tokens.
    """

    trainer: Trainer

    def __post_init__(self) -> None:
        require_vocabulary(self.tokenizer.vocab_size, self.trainer.cfg.model)
        _ = self.params  # checks its fields

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.trainer.cfg.data.tokenizer)

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        template = template_beside(self.trainer.cfg.data.tokenizer)
        return answer_ends(self.tokenizer, template)

    @cached_property
    def params(self) -> SamplingParams:
        """How answers are drawn, but for seeds and lengths."""
        given: dict[str, Any] = dict(self.trainer.cfg.reinforce.sampling)
        if "top_k" in given:
            given["top_k"] = int(given["top_k"])
        return SamplingParams(**{"temperature": 1.0, **given}, detokenize=False)

    @cached_property
    def max_length(self) -> int:
        """The tokens of a transcript at most."""
        return _max_length(self.trainer.cfg)

    @cached_property
    def policy(self) -> PolicyEngine:
        """The engine, without weights until `take_weights`."""
        rows = answers_at_once(self.trainer.cfg.reinforce)
        return PolicyEngine(self.trainer, self.tokenizer, self.ends, self.max_length, rows)

    # ---- environments ----------------------------------------------------------------------------

    def workers(self, args: dict[str, Any]) -> EnvironmentWorkers:
        """The environment of the run with these arguments, in processes."""
        cfg = self.trainer.cfg
        settings = cfg.reinforce
        return EnvironmentWorkers(
            settings.environment,
            cfg.data.tokenizer,
            self.ends,
            args,
            count=settings.workers,
            timeout_s=settings.reward_timeout,
        )

    def collector(self) -> Collector:
        """Collects the rollouts that are trained on."""
        cfg = self.trainer.cfg
        plan = DrawingPlan(
            seed=cfg.run.seed,
            group_size=cfg.reinforce.group_size,
            params=self.params,
            max_new_tokens=cfg.reinforce.max_new_tokens,
            max_length=self.max_length,
        )
        open_environments = partial(self.workers, cfg.reinforce.environment_args)
        return Collector(self.policy, open_environments, plan)

    def held_out_reward(self, beat: Callable[[], None]) -> Record:
        """The mean reward of the likeliest answers to held-out prompts; "loss" is its negative."""
        cfg, settings = self.trainer.cfg, self.trainer.cfg.reinforce
        args, seed = settings.eval_environment_args, cfg.run.seed
        if args is None:  # those of training, whose stream with another seed has other prompts
            args, seed = settings.environment_args, seed + 1
        params = self.params.model_copy(update={"temperature": 0.0})
        plan = DrawingPlan(seed, 1, params, settings.max_new_tokens, self.max_length, "held-out ")
        self.policy.take_weights()
        with Collector(self.policy, partial(self.workers, args), plan, beat=beat) as collector:
            groups = collector.collect(0, cfg.train.eval_steps * settings.prompts_per_step)
        self.policy.rest()
        transcripts = [t for group in groups for t in group]
        reward = float(np.mean([t.reward for t in transcripts]))
        tokens = sum(t.length for t in transcripts)
        return {
            "loss": -reward,
            "tokens": tokens,
            "reward": reward,
            **environment_figures(transcripts),
        }

    # ---- roles -----------------------------------------------------------------------------------

    def scorer(self, critic: Critic | None = None) -> Scorer:
        """Computes those of these fields of a batch that the loss reads, fp32 [B, S] each.

        "old_log_probs" and "ref_log_probs": of labels under the policy and the reference.
        "values": the critic's.
        """
        trainer, settings, roles = self.trainer, self.trainer.cfg.reinforce, {}
        log_probs = partial(kind_of_tokens, placed_log_probs, temperature=self.params.temperature)
        in_reward = settings.kl_coef > 0 and settings.kl_in_reward
        if settings.updates_per_rollout > 1 or settings.correction != "none" or in_reward:
            roles["old_log_probs"] = Role("policy", trainer, frozen=False), log_probs()
        if settings.kl_coef > 0:
            reference = reference_of(trainer, settings.reference)
            roles["ref_log_probs"] = reference, log_probs(with_adapters=reference.held is not None)

        def score(batch: HostBatch) -> dict[str, np.ndarray]:
            found = {} if critic is None else {"values": critic.values(batch)}
            if not roles:
                return found
            blank = dict.fromkeys(roles, np.zeros(batch["tokens"].shape, np.float32))
            placed = trainer.place(rows_of_process(trainer, batch | blank))
            for name, (role, kind) in roles.items():
                found[name] = values_in_order(placed, role.compute(kind, placed))
            return found

        return score


def _max_length(cfg: Config) -> int:
    """The tokens of a transcript at most: one more than the places of a row, as labels need, and no
    more than positions of the model."""
    model, longest = cfg.model, cfg.data.seq_length + 1
    if model.position_embedding == "relative":
        return longest
    return min(longest, model.max_position_embeddings)


def engine_line(trainer: Trainer) -> str:
    """A line of a plan on the engine's memory; it raises `UserError` for what does not fit."""
    settings = trainer.cfg.reinforce
    engine = PolicyEngine(trainer, None, (), _max_length(trainer.cfg), answers_at_once(settings))
    weights, caches = (size / 1e9 for size in engine.bytes_per_device())
    count, where = engine.place.mesh.size, "which the trainer has too"
    if engine.place.is_apart:
        where = "its own"
    return (
        f"engine      weights {weights:.3f}, caches {caches:.3f} GB on each of {count} devices, "
        f"{where}; what its programs need beside them is not counted"
    )


def answers_at_once(settings: ReinforceConfig) -> int:
    """The rows of the engine at most: the answers of a phase. With `engine.rows` they may be as
    many as the answers that can be open, so that old ones do not wait for a row but for their use.
    """
    depth = settings.max_staleness // settings.updates_per_rollout
    ahead = depth if "rows" in settings.engine else 0
    return settings.prompts_per_step * settings.group_size * (1 + ahead)
