"""An exported artifact runs without mjax and gives what mjax gives; what does not fit is named."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import train_tokenizer
from mjax.errors import UserError
from mjax.export import __main__ as command
from mjax.export.artifact import Artifact, ArtifactError
from mjax.models import build, split
from tests.generation import made_ids
from tests.marks import exhaustive, slow

CFG = ModelConfig(
    vocab_size=251,
    hidden_size=32,
    num_hidden_layers=4,
    layer_pattern="LGEM",
    attention={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
    },
    moe={"num_experts": 4, "moe_intermediate_size": 16},
    mamba={"mamba_num_heads": 4, "mamba_head_dim": 16, "state_size": 6, "chunk_size": 4},
    initializer_range=0.3,
    max_position_embeddings=64,
)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 251, n).tolist() for n in (3, 11, 1)]  # one and two blocks of 8
BLOCKED = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mjax", "flax", "optax", "orbax", "safetensors"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Refused())
import runpy
sys.argv[0] = sys.argv[1]
del sys.argv[1]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of an artifact, its model's definition and parameters)."""
    base = tmp_path_factory.mktemp("export")
    definition, params = split(build(CFG, nnx.Rngs(0)))
    train_tokenizer(["some text"], 257, base / "tokenizer.json")
    files = {"tokenizer.json": (base / "tokenizer.json").read_bytes()}
    files |= {"generation_config.json": b'{"eos_token_id": [250, 249]}', "config.json": b"{}"}
    source = array_source(CFG, params)
    write_weights(base / "ckpt", source, definition.specs, extras=files)
    sizes = ["--batch", "1,3", "--length", "20,40", "--block", "8", "--dtype", "float32"]
    command.main(["--ckpt", str(base / "ckpt"), "--out", str(base / "out"), *sizes])
    return base / "out", definition, params


@pytest.fixture(scope="module")
def endless(made):
    """What mjax.generate.__main__ gives without any end id."""
    return made_ids((made[1], made[2], CFG), PROMPTS, 20)


@pytest.fixture(scope="module")
def expected(endless):
    """The same up to an id of generation_config.json, which one of the rows meets."""
    rows = [r[: r.index(249) + 1] if 249 in r else r for r in endless]
    assert sorted(map(len, rows))[1:] == [20, 20] and 250 not in sum(rows, [])
    return rows


def run(folder, *args):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-P", "-c", BLOCKED, str(folder / "run.py"), *args],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env | {"JAX_PLATFORMS": "cpu"},
    )


@slow
def test_a_fresh_process_without_mjax_gives_the_same_tokens(made, expected):
    ids = [arg for p in PROMPTS for arg in ("--ids", ",".join(map(str, p)))]
    done = run(made[0], *ids, "--max-new-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert len({tuple(row) for row in expected}) == 3 and all(len(set(r)) > 2 for r in expected)


def test_the_process_above_could_not_have_used_mjax(tmp_path):
    (tmp_path / "run.py").write_text("import jax, mjax")
    assert "ImportError: mjax is blocked" in run(tmp_path).stderr


@exhaustive
def test_every_bucket_gives_the_same_and_rows_beyond_it_follow(made, expected):
    artifact = Artifact(made[0])
    assert [artifact.generate([p], 20)[0] for p in PROMPTS] == expected  # 1x20 and 1x40
    assert artifact.generate(PROMPTS * 2, 20) == expected * 2  # two calls of 3x40
    assert artifact.generate(PROMPTS, 5) == [row[:5] for row in expected]  # 3x20
    names = "prefill_b{0}_t{1}.stablehlo decode_b{0}_t{1}.stablehlo"
    used = {name for b in ((1, 40), (3, 20), (3, 40)) for name in names.format(*b).split()}
    assert used <= set(artifact._programs)


@slow
def test_end_ids_can_be_replaced(made, endless):
    assert Artifact(made[0]).generate(PROMPTS, 20, eos=[]) == endless


@slow
def test_the_manifest_says_how_to_call(made):
    folder, definition, _ = made
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["eos_token_ids"] == [250, 249] and manifest["platforms"] == ["cpu", "cuda"]
    assert [(b["batch"], b["length"]) for b in manifest["buckets"]] == [
        (1, 20), (1, 40), (3, 20), (3, 40),
    ]  # fmt: skip
    assert (folder / "tokenizer.json").is_file() and not (folder / "config.json").exists()
    for bucket in manifest["buckets"]:
        for kind in ("prefill", "decode"):
            entry = bucket[kind]
            made_of = jax.export.deserialize(bytearray((folder / entry["file"]).read_bytes()))
            assert made_of.platforms == ("cpu", "cuda") and made_of.nr_devices == 1
            sizes = {"B": bucket["batch"], "T": bucket["length"], "S": entry["tokens"], "V": 251}
            cache = manifest["cache"]
            said = [manifest["weights"][name] for name in sorted(manifest["weights"])]
            said += [cache[name] for name in sorted(cache)]
            said += [manifest["convention"][name] for name in ("ids", "real")]
            shapes = [tuple(sizes.get(n, n) for n in e["shape"]) for e in said]
            assert [a.shape for a in made_of.in_avals] == shapes
            assert [str(a.dtype) for a in made_of.in_avals] == [e["dtype"] for e in said]
            assert made_of.out_avals[0].shape == (bucket["batch"], 251)
            assert "custom_call" not in made_of.mlir_module()
            assert (folder / entry["file"]).stat().st_size < 200_000


@pytest.mark.parametrize(
    "change,message",
    [
        ({"format_version": 2}, "version 2, but this reader knows 'mjax-stablehlo' version 1"),
        ({"format": "other"}, "format 'other'"),
        ({"platforms": ["cuda"]}, "made for cuda, but this machine has cpu"),
        ({"calling_convention_version": 1}, "calling convention 1 of jax.export"),
    ],
)
def test_what_cannot_run_is_one_line(made, tmp_path, change, message):
    shutil.copytree(made[0], tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=message):
        Artifact(tmp_path / "a")
    if "format_version" in change:
        done = run(tmp_path / "a", "--ids", "1")
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith("run.py: error: ") and done.stderr.count("\n") == 1


def test_damaged_files_are_named(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "a")
    program = tmp_path / "a" / "prefill_b1_t20.stablehlo"
    program.write_bytes(program.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="prefill_b1_t20.stablehlo: damaged"):
        Artifact(tmp_path / "a").generate([[1]], 2)
    weights = tmp_path / "a" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="weights.safetensors: damaged"):
        Artifact(tmp_path / "a")


@pytest.mark.parametrize(
    "prompts,new,message",
    [
        ([[1] * 17], 18, "a prompt of 17 ids .* do not fit a cache of 40"),
        ([[1], []], 2, "prompt 1: needs one or more ids"),
        ([[251]], 2, r"in \[0, 251\)"),
        ([], 2, "one or more prompts"),
    ],
)
def test_requests_that_do_not_fit_are_one_line(made, prompts, new, message):
    with pytest.raises(ArtifactError, match=message):
        Artifact(made[0]).generate(prompts, new)


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--length", "65"], "--length 65: the model takes model.max_position_embeddings=64"),
        (["--length", "1"], "lengths of 2 or more"),
        (["--platforms", "cpu,tpu", "--length", "8"], "'tpu' is not one of cpu, cuda"),
        (["--batch", "1,x"], "--batch '1,x': give whole numbers"),
    ],
)
def test_what_cannot_be_exported_is_one_line(made, tmp_path, argv, message):
    base = ["--ckpt", str(made[0].parent / "ckpt"), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=message):
        command.main([*base, *argv])
    assert not (tmp_path / "out").exists()
