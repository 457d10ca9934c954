"""Oracle: losses of policies are TRL's, with every gradient, from rewards and answers on.

TRL's own code scores the answers (advantages, weights of the correction) and computes the loss. Its
log-probabilities are given, so a gradient is that of each token; or they are a tiny model's. Some
answers are truncated, and some have tokens of a tool in them. Here answers are packed.
"""

from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mjax.config import load
from mjax.config.schema.reinforce import ReinforceConfig
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.kernels.loss.token_functions import TokenScores
from mjax.models.base.context import Context
from mjax.objectives.objective import Denominators
from mjax.post.policy.advantages import advantages_of, divergence_costs
from mjax.post.policy.policy_objective import PolicyObjective
from mjax.sharding.collectives import LOCAL
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from mjax.train.step import GRADIENTS
from tests.marks import exhaustive
from tests.oracle.families import assert_gradients_near, make, save_gradients

pytest.importorskip("trl")
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

EOS, PAD, WIDTH, MOST = 2, 0, 64, 9
GROUPS, SIZE = 3, 4
PROMPTS = [5, 2, 7]  # tokens of a group's prompt
LENGTHS = np.array([3, 9, 1, 6, 5, 9, 2, 8, 4, 9, 9, 7])
REWARDS = np.array(
    [1.0, 0, 0.5, 1, 0, 0, 0, 0, 2.5, -1, 0.3, 0.3]
)  # the second group has equal ones
TOOL = [(1, slice(3, 5)), (9, slice(0, 2)), (11, slice(5, 7))]  # tokens that were not drawn


