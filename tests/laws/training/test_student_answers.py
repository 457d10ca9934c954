"""Laws of distillation on answers that the student draws: kills, meshes, shares, equal models."""

import json

import jax
import numpy as np
import pytest

from mjax.config import load
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.interop.pretrained import from_pretrained
from mjax.post import reinforce_batches
from mjax.post.distill import distill_defaults
from mjax.post.rollouts.student_answers import StudentStream, conversation_prompts
from mjax.post.teacher import distillation_batches
from mjax.run.batches import from_config
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.laws.run.test_failures import losses, records
from tests.laws.training.test_reinforcement import final_params, run_until_killed
from tests.marks import exhaustive, slow
from tests.teachers import write_teacher_folder
from tests.tiny import TINY

WIDER = "model.hidden_size=48", "model.attention.num_attention_heads=4"
ENVIRONMENT = "reinforce.environment=tests.laws.training.test_reinforcement:Evens"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with pairs of texts, and a wider model that is the teacher."""
    folder = tmp_path_factory.mktemp("files")
    rows = [{"prompt": f"{n}:", "completion": str(n % 7)} for n in range(60)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = config(folder, "x", *WIDER, f"distill.teacher={folder}", "distill.student_share=0")
    write_teacher_folder(folder / "teacher", cfg.model)
    return folder


def config(files, folder, *keys, steps=4):
    """A run of the student on its answers to the prompts of the pairs."""
    own = [key for key in TINY if not key.startswith(("data.mock", "model.vocab", "data.seq"))]
    given = ["model.vocab_size=257", "data.tokenizer=byte", "data.seq_length=24"]
    given += [f"run.dir={folder}", f"train.steps={steps}", "train.eval_interval=null"]
    given += ["schedule.lr=1e-2", "schedule.warmup_steps=0", "schedule.decay=constant"]
    given.append("checkpoint.keep=9")  # threads of a run that was killed here would still delete
    given += [f"distill.teacher={files}/teacher", "distill.student_share=1", "distill.beta=1"]
    if ENVIRONMENT not in keys:
        given += [f"data.conversations.path={files}/pairs.jsonl", "data.split=[0.8, 0.2, 0]"]
    if "distill.student_share=0" not in keys:
        given += ["reinforce.max_new_tokens=8", "reinforce.prompts_per_step=4"]
        given += ["reinforce.group_size=1"]
    return load(None, [*own, *given, *keys], distill_defaults)


def run(cfg, devices=1):
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:devices]), distillation_batches)


def figures(folder):
    return [r for r in records(folder) if "divergence" in r]


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """A fifth of all tokens ends an answer, as drawn weights draw all alike."""
    monkeypatch.setattr(reinforce_batches, "answer_ends", lambda *given: [*range(0, 257, 5)])


@exhaustive
def test_a_run_that_is_killed_in_its_answers_ends_with_the_bits_of_another(
    files, tmp_path, monkeypatch
):
    """A phase has the answers of two steps, between which some are on data."""
    keys = "checkpoint.interval=1", "distill.student_share=0.6", "reinforce.updates_per_rollout=2"
    keys += "run.seed=5", "distill.hidden_layers={0: 0}"  # with a matrix between both widths
    whole = config(files, tmp_path / "whole", *keys, steps=6)
    parts = config(files, tmp_path / "parts", *keys, steps=6)
    run(whole)
    assert run_until_killed(run, parts, 12, monkeypatch)
    run(parts)
    jax.tree.map(np.testing.assert_array_equal, final_params(parts), final_params(whole))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    drawn = [r["student_drawn"] for r in figures(tmp_path / "whole")]
    assert drawn == [1, 0, 0, 1, 1, 1]


@exhaustive
def test_a_mesh_learns_what_one_device_does(files, tmp_path):
    axes = "mesh.dp=2", "mesh.tp=2", "train.micro_batch_size=2"
    run(config(files, tmp_path / "one", steps=2))
    run(config(files, tmp_path / "four", *axes, steps=2), devices=4)
    pairs = zip(figures(tmp_path / "four"), figures(tmp_path / "one"), strict=True)
    for ours, theirs in pairs:
        for name in ("loss", "grad_norm", "divergence", "completions/mean_length"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


@slow
def test_a_student_that_equals_its_teacher_learns_nothing(files, tmp_path):
    """From an environment, whose rewards are logged; with losses of layers."""
    start = f"checkpoint.init_from={files}/teacher"
    keys = *WIDER, start, ENVIRONMENT, "distill.hidden_layers={0: 0}"
    run(config(files, tmp_path, *keys, steps=1))
    (found,) = figures(tmp_path)
    assert abs(found["loss"]) < 1e-6 and found["grad_norm"] < 1e-4 and found["reward"] > 0


@slow
def test_the_steps_without_answers_read_what_they_would_anyway(files, tmp_path, monkeypatch):
    keys = "distill.student_share=0.4", "train.steps=40"
    cfg = config(files, tmp_path, *keys)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    monkeypatch.setattr(StudentStream, "next_batch", lambda stream, step: None)
    stream = distillation_batches(trainer, {}).training
    mixed = list(stream.batches(0, 40, None))
    plain = list(from_config(trainer, {}).training.batches(0, 40, None))
    drawn = [batch is None for batch in mixed]
    assert drawn == [stream.draws(step) for step in range(40)] and 8 <= sum(drawn) <= 24
    later = list(stream.batches(10, 30, None))
    for ours, theirs in zip([*mixed, *later], [*plain, *plain[10:]], strict=True):
        if ours is not None:
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_prompts_are_the_texts_before_answers_of_the_training_part(files, tmp_path):
    cfg = config(files, tmp_path)
    tokenizer = load_tokenizer("byte")
    prompts = conversation_prompts(cfg, tokenizer)
    texts = [tokenizer.decode(ids.tolist()) for ids in prompts.prompts]
    assert len(set(texts)) == len(texts) == 48 and all(text[-1] == ":" for text in texts)
    for seed, index in ((5, 0), (5, 47), (5, 48)):
        prompts.submit(index, "reset", seed, index)
    first, *_ = found = [tokenizer.decode(list(turn.ids)) for _, turn in prompts.ready()]
    assert set(found) <= set(texts) and prompts.ready() == []
    prompts.submit("a", "step", None, [1])
    assert prompts.ready()[0][1].reward == 0
    prompts.submit(0, "reset", 5, 0)
    assert tokenizer.decode(list(prompts.ready()[0][1].ids)) == first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["distill.stored=folder"], "has no answers that are yet to be drawn"),
        (["reinforce.kl_coef=0.1"], "only with policy or value"),
        (["reinforce.workers=2"], "null: its prompts are answered"),
        (["distill.student_share=0", "reinforce.max_new_tokens=8"], "distill.student_share"),
        ([ENVIRONMENT, "distill.student_share=0.5"], "nothing to train on"),
        (["data.conversations.path=null"], "the student needs prompts"),
    ],
)
def test_what_cannot_be_is_refused(files, tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        config(files, tmp_path, *keys)


@exhaustive
def test_a_student_comes_to_say_what_its_teacher_would(files, tmp_path):
    """On held-out answers, which it never saw; they were drawn by neither."""
    keys = "train.eval_interval=20", "train.eval_steps=3", "checkpoint.interval=40"
    keys += "reinforce.prompts_per_step=16", "reinforce.max_new_tokens=12"
    cfg = config(files, tmp_path, *keys, "log.interval=40", steps=40)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    trainer.init()
    batch = next(from_config(trainer, {}).held_out.batches(0, 1, None))
    mask = batch["loss_mask"] > 0

    def choices(model):
        inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
        return np.argmax(model(*inputs), -1)[mask]

    before = choices(trainer.definition.bind(trainer.params()))
    wanted = choices(from_pretrained(files / "teacher").model)
    run(cfg)
    after = choices(from_pretrained(tmp_path).model)
    first, last = (r["eval_divergence"] for r in records(tmp_path) if "eval_divergence" in r)
    assert (before == wanted).mean() < 0.1 and (after == wanted).mean() > 0.2 and last < 0.7 * first
