"""`benchmarks.torch_train` trains what our config means, for each objective that it knows."""

import json
import math
from argparse import Namespace
from functools import partial

import jax
import pytest

pytest.importorskip("transformers", reason="needs the oracle extra")

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks import torch_train as bench  # noqa: E402
from mjax.bench.train import batch_of  # noqa: E402
from mjax.config import load  # noqa: E402
from mjax.errors import UserError  # noqa: E402
from mjax.interop.pretrained import source_of  # noqa: E402
from mjax.post.preference_batches import add_roles  # noqa: E402
from mjax.train import Trainer  # noqa: E402
from tests.marks import quick

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


# Four answers a row, compared in fp32; AdamW decays other parameters in torch than here.
ANSWERS = [*DENSE, *TINY[9:], "model.attention.num_key_value_heads=1", "model.vocab_size=512"]
ANSWERS += ["model.attention.head_dim=16", "train.objective=preference", "preference.beta=0.5"]
ANSWERS += ["schedule.lr=0.01", "schedule.decay=constant", "schedule.warmup_steps=0"]
ANSWERS += ["optimizer.weight_decay=0", "precision.compute=float32"]
ANSWERS += ["train.global_batch_size=2", "train.micro_batch_size=2"]
ARGS = Namespace(dtype="float32", compile="no")


@pytest.fixture
def compiled_eagerly(monkeypatch):
    """What dynamo captures is run by torch's own functions, without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


def answers_and_model(*keys: str) -> tuple:
    """(config, model, arguments of its loss), in fp32 on the CPU."""
    cfg = load("configs/models/llama3_8b.yaml", [*ANSWERS, *keys])
    torch.manual_seed(0)
    model = bench.made_model(cfg, "float32", "no", "cpu")
    return cfg, model, bench.random_answers(cfg, "cpu", documents=4)


def test_steps_of_dpo_are_those_of_mjax(tmp_path):
    cfg, model, answers = answers_and_model()
    model.save_pretrained(tmp_path)
    trainer = Trainer(cfg, devices=jax.devices()[:1])
    trainer.load_params(source_of(tmp_path))
    add_roles(trainer)
    batch = batch_of(trainer, documents=4)
    ours = [float(trainer.step(batch)["loss"]) for _ in range(4)]

    reference = bench.copy_in_bf16(cfg, model, ARGS, "cpu")
    loss = partial(bench.preference_loss(model, reference, cfg.preference.beta, "no"), **answers)
    step = bench.training_step(cfg, model, loss, False, "cpu")
    theirs = [step().item() for _ in range(4)]
    assert ours[0] == pytest.approx(math.log(2), rel=1e-6) and ours[3] < ours[0] / 2
    assert theirs == pytest.approx(ours, rel=2e-3)


def test_the_reference_of_adapters_is_their_base():
    cfg, model, answers = answers_and_model("lora.rank=2")
    _, base, _ = answers_and_model()
    base.to(torch.bfloat16)
    loss = bench.preference_loss(model, None, cfg.preference.beta, "no")
    assert loss(**answers).item() == pytest.approx(math.log(2), rel=1e-6)  # they begin at zero
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    apart = bench.preference_loss(model, base, cfg.preference.beta, "no")
    found = loss(**answers)
    assert found.item() == pytest.approx(apart(**answers).item(), rel=1e-6)
    assert abs(found.item() - math.log(2)) > 0.01
    found.backward()
    has_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert has_gradient == {name for name, _ in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("mode", "rank", "graphs"), quick([("model", 0, 2), ("layers", 0, 4), ("layers", 2, 5)], 2)
)
def test_policy_and_reference_compile_to_few_graphs(mode, rank, graphs, compiled_eagerly, capsys):
    """One graph for each; apart, one for its layers and one for its log-probabilities.

    The input of the first layer with adapters has no gradient, so it has a graph of its own.
    """
    keys = [*TINY[2:6], *ANSWERS, "model.num_hidden_layers=2", "--documents", "4"]
    keys += [f"lora.rank={rank}", "--compile", mode]
    assert bench.main(["--config", "configs/models/llama3_8b.yaml", *keys]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["first_loss"]
    assert first == pytest.approx(math.log(2), abs=0.01)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_berts_layers_compile_apart_and_its_head_with_the_loss(compiled_eagerly, capsys):
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


def test_padded_pairs_have_the_loss_that_they_have_alone(tmp_path):
    pairs = [{"prompt": "a" * n, "chosen": "b" * n, "rejected": "c" * 9} for n in (4, 9, 3, 7, 5)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    keys = ["data.mock=false", "data.tokenizer=byte", f"data.conversations.path={file}"]
    cfg, model, _ = answers_and_model(*keys, "train.micro_batch_size=1", "data.seq_length=36")
    (first, second), tokens = bench.padded_answers(cfg, "cpu")
    assert first["input_ids"].shape == second["input_ids"].shape == (2, 18)
    assert tokens == (8 + 13) + (18 + 18)  # an end follows each answer, and predicts nothing
    assert bench.step_inputs(cfg, "cpu", 1)[1] == tokens
    answer = [*b"bbbb", 256]
    assert [n for n in first["labels"][0].tolist() if n != -100] == answer

    base = bench.copy_in_bf16(cfg, model, ARGS, "cpu")
    with torch.no_grad():
        base.lm_head.weight.add_(0.1 * torch.randn_like(base.lm_head.weight))
    loss = bench.preference_loss(model, base, cfg.preference.beta, "no")

    def alone(batch):
        sums = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            end = int((labels != -100).nonzero().max()) + 1
            cut = ids[None, :end], labels[None, :end]
            policy, start = (
                torch.log_softmax(m(input_ids=cut[0]).logits.float(), -1) for m in (model, base)
            )
            at = cut[1].clamp(min=0)[..., None]
            kept = (cut[1] != -100)[..., None]
            sums.append((((policy - start).gather(-1, at)) * kept).sum())
        return -torch.nn.functional.logsigmoid(cfg.preference.beta * (sums[0] - sums[1]))

    for batch in (first, second):
        assert loss(**batch).item() == pytest.approx(alone(batch).item(), rel=1e-5)
        assert abs(loss(**batch).item() - math.log(2)) > 1e-3
    for key, message in {
        "train.global_batch_size=20": "pairs.jsonl: a step needs 20 pairs",
        "data.seq_length=32": "a pair is longer than data.seq_length=32",
    }.items():
        with pytest.raises(UserError, match=message):
            bench.padded_answers(
                answers_and_model(*keys, "train.micro_batch_size=1", key)[0], "cpu"
            )
