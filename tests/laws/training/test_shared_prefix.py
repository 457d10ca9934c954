"""Laws of shared prefixes: rows that hold a prompt once change no loss and no gradient."""

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.data.base.shared_prefix import placed_blocks
from mjax.errors import UserError
from mjax.objectives.fields import SHARED_FIELDS
from mjax.objectives.next_token import NextToken
from mjax.prove import Cell, compare, holds
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from mjax.train.step import GRADIENTS
from tests.laws.training.test_preferences import ALL_PACKED, ALL_SHARED, first_step
from tests.marks import exhaustive, quick, slow
from tests.tiny import TINY

SHARED = "data.shared_prefixes=true"

KINDS = {
    "mamba": [
        "model.layer_pattern='mamba+mlp, full'",
        "model.num_hidden_layers=2",
        "model.mamba={mamba_num_heads: 4, mamba_head_dim: 8, state_size: 8, chunk_size: 16}",
    ],
    "windows": ["model.layer_pattern='window+mlp'", "model.attention.sliding_window=9"],
    "experts": ["model.layer_pattern='full+experts'", "model.moe.num_experts=4", "run.seed=1"],
    "mla": [
        "model.layer_pattern='mla+mlp'",
        "model.attention.num_key_value_heads=0",
        "model.mla={kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}",
    ],
    "deltanet": [
        "model.layer_pattern='deltanet+mlp'",
        "model.deltanet={linear_num_key_heads: 2, linear_num_value_heads: 4, "
        "linear_key_head_dim: 8, linear_value_head_dim: 8, linear_chunk_size: 16}",
    ],
    "sinks": [
        "model.attention.attention_sinks=true",
        "model.attention.attn_logit_softcapping=5",
        "preference.loss_type=orpo",
    ],
}


def assert_equal_steps(found: tuple[dict, dict], wanted: tuple[dict, dict]) -> None:
    """Losses and figures of two steps are equal, and every gradient; fp32."""
    for name, value in wanted[0].items():
        if name == "router_entropy":  # a mean over tokens, of which there are fewer
            continue
        np.testing.assert_allclose(found[0][name], value, rtol=2e-6, err_msg=name)
    gradients = jax.tree.leaves(wanted[1])
    rounding = 1e-7 * max(np.abs(b).max() for b in gradients)  # of decays' gradients, which cancel
    for a, b in zip(jax.tree.leaves(found[1]), gradients, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(1e-5 * np.abs(b).max(), rounding))


@exhaustive
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=exhaustive if kind != "mamba" else slow) for kind in KINDS],
)
def test_sharing_changes_no_figure_and_no_gradient(kind, tmp_path):
    keys = [*KINDS[kind], "preference.reference_free=true"]
    if kind == "sinks":
        keys.pop()  # orpo has no reference
    *plain, tokens = first_step(tmp_path, *ALL_PACKED, *keys)
    *shared, fewer = first_step(tmp_path, *ALL_SHARED, *keys)
    assert (tokens != 0).sum() - (fewer != 0).sum() == 24 * 10  # prompts but for their last token
    assert plain[0]["rewards/chosen"] != 0
    assert_equal_steps(shared, plain)


@exhaustive
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_a_stored_reference_equals_that_of_a_step(loss, tmp_path):
    """At step 0 it is the policy, so that a number in a wrong place would show."""
    keys = *ALL_SHARED, f"preference.loss_type={loss}"
    stored, *_ = first_step(tmp_path, *keys, "preference.precompute_ref_log_probs=true")
    online, *_ = first_step(tmp_path, *keys)
    for name, value in online.items():
        np.testing.assert_allclose(stored[name], value, rtol=1e-6, atol=2e-6, err_msg=name)


MESHES = [
    ({"dp": 4, "tp": 2}, ["mesh.zero=3", "model.layer_pattern='window+mlp, full+mlp'"]),
    ({"tp": 2, "dp": 2}, ["model.layer_pattern='mamba+mlp, full+mlp'"]),
    ({"pp": 2, "tp": 2, "dp": 2}, []),
]


