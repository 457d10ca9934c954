"""Law: input made to break a reader ends in one line that names it, within seconds."""

import json
import struct
import time

import numpy as np
import pytest

from mjax.checkpoint.base.safetensors import open_folder, read_header
from mjax.config import load
from mjax.data.base.chat import ChatTemplate
from mjax.data.corpus.text import prepare_text
from mjax.errors import UserError
from mjax.json_file import read_json
from mjax.train import Trainer


@pytest.fixture(autouse=True)
def within_seconds():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 20


def one_line(error) -> str:
    line = str(error.value)
    assert "\n" not in line and len(line) < 1000
    return line


# ---- YAML and sizes --------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than 100,000 values"),
        ("model: &m\n  a: *m\n", "not valid YAML: nested too deeply"),
        ("[" * 5000 + "]" * 5000, "not valid YAML: nested too deeply"),
        ("a: " + "x" * 5_000_000, "longer than 4,000,000 characters"),
        ("run: {dir: " + "x" * 100_000 + ", seed: []}", "run.seed="),
        ("train: {steps: [" + "1, " * 50_000 + "1]}", "train.steps=[1, 1"),
        ("? [a, b]\n: 1\n", ""),
    ],
)
def test_yaml_made_to_explode(tmp_path, text, words):
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load(file)
    assert words in one_line(error) and "bomb.yaml" in str(error.value)


def test_a_bomb_in_a_variable_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PATHS", "[" + ", ".join(["&a [x]", *["*a"] * 3]) + "]")
    (tmp_path / "c.yaml").write_text("data: {paths: ${PATHS}}")
    with pytest.raises(UserError, match="not valid YAML"):
        load(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "model.num_hidden_layers=1000000000",
        "model.hidden_size=1000000000000",
        "model.vocab_size=1e30",
        "train.global_batch_size=1000000000000000000000",
        "data.seq_length=1000000000000",
        "data.workers=1000000",
        "mesh.tp=1000000000",
        "model.layer_pattern=G*1000000000",
        "model.layer_pattern='(((G*1000)*1000)*1000)'",
        "mesh.pipeline_layout='E|(t|)*9999999999,L'",
        "train.remat=full*99999999999999999999",
    ],
)
def test_sizes_beyond_all_measure(override):
    with pytest.raises(UserError) as error:
        load(None, ["data.mock=true", override])
    assert override.partition("=")[0] in one_line(error)


# ---- JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"a":' * 200_000, "[" * 200_000, "", "\0", "{", "[1]", '{"a": 1}x', "NaN"]
)
def test_json_that_is_damaged_or_nested_without_end(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_json(tmp_path / "config.json")
    assert "config.json: not " in one_line(error)


@pytest.mark.parametrize("text", ["{ torn", "", "[" * 100_000, "[]"])
def test_damaged_settings_of_a_prepared_corpus(tmp_path, text):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words " * 100)
    data = load(None, [f"data.text={tmp_path}/text", "data.tokenizer=byte"]).data
    prepare_text(data, tmp_path / "run")
    (tmp_path / "run" / "data" / "settings.json").write_text(text)
    with pytest.raises(UserError) as error:
        prepare_text(data, tmp_path / "run")
    assert "settings.json: not " in one_line(error) and "delete the folder" in str(error.value)


# ---- chat templates --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 999999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 1 / 0 }}",
        "{{ range(999999999) | list }}",
        "{% for i in",
    ],
)
def test_templates_that_loop_or_explode(monkeypatch, source):
    pytest.importorskip("jinja2")
    monkeypatch.setattr("mjax.data.base.chat.LONGEST_RENDERING", 1.0)
    template = ChatTemplate(source, "folder/chat_template.jinja", {})
    with pytest.raises(UserError) as error:
        template.render([{"role": "user", "content": "hi"}])
    assert "folder/chat_template.jinja: the chat template cannot render" in one_line(error)


# ---- safetensors -----------------------------------------------------------------------------


