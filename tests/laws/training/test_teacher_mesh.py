"""Laws: a teacher on devices of its own is the teacher on the student's; estimates bound it."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import mjax.post.teacher as post_teacher
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.evaluate.__main__ import main as evaluate
from mjax.models import build, split
from mjax.objectives.objective import OWN_WEIGHTS, share_devices
from mjax.pipeline.run import TrainingTicks
from mjax.pipeline.storage import canonical
from mjax.plan.memory import own_teacher_bytes, teacher_bytes, teacher_role
from mjax.post.base.role_programs import LOG_PROBS, kind_of_tokens
from mjax.post.base.roles import Role
from mjax.post.teacher import (
    distillation_batches,
    placed_hidden_states,
    teacher_fields,
    teacher_of,
    teacher_run,
)
from mjax.prove import FEATURES, SMALL, VOCAB, Cell, deviation, make_batch, make_trainer
from mjax.run.dry_run import dry_run
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train.program_kind import without_moments
from mjax.train.step import GRADIENTS, LOSSES
from mjax.train.trainer import Trainer
from tests.laws.run.test_failures import records
from tests.marks import exhaustive, slow
from tests.teachers import write_teacher_folder

TEACHER = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=56,
    num_hidden_layers=3,
    attention={"num_attention_heads": 4, "num_key_value_heads": 4},
    intermediate_size=40,
    lm_head_bias=True,
    max_position_embeddings=64,
)
HIDDEN = "distill.hidden_layers={0: 1, 1: 2}"
FOUR = ["mesh.dp=2", "mesh.tp=2", "distill.teacher_mesh={devices: 4, tp: 4}"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder of a model with another width and depth, and a bias."""
    return write_teacher_folder(tmp_path_factory.mktemp("teacher") / "teacher", TEACHER)


def run_of(teacher, *keys: str):
    given = [*SMALL, *FEATURES["dense"], "model.num_hidden_layers=2", "train.objective=distill"]
    given += [f"distill.teacher={teacher}", "train.loss_chunk=12", "train.global_batch_size=8"]
    return load(None, [*given, "train.micro_batch_size=1", *keys])


def trainer_of(teacher, devices: int, *keys: str) -> Trainer:
    trainer = Trainer(run_of(teacher, *keys), devices=jax.devices()[:devices])
    trainer.init()
    trainer.role_fields = teacher_fields(trainer)
    return trainer


KEYS = HIDDEN, "distill.beta=0.3", "distill.temperature=1.5"
MESHES = [
    (8, *FOUR),
    (8, "mesh.cp=2", "mesh.dp=2", "mesh.zero=3", "distill.teacher_mesh={devices: 4, tp: 2}"),
    (6, "mesh.dp=4", "distill.teacher_mesh={devices: 2, cp: 2}"),
]


@pytest.fixture(scope="module")
def one(teacher):
    """What one device finds, which holds student and teacher."""
    return jax.device_get(trainer_of(teacher, 1, *KEYS).run_program(GRADIENTS, make_batch(8)))


@exhaustive
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_teacher_on_its_own_devices_gives_the_losses_of_one_device(teacher, one, mesh):
    """Its mesh has other sizes of dp, tp and cp, and the student's rows lie on more devices."""
    devices, *keys = mesh
    trainer = trainer_of(teacher, devices, *KEYS, *keys)
    found = jax.device_get(trainer.run_program(GRADIENTS, make_batch(8)))
    assert deviation((found.losses, found.gradients), (one.losses, one.gradients)) <= 1e-5


@exhaustive
def test_a_student_in_a_pipeline_learns_from_a_teacher_on_other_devices(teacher):
    """Losses, gradients and held-out losses are those of one device."""
    found = []
    for devices, *mesh in (1,), (6, "mesh.pp=2", "mesh.dp=2", "distill.teacher_mesh={devices: 2}"):
        trainer = trainer_of(teacher, devices, *KEYS[1:], *mesh)
        got = trainer.run_program(GRADIENTS, make_batch(8))
        held_out = trainer.run_program(LOSSES, make_batch(8))
        found.append(jax.device_get((got.losses, got.gradients, held_out)))
    assert deviation(found[1], found[0]) <= 1e-5


