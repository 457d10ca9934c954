"""Laws of `python -m mjax.checkpoint`: it shows what is there, and its exit code can be trusted."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.checkpoint.__main__ import main
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.store import Store
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.errors import UserError
from mjax.models import definition_of
from tests.marks import slow

MODEL = """data.mock=true model.vocab_size=97 model.hidden_size=32 model.intermediate_size=48
    model.attention.num_attention_heads=4 model.num_hidden_layers=2""".split()
CFG = load(None, MODEL)
SPECS = definition_of(CFG.model).specs


def make_params(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def draw(spec):
        return jnp.asarray(rng.normal(size=spec.shape), jnp.float32)

    return jax.tree.map(draw, SPECS, is_leaf=lambda s: hasattr(s, "axes"))


def save(folder: Path, step: int, params: dict, *overrides: str, loss: float | None = None) -> None:
    state = {"params": params, "opt": {"mu": params}, "step": jnp.int32(step)}
    cfg = load(None, [*MODEL, *overrides])
    Store(folder, cfg, keep=3, keep_every=None, async_save=False).save(step, state, loss)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder / "checkpoints", 10, make_params(0), loss=2.5)
    save(folder / "checkpoints", 20, make_params(0), "schedule.lr=0.5")
    return folder


def said(capsys, *argv: object) -> tuple[int, str]:
    code = main([str(word) for word in argv])
    return code, capsys.readouterr().out


def test_ls_has_a_line_for_each_step(run, capsys):
    (run / "checkpoints" / "damaged-7").mkdir(exist_ok=True)
    code, out = said(capsys, "ls", run)
    lines = out.splitlines()
    assert code == 0 and lines[0] == str(run / "checkpoints")
    assert [line.split()[0] for line in lines[2:]] == ["10", "20", "damaged-7:"]
    assert "2.5000" in lines[2] and lines[2].endswith("opt, params, step")


def test_show_names_every_array_with_its_size(run, capsys):
    code, out = said(capsys, "show", run / "checkpoints" / "10")
    sizes = [leaf.size for leaf in jax.tree.leaves(make_params(0))]
    assert code == 0 and "step 10, 80 samples" in out and "held-out loss: 2.500000" in out
    assert f"arrays: {2 * len(sizes) + 1}, " in out and f"; {sum(sizes):,} parameters" in out
    assert sum(line.startswith("  ") for line in out.splitlines()) == 2 * len(sizes) + 1
    (line,) = (x for x in out.splitlines() if x.startswith("  params.embedding "))
    assert line.split() == ["params.embedding", "float32", "16.4", "kB", "128", "x", "32"]
    assert "hidden_size: 32" in said(capsys, "show", run, "--config")[1]


def test_diff_finds_keys_and_numbers(run, tmp_path, capsys):
    a = run / "checkpoints" / "10"
    code, out = said(capsys, "diff", a, a)
    count = 2 * len(jax.tree.leaves(make_params(0))) + 1
    summary = f"{count} arrays in both, {count} of them equal; 0 other differences"
    assert code == 0 and out.splitlines()[1:] == [summary]
    code, out = said(capsys, "diff", a, run)
    assert code == 1 and "schedule.lr: 0.0003 -> 0.5" in out and "held_out_loss: 2.5 -> None" in out
    assert "\n  step: 1 of 1 numbers differ, by at most 10 " in out
    other = make_params(0)
    other["head"] = other["head"].at[3, 4].add(0.25)
    save(tmp_path, 10, other, loss=2.5)
    code, out = said(capsys, "diff", a, tmp_path)
    (line,) = (x for x in out.splitlines() if x.startswith("  params.head"))
    assert code == 1 and f"1 of {other['head'].size:,} numbers differ, by at most 0.25 " in line
    assert said(capsys, "diff", a, tmp_path, "--no-values")[0] == 0
    write_weights(tmp_path / "w", array_source(CFG.model, make_params(0)), SPECS, "bfloat16")
    code, out = said(capsys, "diff", a, tmp_path / "w")
    assert code == 1 and "only in" in out and "float32 [128, 32] -> bfloat16 [128, 32]" in out


def test_verify_tells_intact_from_damaged_and_unknown(run, tmp_path, capsys):
    assert said(capsys, "verify", run)[0] == 0
    save(tmp_path, 1, make_params(1))
    save(tmp_path, 2, make_params(2))
    Store(tmp_path, CFG, keep=3, keep_every=None, async_save=False, digests=False).save(
        3, {"x": jnp.ones(3)}
    )
    file = max((tmp_path / "1").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, out = said(capsys, "verify", tmp_path)
    first, second, third = out.splitlines()
    assert code == 1 and f"checkpoint {tmp_path / '1'} is damaged: bytes 0 to" in first
    assert second.startswith(f"{tmp_path / '2'}: intact, ") and "has no digests" in third


@slow
def test_mistakes_are_one_line_and_nothing_is_written(run, tmp_path):
    with pytest.raises(UserError, match="no checkpoint here; give a run"):
        main(["ls", str(tmp_path)])
    before = sorted(run.rglob("*"))
    command = [sys.executable, "-m", "mjax.checkpoint", "show", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("mjax: error: ") and not done.stdout
    assert done.stderr.count("\n") == 1 and sorted(run.rglob("*")) == before
