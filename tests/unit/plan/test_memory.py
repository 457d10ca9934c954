"""Memory policies: how they are written, what a layer keeps, what `auto` makes of an estimate."""

import pytest

from mjax.config import load
from mjax.config.languages.remat import remat_policies
from mjax.config.rules.mesh_rules import AXES
from mjax.errors import UserError
from mjax.kernels.base.chooser import Device, believed
from mjax.models import definition_of
from mjax.plan.activations import kept
from mjax.plan.auto import FRACTION, choose_memory_policy, memory_policies
from mjax.plan.memory import bytes_per_device
from mjax.run.dry_run import dry_run
from tests.marks import exhaustive, quick, slow

LLAMA = "configs/models/llama3_8b.yaml"
SPECS = definition_of(load(LLAMA, []).model).specs
ONE = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    "text,each",
    [
        ("dots", ["dots"] * 4),
        ("full*2,dots", ["full", "full", "dots", "dots"]),
        ("none*1, full*2 ,attention*1", ["none", "full", "full", "attention"]),
    ],
)
def test_counts_go_in_layer_order(text, each):
    assert remat_policies(text, 4) == tuple(each)


@pytest.mark.parametrize(
    "text,says",
    [
        ("most", "no policy 'most'; policies are none, dots, attention, full"),
        ("full*0,dots", r"no policy 'full\*0'"),
        ("full*2,", "no policy ''"),
        ("full,dots*2", "only the last may lack a count"),
        ("full*2,dots*1", "counts 3 layers but model.num_hidden_layers=4"),
        ("full*3,dots*2", "more layers than model.num_hidden_layers=4"),
        ("full*4,dots", "leaves none for 'dots'"),
    ],
)
def test_a_string_that_is_wrong_is_one_clear_line(text, says):
    with pytest.raises(UserError, match=says):
        load(None, ["model.num_hidden_layers=4", "data.mock=true", f"train.remat='{text}'"])


