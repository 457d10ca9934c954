"""Laws: distillation is the formula on whole logits, on every mesh; equal models learn nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import train_tokenizer
from mjax.errors import UserError
from mjax.infer.trace import trace
from mjax.interop.pretrained import from_pretrained
from mjax.interop.sources import source_of
from mjax.models import build, split
from mjax.models.base.adapted import is_of_adapter
from mjax.objectives.objective import OWN_WEIGHTS
from mjax.plan.memory import bytes_per_device, teacher_bytes
from mjax.post.distillation.stored_teacher import TeacherStore
from mjax.post.teacher import distillation_batches, teacher_fields, teacher_of, write_teacher
from mjax.prove import FEATURES, SMALL, VOCAB, Cell, deviation, make_batch, make_trainer
from mjax.train.step import GRADIENTS, LOSSES
from mjax.train.trainer import Trainer
from tests.adapters import adapted_values
from tests.marks import exhaustive, slow
from tests.teachers import write_teacher_folder

LAYERS = "model.num_hidden_layers=2"
TEACHER = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=3,
    attention={"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 5},
    intermediate_size=40,
    final_logit_softcapping=3.0,
    lm_head_bias=True,
    layer_pattern="window+mlp, full+mlp*2",
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder of a model with another width, another depth, a bias and a softcap."""
    return write_teacher_folder(tmp_path_factory.mktemp("teacher") / "teacher", TEACHER)


def student(teacher, cell: Cell, *keys: str, feature: str = "dense"):
    given = ["train.objective=distill", f"distill.teacher={teacher}", "train.loss_chunk=12"]
    trainer = make_trainer(feature, cell, LAYERS, *given, *keys)
    trainer.role_fields = teacher_fields(trainer)
    return trainer


KEYS = ["distill.beta=0.3", "distill.temperature=1.5", "distill.label_weight=0.25"]
MESHES = [
    Cell({"dp": 2, "cp": 2, "tp": 2}, 1, 2, rows=8),
    Cell({"tp": 2}, 0, 2, rows=8),
    Cell({"ep": 2, "tp": 2, "cp": 2}, 3, 1, rows=8),
]


@exhaustive
@pytest.mark.parametrize("cell", MESHES, ids=str)
def test_every_mesh_computes_the_formula_on_whole_logits(teacher, cell):
    feature = "experts" if "ep" in cell.mesh else "dense"
    found = student(teacher, cell, *KEYS, feature=feature)
    batch = make_batch(8)
    ours = jax.device_get(found.run_program(GRADIENTS, batch))
    sums, counts = jax.device_get(found.run_program(LOSSES, batch))
    one = make_trainer(feature, Cell(rows=8), LAYERS)
    inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
    log_p = jax.nn.log_softmax(from_pretrained(teacher).model(*inputs) / 1.5)
    mask = batch["loss_mask"]

    def loss(params):
        logits = one.definition.bind(params)(*inputs)
        q, p = jax.nn.softmax(logits / 1.5), jnp.exp(log_p)
        m = 0.3 * p + 0.7 * q
        terms = 0.3 * p * jnp.log(p / m) + 0.7 * q * jnp.log(q / m)
        labels = batch["labels"][..., None]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)[..., 0]
        return ((0.75 * 1.5**2 * terms.sum(-1) + 0.25 * nll) * mask).sum() / mask.sum()

    if feature == "dense":  # experts add losses of their own
        expected, gradients = jax.jit(jax.value_and_grad(loss))(one.params())
        assert deviation((ours.losses["loss"], ours.gradients), (expected, gradients)) <= 1e-5
        np.testing.assert_allclose(sums["loss"] / counts["loss"], expected, rtol=1e-5)
    else:
        alone = jax.device_get(
            student(teacher, Cell(rows=8), *KEYS, feature=feature).run_program(GRADIENTS, batch)
        )
        assert deviation((ours.losses, ours.gradients), (alone.losses, alone.gradients)) <= 1e-5


@slow
def test_how_a_student_is_trained_says_nothing_to_its_teacher(teacher):
    """Rates of parameters that the teacher lacks, and 8 bits."""
    keys = ["model.attention.qk_norm=true", "optimizer.lr_multipliers={'*q_norm*': 0.5}"]
    keys += ["precision.fp8=current", "precision.fp8_skip_layers=1", "model.num_hidden_layers=3"]
    own = teacher_of(student(teacher, Cell(rows=8), *keys)).trainer.cfg
    assert own.precision.fp8 == "none" and not own.optimizer.lr_multipliers


