"""Laws of stacks and lists of layers (mjax/models/runtime/stacks.py)."""

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.config.languages.layer_pattern import expand
from mjax.models.runtime.execution import plain_layers, scan_groups
from mjax.models.runtime.stacks import cut_group
from mjax.pipeline.chunk_stacks import stack_groups, unstack_groups
from mjax.train import Trainer
from tests.marks import exhaustive

PATTERNS = ["GGGG", "LLGLLG", "EGEG", "GEEE", "LGLGG"]
KINDS = [expand(pattern, len(pattern)) for pattern in PATTERNS]


def layers_of(kinds: tuple[str, ...]) -> dict[str, list[dict]]:
    """A list of layers for each stack, every value another."""
    layers: dict[str, list[dict]] = {}
    for i, plan in enumerate(plain_layers(kinds)):
        layer = {"up": np.full((2, 3), i), "norm": np.full(2, -i)}
        layers.setdefault(plan.stack, []).append(layer)
    return layers


@pytest.mark.parametrize("kinds", KINDS, ids=PATTERNS)
def test_stacks_of_groups_hold_every_layer_once(kinds):
    layers, plans = layers_of(kinds), plain_layers(kinds)
    again = unstack_groups(stack_groups(layers, plans), plans)
    jax.tree.map(np.testing.assert_array_equal, again, layers)


@pytest.mark.parametrize("kinds", KINDS, ids=PATTERNS)
def test_lists_and_stacks_give_the_same_groups(kinds):
    layers, plans = layers_of(kinds), plain_layers(kinds)
    stacks = {
        name: jax.tree.map(lambda *rows: np.stack(rows), *rows) for name, rows in layers.items()
    }
    groups = [cut_group(stacks, group) for group in scan_groups(plans)]
    jax.tree.map(np.testing.assert_array_equal, groups, stack_groups(layers, plans))


@exhaustive
def test_the_stash_of_a_pipeline_that_loops_holds_no_weights():
    """Large weights, few tokens: with two kinds of layers memory is about that with one."""
    keys = ["model.hidden_size=128", "model.intermediate_size=512", "model.num_hidden_layers=8"]
    keys += ["data.mock=true", "data.seq_length=16", "mesh.dp=1", "mesh.pp=2", "train.unroll=1"]
    keys += [
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
        "model.attention.sliding_window=8",
    ]

    def temporaries(pattern: str) -> int:
        cfg = load(None, [*keys, f"model.layer_pattern={pattern}"])
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:2]).reshape(2, 1, 1, 1, 1), ("pp", "dp", "ep", "cp", "tp")
        )
        return Trainer(cfg, mesh).lower().compile().memory_analysis().temp_size_in_bytes

    assert temporaries("LG") < 1.3 * temporaries("L")