@pytest.mark.parametrize("mesh, more", quick(MESHES))
def test_meshes_agree(mesh, more):
    own = ["model.attention.sliding_window=5"] if "window" in "".join(more) else []
    if "mamba" in "".join(more):
        own += ["model.mamba.mamba_num_heads=8", "model.mamba.mamba_head_dim=4"]
        own += ["model.mamba.state_size=6", "model.mamba.chunk_size=4"]
    record = compare("preferences", Cell(mesh, 1, 1), SHARED, *more, *own, steps=2)
    assert holds(record), record


def test_context_parallelism_and_single_answers_are_refused():
    answers = ["data.mock=true", SHARED, "train.objective=preference", "train.loss_divisor=tokens"]
    for key, said in {
        "mesh.cp=2": "mesh.cp=2 cuts rows",
        "preference.loss_type=apo_zero_unpaired": "each prompt has one answer",
        "model.layer_pattern='text+mlp'": "decoders with causal attention",
        "train.objective=next_token": "has no effect",
    }.items():
        with pytest.raises(UserError, match=said):
            load(None, [*TINY, *answers, key])


# ---- groups of several answers -------------------------------------------------------------------


class GroupTokens(NextToken):
    """The cross-entropy of answers' tokens, of rows that may share prefixes."""

    fields = NextToken.fields | SHARED_FIELDS


# (tokens of the prompt, of each answer): equal answers, one of no token, prompts of one token
GROUPS = [[(9, [5, 3, 3, 8])], [(1, [4, 2, 1, 3]), (6, [0, 2, 1, 2])]]
WIDTH = 64


def batch_of_groups(shares: bool) -> dict[str, np.ndarray]:
    """GROUPS as two rows; the second and the third answer of the first group are equal."""
    rng = np.random.default_rng(0)
    names = "tokens", "labels", "segment_ids", "positions", "prefix_ids"
    fields = {name: np.zeros((len(GROUPS), WIDTH), np.int32) for name in names}
    fields["loss_mask"] = np.zeros((len(GROUPS), WIDTH), np.float32)
    for row, groups in enumerate(GROUPS):
        of_row = {name: field[row] for name, field in fields.items()}
        texts, masks = [], []
        for prompt, answers in groups:
            ids = rng.integers(1, 97, prompt)
            own = [rng.integers(1, 97, count) for count in answers]
            if row == 0:
                own[2] = own[1]
            texts.append([np.append(ids, answer) for answer in own])
            masks.append([np.arange(prompt + count) >= prompt for count in answers])
        lengths = [[len(text) - 1 for text in group] for group in texts]
        contexts = [(prompt - 1) * shares for prompt, _ in groups]
        for block in placed_blocks(lengths, contexts):
            text, mask = (x[block.group][block.order or 0] for x in (texts, masks))
            block.fill(of_row)
            at = slice(block.first, block.first + block.count)
            of_row["tokens"][block.places] = text[at]
            of_row["labels"][block.places] = text[1:][at]
            of_row["loss_mask"][block.places] = mask[1:][at]
    return fields


@slow
def test_a_group_of_four_answers_shares_its_prompt():
    keys = [f"train.objective={GroupTokens.__module__}:GroupTokens", f"data.seq_length={WIDTH}"]
    sizes = ["train.global_batch_size=2", "train.micro_batch_size=1"]
    cfg = load(None, [*TINY, *keys, *sizes])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    steps = []
    for shares in False, True:
        found = trainer.run_program(GRADIENTS, batch_of_groups(shares))
        steps.append(jax.device_get((found.losses, found.gradients)))
    assert (batch_of_groups(True)["segment_ids"] > 0).sum() == 27 + 20
    assert_equal_steps(steps[1], steps[0])
