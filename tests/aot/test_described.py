"""`--dry-run --on` compiles for devices that it describes, and prints what the compiler says."""

import contextlib
import io
import re

import pytest

from mjax.config import load
from mjax.plan.absent_devices import cannot_compile, parse_described
from mjax.run.dry_run import dry_run
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(cannot_compile() is not None, reason=str(cannot_compile()))

SMALL = ["model.vocab_size=8192", "train.micro_batch_size=1"]


def plan(on: str, *overrides: str) -> str:
    cfg = load("configs/models/llama3_8b.yaml", [*SMALL, *overrides])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        dry_run(cfg, parse_described(on))
    return said.getvalue()


def figure(text: str, pattern: str) -> float:
    return float(re.search(pattern, text)[1].replace(",", ""))


def exchanges(text: str) -> list[tuple[str, str, float]]:
    """(exposed or hidden, mesh axes, bytes a step) of each kind of exchange that is printed."""
    pattern = r"(exposed|hidden) ?(?:under matmuls)?: [\w-]+ over (\S+), .* ([\d.,]+) MB"
    found = re.findall(pattern, text)
    return [(how, axes, 1e6 * float(size.replace(",", ""))) for how, axes, size in found]


@exhaustive
@pytest.mark.parametrize("devices", [2, 8])
def test_the_plan_holds_the_compiler_s_account(devices):
    """Of two micro-batches a device: weights are gathered once in bf16, gradients reduced once in
    fp32, and masters and moments lie in shards."""
    rows = f"train.global_batch_size={2 * devices}"
    text = plan(f"h200:{devices}", "model.num_hidden_layers=4", "train.remat=dots", rows)
    parameters = figure(text, r"parameters  ([\d,]+)")
    shards = 12 * parameters / devices
    assert figure(text, r"arguments +([\d.]+) GB") == pytest.approx(shards / 1e9, rel=0.01)
    moved = exchanges(text)
    assert moved and {axes for _, axes, _ in moved} == {"dp"}
    assert sum(size for *_, size in moved) == pytest.approx((2 + 4) * parameters, rel=0.05)
    estimate = figure(text, r"memory      estimate ([\d.]+) GB")
    assert abs(estimate / figure(text, r"total +([\d.]+) GB a device") - 1) < 0.25


@exhaustive
def test_exchanges_under_matmuls_are_told_from_exposed_ones():
    """Of one micro-batch: each layer exchanges, both ways in bf16."""
    text = plan("h200:8", "model.num_hidden_layers=2", "train.global_batch_size=8")
    assert "under other layers' matmuls" in text
    moved = exchanges(text)
    assert {how for how, *_ in moved} == {"hidden", "exposed"}
    parameters = figure(text, r"parameters  ([\d,]+)")
    assert sum(size for *_, size in moved) == pytest.approx((2 + 2) * parameters, rel=0.1)


@exhaustive
def test_devices_of_several_nodes_and_other_chips_compile_too():
    more = "model.num_hidden_layers=2", "train.global_batch_size=16", "mesh.zero=3"
    text = plan("b200:16", *more)
    assert "16 x NVIDIA B200" in text and "total" in text
    assert "all-gather over dp" in text and "network between nodes" in text
