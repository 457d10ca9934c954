"""Laws of the figures: FLOPs by hand, a clock that counts training only, a log without doubles."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.config import load
from mjax.config.schema.run import LogConfig
from mjax.models import build, flops, split
from mjax.run.monitor import metrics

LLAMA3_8B = [
    "model.vocab_size=128256",
    "model.hidden_size=4096",
    "model.num_hidden_layers=32",
    "model.intermediate_size=14336",
    "model.attention.num_attention_heads=32",
    "model.attention.num_key_value_heads=8",
]
GPT_1B3 = [
    "model.vocab_size=50257",
    "model.hidden_size=2048",
    "model.num_hidden_layers=24",
    "model.attention.num_attention_heads=16",
    "model.mlp_gated=false",
]
GPT2_124M = [
    "model.vocab_size=50257",
    "model.hidden_size=768",
    "model.num_hidden_layers=12",
    "model.attention.num_attention_heads=12",
    "model.mlp_gated=false",
]


def model(*overrides):
    return load(None, ["data.mock=true", *overrides]).model


def test_llama3_8b_flops_by_hand():
    per_layer = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
    weights = 32 * per_layer + 4096 * 128256
    assert flops.matmul_weights(model(*LLAMA3_8B)) == weights == 7_504_658_432
    by_hand = 6 * weights + 6 * 32 * 8192 * 32 * 128
    assert flops.flops_per_token(model(*LLAMA3_8B), 8192) == by_hand == 51_470_401_536


def test_experts_count_as_far_as_they_are_active():
    moe = [
        "model.layer_pattern=GE",
        "model.moe.num_experts=8",
        "model.moe.moe_intermediate_size=1792",
    ]
    saved = 16 * (3 * 4096 * (14336 - 2 * 1792) - 4096 * 8)  # two of 1792 and a router of 8
    dense, mixed = model(*LLAMA3_8B), model(*LLAMA3_8B, *moe)
    assert flops.matmul_weights(dense) - flops.matmul_weights(mixed) == saved


@pytest.mark.parametrize(
    ("name", "seq", "rate", "mfu"),
    [
        (LLAMA3_8B, 8192, 9_087, 0.47),  # plain step, GOALS P1
        (LLAMA3_8B, 8192, 10_682, 0.556),  # NeMo
        (LLAMA3_8B, 8192, 11_500, 0.60),
        (GPT_1B3, 2048, 55_558, 0.48),  # P4
        (GPT2_124M, 1024, 394_000, 0.32),  # P5
    ],
)
def test_mfu_agrees_with_the_published_pairs_of_rate_and_mfu(name, seq, rate, mfu):
    got = rate * flops.flops_per_token(model(*name), seq) / 989e12
    assert abs(got - mfu) < 0.006


def test_frozen_weights_save_their_gradients_and_what_nothing_before_them_needs():
    cfg = model("model.hidden_act=relu2", "model.mlp_gated=false")
    whole, seq = flops.flops_per_token(cfg, 128), 128
    mlp = cfg.num_hidden_layers * 2 * cfg.hidden_size * cfg.intermediate_size
    assert flops.flops_per_token(cfg, seq, ["dense.mlp.*"]) == whole - 2 * mlp
    head = cfg.hidden_size * cfg.vocab_size
    assert flops.flops_per_token(cfg, seq, ["head"]) == whole - 2 * head
    # A probe: the layers run forward only, and the head has no use for its input's gradient.
    probe = flops.flops_per_token(cfg, seq, ["dense.*", "embedding", "norm"])
    assert probe == (whole - 6 * head) / 3 + 4 * head


def test_the_head_of_a_masked_model_counts_hidden_tokens():
    cfg = load("configs/models/bert_large.yaml", ["data.masked.probability=0.25"])
    head = 6 * cfg.model.hidden_size * cfg.model.vocab_size
    whole = flops.flops_per_token(cfg.model, cfg.data.seq_length)
    assert flops.flops_of_run(cfg) == whole - 0.75 * head


def test_windowed_layers_count_the_keys_that_their_queries_see():
    s, window = 512, 100
    cfg = model(
        "model.layer_pattern=LLG",
        "model.num_hidden_layers=6",
        f"model.attention.sliding_window={window}",
    )
    rows = np.arange(s)
    full, local = (rows + 1).mean(), np.minimum(rows + 1, window).mean()
    keys = 4 * local + 2 * full
    counted = flops.flops_per_token(cfg, s) - 6 * flops.matmul_weights(cfg)
    exact = 12 * cfg.attention.num_attention_heads * cfg.attention.head_dim * keys
    assert abs(counted / exact - 1) < 1 / window  # the convention takes s/2 for (s+1)/2


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.mlp_gated=false", "model.attention.num_key_value_heads=1"],
        ["model.attention.head_dim=8"],
    ],
)
def test_matmul_weights_are_the_matrices_and_the_head_of_the_real_model(overrides):
    cfg = model("model.vocab_size=256", *overrides)
    specs = split(nnx.eval_shape(lambda: build(cfg, nnx.Rngs(0))))[0].specs
    leaves = jax.tree.leaves(specs)
    assert flops.matmul_weights(cfg) == sum(s.size for s in leaves if s.role in ("matrix", "head"))


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("cpu", None),
        ("NVIDIA L400", None),
    ],
)
def test_peak_of_known_chips_and_none_for_others(kind, peak):
    assert metrics.peak_tflops(LogConfig(), kind) == peak
    assert metrics.peak_tflops(LogConfig(peak_tflops=123.0), kind) == 123.0


def test_speed_is_per_device(monkeypatch):
    cfg = load(None, ["data.mock=true", "log.peak_tflops=100"])
    got = metrics.speed(cfg, tokens=8000, seconds=2.0)
    assert got["tokens_per_second"] == 8000 / 2 / 8 == 500
    per_token = flops.flops_per_token(cfg.model, cfg.data.seq_length)
    assert got["mfu"] == pytest.approx(500 * per_token / 100e12)


def test_the_clock_counts_training_and_nothing_else(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = metrics.Clock()
    clock.count(1000)  # the compiling step
    assert clock.lap() == (0, 0, 0.0)
    clock.start()
    now[0] += 2
    clock.count(10)
    with clock.paused():
        now[0] += 20
    now[0] += 3 + 60
    jax.monitoring.record_event_duration_secs(metrics.COMPILED, 60.0)
    clock.count(10)
    steps, tokens, seconds = clock.lap()
    assert (steps, tokens, seconds) == (2, 20, 5.0)
    assert clock.lap()[:2] == (0, 0)


def write(path, start, steps):
    sink, close = metrics.jsonl_sink(path.parent, start)
    for step in steps:
        sink({"step": step, "loss": 1.0 / step})
    close()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_log_holds_each_step_once_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 8))
    with path.open("a") as f:
        f.write('{"step": 8, "lo')  # killed here; the last checkpoint is step 5
    write(path, 5, range(6, 11))
    assert steps_in(path) == list(range(1, 11))


def test_every_record_is_on_disk_at_once_and_is_standard_json(tmp_path):
    sink, close = metrics.jsonl_sink(tmp_path, 0)
    sink({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "grad_norm": None, "mfu": None
    }  # fmt: skip
    close()
