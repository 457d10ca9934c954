"""Oracle: losses of preferences are TRL's, with every gradient, for each variant.

TRL's own `_compute_loss` runs on log-probabilities that are given, so a gradient is that of each
token. Answers are of unlike lengths and packed; one pair is a tie in log-ratios.
"""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mjax.config import load
from mjax.config.schema.preference import PreferenceConfig
from mjax.interop.pretrained import from_pretrained, source_of
from mjax.kernels.loss.token_functions import TokenScores
from mjax.models.base.context import Context
from mjax.objectives.objective import Denominators
from mjax.post.preference import preference_defaults
from mjax.post.preferences.objective import Preference
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.oracle.families import assert_gradients_near, make, save_gradients

pytest.importorskip("trl")
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402

WIDTH = 64
LENGTHS = [(3, 5, 9), (1, 7, 2), (6, 1, 8), (4, 4, 4)]  # of prompt, chosen and rejected answer
ROW_OF = [0, 1, 0, 1]  # the row of each pair


def answers_of_pairs() -> list[tuple]:
    """((ids, tokens of the prompt) of the chosen answer, the same of the rejected one)."""
    rng, pairs = np.random.default_rng(1), []
    for prompt, chosen, rejected in LENGTHS:
        before = rng.integers(3, 251, prompt)
        both = [np.append(before, rng.integers(3, 251, n)) for n in (chosen, rejected)]
        pairs.append(tuple((ids.astype(np.int32), prompt) for ids in both))
    return pairs


def pair_batch(reads_last: bool = False) -> tuple[dict, list]:
    """(a batch of two packed rows, the pairs in it)."""
    names = {"tokens": np.int32, "labels": np.int32, "segment_ids": np.int32}
    names |= {"positions": np.int32, "loss_mask": np.float32, "answer_values": np.float32}
    names |= {"ref_log_probs": np.float32, "margins": np.float32}
    batch = {name: np.zeros((2, WIDTH), dtype) for name, dtype in names.items()}
    rng, ends, documents = np.random.default_rng(2), [0, 0], [0, 0]
    for number, pair in enumerate(answers_of_pairs()):
        row = ROW_OF[number]
        for (ids, prompt), value in zip(pair, (1, -1), strict=True):
            count, shift = len(ids) - (not reads_last), int(not reads_last)
            documents[row] += 1
            at = slice(ends[row], ends[row] + count)
            batch["tokens"][row, at] = ids[:count]
            if not reads_last:
                batch["labels"][row, at] = ids[1:]
            batch["segment_ids"][row, at] = documents[row]
            batch["positions"][row, at] = np.arange(count)
            batch["loss_mask"][row, at] = np.arange(shift, len(ids)) >= prompt
            batch["ref_log_probs"][row, at] = rng.normal(-3, 1, count)
            batch["answer_values"][row, at.stop - 1] = value
            batch["margins"][row, at.stop - 1] = number / 4 * (value > 0)
            ends[row] = at.stop
    return batch, answers_of_pairs()


