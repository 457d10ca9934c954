"""`TrainingClient`: the programs of mjax for training loops of one's own, by the verbs of Tinker.

Its gradients, engine and checkpoints are those of `mjax train` and `mjax reinforce`. Invariant: the
`forward_backward` calls before an `optim_step` are one batch. The sum of a loss over all of them is
divided by its count over all of them.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mjax.config.schema.run import Config
from mjax.errors import UserError
from mjax.infer.requests import SamplingParams
from mjax.kernels.loss.token_functions import TokenFunction
from mjax.objectives.fields import LAYER_FIELDS, HostBatch
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import NEXT_TOKEN, Objective, objective_of
from mjax.objectives.token_loss import TokenLoss
from mjax.post.base.role_programs import kind_of_tokens, placed_log_probs
from mjax.post.base.roles import rows_of_process, values_in_order
from mjax.post.policy.policy_losses import ADVANTAGES, OLD, SAMPLER, importance_sampling
from mjax.post.policy.policy_objective import PolicyObjective
from mjax.post.reinforce_batches import RolloutSetup
from mjax.post.rollouts.collector import seed_of
from mjax.post.rollouts.packing import PackedTranscripts, packed_transcripts
from mjax.post.rollouts.transcript import OpenRollout, Transcript
from mjax.run.faults.replicas import ReplicaCheck
from mjax.run.resume import begin, restored_record
from mjax.train.step import GRADIENTS, MeanGradient, joint_mean
from mjax.train.trainer import Trainer

LOSSES_BY_NAME = "cross_entropy", "importance_sampling", "policy"


class TrainingClient:
    """A model, its optimizer and an engine with the same weights, on `mesh`.

    It starts as a run of `cfg` does at step 0; `load` goes on from a checkpoint in run.dir. Losses
    of policies have the settings of cfg.reinforce. Texts are transcripts of token ids, or rows that
    are packed already, with the fields of the loss.
    """

    def __init__(self, cfg: Config, mesh: Mesh | None = None):
        self.trainer = Trainer(cfg, mesh)
        self.trainer.require_plain_update("TrainingClient")
        begin(self.trainer)
        if self.trainer.state is None:
            self.trainer.init()
        self.sampled = 0  # prompts so far, which the noise of answers depends on
        self.trainer.checkpoints.batches_at = lambda step: {"client": {"sampled": self.sampled}}
        self._learners: dict[Hashable, Trainer] = {}
        self._means: dict[Hashable, MeanGradient] = {}
        self._losses: list[dict[str, jax.Array]] = []  # of the gradients so far
        interval, store = self.trainer.cfg.train.check_replicas_interval, self.trainer.store
        self._replicas = ReplicaCheck(self.trainer, interval, lambda: str(store.newest() or "none"))

    @property
    def step_number(self) -> int:
        """The updates so far."""
        return self.trainer.step_number

    # ---- training --------------------------------------------------------------------------------

    def forward_backward(
        self,
        data: Sequence[Transcript] | HostBatch,
        loss: str | TokenFunction = "cross_entropy",
        **values: Sequence,
    ) -> dict[str, jax.Array]:
        """Add the gradient of a loss of `data`; returns its figures, scalars on the device.

        loss: one of `LOSSES_BY_NAME`, or a token function (`kernels/loss/token_functions.py`).
            policy is that of reinforce.loss_type.
        values: fields of the loss, such as advantages: for each transcript a number, or an array
            with one for each of its tokens. "sampler_log_probs" are those of the transcripts.
        """
        if isinstance(data, Mapping):
            batch = {**data, **{name: np.asarray(field) for name, field in values.items()}}
        else:
            pack = self._packed(data)
            batch = pack.batch(**{n: _of_tokens(n, given, data) for n, given in values.items()})
        key, learner = self._learner(loss, batch)
        for name in learner.objective.fields.keys() - batch.keys():
            raise UserError(
                f"loss={loss!r} reads {name}; give it, such as {OLD}=client.log_probs(transcripts) "
                "from before the first update on them"
            )
        placed = learner.place(rows_of_process(learner, batch))
        found: Any = learner.run_placed(GRADIENTS, placed, self.trainer.weights())
        own = MeanGradient(found.gradients, found.tokens)
        before = self._means.get(key)
        self._means[key] = own if before is None else joint_mean(before, own)
        self._losses.append(found.losses)
        return found.losses | {"grad_norm": found.norm, "tokens": found.tokens}

    def optim_step(
        self, lr: float | None = None, weight_decay: float | None = None
    ) -> dict[str, float]:
        """Update the weights by the gradients so far; several losses are added.

        The default rates are those of the config's schedule. Raises `NonFiniteLoss` for losses or
        gradients that are no numbers; the weights then stay, and the gradients are dropped. Raises
        `ReplicasDiffer` at steps of train.check_replicas_interval.
        """
        if not self._means:
            raise UserError("optim_step: there is no gradient; call forward_backward before it")
        means = [mean.gradients for mean in self._means.values()]
        gradients = jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *means)
        worst = np.sum(jax.tree.leaves(jax.device_get(self._losses)))
        count = sum(float(mean.count) for mean in self._means.values())
        self._forget()
        self.trainer.require_finite("loss", worst)
        if not count:
            raise UserError("optim_step: no token has a loss; leave such transcripts out")
        figures = self.trainer.apply_gradients(gradients, lr, weight_decay)
        self._replicas.ask_if_due(self.step_number)
        self._replicas.read(self.step_number)
        return figures

    def _forget(self) -> None:
        """Drop the gradients so far."""
        self._means.clear()
        self._losses.clear()

    def _learner(self, loss: Any, batch: HostBatch) -> tuple[Hashable, Trainer]:
        """(key of a loss, a trainer that has its programs and no state)."""
        function, names = loss, ()  # names: of the fields that a token function reads
        if loss == "importance_sampling":
            function, names = importance_sampling, (ADVANTAGES, SAMPLER)
        elif not isinstance(loss, str):
            names = tuple(sorted(batch.keys() - NextToken.fields.keys() - LAYER_FIELDS.keys()))
        elif loss not in LOSSES_BY_NAME:
            known = ", ".join(LOSSES_BY_NAME)
            raise UserError(f"loss={loss!r}: give one of {known}, or a function of tokens")
        key = loss, names
        if key not in self._learners:
            objective, own = self._objective(function, names), self.trainer
            self._learners[key] = Trainer(own.cfg, own.mesh, objective=objective)
        return key, self._learners[key]

    def _objective(self, loss: Any, names: tuple[str, ...]) -> Objective:
        """The objective of a named loss, or of a token function of fields of these names."""
        cfg = self.trainer.cfg
        if loss == "policy":
            return PolicyObjective.of(cfg)
        if loss == "cross_entropy":
            plain = cfg.train.model_copy(update={"objective": NEXT_TOKEN})
            return objective_of(cfg.model_copy(update={"train": plain}))
        return TokenLoss(loss, names, cfg.reinforce.temperature)

    def _packed(self, transcripts: Sequence[Transcript]) -> PackedTranscripts:
        cfg = self.trainer.cfg
        longest = max((len(t.ids) for t in transcripts), default=0)
        if longest < 2 or longest > cfg.data.seq_length + 1:
            raise UserError(
                f"the longest of {len(transcripts)} transcripts has {longest} tokens; give some, "
                f"of 2 to data.seq_length + 1 = {cfg.data.seq_length + 1}"
            )
        return packed_transcripts(transcripts, cfg.train.global_batch_size, cfg.data.seq_length)

    # ---- sampling --------------------------------------------------------------------------------

    @functools.cached_property
    def _rollout_setup(self) -> RolloutSetup:
        if self.trainer.cfg.data.tokenizer is None:
            raise UserError("data.tokenizer: the engine needs one; name a file or byte")
        return RolloutSetup(self.trainer)

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, n: int = 1
    ) -> list[list[Transcript]]:
        """`n` answers to each prompt of token ids by the weights as they are; rewards are NaN.

        The default params are reinforce.sampling and max_new_tokens. The noise of an answer is a
        function of run.seed, the number of its prompt since step 0, and its own number.
        """
        settings, policy = self.trainer.cfg.reinforce, self._rollout_setup.policy
        if params is None:
            most = {"max_tokens": settings.max_new_tokens}
            params = self._rollout_setup.params.model_copy(update=most)
        engine, rollouts = policy.take_weights(), []
        try:
            for group, ids in enumerate(prompts, start=self.sampled):
                for number in range(n):
                    own = {"seed": seed_of(self.trainer.cfg.run.seed, group, number), "n": 1}
                    request = engine.add(ids, params.model_copy(update=own))
                    rollout = OpenRollout(group, number, None, reward=float("nan"))
                    rollout.add_given(ids)
                    rollouts.append((rollout, request))
            while engine.has_work:
                engine.step()
        except BaseException:
            for _, request in rollouts:
                engine.abort(request.output.request_id)
            raise
        self.sampled += len(prompts)
        policy.rest()
        for rollout, request in rollouts:
            drawn = request.output.outputs[0]
            versions = list(map(policy.step_of, drawn.weight_versions))
            rollout.add_drawn(drawn.token_ids, drawn.processed_logprobs, versions)
            rollout.reason = drawn.finish_reason or ""
        found = [rollout.transcript() for rollout, _ in rollouts]
        return [found[first : first + n] for first in range(0, len(found), n)]

    def log_probs(self, transcripts: Sequence[Transcript]) -> list[np.ndarray]:
        """The log-probability of each token after those before it, fp32 [n] each; 0 of the first.

        They are the trainer's, at the temperature of reinforce.sampling.
        """
        pack = self._packed(transcripts)
        _, learner = self._learner("cross_entropy", {})
        temperature = self.trainer.cfg.reinforce.temperature
        kind = kind_of_tokens(placed_log_probs, temperature=temperature)
        placed = learner.place(rows_of_process(learner, pack.batch()))
        found = learner.run_placed(kind, placed, self.trainer.weights())
        return pack.taken(values_in_order(placed, found))

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of this step, which mjax train can go on from; returns its folder."""
        if self._means:
            raise UserError("save: gradients that no optim_step has used are not saved; call it")
        self._replicas.require_equal(self.step_number)
        self.trainer.save()
        self.trainer.store.wait()
        return self.trainer.store.directory / str(self.trainer.step_number)

    def load(self, step: int | None = None) -> int:
        """Go on from checkpoint `step` in run.dir (None: the newest); returns its step."""
        self.trainer.store.forget_steps()  # others may have written since
        self.trainer.restore(step)
        self._forget()
        record = restored_record(self.trainer).get("batches", {})
        self.sampled = record.get("client", {}).get("sampled", 0)
        if "_rollout_setup" in self.__dict__:
            self._rollout_setup.policy.expire()
        return self.trainer.step_number


def _of_tokens(name: str, values: Sequence, transcripts: Sequence[Transcript]) -> list[np.ndarray]:
    """Values of each token from those of transcripts, 0 where a token is not trained."""
    arrays = [np.asarray(value, np.float32) for value in values]
    pairs = list(zip(arrays, transcripts, strict=False))
    if len(arrays) != len(transcripts) or any(a.shape not in ((), t.ids.shape) for a, t in pairs):
        raise UserError(
            f"{name}: {len(arrays)} values for {len(transcripts)} transcripts; give each a number, "
            "or an array with one for each of its tokens"
        )
    return [np.where(transcript.is_sampled, array, 0) for array, transcript in pairs]
