"""Laws of towers with mesh sizes of their own: the numbers of one device, no exchange inside."""

import re
from collections import Counter

import jax
import pytest

from mjax.config import load
from mjax.config.rules.mesh_rules import AXES
from mjax.errors import UserError
from mjax.plan.activations import kept
from mjax.prove import Cell, compare, deviation, holds, make_batch, make_trainer, with_items
from mjax.prove.features import FEATURES, SMALL
from tests.marks import exhaustive, quick, slow

WHOLE = "mesh.towers={vision: {tp: 1, cp: 1}}"
ROWS_OVER_TP = "mesh.towers={vision: {tp: 1}}"
ROWS_OVER_CP = "mesh.towers={vision: {cp: 1}}"
BOTH = "mesh.towers={vision: {tp: 1, cp: 1}, audio: {tp: 1, cp: 1}}"
UNLIKE = "mesh.towers={vision: {tp: 1}, audio: {cp: 1}}"
DROPOUT = "model.attention.attention_dropout=0.1"
FROZEN = "train.freeze=['vision_mlp.*', 'patch_embedding.*']"
CASES = [  # of 6 or 10 images on a device some are empty over tp=4, and all but one of 3 tiles
    ("llava", Cell({"tp": 4}, 0, 8), ROWS_OVER_TP),
    ("mimo", Cell({"cp": 2, "tp": 2}, 3, 3), UNLIKE),
    ("llava", Cell({"tp": 2}, 0, 1), WHOLE, FROZEN),
    ("llava", Cell({"cp": 2, "tp": 2}, 3, 1, cp_type="ring"), ROWS_OVER_CP),  # no tower has a ring
    ("llava", Cell({"dp": 2, "tp": 2}, 3, 2), WHOLE, "optimizer.name=muon", DROPOUT),
    ("llava-onevision", Cell({"cp": 2, "tp": 2}, 1, 8), WHOLE),
]


@exhaustive
@pytest.mark.parametrize("case", quick([(case,) for case in CASES], 2), ids=str)
def test_loss_norm_and_gradients_are_those_of_one_device(case):
    feature, cell, *keys = case
    record = compare(feature, cell, *keys, steps=3)
    assert holds(record), record


@slow
def test_weights_of_the_tower_are_whole_and_those_of_the_text_are_not():
    trainer = make_trainer("llava", Cell({"dp": 2, "tp": 2}, 1), ROWS_OVER_TP)
    where = trainer.state_layout.placement
    for stack, over_tp in (("vision_mlp", False), ("projector", False), ("dense", True)):
        cuts = [str(cut) for cut in jax.tree.leaves(where.weights[stack])]
        assert any("tp" in cut for cut in cuts) == over_tp, stack
        stored = [str(cut) for cut in jax.tree.leaves(where.stored[stack])]
        assert any("dp" in cut and "tp" in cut for cut in stored), stack


EXCHANGE = re.compile(r" (all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def exchanges(layers: int, *keys: str) -> Counter:
    """The exchanges of a compiled step of so many layers of a tower, one after the other."""
    pattern = f"model.layer_pattern='V*{layers},[P],G'", f"model.num_hidden_layers={layers + 2}"
    trainer = make_trainer("llava", Cell({"cp": 2, "tp": 2}), *pattern, "train.unroll=0", *keys)
    return Counter(EXCHANGE.findall(trainer.lower().compile().as_text()))


@exhaustive
def test_a_layer_of_a_whole_tower_exchanges_nothing():
    assert exchanges(2, WHOLE) == exchanges(1, WHOLE)
    grown = exchanges(2)
    grown.subtract(exchanges(1))
    assert sum(grown.values()) >= 8  # two gathers and two scatters each way, and keys


@exhaustive
def test_evaluation_gives_the_loss_of_one_device():
    found = []
    for cell, keys in ((Cell({"cp": 2, "tp": 2}, 1), [BOTH]), (Cell(), [])):
        trainer = make_trainer("mimo", cell, *keys)
        batch = make_batch(24)
        found.append(trainer.evaluate(batch | with_items(trainer.cfg, batch)))
    assert deviation(*found) <= 1e-6


def test_the_estimate_counts_whole_weights_and_fewer_rows():
    given = [*SMALL, *FEATURES["llava"], "mesh.tp=4", "train.micro_batch_size=3"]
    given.append("train.global_batch_size=24")
    sizes = dict.fromkeys(AXES, 1) | {"tp": 4}
    configs = [load(None, given + keys) for keys in ([], [WHOLE])]
    cut, whole = (kept(cfg, sizes, "vision+mlp", "dots") for cfg in configs)
    shapes = [{tensor.name: tensor.shape for tensor in found} for found in (cut, whole)]
    assert shapes[0]["input"] == (6, 4, 16) and shapes[0]["up"] == (6, 16, 6)
    assert shapes[1]["input"] == (2, 16, 16) and shapes[1]["up"] == (2, 16, 24)  # of 8, 2 empty


@pytest.mark.parametrize(
    "keys,said",
    [
        (["mesh.towers={vision: {tp: 2}}", "mesh.tp=4"], "sizes between 1 and mesh.tp=4 are not"),
        (["mesh.towers={audio: {tp: 1}}"], "no projector reads a tower called audio in this model"),
        (["mesh.towers={vision: {pp: 1}}"], "mesh.towers"),
        (["mesh.towers={vision: {tp: 1}}", "mesh.tp=3"], "mesh.tp=3"),
        (["mesh.towers={vision: {tp: 1}}", "model.vision.length_multiple=2", "mesh.cp=2"], "2 cp"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(keys, said):
    with pytest.raises(UserError) as error:
        load(None, [*SMALL, *FEATURES["llava"], *keys])
    assert said in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_heads_that_tp_does_not_divide_fit_a_tower_of_its_own():
    heads = "model.vision.num_attention_heads=2"
    for keys, is_legal in (([], False), ([ROWS_OVER_TP], True)):
        given = [*SMALL, *FEATURES["llava"], heads, "mesh.tp=4", *keys]
        if is_legal:
            load(None, given)
            continue
        with pytest.raises(UserError, match="num_attention_heads=2 is not divisible by mesh.tp=4"):
            load(None, given)
