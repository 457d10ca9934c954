"""Law: a state that any mesh has saved is restored onto every other one, bit for bit.

Every mesh, ZeRO stage and pipeline layout of a list trains a step and saves; then each restores
what each has saved, which must be the same numbers in canonical form, and give the same next loss.
A step is compiled once a mesh and serves both.
"""

import jax
import numpy as np
import pytest

from mjax.pipeline.storage import canonical
from mjax.prove import Cell, make_batch, make_trainer
from mjax.prove.features import EXPERTS
from mjax.train import Trainer
from mjax.train.checkpoints import Checkpoints
from tests.marks import exhaustive, slow

BOUND = 1e-6  # of the next loss, relative
CHUNKS = "mesh.pipeline_layout='Et*2||t|tL'"  # two stages, each of two chunks, one of them empty
UNEVEN = "mesh.pipeline_layout='Et|tttL'"

# A dimension of 36 is divided by no ZeRO group of 8, so that it is stored padded.
ALL_AT_ONCE = [
    *EXPERTS,
    "model.moe.num_experts=8",
    "model.tie_word_embeddings=true",
    "model.hidden_size=36",
    "optimizer.name=muon",
    "model.attention.num_attention_heads=8",
    "model.attention.num_key_value_heads=4",
]
EXPERT_MESHES = [
    (Cell(), ()),
    (Cell({"dp": 8}, 3, 1), ()),
    (Cell({"dp": 2, "ep": 4}, 2, 1), ()),
    (Cell({"tp": 4, "dp": 2}, 2, 2), ()),
    (Cell({"tp": 2, "ep": 2, "cp": 2}, 3, 2), ()),
    (Cell({"pp": 2, "ep": 2, "tp": 2}, 3, 3), ()),
    (Cell({"pp": 4, "dp": 2}, 1, 4), ()),
    (Cell({"pp": 2, "dp": 2, "ep": 2}, 1, 2), (CHUNKS,)),
    (Cell({"pp": 2, "tp": 2, "cp": 2}, 0, 4), (UNEVEN,)),
]
FP8 = ["precision.fp8=delayed", "precision.fp8_amax_history=4"]
DENSE_MESHES = [
    (Cell(), ()),
    (Cell({"dp": 8}, 1, 3), ()),
    (Cell({"dp": 8}, 3, 1), ()),
    (Cell({"dp": 4, "tp": 2}, 2, 3), ()),
    (Cell({"dp": 2, "tp": 4}, 1, 2), ()),
    (Cell({"tp": 8}, 0, 1), ()),
    (Cell({"tp": 2, "cp": 2, "dp": 2}, 3, 2), ()),
    (Cell({"pp": 4, "tp": 2}, 1, 4), ()),
    (Cell({"pp": 2, "dp": 4}, 3, 3), ()),
    (Cell({"pp": 2, "dp": 2, "tp": 2}, 1, 2), (CHUNKS,)),
    (Cell({"pp": 2, "tp": 2}, 1, 4), (UNEVEN,)),
    (Cell({"pp": 2, "cp": 2, "dp": 2}, 0, 3), ()),
]


def canonical_bits(trainer: Trainer) -> dict[str, bytes]:
    """The whole state in canonical form, as bytes by key path."""
    state = jax.device_get(canonical(trainer.storage, trainer.state))
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def restore_everywhere(folder, feature: str, keys: list[str], meshes: list) -> int:
    """Save on each of `meshes`, restore each on each; how many arrays were stored padded."""
    trainers, saved, padded = [], [], 0
    for number, (cell, more) in enumerate(meshes, start=1):
        given = *keys, *more, f"run.dir={folder}", "checkpoint.keep=100"
        trainer = make_trainer(feature, cell, *given)
        trainer.step(make_batch(cell.rows))
        trainer.set_step(number)  # so that a folder holds them all
        trainer.save()
        trainer.store.wait()
        saved.append(canonical_bits(trainer))
        padded += sum(map(bool, trainer.storage.paddings.values()))
        trainer.state = None
        trainers.append(trainer)
    losses = np.zeros((len(meshes), len(meshes)))
    for here, trainer in enumerate(trainers):
        trainer.checkpoints = Checkpoints(trainer.cfg, trainer.state_layout)  # sees all steps
        for there in range(len(meshes)):
            assert trainer.restore(there + 1) == there + 1
            assert canonical_bits(trainer) == saved[there], (meshes[there], meshes[here])
            losses[there, here] = trainer.step(make_batch(meshes[here][0].rows, seed=1))["loss"]
    own = losses.diagonal()[:, None]
    assert (np.abs(losses / own - 1) <= BOUND).all(), losses / own - 1
    assert len(set(own.ravel())) > 1, "the meshes have saved states of their own"
    return padded


@slow
@pytest.mark.timeout(3600)  # three minutes of one core that is not shared
@exhaustive
def test_every_mesh_restores_every_other_meshes_experts_ties_and_muon(tmp_path):
    assert restore_everywhere(tmp_path, "dense", ALL_AT_ONCE, EXPERT_MESHES)


FOLDED = ("mesh.expert_tp=1",)
LAYOUTS = [
    (Cell({"ep": 2, "tp": 2}, 1, 2), ()),
    (Cell({"ep": 2, "tp": 2}, 3, 2), FOLDED),
    (Cell({"tp": 4}, 0, 1), FOLDED),
]


@exhaustive
def test_cut_and_whole_experts_restore_each_other(tmp_path):
    restore_everywhere(tmp_path, "experts", ["model.num_hidden_layers=1"], LAYOUTS)


@exhaustive
@pytest.mark.timeout(3600)  # three minutes of one core that is not shared
def test_meshes_restore_each_others_fp8_state(tmp_path):
    every_other = DENSE_MESHES[1::2]  # FP8 compiles for twice as long
    restore_everywhere(tmp_path, "dense", FP8, every_other)
