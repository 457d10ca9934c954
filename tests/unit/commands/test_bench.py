"""The benchmarks: what a profile means, what a baseline lets pass, and that each of them runs."""

import json
import math
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import torch_train
from mjax.bench import checkpoint, collective, data, decode, engine, kernel, report, train
from mjax.bench.breakdown import KernelEvent, breakdown, classify, parse, profile, top
from mjax.config import load
from mjax.errors import UserError
from mjax.infer.engine import Engine
from mjax.post.preferences.mock_answers import equal_answers, require_pairs
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer
from tests.marks import exhaustive, quick, slow

TINY = [
    "model.vocab_size=64",
    "model.hidden_size=16",
    "model.attention.num_attention_heads=2",
    "model.num_hidden_layers=2",
    "data.mock=true",
    "data.seq_length=8",
    "train.global_batch_size=16",
    "train.micro_batch_size=1",
]

# As XLA prints a scheduled program for GPUs, cut to what is read.
HLO = """HloModule jit_train_step, is_scheduled=true

%fused_slice (p.0: bf16[8,4,4], p.1: s32[]) -> bf16[4,4] {
  %p.0 = bf16[8,4,4]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %next = s32[] add(%p.1, %p.1)
  ROOT %cut = bf16[4,4]{1,0} dynamic-slice(%p.0, %next), metadata={op_name="jit(f)/jvp()/slice"}
}

%fused_norm (p.2: bf16[4,4]) -> (bf16[4,4], f32[4]) {
  %p.2 = bf16[4,4]{1,0} parameter(0)
  %m = bf16[4,4]{1,0} multiply(%p.2, %p.2), metadata={op_name="jit(f)/jvp()/attention/norm/mul"}
  ROOT %t = (bf16[4,4]{1,0}, f32[4]{0}) tuple(%m, %m)
}

%triton (p.3: bf16[4,4]) -> bf16[4,4] {
  ROOT %p.3 = bf16[4,4]{1,0} parameter(0)
}

ENTRY %main (x: bf16[4,4]) -> bf16[4,4] {
  %x = bf16[4,4]{1,0} parameter(0)
  %loop_slice.1 = bf16[4,4]{1,0} fusion(%x), kind=kLoop, calls=%fused_slice
  %fusion.2 = (bf16[4,4]{1,0}, /*index=1*/f32[4]{0}) fusion(%x), kind=kInput, calls=%fused_norm
  %gemm.3 = bf16[4,4]{1,0} fusion(%x), kind=kCustom, calls=%triton, metadata={op_name="jit(f)/transpose(jvp())/checkpoint/mlp/dot_general"}, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %call.4 = (bf16[4,4]{1,0}, s8[9]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/jvp(head)/while/body/dot_general"}
  %sdpa.5 = (bf16[4,4]{1,0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(f)/attention/sdpa/bwd"}
  %experts.8 = bf16[4,4]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp()/mlp/mosaic_gpu"}
  %gather-start = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%x), metadata={op_name="jit(f)/gather/all_gather"}
  %gather-done = bf16[8]{0} all-gather-done(%gather-start)
  %silu.6 = bf16[4,4]{1,0} exponential(%x), metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/mlp/exp"}
  ROOT %adam.7 = bf16[4,4]{1,0} sqrt(%x), metadata={op_name="jit(f)/optimizer/sqrt"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "event, expected",
    [
        (KernelEvent(0, 1, "k", "loop_slice.1"), ("copies and transposes", "forward")),
        (KernelEvent(0, 1, "k", "fusion.2"), ("norm", "forward")),
        (KernelEvent(0, 1, "k", "gemm.3"), ("matmul", "backward")),
        (KernelEvent(0, 1, "k", "call.4"), ("head and loss: matmul", "forward")),
        (KernelEvent(0, 1, "k", "sdpa.5"), ("attention", "backward")),
        (KernelEvent(0, 1, "k", "experts.8"), ("matmul", "forward")),
        (KernelEvent(0, 1, "k", "gather-done"), ("communication, exposed", "forward")),
        (KernelEvent(0, 1, "k", "silu.6"), ("activation", "recompute")),
        (KernelEvent(0, 1, "k", "adam.7"), ("optimizer", "forward")),
        # no instruction: by the name of the kernel
        (KernelEvent(0, 1, "silu_6", "command_buffer_3"), ("activation", "recompute")),
        (KernelEvent(0, 1, "nvjet_sm90_tst_256x128"), ("matmul", "forward")),
        (KernelEvent(0, 1, "cudnn_generated_fort_native_sdpa"), ("attention", "forward")),
        (KernelEvent(0, 1, "attention_forward"), ("attention", "forward")),
        (KernelEvent(0, 1, "ncclDevKernel_AllGather"), ("communication, exposed", "forward")),
        (KernelEvent(0, 1, "MemcpyH2D"), ("copies and transposes", "forward")),
        (KernelEvent(0, 1, "mystery"), ("residual, other", "forward")),
    ],
)
def test_kernels_are_sorted_by_scope_and_kind(event, expected):
    assert classify(event, parse(HLO)) == expected


def test_breakdown_adds_up_to_the_wall_time():
    us = 1000.0
    events = [
        KernelEvent(0, 10 * us, "k", "fusion.2"),
        KernelEvent(10 * us, 20 * us, "k", "gemm.3"),
        KernelEvent(25 * us, 15 * us, "nccl", "gather-start"),  # 5 hidden, 10 exposed, of which
        KernelEvent(38 * us, 4 * us, "k", "loop_slice.1"),  # 2 under a copy
        KernelEvent(41 * us, 3 * us, "k", "adam.7"),  # 1 of them under that copy
        KernelEvent(50 * us, 10 * us, "k", "gemm.3"),
    ]
    *rows, hidden = breakdown(events, HLO, steps=2)
    found = {row["part"]: row["ms"] * 2000 for row in rows}  # microseconds of both steps
    expected = {
        "norm": 10,
        "matmul": 30,
        "copies and transposes": 4,
        "optimizer": 2,
        "communication, exposed": 8,
        "gaps": 6,
    }
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(60)
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    assert (hidden["part"], hidden["ms"] * 2000) == ("communication, hidden", pytest.approx(7))
    matmul = next(row for row in rows if row["part"] == "matmul")
    assert matmul["backward"] == matmul["ms"] and matmul["forward"] == 0


@exhaustive
def test_pairs_of_equal_documents_are_measured_with_their_reference():
    keys = "train.objective=preference", "schedule.lr=0.01", "preference.beta=1"
    record = train.measure_training(load(None, [*TINY, *keys]), steps=2, warmup=0, documents=2)
    assert record["case"]["preference"] == "sigmoid" and record["case"]["documents"] == 2
    assert 0 < record["loss"] < 0.9 * math.log(2)  # where training starts it is log 2
    cfg = load(None, [*TINY, *keys])
    batch = train.random_batch(cfg, documents=4)
    found = equal_answers(batch, 4)
    assert found["loss_mask"][0].tolist() == [0, 1] * 4
    assert found["positions"][0].tolist() == [0, 1] * 4
    assert found["answer_values"][0].tolist() == [0, 1, 0, -1, 0, 1, 0, -1]
    for documents in (3, 6):
        with pytest.raises(UserError, match=f"--documents {documents}: preferences need an even"):
            equal_answers(batch, documents)
    for key in ("preference.precompute_ref_log_probs=true", "preference.loss_type=kto"):
        with pytest.raises(UserError, match="random pairs are not built for preference"):
            require_pairs(load(None, [*TINY, *keys, key]))


def test_longest_instructions_come_first():
    events = [KernelEvent(0, 5e6, "a", "silu.6"), KernelEvent(5e6, 4e6, "b", "adam.7")]
    events += [KernelEvent(9e6, 4e6, "c", "adam.7")]
    rows = top(events, HLO, steps=1, count=5)
    assert [(row["op"], row["ms"], row["kernels"]) for row in rows] == [
        ("adam", 8.0, 2),
        ("silu", 5.0, 1),
    ]
    assert rows[0]["path"].endswith("optimizer/sqrt")


def test_the_model_and_step_carry_the_scopes_that_rows_go_by():
    cfg = load(None, TINY)
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    program = parse(trainer.lower().compile().as_text())
    found = {classify(KernelEvent(0, 1, "k", op), program)[0] for op in program}
    missing = {"matmul", "norm", "activation", "head and loss: rest", "embedding", "optimizer"}
    missing |= {"attention", "RoPE, bias", "gradients: add up", "gradients: reduce, norm"}
    assert not missing - found


def test_profile_of_a_cpu_has_no_device_and_says_so(capsys):
    assert profile(lambda: jax.numpy.ones(3) + 1) == ([], "")
    train.explain({"ms": 1.0, "breakdown": None})
    assert "no breakdown" in capsys.readouterr().err


@pytest.mark.slow
def test_train_measures_and_explains(capsys):
    assert train.main([*TINY, "--steps=2", "--warmup=1", "--breakdown"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["breakdown"] is None and "no breakdown" in err
    assert record["ms_range"][0] <= record["ms"] <= record["ms_range"][1]
    assert record["tokens_per_second"] == pytest.approx(16 / record["ms"] * 1e3, rel=1e-2)
    assert record["start_s"] >= record["first_step_s"] > 0
    assert {"device", "commit", "jaxlib", "driver"} <= record.keys()


def test_startup_runs_twice_on_one_cache_that_starts_empty(monkeypatch):
    seen = []

    def run(command, env, **_):
        cache = env["JAX_COMPILATION_CACHE_DIR"]
        seen.append((cache, len(list(Path(cache).iterdir()))))
        (Path(cache) / "entry").touch()
        line = json.dumps({"start_s": 20.0 / len(seen)})
        return subprocess.CompletedProcess(command, 0, f"{line}\n", "")

    monkeypatch.setattr(train.subprocess, "run", run)
    args = Namespace(config=None, documents=1, overrides=TINY)
    assert train.startup(args) == {"start_cold_s": 20.0, "start_warm_s": 10.0}
    assert seen[0][0] == seen[1][0] and [count for _, count in seen] == [0, 1]
    failed = subprocess.CompletedProcess([], 2, "", "mjax: error: no such file")
    monkeypatch.setattr(train.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="no such file"):
        train.startup(args)


def made(ms, **case):
    return {"bench": "kernel", "case": {"kernel": "x", **case}, "ms": ms, "device": "H"}


def test_compare_tells_slower_from_faster_and_new():
    old = [made(9.0), made(10.0), made(10.0, shape=[1]), made(10.0, shape=[2])]
    new = [made(10.4), made(10.2, shape=[1]), made(9.0, shape=[2]), made(1.0, shape=[3])]
    rows = report.compare_records(new, old, 0.03)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == ["SLOWER", "ok", "faster", "not in the baseline"]
    assert rows[0]["ratio"] == pytest.approx(1.04)  # against the last of two
    with pytest.raises(UserError, match="no record of the same"):
        report.compare_records([made(1.0, shape=[7])], old, 0.03)
    with pytest.raises(UserError):
        report.compare_records([made(10.0) | {"device": "other"}], old, 0.03)


@pytest.mark.parametrize("ms, code", [(100.0, 0), (103.1, 1), (97.0, 0)])
def test_exit_code_follows_the_baseline(ms, code, tmp_path, capsys):
    record = {"bench": "b", "case": {"n": [1, 2]}}
    path = tmp_path / "old.jsonl"
    path.write_text("noise\n" + json.dumps(record | {"ms": 100.0} | report.stamp()) + "\n")
    args = Namespace(baseline=str(path), tolerance=0.03, table=True)
    assert report.report(args, [record | {"ms": ms}]) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["ms"] == ms and ("SLOWER" in err) == bool(code)


def test_baseline_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="--baseline"):
        report.read_baseline(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "name, shape, flops, works",
    quick(
        [
            ("attention", (1, 32, 4, 2, 8, 2), 2 * 1 * 4 * 32 * 32 / 2 * 8, 4),
            ("loss", (40, 200, 8), 6 * 40 * 256 * 8, 3),
            ("matmul", (32, 8, 16), 2 * 32 * 8 * 16, 3),
            ("norm", (64, 8, 1), None, 17),
            ("grouped", (32, 3, 8, 16), 2 * 32 * 8 * 16, 8),
            ("grouped8", (32, 3, 8, 16), 2 * 32 * 8 * 16, 8),
            ("ssd", (1, 48, 4, 2, 8, 16), 48 * (2 * 16 * 64 + 4 * 8 * (64 + 4 * 16)), 8),
        ],
        1,
        2,
        4,
    ),
)
def test_kernels_run_and_count_their_work(name, shape, flops, works, capsys):
    args = [name, "--shape", ",".join(map(str, shape)), "--samples", "1"]
    assert kernel.main(args) == 0
    ceilings, records = [], []
    for line in capsys.readouterr().out.splitlines():
        record = json.loads(line)
        (ceilings if record["case"]["kernel"] == "ceiling" else records).append(record)
    assert len(ceilings) == 2 and len(records) == works
    assert {tuple(r["case"]["shape"]) for r in records} == {shape}
    assert all(r["ms"] > 0 and r["of_ceiling"] > 0 for r in records)
    if flops is None:
        assert all("gb_per_s" in r for r in records)
    else:
        assert records[0]["tflops"] * records[0]["ms"] * 1e9 == pytest.approx(flops, rel=2e-3)
    if name == "grouped":
        assert all(r["error"] < 0.01 for r in records[::2])
    if name == "grouped8":
        assert all("ours_is_faster" in r for r in records[1::2])
    if name == "ssd":
        assert records[0]["error"] == records[4]["error"] == 0  # on CPUs both are plain JAX
        assert "ours_is_faster" in records[2] and "gb_per_s" in records[7]
    if name == "loss":
        assert "loss_overhead" in records[2] and "ours_is_faster" in records[1]


@pytest.mark.parametrize("shape", ["1,2", "a,b,c", "0,1,1"])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(UserError, match="tokens,vocab,width"):
        kernel.main(["loss", "--shape", shape])


def test_collectives_run_on_all_devices(capsys):
    assert collective.main(["--sizes", "0.01", "--samples", "1"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    n = jax.device_count()
    assert [r["case"]["collective"] for r in records] == list(collective.collectives(2))
    assert {r["case"]["devices"] for r in records} == {n}
    # bytes: a whole number of shards of shards, in bf16
    size = -(-5000 // n**2) * n**2 * 2
    shares = [share for *_, share in collective.collectives(n).values()]
    for record, share in zip(records, shares, strict=True):
        moved = record["gb_per_s"] * record["ms"] * 1e6
        assert moved == pytest.approx(size * share, rel=2e-3)


def test_data_path_is_measured(capsys):
    assert data.main(["--tokens=20000", "--seq-length=32", "--batch=8"]) == 0
    index, loader = map(json.loads, capsys.readouterr().out.splitlines())
    assert (index["bench"], loader["bench"]) == ("data_index", "data_loader")
    assert loader["tokens_per_second"] > 0 and loader["ms"] > 0


@exhaustive
def test_a_save_and_a_restore_are_measured(tmp_path, capsys):
    argv = ["--dir", str(tmp_path), "--steps=2", "mesh.dp=8", "mesh.zero=0"]
    assert checkpoint.main([*argv, *TINY]) == 0
    record = json.loads(capsys.readouterr().out)
    parameters = 2 * 64 * 16  # embedding and head; blocks and moments come on top
    assert record["gb"] > 3 * 4 * parameters / 1e9
    assert record["save_s"] > record["ms"] / 1e3 and record["replica_check_ms"] > 0
    positive = "step_ms", "writing_ms", "restore_gb_s", "disk_write_gb_s", "disk_read_gb_s"
    assert min(record[name] for name in positive) > 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(UserError, match="name another"):
        checkpoint.main(["--dir=/nowhere", *TINY])


def test_launches_are_timed_one_by_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += 0.004
        return jax.numpy.zeros(())

    assert report.launch_ms(run, samples=3, sample_ms=10) == pytest.approx(4)


SMALL_MODEL = [*TINY, "model.max_position_embeddings=32", "model.tie_word_embeddings=false"]


@slow
def test_decoding_is_measured_against_what_it_reads(capsys):
    argv = ["--batch=1,3", "--prompt=5", "--new=6", "--samples=1", "--bandwidth=100", "--table"]
    assert decode.main([*argv, *SMALL_MODEL]) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["case"]["batch"] for r in records] == [1, 3] and "bound_ms" in err
    cfg = load(None, SMALL_MODEL).model
    width, ffn, vocab = 16, cfg.intermediate_size, cfg.padded_vocab_size
    layer = (2 + 2) * width**2 + (3 if cfg.mlp_gated else 2) * width * ffn + 2 * width
    weights = 2 * layer + width + vocab * width  # two layers, the final norm, the head
    for found in records:
        cache = found["case"]["batch"] * (5 + 3) * 2 * 2 * width
        assert found["gb_read"] == pytest.approx(2 * (weights + cache) / 1e9, rel=1e-3)
        assert found["bound_ms"] == pytest.approx(1e3 * found["gb_read"] / 100, rel=1e-3)
        assert found["ms"] > 0 and found["prefill_ms"] > 0


@slow
def test_the_engine_serves_a_load_and_compiles_nothing_later(capsys):
    argv = ["--requests=3", "--prompt=5", "--new=6", "--rows=2", "--chunk=16", "--rate=1000"]
    assert engine.main([*argv, *SMALL_MODEL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["programs"] == 3 and found["compiled_later"] == 0
    assert found["ms"] > 0 and found["tokens_per_second"] > 0
    assert found["first_ms"]["p50"] > 0 and found["between_ms"]["p50"] > 0


@slow
def test_the_engine_shares_layers_over_devices(capsys, monkeypatch):
    made = []
    monkeypatch.setattr(engine, "Engine", lambda *a, **kw: made.append(Engine(*a, **kw)) or made[0])
    argv = ["--requests=1", "--prompt=5", "--new=2", "--rows=1", "--chunk=16", "--tp=2"]
    assert engine.main([*argv, *SMALL_MODEL]) == 0
    assert json.loads(capsys.readouterr().out)["case"]["tp"] == 2
    assert made[0].programs.parallel.tp == 2


@pytest.mark.parametrize("key", ["mesh.tp=2", "lora={rank: 4}"])
@pytest.mark.parametrize("command", [engine, decode])
def test_keys_that_a_benchmark_of_models_would_ignore_are_refused(command, key):
    with pytest.raises(UserError, match=f"{key} has no effect here"):
        command.main([*SMALL_MODEL, key])


@slow
def test_a_model_that_guesses_for_itself_says_how_often_it_is_right(capsys):
    argv = ["--requests=2", "--prompt=5", "--new=9", "--rows=2", "--chunk=16"]
    argv += ["--drafts=2", "--drafter=mtp", *SMALL_MODEL, "model.num_nextn_predict_layers=1"]
    assert engine.main([*argv, "model.initializer_range=1e-30"]) == 0  # one token is ever likeliest
    found = json.loads(capsys.readouterr().out)
    assert found["case"]["drafter"] == "mtp" and found["acceptance_rate"] == 1
    assert found["accepted"] == pytest.approx(2, abs=0.5) and found["compiled_later"] == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batch=1,x"], "--batch"),
        (["--batch="], "--batch"),
        (["--batch=1,0"], "--batch 0: give 1 or more"),
        (["--bandwidth=0"], "--bandwidth 0.0"),
        (["--prompt=30", "--new=3"], "max_position_embeddings=32"),
    ],
)
def test_what_cannot_be_decoded_is_one_line(argv, message):
    with pytest.raises(UserError, match=message):
        decode.main([*argv, *SMALL_MODEL])


@pytest.mark.parametrize("command", [engine, decode])
def test_a_benchmark_of_models_needs_one(command):
    with pytest.raises(UserError, match="no model; give --config"):
        command.main([])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.freeze=[]", "--steps", "0"], "--steps 0: at least one step"),
        (["train.freeze=['head']"], "trains all parameters; give train.freeze="),
        (["train.objective=denoise"], "train.objective=denoise is not compared; next_token, "),
        (["train.objective=preference"], "--documents 1: give an even number"),
        (
            ["--documents=2", "train.objective=preference", "preference.loss_type=ipo"],
            "of preference it reads beta",
        ),
    ],
)
def test_what_torch_cannot_be_compared_with_is_one_line(monkeypatch, argv, message):
    monkeypatch.setattr(decode, "find_spec", lambda name: True)
    with pytest.raises(UserError, match=message):
        torch_train.main(["data.mock=true", *argv])


def test_torch_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch_train: torch and transformers cannot be imported"):
        torch_train.main(["data.mock=true"])


def test_transformers_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch and transformers cannot be imported"):
        decode.main(["--transformers", "--prompt=5", "--new=5", *SMALL_MODEL])


def test_transformers_has_ended_before_jax_takes_the_device(monkeypatch, capsys):
    """Its process has JAX on the CPU, all sizes, and no other engine; ours comes after it."""
    order = []

    def run(command, env, **_):
        order.append("transformers")
        assert env["JAX_PLATFORMS"] == "cpu" and "--engine=transformers" in command
        assert {"--batch=2", "--prompt=5", "--new=4", *SMALL_MODEL} <= set(command)
        assert "--transformers" not in command
        line = json.dumps({"bench": "decode", "case": {"engine": "transformers"}, "ms": 1.0})
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{line}\n")

    monkeypatch.setattr(decode, "find_spec", lambda name: object())
    monkeypatch.setattr(decode, "subprocess", SimpleNamespace(run=run, PIPE=None))
    monkeypatch.setitem(decode.ENGINES, "mjax", lambda *_: order.append("mjax") or run_in_no_time)
    sizes = "--batch=2", "--prompt=5", "--new=4", "--samples=1"
    assert decode.main(["--transf", *sizes, *SMALL_MODEL]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"]["engine"] for line in lines] == ["transformers", "mjax"]
    assert order == ["transformers", "mjax"]


def run_in_no_time(ids):
    return [0.1, 0.2, 0.3]


def test_a_failure_of_transformers_is_one_line(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: object())
    failed = SimpleNamespace(returncode=1, stdout="")
    own = SimpleNamespace(run=lambda *_, **__: failed, PIPE=None)
    monkeypatch.setattr(decode, "subprocess", own)
    with pytest.raises(UserError, match="--transformers: its process ended with exit code 1"):
        decode.main(["--transformers", "--prompt=5", "--new=4", *SMALL_MODEL])