@slow
def test_a_teacher_is_promised_as_few_documents_as_its_student(teacher, monkeypatch):
    """Without a bound cuDNN's attention would keep statistics of a document for each token."""
    trainer = student(teacher, Cell(rows=8), "train.attention=cudnn", "precision.compute=bfloat16")
    seen = []
    monkeypatch.setattr(
        Trainer, "run_placed", lambda own, *_: seen.append(own.programs.documents) or {}
    )
    trainer.place(make_batch(8))
    assert seen == [trainer.programs.documents] * 2 and seen[0].most > 0


@exhaustive
def test_a_student_that_equals_its_teacher_learns_nothing(tmp_path):
    one = make_trainer("dense", Cell(rows=8), LAYERS)
    source = array_source(one.cfg.model, one.params())
    write_weights(tmp_path / "same", source, one.definition.specs)
    hidden = "distill.hidden_layers={0: 0, 1: 1}", "distill.hidden_losses={cosine: 1, mse: 1}"
    for beta in (0, 0.5, 1):
        keys = f"distill.beta={beta}", *hidden
        trainer = student(tmp_path / "same", Cell({"tp": 2}, rows=8), *keys)
        assert OWN_WEIGHTS not in trainer.params()
        found = trainer.run_program(GRADIENTS, make_batch(8))
        assert abs(found.losses["divergence"]) < 1e-6 and found.norm < 1e-4
        assert abs(found.losses["hidden"]) < 1e-6


HIDDEN = "distill.hidden_layers={0: 1, 1: 2}"
ON_MESHES = [
    Cell({"tp": 2, "dp": 2}, 1, 2, rows=8),
    Cell({"dp": 2, "cp": 2, "tp": 2}, 3, 1, rows=8),
    Cell({"cp": 2, "dp": 2}, 2, 2, rows=8),
    Cell({"ep": 4, "tp": 2}, 3, 2, rows=8),
]


@exhaustive
@pytest.mark.parametrize("cell", ON_MESHES, ids=str)
def test_losses_of_layers_are_those_of_whole_outputs_on_every_mesh(teacher, cell):
    """Outputs of both models by `trace`; the matrices between them have gradients, too."""
    keys = [HIDDEN, "distill.hidden_losses={cosine: 0.5, mse: 2.0}"]
    batch = make_batch(8)
    batch |= {"segment_ids": np.ones((8, 16), np.int32)}  # `trace` does not pack
    batch |= {"positions": np.tile(np.arange(16, dtype=np.int32), (8, 1))}
    found = student(teacher, cell, *keys)
    ours = jax.device_get(found.run_program(GRADIENTS, batch))
    plain = student(teacher, Cell(rows=8)).run_program(GRADIENTS, batch)
    one = student(teacher, Cell(rows=8), *keys)
    params, tokens, mask = one.params(), batch["tokens"], batch["loss_mask"]
    assert {a.shape for a in params[OWN_WEIGHTS].values()} == {(32, 48)}
    _, wanted = trace(from_pretrained(teacher).model, tokens, keep=["layers.1", "layers.2"])

    def hidden(params):
        _, seen = trace(one.definition.bind(params), tokens, keep=["layers.0", "layers.1"])
        total = 0
        for layer, of_teacher in (0, 1), (1, 2):
            x = seen[f"layers.{layer}"] @ params[OWN_WEIGHTS][f"layer_{layer}"]
            y = wanted[f"layers.{of_teacher}"]
            lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
            total += 0.5 * (1 - (x * y).sum(-1) / lengths) + 2 * ((x - y) ** 2).mean(-1)
        return (total / 2 * mask).sum() / mask.sum()

    expected, gradients = jax.jit(jax.value_and_grad(hidden))(params)
    own = gradients.pop(OWN_WEIGHTS)
    rest = jax.tree.map(jnp.add, gradients, plain.gradients)
    assert deviation(ours.losses["hidden"], expected) <= 1e-5
    assert deviation(ours.gradients, rest | {OWN_WEIGHTS: own}) <= 1e-5


