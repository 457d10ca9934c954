"""Laws of attention in rows of packed images: which kernel, for how many images, and its mask."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load
from mjax.data.multimodal.image_text import ImageTextDataset
from mjax.data.multimodal.packed import PackedTexts
from mjax.kernels.attention.api import attention
from mjax.kernels.base import chooser
from mjax.kernels.base.attention_call import AttentionArrays, AttentionCall
from mjax.plan.kernel_lines import attention_by_word, document_lines
from mjax.prove import deviation
from mjax.run.batches import DatasetStream, RunBatches
from mjax.run.training_run import bound_documents
from mjax.train import Trainer
from mjax.train.batch import field_maker
from mjax.train.program_kind import without_moments
from mjax.train.step import LOSSES
from tests.devices import HOPPER, choose_for
from tests.laws.models.test_qwen_vl import QWEN_VL, pictures
from tests.laws.run.test_image_data import BYTES, config, write
from tests.marks import quick

ONE = {axis: 1 for axis in ("dp", "tp", "pp", "cp", "ep")}


def test_windows_are_the_mask_of_those_who_lie_together():
    """A bound on the places that a patch sees changes nothing: no window is longer."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 17, 40)
    windows = np.repeat(np.arange(40), lengths)[None, :220].astype(np.int32)
    shape = 1, windows.size, 2, 8
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    columns = jnp.arange(windows.size, dtype=jnp.int32)
    arrays = AttentionArrays((columns, columns), (windows, windows))

    def loss(inputs, window):
        call = AttentionCall(1.0, window, mask="full", implementation="xla")
        return jnp.sum(jnp.sin(attention(*inputs, call, arrays)))

    of_both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found = [of_both((q, k, v), window) for window in (None, 16)]
    assert deviation(*found) < 1e-6


@pytest.fixture
def hopper_choices(monkeypatch):
    """A list to which each call of attention is added with its kernel for an H100, once traced."""
    rule, seen = chooser.RULES["attention"], []

    def recorded(x, **facts):
        call = facts["call"]
        seen.append((call, rule(x._replace(device=HOPPER), **facts).name))
        return rule(x, **facts)

    monkeypatch.setitem(chooser.RULES, "attention", recorded)
    monkeypatch.setattr("mjax.train.batch.this_device", lambda: HOPPER)
    return seen


def data_and_trainer(path, kind):
    cfg = config(QWEN_VL, path, "mesh.dp=1", "train.micro_batch_size=1")
    data = ImageTextDataset(path, "train", [1.0, 0, 0], None, cfg, BYTES)
    data = data if kind is ImageTextDataset else kind(data, None)
    cfg = config(QWEN_VL, path, "mesh.dp=1", f"train.global_batch_size={len(data)}")
    return data, Trainer(cfg, devices=jax.devices()[:1])


@pytest.mark.parametrize(("kind", "promised"), quick([(ImageTextDataset, 4), (PackedTexts, 8)], 1))
def test_the_tower_is_compiled_for_the_images_of_a_row(tmp_path, hopper_choices, kind, promised):
    """A bound from the data and the count of a batch agree, and windows need none."""
    data, trainer = data_and_trainer(write(tmp_path, "tar", pictures()), kind)
    stream = DatasetStream(data, trainer.cfg, trainer.objective, lambda n: (n, len(data)))
    bound_documents(trainer, RunBatches(stream))
    assert trainer.programs.documents.images == promised
    batch = data.batch(np.arange(len(data)))
    batch |= field_maker(trainer.cfg, trainer.objective)(batch, 0, np.arange(len(data)))
    trainer.place(batch)
    assert trainer.programs.documents.images == promised
    of_teacher = replace(trainer.programs)
    assert of_teacher.documents != trainer.programs.documents
    of_teacher.share_bound(trainer.programs)
    assert of_teacher.documents == trainer.programs.documents
    hopper_choices.clear()
    rows = trainer.placer.abstract(len(data), trainer.cfg.data.seq_length)
    weights = without_moments(trainer.abstract_state())
    trainer.programs.jitted(LOSSES, len(data)).eval_shape(weights, rows)
    in_tower = {
        (call.window, call.max_documents, kernel)
        for call, kernel in hopper_choices
        if call.mask == "full"
    }
    assert in_tower == {(None, promised, "cudnn"), (16, 0, "xla")}


@pytest.mark.parametrize(("processes", "promised"), [(1, 0), (2, 32)])
def test_images_that_nobody_has_counted_are_bounded_by_the_row(
    tmp_path, monkeypatch, processes, promised
):
    """One process counts those of each batch; several must agree before there is one."""
    data, trainer = data_and_trainer(write(tmp_path, "tar", pictures(3)), ImageTextDataset)
    data.lines[0] = replace(data.lines[0], videos=["a film"])
    monkeypatch.setattr("mjax.train.batch.this_device", lambda: HOPPER)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    stream = DatasetStream(data, trainer.cfg, trainer.objective, lambda n: (n, 1))
    bound_documents(trainer, RunBatches(stream))
    assert trainer.programs.documents.images == promised


def test_the_plan_names_the_kernels_of_few_and_of_many_images(monkeypatch):
    choose_for(monkeypatch, HOPPER, "attention")
    cfg = load("configs/models/qwen2_5_vl_7b.yaml", ["data.mock=true", "data.seq_length=4096"])
    few = attention_by_word(cfg, ONE, 2)
    assert few["vision_2d"].name == "cudnn" and few["vision_window"].name == "xla"
    (line,) = [line for line in document_lines(cfg, ONE) if "(vision_2d)" in line]
    most = int(re.search(r"more than (\d+) images: xla, because", line)[1])
    vision = cfg.model.vision
    assert most * vision.head_dim <= vision.max_patches < 2 * most * vision.head_dim