def padded(answers: list[tuple]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, completion mask, attention mask) of answers, padded to the longest."""
    width = max(len(ids) for ids, _ in answers)
    ids = torch.zeros(len(answers), width, dtype=torch.long)
    completion, attention = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (given, prompt) in enumerate(answers):
        ids[row, : len(given)] = torch.tensor(given)
        completion[row, prompt : len(given)] = 1
        attention[row, : len(given)] = 1
    return ids, completion, attention


def columns(batch: dict) -> list[tuple[int, np.ndarray]]:
    """(row, columns) of each answer in a packed batch: all chosen ones, then all rejected."""
    found = []
    for value in (1, -1):
        seen = [0, 0]
        for row in ROW_OF:
            document = 2 * seen[row] + (1 if value > 0 else 2)
            found.append((row, np.flatnonzero(batch["segment_ids"][row] == document)))
            seen[row] += 1
    return found


def spread(values: np.ndarray, batch: dict, width: int) -> np.ndarray:
    """Packed values [B, S] as padded ones [answers, width]."""
    found = np.zeros((2 * len(ROW_OF), width), values.dtype)
    for n, (row, at) in enumerate(columns(batch)):
        found[n, : len(at)] = values[row, at]
    return found


def ours(settings: dict, log_probs: np.ndarray, batch: dict) -> tuple[float, np.ndarray, dict]:
    """(the loss, its gradient by each token's log-probability, the losses and figures)."""
    objective = Preference(PreferenceConfig(**settings))
    batch = {name: jnp.asarray(field) for name, field in batch.items()}

    def total(log_probs):
        edges = SimpleNamespace(token_scores=lambda *_, **__: TokenScores(log_probs))
        losses = objective.losses(edges, log_probs, batch, None, Context())
        shares = Denominators(objective.counts(batch), {}, 1).shares(losses, {})
        return sum(shares[name] for name in ("loss", "sft") if name in shares), shares

    (loss, shares), slope = jax.value_and_grad(total, has_aux=True)(jnp.asarray(log_probs))
    return float(loss), np.asarray(slope), shares


class Accelerator:
    device = "cpu"

    def gather(self, x):
        return x

    gather_for_metrics = gather


def stub(**more) -> SimpleNamespace:
    """What TRL's losses ask of their trainer."""
    training = SimpleNamespace(training=True)
    facts = {"model": training, "accelerator": Accelerator(), "aux_loss_enabled": False}
    facts |= {"_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0}
    facts |= {"ld_alpha": None, "use_weighting": False, "_tp_size": 1}
    return SimpleNamespace(**facts | {"precompute_ref_logps": True} | more)


def fake_model(log_probs: torch.Tensor):
    """A model that returns these log-probabilities of its labels; others are not trained on."""

    def forward(input_ids, labels=None, **_):
        kept = torch.where(labels[:, 1:] == -100, 0.0, log_probs)
        nothing = torch.zeros_like(log_probs)
        figures = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing > 0}
        return SimpleNamespace(log_probs=kept, **figures)

    return forward


def given_log_probs(batch: dict) -> np.ndarray:
    """Log-probabilities of a packed batch; those of the last pair tie with the reference's."""
    log_probs = np.random.default_rng(3).normal(-2, 1.5, batch["tokens"].shape)
    log_probs = np.minimum(log_probs, -1e-3).astype(np.float32)
    tied = (batch["segment_ids"] > 2) & (np.arange(2) == 1)[:, None]
    return np.where(tied, batch["ref_log_probs"], log_probs)


VARIANTS = [
    *({"loss_type": name} for name in ("sigmoid", "hinge", "ipo", "sigmoid_norm", "nca_pair")),
    *({"loss_type": name} for name in ("bco_pair", "sppo_hard", "apo_zero", "apo_down")),
    {"loss_type": "discopop", "discopop_tau": 0.07},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "exo_pair", "label_smoothing": 0.1, "beta": 0.4},
    {"loss_type": "sigmoid", "f_divergence_type": "forward_kl"},
    {"loss_type": "sigmoid", "f_divergence_type": "js_divergence", "beta": 0.7},
    {"loss_type": "ipo", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    {"loss_type": "hinge", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_losses_of_pairs_with_a_reference(settings):
    batch, pairs = pair_batch()
    log_probs = given_log_probs(batch)
    loss, slope, shares = ours(settings, log_probs, batch)

    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids, completion, attention = padded(answers)
    width = ids.shape[1] - 1
    leaf = torch.tensor(spread(log_probs, batch, width), requires_grad=True)
    of_reference = spread(batch["ref_log_probs"] * batch["loss_mask"], batch, width).sum(1)
    chosen, rejected = torch.tensor(of_reference).chunk(2)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    full = PreferenceConfig(**settings)
    trainer = stub(
        loss_types=[*full.losses],
        loss_weights=[*full.losses.values()],
        beta=full.beta,
        label_smoothing=full.label_smoothing,
        f_divergence_type=full.f_divergence_type,
        f_alpha_divergence_coef=full.f_alpha_divergence_coef,
        args=SimpleNamespace(discopop_tau=full.discopop_tau),
    )
    wanted = DPOTrainer._compute_loss(trainer, fake_model(leaf), inputs, False)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    np.testing.assert_allclose(spread(slope, batch, width), leaf.grad.numpy(), rtol=1e-5, atol=1e-6)
    figures = trainer._metrics["train"]
    for name in ("chosen", "rejected", "margins", "accuracies"):
        (value,) = figures[f"rewards/{name}"]
        assert float(shares[f"rewards/{name}"]) == pytest.approx(value, rel=1e-5, abs=1e-6)


FREE = [
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7},
    {"loss_type": ["cpo", "sft"], "label_smoothing": 0.1},
    {"loss_type": "orpo", "beta": 0.3},
]


@pytest.mark.parametrize("settings", FREE, ids=str)
def test_losses_of_pairs_without_a_reference(settings):
    batch, pairs = pair_batch()
    log_probs = given_log_probs(batch)
    log_probs[0, batch["segment_ids"][0] == 3] = -1e-9  # a probability of 1, where odds are large
    loss, slope, _ = ours(settings, log_probs, batch)

    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids, completion, attention = padded(answers)
    width = ids.shape[1] - 1
    leaf = torch.tensor(spread(log_probs, batch, width), requires_grad=True)
    mask = completion[:, 1:]
    sums, counts = (leaf * mask).sum(1), mask.sum(1)
    full, half = PreferenceConfig(**settings), len(pairs)
    (name, *_) = full.losses
    trainer = stub(
        beta=full.beta, simpo_gamma=full.simpo_gamma, label_smoothing=full.label_smoothing
    )
    trainer.loss_type, trainer.alpha = {"cpo": "sigmoid"}.get(name, name), 0.0
    if name == "orpo":
        chosen, rejected = (sums / counts).chunk(2)
        chosen, rejected = chosen.clamp(max=-1e-7), rejected.clamp(max=-1e-7)
        wanted = -ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
        real = attention[:half, 1:]
        wanted = wanted - (leaf[:half] * real).sum() / real.sum()
    else:
        chosen, rejected = (sums if name == "cpo" else sums / counts).chunk(2)
        wanted = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
        if "sft" in full.losses:
            wanted = wanted - (leaf * mask)[:half].sum() / counts[:half].sum()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    np.testing.assert_allclose(spread(slope, batch, width), leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_losses_of_single_answers(name):
    """The first document of two is an answer, the second its prompt with another one's answer."""
    batch, pairs = pair_batch()
    labels = [True, False, False, True]
    is_end = batch["answer_values"] > 0
    batch["answer_values"] = np.zeros_like(batch["answer_values"])
    seen = [0, 0]
    for row, label in zip(ROW_OF, labels, strict=True):
        batch["answer_values"][row, np.flatnonzero(is_end[row])[seen[row]]] = 1 if label else -1
        seen[row] += 1
    log_probs = given_log_probs(batch)
    settings = {"loss_type": name, "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}

    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids, completion, attention = padded(answers)
    width, half = ids.shape[1] - 1, len(pairs)
    leaf = torch.tensor(spread(log_probs, batch, width), requires_grad=True)
    of_reference = spread(batch["ref_log_probs"] * batch["loss_mask"], batch, width).sum(1)
    sums = (leaf.detach() * completion[:, 1:]).sum(1).numpy()
    kl = max((sums - of_reference)[half:].mean(), 0)
    assert kl > 0
    batch["kl"] = np.full(2, kl, np.float32)
    loss, slope, _ = ours(settings, log_probs, batch)

    inputs = {"input_ids": ids[:half], "attention_mask": attention[:half]}
    inputs |= {"completion_mask": completion[:half], "label": torch.tensor(labels)}
    inputs |= {"ref_logps": torch.tensor(of_reference[:half])}
    inputs |= {"ref_KL_logps": torch.tensor(of_reference[half:])}
    trainer = stub(
        loss_type=name,
        calculate_KL=name == "kto",
        beta=0.2,
        desirable_weight=1.3,
        undesirable_weight=0.8,
        _compute_kl_logps=lambda model, batch: torch.tensor(sums[half:]),
    )
    wanted = KTOTrainer._compute_loss(trainer, fake_model(leaf[:half]), inputs, False)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    found = spread(slope, batch, width)
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_whole_model(tmp_path):
    """DPO with an SFT term: log-probabilities of the model itself, against a plain torch loss."""
    theirs = make("llama2")
    theirs.save_pretrained(tmp_path / "hf")
    batch, pairs = pair_batch()
    keys = [f"checkpoint.init_from={tmp_path / 'hf'}", "data.mock=true", f"data.seq_length={WIDTH}"]
    keys += ["precision.compute=float32", "train.global_batch_size=2", "data.tokenizer=byte"]
    keys += ["preference.loss_type=[sigmoid,sft]", f"run.dir={tmp_path / 'run'}"]
    cfg = load(None, keys, preference_defaults)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.load_params(source_of(tmp_path / "hf"))
    _, _, gradients = trainer.grads(batch)

    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids, completion, attention = padded(answers)
    logits = theirs(ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    log_probs = logits.gather(2, ids[:, 1:, None])[..., 0] * completion[:, 1:]
    width, half = ids.shape[1] - 1, len(pairs)
    of_reference = spread(batch["ref_log_probs"] * batch["loss_mask"], batch, width).sum(1)
    chosen, rejected = (log_probs.sum(1) - torch.tensor(of_reference)).chunk(2)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    (loss - log_probs[:half].sum() / completion[:half].sum()).backward()
    saved = save_gradients(theirs, make("llama2"), tmp_path / "grads")
    assert_gradients_near(jax.device_get(gradients), from_pretrained(saved).params)
