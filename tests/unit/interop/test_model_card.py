"""The model card of an export tells what the run recorded, and nothing of this machine."""

import json
from pathlib import Path

import pytest
import yaml

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.model_card import with_card

TINY = ModelConfig(
    model_type="llama",
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2},
)
RUN = {
    "step": 1200,
    "consumed_samples": 38_400,
    "held_out_loss": 2.125,
    "data": [{"path": "/secret/data/wiki"}],
    "versions": {"mjax": "0.1.7"},
    "config": {
        "checkpoint": {"init_from": "org/base"},
        "data": {"seq_length": 512, "conversations": {"path": "/secret/chats.jsonl"}},
        "schedule": {"lr": 3e-4},
        "precision": {"compute": "bfloat16", "fp8": "none"},
        "lora": {"rank": 0},
    },
}


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Writes the record of a step of a run; gives the run."""
    monkeypatch.chdir(tmp_path)

    def write(record: dict) -> Path:
        folder = tmp_path / "secret" / "my-run"
        for item in ("state", "meta"):
            (folder / "checkpoints" / "1200" / item).mkdir(parents=True, exist_ok=True)
        file = folder / "checkpoints" / "1200" / "meta" / "metadata"
        file.write_text(json.dumps(record))
        return folder

    return write


def read(card: bytes) -> tuple[dict, str]:
    _, front, text = card.decode().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_of_a_run(step):
    files = with_card({"README.md": b"of the base"}, TINY, str(step(RUN)), None)
    metadata, text = read(files["README.md"])
    assert files["BASE_README.md"] == b"of the base"
    assert metadata == {
        "library_name": "transformers",
        "license": "unknown",
        "base_model": "org/base",
        "pipeline_tag": "text-generation",
        "tags": ["mjax", "llama"],
    }
    assert text.startswith("\n# my-run\n")
    for fact in (
        "| base model | org/base |",
        "| step | 1,200 |",
        "| tokens seen, padding included | 19,660,800 |",
        "| data | wiki, chats.jsonl |",
        "| held-out loss | 2.125 |",
        "| `schedule.lr` | 0.0003 |",
        "| `precision.compute` | bfloat16 |",
        "| mjax | 0.1.7 |",
        "| parameters | 39,072 |",
    ):
        assert fact in text, fact
    assert "secret" not in text and "fp8" not in text and "rank" not in text


def test_a_base_on_this_machine_is_no_model_of_the_hub(step):
    config = RUN["config"] | {"checkpoint": {"init_from": "/secret/Llama-3"}}
    run = step(RUN | {"config": config, "held_out_loss": None})
    metadata, text = read(with_card({}, TINY, str(run), "apache-2.0")["README.md"])
    assert "base_model" not in metadata and metadata["license"] == "apache-2.0"
    assert "| base model | Llama-3 |" in text and "held-out" not in text and "secret" not in text


def test_the_commit_of_the_base_of_adapters_is_named(step):
    run = step(RUN | {"base": {"from": "org/base@" + 40 * "a", "digest": "1"}})
    metadata, text = read(with_card({}, TINY, str(run), None)["README.md"])
    assert metadata["base_model"] == "org/base" and f"org/base@{40 * 'a'} |" in text


def test_weights_that_no_run_changed_keep_their_card(step):
    weights = {"contents": "weights", "step": 0, "config": {}, "versions": {"mjax": "0.1.7"}}
    run = step(weights)
    assert with_card({"README.md": b"theirs"}, TINY, str(run), None) == {"README.md": b"theirs"}
    metadata, text = read(with_card({}, TINY, str(run), None)["README.md"])
    assert metadata["license"] == "unknown" and "Weights converted by mjax." in text
    assert "step" not in text and "tokens seen" not in text
