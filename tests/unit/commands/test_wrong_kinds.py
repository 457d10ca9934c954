"""Values of another kind than belongs there are one line each, whatever reads them."""

import copy
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mjax import convert
from mjax.bench.data import main as measure
from mjax.checkpoint.base.companion_files import end_ids
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.chat import load_chat_template
from mjax.data.base.tokenizer import load_tokenizer, train_tokenizer
from mjax.data.corpus.indexed import IndexedDatasetWriter
from mjax.data.sentences.labelled import LabelledDataset
from mjax.errors import UserError
from mjax.evaluate import __main__ as evaluate
from mjax.generate import __main__ as generate
from mjax.infer.checks import require_decoder
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import Pretrained
from mjax.models import build, split
from mjax.objectives.fields import BatchField
from mjax.objectives.next_token import NextToken
from mjax.objectives.objective import objective_of
from mjax.train.batch import field_maker
from mjax.train.trainer import Trainer
from tests.marks import quick
from tests.unit.interop.test_config_words import LLAMA, LLAVA

SMALL = """data.mock=true data.seq_length=8 model.hidden_size=16 model.num_hidden_layers=1
    model.attention.num_attention_heads=2 model.vocab_size=64 train.global_batch_size=1
    train.micro_batch_size=1""".split()
TOWER = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, image_size=4)
TOWER |= dict(patch_size=2, image_token_id=250, num_channels=1)
SIZES = dict(vocab_size=257, hidden_size=16, max_position_embeddings=32, initializer_range=0.3)
SIZES |= dict(attention={"num_attention_heads": 2}, intermediate_size=24)


# ---- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, path, value, message",
    [
        (LLAMA, ("model_type",), ["llama"], r"model_type=\['llama'\] is not supported"),
        (LLAMA, ("rope_scaling",), ["yarn"], r"rope_scaling=\['yarn'\]"),
        (LLAMA, ("rope_parameters",), "yarn", "rope_parameters='yarn'"),
        (LLAMA, ("hidden_act",), ["silu"], r"hidden_act=\['silu'\] is not of the kind"),
        (LLAMA, ("num_hidden_layers",), 10**12, "num_hidden_layers=1000000000000 is above"),
        (LLAVA, ("text_config",), [1], r"text_config=\[1\] is not of the kind"),
        (LLAVA, ("vision_config", "image_size"), "x", "image_size"),
        (
            LLAVA,
            ("vision_config", "num_hidden_layers"),
            "2",
            r"vision_config.num_hidden_layers='2'",
        ),
        (LLAVA, ("vision_config", "patch_size"), 0, "patch_size=0 cuts no image"),
        (LLAVA, ("text_config", "hidden_act"), {"a": 1}, r"text_config.hidden_act=\{'a': 1\}"),
    ],
)
def test_a_value_of_config_json_is_named(config, path, value, message):
    config = copy.deepcopy(config)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError, match=message) as error:
        config_from_hf(config)
    assert len(str(error.value).splitlines()) == 1


def test_keys_may_be_numbers():
    assert config_from_hf(LLAMA | {"id2label": {0: "a", 1: "b"}}) == config_from_hf(LLAMA)


# ---- files beside the weights --------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["2", [1, "2"], {"a": 1}, True, 1.5])
def test_ids_that_end_a_text_are_whole_numbers(tmp_path, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match="generation_config.json: eos_token_id=.* is no id"):
        end_ids(tmp_path, None)


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
@pytest.mark.parametrize("token", [["a"], 5, {"text": "a"}])
def test_a_token_is_a_text(tmp_path, key, token):
    settings = {key: token, "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="tokenizer_config.json .*the token .* is neither a text"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("template", [5, [1], [{"name": "a"}], {"default": 1}, True])
def test_a_chat_template_is_a_text(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match="chat_template is neither a text nor named ones"):
        load_chat_template(tmp_path)


def test_a_chat_template_is_utf_8(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="a chat template cannot be read: .*invalid start byte"):
        load_chat_template(tmp_path)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_shard_has_a_size(monkeypatch, size):
    argv = ["convert", "export", "--ckpt", "X", "--hf", "Y", "--max-shard-gb", size]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError, match="--max-shard-gb .*: give a number above 0"):
        convert.main()


def given(*words: str) -> SimpleNamespace:
    return generate._parse(["--ckpt", "X", "--prompt", "x", *words])