@pytest.mark.parametrize(
    "overrides,says",
    [
        (["train.remat=attention", "train.offload=[up]"], "no layer keeps 'up'"),
        (["train.remat=full", "train.offload=all"], "no layer keeps 'all'"),
        (["train.remat=dots", "train.offload=[u]"], "no layer keeps 'u'"),
        (["train.offload=all", "train.unroll=0"], "set train.unroll=auto"),
        (["train.offload=all", "mesh.pp=2"], "stages of mesh.pp=2"),
        (["train.remat=full*3,dots", "mesh.pp=2"], "layers in a pipeline stage=2"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(overrides, says):
    with pytest.raises(UserError, match=says):
        load(None, ["model.num_hidden_layers=4", "data.mock=true", *overrides])


def llama(*overrides: str):
    return load(LLAMA, overrides)


def test_a_layer_keeps_what_its_policy_names_and_its_input():
    """Of 8192 tokens in bf16; attention of XLA, which CPUs run, has no named output."""
    tokens = 2 * 8192
    want = {"input": 4096, "q": 4096, "kv": 2048, "attn_proj": 4096, "up": 28672}
    found = kept(llama(), ONE, "full+mlp", "dots")
    assert {t.name: t.bytes / tokens for t in found} == want
    away = [t.name for t in found if t.goes_to_host("dots", ("up", "down"))]
    assert away == ["up"] and not any(t.goes_to_host("none", ("up",)) for t in found)
    assert [(t.name, t.shape) for t in kept(llama(), ONE, "full+mlp", "full")] == [
        ("input", (1, 8192, 4096))
    ]


def test_a_device_keeps_its_share():
    whole = sum(t.bytes for t in kept(llama(), ONE, "full+mlp", "dots"))
    for sizes in ({"tp": 4}, {"cp": 4}, {"cp": 2, "tp": 2, "dp": 2}):
        assert sum(t.bytes for t in kept(llama(), ONE | sizes, "full+mlp", "dots")) == whole / 4


def test_a_policy_that_names_less_keeps_less():
    each = [kept(llama(), ONE, "full+mlp", p) for p in ("none", "dots", "full")]
    sizes = [sum(t.bytes for t in found) for found in each]
    assert sizes[0] > sizes[1] > sizes[2]


def need(cfg, devices: int = 8) -> float:
    return sum(bytes_per_device(cfg, cfg.mesh, devices, SPECS).values())


def of(remat: str, offload: bool = False, *overrides: str):
    return llama(f"train.remat={remat}", f"optimizer.offload={str(offload).lower()}", *overrides)


@exhaustive
@pytest.mark.parametrize("unroll", [0, 1])
def test_auto_takes_the_first_that_fits(unroll):
    """Just below what one needs, the next is chosen; each says its numbers. Only where layers are
    unrolled are all tensors kept."""
    keys = False, f"train.unroll={unroll}"
    none, dots, full = (need(of(remat, *keys), 1) for remat in ("none", "dots", "full"))
    for memory, remat, offload in (
        (none * 1.001, ("none", "dots")[unroll], False),
        (none * 0.999, ("dots*1,none", "dots")[unroll], False),
        (dots * 1.001, "dots", False),
        (dots * 0.999, "full*1,dots", False),
        (full * 1.001, "full", False),
        (full * 0.999, ("dots*30,none", "dots")[unroll], True),
    ):
        cfg, why = choose_memory_policy(
            llama(f"train.unroll={unroll}"), 1, memory / FRACTION, SPECS
        )
        assert (cfg.train.remat, cfg.optimizer.offload) == (remat, offload)
        assert need(cfg, 1) <= memory and f"{need(cfg, 1) / 1e9:.1f} GB" in why and remat in why


@slow
def test_auto_stops_at_the_least_count_of_layers():
    target = (need(of("dots")) + need(of("full"))) / 2
    cfg, _ = choose_memory_policy(llama(), 8, target / FRACTION, SPECS)
    full = int(cfg.train.remat.removeprefix("full*").removesuffix(",dots"))
    assert need(cfg) <= target < need(of(f"full*{full - 1},dots"))


def test_8_bit_weights_are_half_of_bf16s():
    tables = 2 * 128256 * 4096
    parts = [
        bytes_per_device(of("full", False, *fp8), of("full").mesh, 8, SPECS)["weights"]
        for fp8 in ((), ("precision.fp8=delayed",))
    ]
    norms = (2 * 32 + 1) * 4096
    assert parts[0] - parts[1] == 8_030_261_248 - tables - norms


def test_where_nothing_fits_the_least_is_taken_and_said():
    cfg, why = choose_memory_policy(llama(), 8, 20e9, SPECS)
    assert (cfg.train.remat, cfg.optimizer.offload) == ("full", True) and "NOT fit" in why


def test_the_whole_llama_on_one_h200_keeps_its_moments_on_the_host_and_on_eight_on_the_device():
    for devices, offload in ((1, True), (8, False)):
        cfg, _ = choose_memory_policy(llama(), devices, 138e9, SPECS)
        assert cfg.train.remat.startswith("dots") and cfg.optimizer.offload is offload


def test_what_is_given_is_never_changed():
    cfg = of("attention", False)
    assert choose_memory_policy(cfg, 8, 1e9, SPECS) == (cfg, None)
    cfg, _ = choose_memory_policy(llama("train.remat=none"), 8, 1e9, SPECS)
    assert cfg.train.remat == "none" and cfg.optimizer.offload is True
    muon = llama("optimizer.name=muon")
    assert all(option.optimizer.offload is False for option in memory_policies(muon, 8))


def test_without_a_known_limit_nothing_is_traded_for_memory():
    cfg, why = choose_memory_policy(llama(), 8, None, SPECS)
    assert (cfg.train.remat, cfg.optimizer.offload) == ("dots", False) and "limit" in why


def test_counts_of_a_pipeline_are_of_a_stage():
    cfg = llama("mesh.pp=4", "mesh.dp=1", "train.global_batch_size=16")
    counts = {option.train.remat for option in memory_policies(cfg, 4)}
    assert counts == {"dots", "full", *(f"full*{k},dots" for k in range(1, 8))}


def test_auto_sends_no_more_than_matmul_outputs_through_a_pipeline_s_stash():
    cfg = llama("mesh.pp=4", "mesh.dp=1", "train.global_batch_size=16", "train.unroll=0")
    assert choose_memory_policy(cfg, 4, 1e15, SPECS)[0].train.remat == "dots"


@slow
def test_dry_run_says_what_is_kept_and_where(tmp_path, capsys):
    overrides = [
        "model.vocab_size=256",
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.attention.num_attention_heads=4",
        "model.num_hidden_layers=3",
        "data.mock=true",
        "data.seq_length=64",
        "mesh.tp=2",
        "train.micro_batch_size=2",
        "train.remat='full*1,dots'",
        "train.offload=[up]",
        f"run.dir={tmp_path}",
    ]
    dry_run(load(None, overrides))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "full 1 x full+mlp input bfloat16 2 32 64 0.008 device 0.000".split() in lines
    assert "dots 2 x full+mlp up bfloat16 2 64 2 64 0.033 host 0.000".split() in lines
    assert ["memory:", "train.remat=full*1,dots", "optimizer.offload=false:"] in [
        line[:3] for line in lines
    ]


@pytest.mark.parametrize(
    "name, layers, measured",
    quick(
        [("mixtral_8x7b", 1, 35.0e9), ("mixtral_8x7b", 3, 92.2e9), ("qwen3_30b_a3b", 8, 113.7e9)],
    ),
)
def test_the_estimate_of_experts_is_near_what_an_h200_measured(name, layers, measured):
    """On 2026-11-23 and 25: one GPU, s4096, 4 micro-batches of 2 (docs/train/memory.md)."""
    keys = ["data.seq_length=4096", "train.global_batch_size=8", "train.micro_batch_size=2"]
    keys += ["train.remat=none", "train.experts=mosaic", "train.attention=cudnn", "train.unroll=0"]
    with believed(Device("gpu", hopper=True, triton=True)):
        cfg = load(f"configs/models/{name}.yaml", [f"model.num_hidden_layers={layers}", *keys])
        found = bytes_per_device(cfg, cfg.mesh, 1, definition_of(cfg.model).specs)
    assert -0.04 < sum(found.values()) / measured - 1 < 0.06