def answers() -> tuple[list, list, np.ndarray]:
    """(ids of prompts, ids of answers, the tokens that were drawn, [12, MOST])."""
    rng = np.random.default_rng(1)
    of_groups = [rng.integers(3, 251, n).tolist() for n in PROMPTS]
    prompts = [of_groups[n // SIZE] for n in range(len(LENGTHS))]
    texts, drawn = [], np.arange(MOST) < LENGTHS[:, None]
    for length in LENGTHS:
        ids = rng.integers(3, 251, length)
        if length < MOST:  # one of MOST tokens was truncated
            ids[-1] = EOS
        texts.append(ids.tolist())
    for n, at in TOOL:
        drawn[n, at] = False
    return prompts, texts, drawn


def log_probs_of(seed: int, spread: float) -> np.ndarray:
    """Log-probabilities of answers' tokens [12, MOST], near the same ones for every seed."""
    shape = len(LENGTHS), MOST
    near = np.random.default_rng(5).normal(-2, 0.7, shape)
    return np.float32(near + spread * np.random.default_rng(seed).normal(size=shape))


GIVEN = {"policy": (11, 0.25), "old": (12, 0.25), "sampler": (13, 0.1), "ref": (14, 0.3)}
GIVEN = {name: log_probs_of(*how) for name, how in GIVEN.items()}
GIVEN["sampler"] += GIVEN["old"] - log_probs_of(0, 0)  # near the old ones
ENTROPIES = np.abs(log_probs_of(15, 0.5))


def packed(values: np.ndarray) -> np.ndarray:
    """Values [12, MOST] of answers' tokens at the labels of a packed batch [3, WIDTH]."""
    found = np.zeros((GROUPS, WIDTH), values.dtype)
    for n, (row, at) in enumerate(places()):
        found[row, at] = values[n, : LENGTHS[n]]
    return found


def places() -> list[tuple[int, slice]]:
    """(row, places of the labels) of each answer."""
    found = []
    for row in range(GROUPS):
        begin = 0
        for n in range(row * SIZE, row * SIZE + SIZE):
            first = begin + PROMPTS[row] - 1
            found.append((row, slice(first, first + LENGTHS[n])))
            begin = first + LENGTHS[n]
    return found


def batch_of(
    settings: ReinforceConfig, rewards: np.ndarray, drawn: np.ndarray, given: dict = GIVEN
) -> dict:
    """The packed batch, a row for each group."""
    prompts, texts, _ = answers()
    names = "tokens", "labels", "segment_ids", "positions"
    batch = {name: np.zeros((GROUPS, WIDTH), np.int32) for name in names}
    for n, (row, at) in enumerate(places()):
        ids = np.array(prompts[n] + texts[n], np.int32)
        document = slice(at.stop - len(ids) + 1, at.stop)
        batch["tokens"][row, document], batch["labels"][row, document] = ids[:-1], ids[1:]
        batch["segment_ids"][row, document] = n % SIZE + 1
        batch["positions"][row, document] = np.arange(len(ids) - 1)
    groups = np.arange(len(LENGTHS)) // SIZE
    advantages = advantages_of(settings, rewards, groups, drawn.sum(1))
    fields = {"loss_mask": drawn, "advantages": advantages[:, None] * drawn}
    fields |= {f"{name}_log_probs": given[name] * drawn for name in ("old", "sampler", "ref")}
    batch |= {name: packed(np.float32(field)) for name, field in fields.items()}
    if not settings.reads_old:
        del batch["old_log_probs"]
    if not settings.kl_coef:
        del batch["ref_log_probs"]
    return batch


def ours(settings: ReinforceConfig, batch: dict) -> tuple[float, np.ndarray, np.ndarray, dict]:
    """(the total, its gradients by log-probabilities and entropies, losses and figures)."""
    objective = PolicyObjective(settings)
    batch = {name: jnp.asarray(field) for name, field in batch.items()}
    batch |= objective.derive_fields(batch, LOCAL)

    def total(log_p: jax.Array, entropy: jax.Array) -> tuple[jax.Array, dict]:
        scores = TokenScores(log_p, entropy)

        def head_sums(x, labels, mask, ctx, function, fields):
            loss, figures = function(scores, fields)
            terms = {"loss": loss} | jax.lax.stop_gradient(figures)
            return {name: jnp.sum(jnp.where(mask == 0, 0, term)) for name, term in terms.items()}

        edges = SimpleNamespace(token_scores=lambda *_, **__: scores, head_sums=head_sums)
        losses = objective.losses(edges, log_p, batch, None, Context())
        shares = Denominators(objective.counts(batch), {}, 1).shares(losses, {})
        return sum(shares.values()), shares  # figures have no gradient

    given = jnp.asarray(packed(GIVEN["policy"])), jnp.asarray(packed(ENTROPIES))
    (by_log_p, by_entropy), shares = jax.grad(total, (0, 1), has_aux=True)(*given)
    loss = shares["loss"] - settings.entropy_coef * shares["entropy"]
    return float(loss), np.asarray(by_log_p), np.asarray(by_entropy), shares


class Accelerator:
    """The calls of accelerate's of one process."""

    device, num_processes, process_index = "cpu", 1, 0
    sync_gradients = is_main_process = True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        return x

    def autocast(self):
        return nullcontext()


def theirs(kind: type, rewards: np.ndarray, drawn: np.ndarray, given: dict = GIVEN, **more):
    """TRL's trainer, without a model or data of its own."""
    trainer = object.__new__(kind)
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"gradient_checkpointing_kwargs": None, "per_device_train_batch_size": len(LENGTHS)}
    args |= {"gradient_accumulation_steps": 1, "report_to": []}

    facts = {
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
    }
    facts |= {"ref_model": "ref", "args": SimpleNamespace(**args), "beta": 0.0, "tools": None}
    facts |= {"environment_factories": None, "environments": None, "_multi_environment": False}
    facts |= {"_tokenizer": SimpleNamespace(pad_token_id=PAD), "eos_token_ids": [EOS]}
    facts |= {"pad_to_multiple_of": None, "mask_truncated_completions": False}
    facts |= {"num_generations": SIZE, "reward_weights": torch.ones(1), "scale_rewards": "group"}
    facts |= {"multi_objective_aggregation": "sum_then_normalize", "reward_func_names": ["r"]}
    facts |= {"_metrics": defaultdict(lambda: defaultdict(list)), "_pending_extra_logs": {}}
    facts |= {"_pending_metrics": {}, "_logs": defaultdict(lambda: defaultdict(deque))}
    facts |= {"loss_type": "grpo", "importance_sampling_level": "token", "num_iterations": 1}
    facts |= {"epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0}
    facts |= {"off_policy_mask_threshold": None, "max_completion_length": MOST}
    facts |= {"use_vllm": False, "vllm_importance_sampling_correction": False}
    facts |= {"vllm_importance_sampling_mode": "token_truncate", "entropy_coef": 0.0}
    facts |= {"vllm_importance_sampling_clip_min": None, "use_adaptive_entropy": False}
    facts |= {"vllm_importance_sampling_clip_max": 2.0, "current_gradient_accumulation_steps": 1}
    facts |= {"aux_loss_enabled": False, "log_multimodal": False, "is_fsdp_enabled": False}
    facts |= {"normalize_advantages": False, "reward_clip_range": None, **more}
    facts["_entropy_bonus_enabled"] = facts["entropy_coef"] != 0
    for name, fact in facts.items():
        setattr(trainer, name, fact)
    trainer._logs |= {"prompt": [], "completion": [], "advantages": []}
    prompts, texts, _ = answers()
    tool = [np.int64(drawn[n, :length]).tolist() for n, length in enumerate(LENGTHS)]
    sampled = [given["sampler"][n, :length].tolist() for n, length in enumerate(LENGTHS)]
    generated = prompts, texts, tool, [""] * len(texts), sampled, {}, None, None
    if kind is RLOOTrainer:
        generated = prompts, texts, [""] * len(texts)
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *_: torch.tensor(rewards)[:, None]
    return trainer


def score_and_compute(trainer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """(loss, leaves: log-probabilities and entropies, what TRL scored) with given ones."""
    old, ref = torch.tensor(GIVEN["old"]), torch.tensor(GIVEN["ref"])
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        ref if model == "ref" else old,
        None,
        None,
    )
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    leaves = [torch.tensor(values, requires_grad=True) for values in (GIVEN["policy"], ENTROPIES)]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (*leaves, None)
    return trainer._compute_loss(trainer.model, inputs), *leaves, inputs


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
TWICE = {"num_iterations": 2}
CASES = {
    "grpo at ratio 1": ({"loss_type": "grpo"}, {}),
    "grpo": (
        {"loss_type": "grpo", "updates_per_rollout": 2, "kl_coef": 0.3},
        {**TWICE, "beta": 0.3},
    ),
    "grpo, batch": (
        {"loss_type": "grpo", "updates_per_rollout": 2, "advantage_scale": "batch"},
        {**TWICE, "scale_rewards": "batch"},
    ),
    "grpo, entropy": (
        {"loss_type": "grpo", "updates_per_rollout": 2, "entropy_coef": 0.1},
        {**TWICE, "entropy_coef": 0.1},
    ),
    "bnpo": (
        {"loss_type": "grpo", "updates_per_rollout": 2, "loss_divisor": "tokens"},
        {**TWICE, "loss_type": "bnpo"},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "updates_per_rollout": 2, "clip_low": 0.1, "kl_coef": 0.1},
        {**TWICE, "loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_low": 0.1, "beta": 0.1},
    ),
    "dapo": (
        {"loss_type": "dapo", "updates_per_rollout": 2},
        {**TWICE, "loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "cispo": (
        {"loss_type": "cispo", "updates_per_rollout": 2, "clip_high": 0.1, "entropy_coef": -0.2},
        {**TWICE, "loss_type": "cispo", "epsilon_high": 1.1, "entropy_coef": -0.2},
    ),
    "sapo": ({"loss_type": "sapo", "updates_per_rollout": 2}, {**TWICE, "loss_type": "sapo"}),
    "gspo": (
        {"loss_type": "gspo", "updates_per_rollout": 2, "clip_low": 0.05, "kl_coef": 0.2},
        {
            **TWICE,
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 4e-4,
            "beta": 0.2,
        },
    ),
}
for _name, _mode in {
    "truncate": "token_truncate",
    "mask": "token_mask",
    "sequence_truncate": "sequence_truncate",
    "sequence_mask": "sequence_mask",
}.items():
    for _loss in ("grpo", "gspo", "cispo"):
        _level = "sequence" if _loss == "gspo" else "token"
        _high = {"grpo": 1.2, "gspo": 1 + 4e-4, "cispo": 5.0}[_loss]
        _low = 3e-4 if _loss == "gspo" else 0.2
        _bound = {"vllm_importance_sampling_clip_max": 1.1}
        if "mask" in _name:
            _bound["vllm_importance_sampling_clip_min"] = 0.9
        CASES[f"{_loss}, {_name}"] = (
            {
                "loss_type": _loss,
                "correction": _name,
                "correction_high": 1.1,
                **({"correction_low": 0.9} if "mask" in _name else {}),
            },
            {
                **VLLM,
                **_bound,
                "vllm_importance_sampling_mode": _mode,
                "loss_type": "grpo" if _loss == "gspo" else _loss,
                "importance_sampling_level": _level,
                "epsilon_high": _high if _loss == "cispo" else _high - 1,
                "epsilon_low": _low,
            },
        )


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_figures_are_those_of_trl(name):
    keys, more = CASES[name]
    settings = ReinforceConfig(**keys, group_size=SIZE, max_new_tokens=MOST)
    _, _, drawn = answers()
    batch = batch_of(settings, REWARDS, drawn)
    loss, by_log_p, by_entropy, shares = ours(settings, batch)

    trainer = theirs(GRPOTrainer, REWARDS, drawn, **more)
    wanted, log_p, entropy, inputs = score_and_compute(trainer)
    wanted.backward()
    advantages = advantages_of(settings, REWARDS, np.arange(12) // SIZE, drawn.sum(1))
    np.testing.assert_allclose(advantages, inputs["advantages"], rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    largest = log_p.grad.abs().max().item()
    found = packed(log_p.grad.numpy())
    np.testing.assert_allclose(by_log_p, found, rtol=1e-5, atol=1e-5 * largest)
    if entropy.grad is None:
        assert not by_entropy.any()
    else:
        found = packed(entropy.grad.numpy() * drawn)
        np.testing.assert_allclose(by_entropy, found, rtol=1e-5, atol=1e-7)
    figures = trainer._metrics["train"]
    compared = [name for name in shares if name in figures]
    assert len(compared) >= len(shares) - 4 and {"entropy"} <= set(compared)
    for figure in compared:
        (value,) = figures[figure]
        assert float(shares[figure]) == pytest.approx(value, rel=1e-5, abs=1e-6), figure


def test_luspo_is_gspo_over_a_constant():
    settings = ReinforceConfig(
        loss_type="gspo", updates_per_rollout=2, loss_divisor="constant", max_new_tokens=MOST
    )
    _, _, drawn = answers()
    loss, by_log_p, *_ = ours(settings, batch_of(settings, REWARDS, drawn))
    more = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
    trainer = theirs(
        GRPOTrainer, REWARDS, drawn, **TWICE, **more, epsilon_low=3e-4, epsilon_high=4e-4
    )
    wanted, log_p, *_ = score_and_compute(trainer)
    # TRL's luspo multiplies an answer's loss by its tokens through the mask.
    wanted.backward()
    assert MOST * loss == pytest.approx(wanted.item(), rel=1e-5)
    np.testing.assert_allclose(MOST * by_log_p, packed(log_p.grad.numpy()), rtol=1e-5, atol=1e-7)


def test_answers_of_which_nothing_counts_are_no_answers():
    """TRL counts truncated answers that it masks; here the divisor leaves them out."""
    _, _, drawn = answers()
    kept = drawn & (LENGTHS < MOST)[:, None]
    settings = ReinforceConfig(loss_type="grpo", updates_per_rollout=2)
    loss, by_log_p, *_ = ours(settings, batch_of(settings, REWARDS, kept))
    trainer = theirs(GRPOTrainer, REWARDS, drawn, **TWICE, mask_truncated_completions=True)
    wanted, log_p, *_ = score_and_compute(trainer)
    wanted.backward()
    factor = len(LENGTHS) / (LENGTHS < MOST).sum()
    assert loss == pytest.approx(factor * wanted.item(), rel=1e-5)
    np.testing.assert_allclose(by_log_p, factor * packed(log_p.grad.numpy()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_rloo_with_the_divergence_in_the_reward(scale):
    keys = {"kl_coef": 0.05, "kl_in_reward": True, "kl_estimator": "k1", "advantage_scale": scale}
    settings = ReinforceConfig(loss_type="rloo", updates_per_rollout=2, **keys)
    drawn = np.arange(MOST) < LENGTHS[:, None]
    costs = divergence_costs(settings, GIVEN["old"], GIVEN["ref"])
    rewards = REWARDS - (costs * drawn).sum(1)
    loss, by_log_p, _, shares = ours(settings, batch_of(settings, rewards, drawn))
    trainer = theirs(
        RLOOTrainer, REWARDS, drawn, beta=0.05, normalize_advantages=scale == "batch", **TWICE
    )
    wanted, log_p, *_ = score_and_compute(trainer)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(by_log_p, packed(log_p.grad.numpy()), rtol=1e-5, atol=1e-6)
    for name in ("low_mean", "high_mean", "region_mean"):
        (value,) = trainer._metrics["train"][f"clip_ratio/{name}"]
        assert float(shares[f"clip_ratio/{name}"]) == pytest.approx(value, abs=1e-6)


MODELS = {
    "grpo, everything": (
        "grpo",
        ["kl_coef=0.2", "entropy_coef=0.05", "correction=truncate", "correction_high=1.02"],
        {
            **VLLM,
            "vllm_importance_sampling_clip_max": 1.02,
            "beta": 0.2,
            "entropy_coef": 0.05,
        },
    ),
    "dapo": (
        "dapo",
        ["updates_per_rollout=2"],
        {**TWICE, "loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "gspo": (
        "gspo",
        ["updates_per_rollout=2", "kl_coef=0.1", "clip_low=0.01"],
        {
            **TWICE,
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 4e-4,
            "beta": 0.1,
        },
    ),
}
HEAT = 0.8  # of the sampler


def models(folder) -> dict[str, torch.nn.Module]:
    """A policy, the one before an update and a reference, saved, with TRL's head."""
    found = {}
    for seed, name in enumerate(("policy", "old", "ref")):
        model = found[name] = make("llama2")
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        add_fused_lm_head(model, temperature=HEAT, outputs=("log_probs", "entropy"))
        model.train()
    return found


FIRST, *OTHERS = MODELS


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(n, marks=exhaustive) for n in OTHERS)])
def test_gradients_of_a_whole_model(name, tmp_path):
    loss, keys, more = MODELS[name]
    _, _, drawn = answers()
    all_models = models(tmp_path)
    near = np.zeros((len(LENGTHS), MOST), np.float32)
    trainer = theirs(GRPOTrainer, REWARDS, drawn, {"sampler": near}, **more)
    trainer.model, trainer.ref_model = all_models["old"], all_models["ref"]
    given = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    near = given["old_per_token_logps"].numpy() + log_probs_of(1, 0.03) - log_probs_of(0, 0)
    trainer = theirs(GRPOTrainer, REWARDS, drawn, {"sampler": near}, **more)
    trainer.model, trainer.ref_model = all_models["old"], all_models["ref"]
    inputs = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    policy = trainer.model = all_models["policy"]
    wanted = trainer._compute_loss(policy, inputs)
    wanted.backward()

    own = [f"reinforce.{key}" for key in [f"loss_type={loss}", *keys, f"max_new_tokens={MOST}"]]
    own += [f"reinforce.sampling={{temperature: {HEAT}}}", "train.objective=policy"]
    own += ["precision.compute=float32", f"train.global_batch_size={GROUPS}", "data.mock=true"]
    own += [f"data.seq_length={WIDTH}", f"train.micro_batch_size={GROUPS}"]
    start = source_of(tmp_path / "policy")
    tree = {"model": start.cfg.model_dump(mode="json", exclude_none=True, exclude_defaults=True)}
    cfg = load(None, own, lambda _: tree)
    ours = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    ours.load_params(start)
    of_theirs = {"old": "old_per_token_logps", "ref": "ref_per_token_logps"}
    given = {name: inputs.get(field) for name, field in of_theirs.items()}
    given = {name: near * 0 if x is None else x.numpy() for name, x in given.items()}
    batch = batch_of(cfg.reinforce, REWARDS, drawn, given | {"sampler": near})
    found = ours.run_program(GRADIENTS, batch)
    losses = jax.device_get(found.losses)
    value = losses["loss"] - cfg.reinforce.entropy_coef * losses["entropy"]
    assert value == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    saved = save_gradients(policy, make("llama2"), tmp_path / "grads")
    assert_gradients_near(jax.device_get(found.gradients), from_pretrained(saved).params)
    figures = trainer._metrics["train"]
    for figure in ("entropy", "sampling/importance_sampling_ratio/mean", "kl"):
        if figure in figures and figure in losses:
            assert float(losses[figure]) == pytest.approx(figures[figure][0], rel=1e-5), figure