PIPELINES = [
    (4, "mesh.virtual_stages=2", "distill.hidden_layers={0: 1, 2: 2, 3: 0}"),
    (2, "train.remat=full", "distill.hidden_layers={1: 0}"),
    (3, "mesh.tp=2", "mesh.dp=1", "distill.hidden_layers={2: 2, 0: 1}"),  # uneven stages
]


@exhaustive
@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_stages_add_the_losses_of_their_own_layers(teacher, case):
    """Losses, every gradient, the matrices' too, and held-out losses are those of one device."""
    layers, *keys = case
    mse = "distill.hidden_losses={cosine: 1, mse: 0.5}"
    given = f"model.num_hidden_layers={layers}", *KEYS[1:], mse
    mesh = "mesh.dp=2", "mesh.pp=2", "distill.teacher_mesh={devices: 2}", *keys
    found = []
    for devices, *more in (1, keys[-1]), (6, *mesh):
        trainer = trainer_of(teacher, devices, *given, *more)
        got = trainer.run_program(GRADIENTS, make_batch(8))
        held_out = trainer.run_program(LOSSES, make_batch(8))
        gradients = canonical(trainer.storage, got.gradients)
        found.append(jax.device_get((got.losses, gradients, held_out)))
    losses, gradients, held_out = found[1]
    assert losses["hidden"] > 0.1 and held_out[0]["hidden"] > 1
    of_pairs = gradients[OWN_WEIGHTS].values()
    assert len(of_pairs) == keys[-1].count(":") and all(np.any(g) for g in of_pairs)
    assert deviation(found[1], found[0]) <= 1e-5


@slow
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_stage_keeps_one_activation_for_each_output_that_is_learned(teacher, monkeypatch, policy):
    probe, kept = TrainingTicks.probe, []

    def probed(self):
        found = probe(self)
        kept.append(sum(leaf.size * leaf.dtype.itemsize for leaf in found[1]))
        return found

    monkeypatch.setattr(TrainingTicks, "probe", probed)
    for pairs in "{}", "{0: 1, 2: 2, 3: 0}":  # of four chunks none has two
        keys = (
            "mesh.dp=2",
            "mesh.pp=2",
            "distill.teacher_mesh={devices: 2}",
            f"train.remat={policy}",
        )
        more = (
            f"distill.hidden_layers={pairs}",
            "mesh.virtual_stages=2",
            "model.num_hidden_layers=4",
        )
        trainer = Trainer(run_of(teacher, *keys, *more), devices=jax.devices()[:6])
        trainer.lower()
    activation = 4 * 16 * trainer.cfg.model.hidden_size
    assert activation <= kept[-1] - kept[0] < 1.05 * activation


@slow
def test_the_student_s_devices_hold_nothing_of_the_teacher_but_fields(teacher):
    """Its weights are on its own devices, and the step of the student reads none but its head."""
    trainer = trainer_of(teacher, 8, *FOUR)
    mine, own = set(jax.devices()[:4]), set(jax.devices()[4:8])
    assert set(trainer.mesh.devices.flat) == mine and set(trainer.role_devices) == own
    weights = jax.tree.leaves(teacher_of(trainer).weights()["params"])
    assert all(array.devices() == own for array in weights)
    placed = trainer.place(make_batch(8))
    assert all(array.devices() == mine for array in placed.values())
    read = [leaf.shape for leaf in jax.tree.leaves(trainer.lower().args_info)]
    wide = [shape for shape in read if TEACHER.hidden_size in shape]
    assert sorted(wide) == [(8, 16, 56), placed["teacher_head"].shape]


@exhaustive
def test_a_run_goes_on_at_another_dp_with_its_teacher_elsewhere(teacher, tmp_path):
    batch, keys = make_batch(8), (f"run.dir={tmp_path}", "checkpoint.async_save=false")
    first = trainer_of(teacher, 8, *FOUR, *keys)
    for _ in range(2):  # the first step's rate is 0
        first.step(batch)
    first.save()
    first.store.wait()
    wanted = float(first.step(batch)["loss"])
    again = trainer_of(teacher, 6, "mesh.dp=4", "distill.teacher_mesh={devices: 2}", *keys)
    assert again.restore() == 2
    np.testing.assert_allclose(float(again.step(batch)["loss"]), wanted, rtol=1e-5)


