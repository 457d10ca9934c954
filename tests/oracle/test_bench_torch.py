"""`benchmarks.torch_train` trains what our config means, for each objective that it knows."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="needs the oracle extra")

from benchmarks import torch_train as bench  # noqa: E402
from mjax.config import load  # noqa: E402

TINY = ["--compile", "no", "--steps", "2", "--warmup", "0", "train.freeze=[]"]
TINY += ["train.global_batch_size=4", "train.micro_batch_size=2", "model.hidden_size=32"]
TINY += ["model.attention.num_attention_heads=2", "model.intermediate_size=48"]
TOWER = ["model.vision.image_size=28", "model.vision.hidden_size=32"]
TOWER += ["model.vision.intermediate_size=48", "model.vision.num_attention_heads=2"]
PAIRS = ["model.layer_pattern='V,G'", "model.num_hidden_layers=2", "train.micro_batch_size=4"]
READS = ["model.layer_pattern='V,[P],G'", "model.num_hidden_layers=3", "data.seq_length=16"]
DENSE = ["model.num_hidden_layers=1", "data.seq_length=16"]
EXPERTS = [*DENSE, "model.attention.num_key_value_heads=2", "model.attention.head_dim=16"]

# config, overrides, the loss of a model that knows nothing, how near the first one is
CASES = {
    "vit_l16": (["model.num_hidden_layers=1"], math.log(1000), 0.2),
    "clip_vit_l14": ([*TOWER, *PAIRS], math.log(4), 0.5),
    "llava_1_5_7b": ([*TOWER, *READS], math.log(32064), 0.5),
    "mixtral_8x7b": (EXPERTS, math.log(32000), 0.5),
    "bert_base": (DENSE, math.log(30522), 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_counts_what_mjax_counts(name, capsys):
    overrides, loss, near = CASES[name]
    assert bench.main(["--config", f"configs/models/{name}.yaml", *TINY, *overrides]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["case"]["global_batch"] == 4
    assert record["first_loss"] == pytest.approx(loss, abs=near)
    tokens = 4 * record["case"]["seq"] * 1e3 / record["ms"]
    assert record["tokens_per_second"] == pytest.approx(tokens, rel=0.01)


def test_packed_texts_are_texts_of_their_own():
    keys = ["model.num_hidden_layers=1", "model.vocab_size=512", *TINY[7:], "data.seq_length=16"]
    keys += ["model.attention.num_key_value_heads=1", "model.attention.head_dim=16"]
    cfg = load("configs/models/llama3_8b.yaml", [*keys, "train.micro_batch_size=2"])
    model = bench.made_model(cfg, "float32", "no", "cpu")
    packed = bench.random_inputs(cfg, "cpu", documents=4)
    alone = {"input_ids": packed["input_ids"].reshape(8, 4)}
    alone["labels"] = alone["input_ids"]
    assert model(**packed).loss.item() == pytest.approx(model(**alone).loss.item(), rel=1e-6)


def test_berts_layers_compile_apart_and_its_head_with_the_loss(monkeypatch, capsys):
    import torch
    from torch._dynamo.utils import counters

    def compile_eagerly(module):  # what dynamo captures, without a C++ compiler
        module._compiled_call_impl = torch.compile(module._call_impl, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    losses, captured = [], []
    for depth, mode in ((2, "no"), (2, "layers"), (1, "layers")):
        torch._dynamo.reset()
        counters.clear()
        keys = ["--config", "configs/models/bert_base.yaml", *TINY, *DENSE, "--compile", mode]
        keys += [f"model.num_hidden_layers={depth}", "--dtype", "float32"]
        assert bench.main(keys) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["first_loss"])
        captured.append((counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert captured[0] == (0, 0)
    assert captured[1] == captured[2]  # equal layers share a graph, so depth adds nothing to it
    assert captured[1][0] == 2