def tensor(first, last, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def write(file, header, size) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


GOOD = {"a": tensor(0, 8), "b": tensor(8, 16)}


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        (GOOD | {"b": tensor(4, 12)}, 12, "tensor b overlaps another"),
        (GOOD | {"b": tensor(12, 20)}, 20, "tensor b leaves a gap"),
        (GOOD, 20, "4 bytes belong to no tensor"),
        ({}, 4, "4 bytes belong to no tensor"),
        (GOOD, 12, "ends within tensor b"),
        ({"a": tensor(-8, 0)}, 0, "damaged safetensors header"),
        ({"a": tensor(0.0, 8.0)}, 8, "damaged safetensors header"),
        ({"a": tensor(0, 8, (2.0,))}, 8, "damaged safetensors header"),
        ({"a": tensor(0, 8, (-2,))}, 8, "damaged safetensors header"),
        ({"a": tensor(0, 8, (True, 2))}, 8, "damaged safetensors header"),
        ({"a": tensor(8, 0)}, 8, "tensor a has -8 bytes"),
        ({"a": tensor(8, 0, dtype="F4")}, 8, "tensor a leaves a gap"),
        ({"a": tensor(0, 8, (1 << 62, 1 << 62))}, 8, "tensor a has 8 bytes"),
        (b'{"a":' * 100_000, 0, "damaged safetensors header"),
        ([], 0, "damaged safetensors header"),
    ],
)
def test_safetensors_headers_that_lie(tmp_path, header, size, words):
    write(tmp_path / "model.safetensors", header, size)
    with pytest.raises(UserError) as error:
        read_header(tmp_path / "model.safetensors")
    assert f"model.safetensors: {words}" in one_line(error)


def test_safetensors_headers_that_are_true(tmp_path):
    file = tmp_path / "model.safetensors"
    write(file, GOOD | {"__metadata__": {"format": "pt"}, "empty": tensor(8, 8, (0, 5))}, 16)
    assert set(read_header(file)) == {"a", "b", "empty"}


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", 7])
def test_weight_maps_name_plain_files(tmp_path, name):
    write(tmp_path / "model.safetensors", GOOD, 16)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError) as error:
        open_folder(tmp_path)
    assert "model.safetensors.index.json: " in one_line(error)


# ---- batches ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    small = [
        "model.hidden_size=32",
        "model.attention.num_attention_heads=4",
        "model.num_hidden_layers=1",
    ]
    trainer = Trainer(
        load(None, ["data.mock=true", "model.vocab_size=50", "train.micro_batch_size=1", *small])
    )
    trainer.init()
    return trainer


def batch(**changes) -> dict:
    ones = np.ones((8, 16), np.int32)
    fields = {"tokens": ones, "labels": ones, "loss_mask": ones.astype(np.float32)}
    return fields | {"segment_ids": ones, "positions": ones} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.full((8, 16), 50)}, "tokens holds id 50, outside model.vocab_size=50"),
        ({"tokens": np.full((8, 16), -1)}, "tokens holds id -1"),
        ({"tokens": np.full((8, 16), 2**32)}, "tokens holds id 4294967296"),
        ({"labels": np.full((8, 16), 999)}, "labels holds id 999"),
        ({"tokens": np.ones((8, 16))}, "tokens holds float64; give whole numbers of int32"),
        (
            {"tokens": np.ones((8, 15), int)},
            r"tokens has shape (8, 15); it must be (8, 16)",
        ),
        ({"positions": np.ones(16, int)}, "positions has shape (16,)"),
        ({"positions": np.ones((0, 16), int)}, "positions has shape (0, 16)"),
        ({"loss_mask": np.full((8, 16), "1")}, "loss_mask holds <U1"),
    ],
)
def test_batches_that_are_not_what_the_step_takes(trainer, changes, words):
    before = trainer.state
    with pytest.raises(UserError) as error:
        trainer.step(batch(**changes))
    assert f"batch: {words}" in one_line(error)
    assert trainer.state is before and trainer.step_number == 0


def test_labels_that_do_not_count_may_be_anything(trainer):
    labels = np.full((8, 16), -100)
    trainer.placer.place(batch(labels=labels, loss_mask=np.zeros((8, 16))))