def test_pictures_and_sounds_need_a_tower():
    model = ModelConfig(**SIZES)
    with pytest.raises(UserError, match="--image p.png: the model has no tower that reads it"):
        generate.read_images(given("--image", "p.png"), model, None)
    with pytest.raises(UserError, match="--audio s.wav: the model has no tower that reads it"):
        generate.read_sounds(given("--audio", "s.wav"), model)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--image-mean 0.1 0.2 0.3", "--image-mean .*: give one finite number"),
        ("--image-mean nan", "--image-mean nan: give one finite number"),
        ("--image-std 0", "--image-std 0.0: give numbers above 0"),
    ],
)
def test_what_images_lose_is_one_number_a_channel(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        generate.read_images(given("--image", "p.png", *words.split()), llava(), None)


def test_a_tower_of_one_channel_reads_gray_by_itself(tmp_path):
    from PIL import Image

    Image.new("L", (4, 4), 255).save(tmp_path / "p.png")
    images, _ = generate.read_images(given("--image", f"{tmp_path}/p.png"), llava(), None)
    assert images.shape == (1, 1, 4, 4, 1) and np.array_equal(images, np.ones(images.shape))


def llava() -> ModelConfig:
    layers = dict(num_hidden_layers=3, layer_pattern="V*1, [P], G*1")
    return ModelConfig(**SIZES, **layers, vision=TOWER)


def test_a_misspelt_task_is_named(monkeypatch):
    class Manager:
        all_tasks: ClassVar = ["hellaswag", "gsm8k"]

        def __init__(self, include_path):
            pass

        def match_tasks(self, names):
            return [name for name in self.all_tasks if name in names]

    names = "lm_eval", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model"
    stubs = {name: ModuleType(name) for name in names}
    stubs["lm_eval"].simple_evaluate = None
    stubs["lm_eval.tasks"].TaskManager = Manager
    stubs["lm_eval.api.model"].LM = object
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UserError, match="no task 'helaswag'; did you mean hellaswag"):
        evaluate.main(["harness", "--ckpt", "X", "--tasks", "gsm8k,helaswag"])
    monkeypatch.delitem(sys.modules, "mjax.evaluate.harness", raising=False)


def test_a_corpus_has_a_name_and_a_vocabulary_an_end(tmp_path):
    with pytest.raises(UserError, match="'' names no files to write"):
        IndexedDatasetWriter("")
    with pytest.raises(UserError, match="vocabulary of 10000001: at least 257"):
        train_tokenizer(["a"], 10_000_001, tmp_path / "tokenizer.json")


def test_a_benchmark_needs_something_to_measure():
    with pytest.raises(UserError, match="--tokens nan: give 1 or more"):
        measure(["--tokens", "nan"])


def test_a_tower_of_one_channel_is_trained_with_one_mean():
    words = ["model.layer_pattern='V*1,[P],G*1'", "model.num_hidden_layers=3"]
    words += [f"model.vision.{key}={value}" for key, value in TOWER.items()]
    with pytest.raises(UserError, match="mean=.* does not fit model.vision.num_channels=1"):
        load(None, [*SMALL, *words, "model.vocab_size=257", "data.images.mean=[0.1, 0.2, 0.3]"])


# ---- models --------------------------------------------------------------------------------------


def test_a_text_without_images_has_a_perplexity_under_a_llava():
    cfg = llava()
    definition, params = split(build(cfg, nnx.Rngs(0)))
    ids = np.random.default_rng(0).integers(0, 250, 12)
    found = evaluate.score(Pretrained(cfg, definition, params, None, None), ids, 32, 16)
    chances = jax.nn.log_softmax(definition.bind(params)(jnp.asarray(ids[None, :-1])))[0]
    wanted = -float(chances[np.arange(11), ids[1:]].sum())
    assert found == (pytest.approx(wanted, rel=1e-5), 11)


def test_segments_of_a_source_and_its_target_go_together():
    relative = dict(position_embedding="relative", decoder_start_token_id=0)
    cfg = ModelConfig(**SIZES, num_hidden_layers=2, layer_pattern="B, [GXD]", **relative)
    model, tokens = build(cfg, nnx.Rngs(0)), jnp.ones((1, 4), jnp.int32)
    for given in ({"segments": tokens}, {"target_segments": tokens}):
        with pytest.raises(UserError, match="segments and target_segments go together"):
            model(tokens, target=tokens, **given)