@exhaustive
def test_a_run_is_evaluated_on_fewer_devices_than_its_teacher_had(teacher, tmp_path, capsys):
    """The teacher lies on the student's mesh, and the held-out losses are those of the run."""
    keys = "train.steps=2", "train.eval_interval=2", "train.eval_steps=2", "schedule.warmup_steps=0"
    cfg = run_of(teacher, *KEYS, *keys, "data.mock=true", f"run.dir={tmp_path}", *FOUR)
    train(cfg, None, distillation_batches)
    found = [r for r in records(tmp_path) if "eval_loss" in r][-1]
    one = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: one)
        evaluate(["loss", "--run", str(tmp_path), "--split", "valid", "mesh.dp=1", "mesh.tp=1"])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("loss", "divergence", "nll", "hidden"):
        assert printed[name] == pytest.approx(found[f"eval_{name}"], rel=1e-5)


def test_devices_that_leave_none_and_sizes_that_do_not_divide_are_refused(teacher, tmp_path):
    devices = [SimpleNamespace(number=number, process_index=number // 4) for number in range(8)]
    a, b, c, d, *others = devices
    assert share_devices(SimpleNamespace(own_devices=(1, "x")), [a, b, c, d]) == ([a, b, c], [d])
    assert share_devices(SimpleNamespace(), devices) == (devices, [])
    two = share_devices(SimpleNamespace(own_devices=(2, "x")), devices)
    assert two == ([a, b, c, *others[:3]], [d, others[3]])  # the last one of each process
    with pytest.raises(UserError, match="^x: 3 devices are not as many in each of 2 processes"):
        share_devices(SimpleNamespace(own_devices=(3, "x")), devices)
    with pytest.raises(UserError, match="^x: 2 of 5 devices do not leave one"):
        share_devices(SimpleNamespace(own_devices=(2, "x")), devices[:5])
    devices = devices[:4]
    for count in (4, 5):
        with pytest.raises(UserError, match=f"^x: {count} of 4 devices do not leave one"):
            share_devices(SimpleNamespace(own_devices=(count, "x")), devices)
    with pytest.raises(UserError, match="^distill.teacher_mesh={'devices': 8}: 8 of 8 devices"):
        Trainer(run_of(teacher, "distill.teacher_mesh={devices: 8}"), devices=jax.devices()[:8])
    with pytest.raises(UserError, match="distill.teacher_mesh={'tp': 2} has no number of devices"):
        run_of(teacher, "distill.teacher_mesh={tp: 2}")
    for wrong in ("{devices: 4, pp: 2}", "{devices: 0}", "{devices: two}"):
        with pytest.raises(UserError, match=r"distill\.teacher_mesh"):
            run_of(teacher, f"distill.teacher_mesh={wrong}")
    keys = "mesh.dp=2", "distill.teacher_mesh={devices: 3, tp: 3}"
    trainer = Trainer(run_of(teacher, *keys), devices=jax.devices()[:5])
    refused = r"^distill.teacher_mesh={.*}: .*heads=4 is not divisible"
    with pytest.raises(UserError, match=refused):
        teacher_of(trainer)
    text = tmp_path / "words.txt"
    text.write_text("words of a text " * 99)
    corpus = f"data.text={text}", "data.tokenizer=byte", "data.mock=false"
    run = run_of(teacher, *keys, *corpus, "data.seq_length=16", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(UserError, match=refused):
        train(run, devices=jax.devices()[:5], batch_source=distillation_batches)
    assert not (tmp_path / "run").exists()
    cfg = run_of(teacher, "mesh.dp=4", FOUR[-1])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    with pytest.raises(UserError, match="needs a trainer of devices"):
        teacher_of(trainer)


def test_memory_that_runs_out_on_the_devices_of_a_teacher_is_theirs(teacher, monkeypatch):
    trainer = trainer_of(teacher, 2, "distill.teacher_mesh={devices: 1}")

    def exhausted(self, *given):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Role, "compute", exhausted)
    with pytest.raises(UserError, match="device of the teacher: .*give distill.teacher_mesh more"):
        trainer.place(make_batch(8))


def temporary(trainer: Trainer, kind, params, *more) -> int:
    """The bytes that a compiled program needs beside what it is given and returns."""
    state = without_moments(trainer.abstract_state()) | {"params": params}
    rows, width = trainer.cfg.train.global_batch_size, trainer.cfg.data.seq_length
    program = trainer.programs.jitted(kind, rows)
    compiled = program.lower(state, trainer.placer.abstract(rows, width), *more).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@slow
@pytest.mark.parametrize("mesh", [("dp", 1), ("dp", 3), ("tp", 0)])
def test_the_forward_pass_of_a_teacher_needs_no_more_than_is_estimated(tmp_path, mesh):
    """By the compiler's account of its program, which is at least a quarter of the estimate."""
    axis, zero = mesh
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256}
    model = TEACHER.model_copy(update=sizes)
    definition, params = split(build(model, nnx.Rngs(3)))
    write_weights(tmp_path / "teacher", array_source(model, params), definition.specs)
    keys = "data.seq_length=128", f"mesh.{axis}=2", f"mesh.zero={zero}"
    trainer = Trainer(run_of(tmp_path / "teacher", *keys), devices=jax.devices()[:2])
    own = Trainer(teacher_run(trainer.cfg), trainer.mesh)
    held = own.abstract_state()["params"]
    real = temporary(own, kind_of_tokens(placed_hidden_states, outputs=()), held)
    found = teacher_role(trainer.cfg, trainer.objective, 2)
    assert real <= found["forward pass"] <= 4 * real
    assert found["weights"] == pytest.approx(sum(map(shard_bytes, jax.tree.leaves(held))), rel=0.01)


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize


@slow
def test_a_step_needs_more_than_the_forward_pass_of_its_reference():
    """So the estimate of a live reference is that of its weights."""
    trainer = make_trainer("preferences", Cell({"dp": 2, "tp": 2}, 1, 1, rows=8))
    forward = temporary(trainer, LOG_PROBS, trainer.abstract_state()["params"])
    step = trainer.lower().compile().memory_analysis().temp_size_in_bytes
    assert forward <= step


@slow
def test_the_plan_names_what_both_kinds_of_devices_hold(teacher, capsys, monkeypatch):
    monkeypatch.setattr("mjax.run.dry_run.compiled_lines", lambda trainer: [])
    trainer = Trainer(cfg := run_of(teacher, *FOUR), devices=jax.devices()[:8])
    sizes, objective = dict(trainer.mesh.shape), trainer.objective
    fields = 4 * 56 * (2 * 4 * 16 + objective.teacher.padded_vocab_size / 2)
    assert teacher_bytes(trainer.cfg, sizes, objective) == fields
    own = own_teacher_bytes(trainer.cfg, 2, objective)
    held = jax.tree.leaves(
        Trainer(teacher_run(cfg), devices=jax.devices()[:4]).abstract_state()["params"]
    )
    assert own["weights"] == pytest.approx(sum(map(shard_bytes, held)), rel=0.01)
    dry_run(cfg)
    text = capsys.readouterr().out
    assert "pp=1 x dp=2 x ep=1 x cp=1 x tp=2: 4 x cpu" in text
    assert "teacher     0.000 GB a device, which the compiled step does not count" in text
    assert "4 devices of its own: weights 0.000, forward pass 0.000, fields 0.000 GB each" in text


@pytest.mark.parametrize(
    "rows, said",
    [
        ({"student": (0, 6), "teacher": (0, 6)}, [b"all"] * 2),
        ({"student": (3, 6), "teacher": (3, 6)}, [b"own"] * 2),
        ({"student": (2, 6), "teacher": (2, 6)}, None),  # dp 3 over two processes
        ({"student": (3, 6), "teacher": (0, 6)}, None),
        ({"student": (0, 6), "teacher": (0, 6)}, [b"", b"all"]),
    ],
)
def test_processes_have_all_rows_or_their_shares(monkeypatch, rows, said):
    """As the second of two processes sees it; said: what all say."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(post_teacher, "said_by_all", lambda word: said or [word] * 2)
    cfg = SimpleNamespace(train=SimpleNamespace(global_batch_size=6))
    student, teacher = (
        SimpleNamespace(cfg=cfg, local_rows=lambda n, part=slice(*part): part)
        for part in rows.values()
    )
    if said in ([b"all"] * 2, [b"own"] * 2):
        post_teacher.require_same_rows(student, teacher, "key")
    else:
        with pytest.raises(UserError, match="key: student and teacher need the same rows"):
            post_teacher.require_same_rows(student, teacher, "key")