@exhaustive
@pytest.mark.parametrize(
    "cell",
    [
        Cell(rows=8),
        Cell({"dp": 2, "cp": 2, "tp": 2}, 1, 1, rows=8),
        Cell({"ep": 2, "tp": 2}, 3, 2, rows=8),
    ],
    ids=str,
)
def test_losses_of_layers_reach_adapters_as_whole_weights(teacher, cell):
    """Losses are those of the merged student; adapters have its gradients by the chain rule."""
    feature, batch = "experts" if "ep" in cell.mesh else "dense", make_batch(8)
    adapted = student(teacher, cell, HIDDEN, "lora.rank=2", feature=feature)
    begun, ours = jax.device_get((adapted.params(), adapted.run_program(GRADIENTS, batch)))
    merge = functools.partial(adapted_values, specs=adapted.specs)
    whole = student(teacher, Cell(rows=8), HIDDEN, feature=feature)
    whole.start(jax.tree.map(jnp.asarray, merge(begun)))
    wanted = jax.device_get(whole.run_program(GRADIENTS, batch))
    assert ours.losses["hidden"] > 0.1 and deviation(ours.losses, wanted.losses) <= 1e-5
    begun, of_weights = flatten_dict(begun), flatten_dict(wanted.gradients)
    found = flatten_dict(ours.gradients)
    trained = {path: begun[path] for path in found}
    assert {path[0] for path in found if not is_of_adapter(path)} == {OWN_WEIGHTS}

    def of_trained(trained: dict) -> jax.Array:
        values = flatten_dict(merge(unflatten_dict(begun | trained)))
        return sum(jnp.vdot(of_weights[path], values[path]) for path in values)

    assert deviation(found, jax.grad(of_trained)(trained)) <= 2e-5


@exhaustive
def test_matrices_between_layers_are_saved_and_not_exported(teacher, tmp_path):
    """A run goes on with them at another mesh, and a student of its weights has none."""
    keys = [HIDDEN, f"run.dir={tmp_path}", "checkpoint.async_save=false"]
    first = student(teacher, Cell({"dp": 2}, 1, 1, rows=8), *keys)
    for _ in range(2):  # the first step's rate is 0
        first.step(make_batch(8))
    first.save()
    first.store.wait()
    again = student(teacher, Cell({"tp": 2}, rows=8), *keys)
    again.restore()
    other = student(teacher, Cell(rows=8), "distill.hidden_layers={0: 1}", *keys[1:])
    with pytest.raises(UserError) as error:
        other.restore()
    assert str(error.value) == (
        f"checkpoint {tmp_path / 'checkpoints' / '2'} has weights objective.layer_1: [32, 48], "
        "this run: none; set distill.hidden_layers back to {'0': 1, '1': 2} (now {'0': 1}) or "
        "choose another run.dir"
    )
    saved = first.params()
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params(), saved))
    exported = from_pretrained(tmp_path).params
    assert OWN_WEIGHTS in saved and OWN_WEIGHTS not in exported
    start = again.checkpoints.load_weights(source_of(tmp_path))[0]
    assert not np.array_equal(start[OWN_WEIGHTS]["layer_0"], saved[OWN_WEIGHTS]["layer_0"])


def test_layers_that_are_not_there_are_refused(teacher):
    with pytest.raises(UserError, match="layer 7 of the teacher, whose last is 2"):
        student(teacher, Cell(rows=8), "distill.hidden_layers={0: 7}")
    with pytest.raises(UserError, match="a layer of the student, whose last is 1"):
        student(teacher, Cell(rows=8), "distill.hidden_layers={2: 1}")