def test_a_pair_of_texts_needs_room(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a", "text_pair": "b", "label": 0}\n' * 2)
    frame = "cls_token_id=250 sep_token_id=251 pad_token_id=252".split()
    words = [*(f"data.masked.{word}" for word in frame), "model.layer_pattern=B"]
    words += ["data.seq_length=3", "model.bert.num_labels=2", "model.vocab_size=257"]
    cfg = load(None, [*SMALL, *words, "train.objective=classify"])
    with pytest.raises(UserError, match=r"data.seq_length=3: \[CLS\], a token, and .* need 4"):
        LabelledDataset(lines, "train", [1, 0, 0], 2, cfg, load_tokenizer("byte"))


# ---- objectives ----------------------------------------------------------------------------------


class NoLoss(NextToken):
    def counts(self, batch):
        return {"mine": jnp.float32(1)}


class CountOfRows(NextToken):
    def counts(self, batch):
        return {"loss": jnp.sum(batch["loss_mask"], 1)}


class LossOfRows(NextToken):
    def losses(self, *args):
        return {"loss": super().losses(*args)["loss"] * jnp.ones(3)}


class Uncounted(NextToken):
    def losses(self, *args):
        return super().losses(*args) | {"more": jnp.float32(1)}


class Shorter(NextToken):
    def embed(self, *args):
        return super().embed(*args)[:, :-1]


class Derives(NextToken):
    def derive_fields(self, batch, parallel):
        return {"more": jnp.zeros(5)}


class UnknownAxis(NextToken):
    fields: ClassVar = NextToken.fields | {"labels": BatchField(np.int32, ("batch", "columns"))}


class MakesNothing(NextToken):
    def make_fields(self, batch, seed, step, rows):
        return None


class NoFields(NextToken):
    fields: ClassVar = {"tokens": np.int32}


class Raises(NextToken):
    def __init__(self):
        raise KeyError("mine")


@pytest.mark.parametrize(
    "kind, message",
    quick(
        [
            (NoLoss, "NoLoss.counts returns mine, without 'loss'"),
            (CountOfRows, r"CountOfRows.counts: 'loss' is no number \(\(1,\)\)"),
            (LossOfRows, r"LossOfRows.losses: 'loss' is no number \(\(3,\)\)"),
            (Uncounted, "Uncounted.counts returns loss, without 'more'"),
            (Shorter, r"Shorter.embed returns \(1, 7, 16\), and the layers take .*\(1, 8, 16\)"),
            (Derives, r"Derives.derive_fields: more has shape \(5,\); give the 1 rows"),
            (UnknownAxis, r"batch: labels has the axes \('batch', 'columns'\); known: batch, seq"),
        ],
        0,
        3,
        4,
    ),
)
def test_what_an_objective_returns_is_checked(kind, message):
    cfg = load(None, [*SMALL, f"train.objective={__name__}:{kind.__name__}"])
    trainer = Trainer(cfg, devices=jax.devices()[:1])
    trainer.init()
    ones = np.ones((1, 8), np.int32)
    fields = {name: ones for name in ("tokens", "labels", "loss_mask", "segment_ids", "positions")}
    with pytest.raises(UserError, match=message):
        trainer.step(fields)


def test_an_objective_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_objective.py").write_text("x = 1\nx / 0\n")
    (tmp_path / "misspelt_objective.py").write_text("x = 1\n\ndef (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in (
        ("broken_objective:A", "broken_objective:A: ZeroDivisionError.*broken_objective.py:2"),
        ("misspelt_objective:A", "misspelt_objective:A: SyntaxError.*misspelt_objective.py:3"),
        (f"{__name__}:Raises", "Raises: KeyError: 'mine' at .*test_wrong_kinds.py:"),
        (f"{__name__}:NoFields", "NoFields: fields is no dictionary of BatchField"),
    ):
        with pytest.raises(UserError, match=message) as error:
            objective_of(load(None, [*SMALL, f"train.objective={name}"]))
        assert len(str(error.value).splitlines()) == 1
    cfg = load(None, SMALL)
    with pytest.raises(UserError, match="MakesNothing.make_fields returns None"):
        field_maker(cfg, MakesNothing())({}, 0, np.arange(1))


def test_a_model_that_scores_texts_is_named_as_one():
    with pytest.raises(UserError, match="^model.num_labels=1: a model that scores texts continues"):
        require_decoder(ModelConfig(num_labels=1))