@exhaustive
def test_stored_tokens_of_a_teacher_go_on_at_another_dp_and_name_what_is_wrong(teacher, tmp_path):
    """All of the vocabulary but one token stored is the divergence; a run reads its own samples."""
    keys = [*SMALL, *FEATURES["dense"], LAYERS, "data.mock=true", "train.objective=distill"]
    keys += ["train.global_batch_size=16", "train.micro_batch_size=2", "train.steps=2"]
    keys += [f"distill.teacher={teacher}", "data.seq_length=16", "schedule.warmup_steps=1"]
    cfg, store = load(None, keys), tmp_path / "store"
    assert write_teacher(cfg, store, VOCAB - 1) == 32
    kept = {path: path.stat().st_mtime_ns for path in store.glob("*.npz")}
    assert len(kept) == 2 and write_teacher(cfg, store, VOCAB - 1) == 32
    assert kept == {path: path.stat().st_mtime_ns for path in store.glob("*.npz")}
    found = []
    for more in (["mesh.dp=1"], [f"distill.stored={store}", "mesh.dp=2"]):
        trainer = Trainer(load(None, [*keys, *more]), devices=jax.devices()[: len(more)])
        trainer.init()
        batches = distillation_batches(trainer, {})
        losses = []
        for batch in batches.training.batches(0, 2, trainer.local_rows):
            losses.append(float(trainer.run_program(GRADIENTS, batch).losses["divergence"]))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-4)
    stored = TeacherStore(store)
    tokens = np.zeros((1, 16), np.int32)
    with pytest.raises(UserError, match="sample 1 was written for other tokens"):
        stored.read("train", range(1, 2), tokens)
    with pytest.raises(UserError, match="sample 32 of train is not in it"):
        stored.read("train", range(32, 33), tokens)
    bytes_of = bytearray(stored.shard("train", 16).read_bytes())
    bytes_of[len(bytes_of) // 2] ^= 1
    stored.shard("train", 16).write_bytes(bytes_of)
    with pytest.raises(UserError, match=r"0016.npz: cannot be read: .*; delete it"):
        stored.read("train", range(17, 18), tokens)
    with pytest.raises(UserError, match="was written by another teacher or setting"):
        write_teacher(cfg, store, 3)
    with pytest.raises(UserError, match="written with temperature=1.0, and this run has 2.0"):
        load_objective = [*keys, "mesh.dp=1", f"distill.stored={store}", "distill.temperature=2.0"]
        Trainer(load(None, load_objective), devices=jax.devices()[:1])


@exhaustive
def test_a_teacher_s_vocabulary_may_go_on_where_the_student_s_ends(tmp_path):
    """The loss is that of the teacher's logits of the tokens that both have, on two devices."""
    text = [" ".join(f"{word}{word}s" for word in ("tree", "leaf", "root", "bark"))]
    sizes = {"few": 260, "more": 264}
    files = {name: tmp_path / f"{name}.json" for name in sizes}
    for name, size in sizes.items():
        assert train_tokenizer(text, size, files[name]).vocab_size == size
    model = TEACHER.model_copy(update={"vocab_size": 300, "vocab_multiple": 2})
    definition, params = split(build(model, nnx.Rngs(3)))
    extras = {"tokenizer.json": files["more"].read_bytes()}
    folder = tmp_path / "teacher"
    write_weights(folder, array_source(model, params), definition.specs, extras=extras)
    keys = ["model.vocab_size=270", f"data.tokenizer={files['few']}"]
    sums, counts = student(folder, Cell({"tp": 2}, rows=8), *keys).run_program(
        LOSSES, batch := make_batch(8)
    )
    one = make_trainer("dense", Cell(rows=8), LAYERS, "model.vocab_size=270")
    inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
    log_p = jax.nn.log_softmax(from_pretrained(folder).model(*inputs)[..., :270])
    log_q = jax.nn.log_softmax(one.definition.bind(one.params())(*inputs))
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(-1) * batch["loss_mask"]
    np.testing.assert_allclose(sums["loss"], divergence.sum(), rtol=1e-5)
    train_tokenizer(["zz yy xx ww zz yy xx ww"], 260, files["few"])
    other = tmp_path / "other.json"
    files["few"].rename(other)
    with pytest.raises(UserError, match=r"token 257 is '.*' in .*other.json and '.*' in the"):
        student(folder, Cell(rows=8), keys[0], f"data.tokenizer={other}")
    with pytest.raises(UserError, match="data.tokenizer is not set to the student's, so tokens"):
        student(folder, Cell(rows=8), keys[0])


@slow
def test_the_estimate_of_memory_counts_the_teacher_s_shards_and_fields(teacher):
    trainer = student(teacher, Cell({"dp": 2, "tp": 2}, 1, 1, rows=8), HIDDEN)
    placed = trainer.place(make_batch(8))

    def here(*arrays) -> int:
        shards = [array.addressable_shards[0].data for array in arrays]
        return sum(shard.nbytes for shard in shards)

    held = here(*jax.tree.leaves(teacher_of(trainer).weights()["params"]))
    fields = 2 * here(placed["teacher_hidden"], placed["teacher_layers"])
    real = held + fields + here(placed["teacher_head"])
    found = teacher_bytes(trainer.cfg, dict(trainer.mesh.shape), trainer.objective)
    assert found == pytest.approx(real, rel=0.01)
    need = bytes_per_device(trainer.cfg, trainer.cfg.mesh, 4, trainer.specs)
    assert need["teacher"] == found


def test_a_teacher_of_another_vocabulary_is_refused(teacher):
    with pytest.raises(UserError, match="distil between models of one tokenizer"):
        make_trainer(
            "dense",
            Cell(rows=8),
            f"distill.teacher={teacher}",
            "train.objective=distill",
            "model.vocab_size=320",
        )
    with pytest.raises(UserError, match="distill.teacher is not set"):
        make_trainer("dense", Cell(rows=8), "train.objective=distill")
