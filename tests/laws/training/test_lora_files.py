"""Laws of what a run with adapters leaves: it is weights like any others, merges, and comes apart
again, bit for bit."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mjax.checkpoint.base.source import Source, array_source, flat
from mjax.config import load
from mjax.convert import main as convert
from mjax.errors import UserError
from mjax.interop.adapted_source import adapter_step, read_adapter_run, starting_arrays
from mjax.interop.adapter_stack import stack_adapters
from mjax.interop.adapters_of_run import joined_trees
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.merge import RECORD, extract
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.pretrained import from_pretrained
from mjax.interop.sources import source_of
from mjax.models import definition_of
from mjax.models.base.adapted import is_of_adapter
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.params import with_specs
from mjax.run.dry_run import dry_run
from mjax.run.resume import resume
from mjax.train import Trainer
from tests.adapters import adapted_values, drawn_adapters
from tests.chats import CHATML, MARKED, write_tokenizer
from tests.marks import exhaustive, quick, slow

ROWS = 4
MODEL = [
    "model.model_type=qwen3",
    "model.vocab_size=257",
    "model.hidden_size=16",
    "model.attention.num_attention_heads=4",
    "model.attention.num_key_value_heads=2",
    "model.attention.qk_norm=true",
    "model.intermediate_size=24",
    "model.num_hidden_layers=2",
    "data.mock=true",
    "data.seq_length=16",
    f"train.global_batch_size={ROWS}",
    "schedule.warmup_steps=0",
    "precision.compute=float32",
]
LORA = ["lora.rank=3", "lora.alpha=5", "lora.trained=[final_norm.gain]", "schedule.lr=0.05"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with base/, a Hugging Face folder, and run/, a step of adapters on it."""
    home = tmp_path_factory.mktemp("lora")
    write_base(home / "base")
    save_run(home)
    return home


def write_base(folder: Path, sizes: Sequence[str] = ()):
    """Write random weights as a Hugging Face folder; returns their model."""
    cfg = load(None, [*MODEL, *sizes]).model
    specs, rng = definition_of(cfg).specs, np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(0, 0.2, s.shape).astype(np.float32), specs)
    extras = {"config.json": json.dumps(config_to_hf(cfg)).encode()}
    read = array_source(cfg, params).read
    export(read, cfg, specs, slots(cfg, specs), folder, "bfloat16", extras=extras)
    return cfg


def trainer_at(home: Path, *keys: str) -> Trainer:
    trainer = Trainer(load(None, [*MODEL, *keys]), devices=jax.devices()[:1])
    resume(trainer)
    return trainer


def save_run(home: Path, *keys: str) -> Trainer:
    """Save a step of adapters on home/base, with nothing at zero, which no step has to compute."""
    where = f"run.dir={home}/run", f"checkpoint.init_from={home}/base"
    trainer = trainer_at(home, *where, *LORA, *keys)
    params = flatten_dict(trainer.state["params"])
    for path, array in params.items():
        if is_of_adapter(path) or path == ("final_norm", "gain"):
            params[path] = array + 0.05
    trainer.state["params"] = unflatten_dict(params)
    trainer.save()
    trainer.store.wait()
    return trainer


def weights_in(source: Source) -> dict:
    """The parameters of a checked source."""
    source.check()
    specs = flat(definition_of(source.cfg).specs)
    return {p: source.read(p, tuple(slice(0, n) for n in s.shape)) for p, s in specs.items()}


def run_convert(monkeypatch, *argv: object) -> None:
    monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
    assert convert() == 0


@slow
def test_a_run_with_adapters_is_weights_like_any_others(home):
    trainer = trainer_at(home, f"run.dir={home}/run", f"checkpoint.init_from={home}/base", *LORA)
    found = require_weights_of(trainer, home / "run")
    whole = trainer_at(home, f"run.dir={home}/next", f"checkpoint.init_from={home}/run")
    started = flatten_dict(jax.device_get(whole.params()))
    for path, array in found.items():
        np.testing.assert_array_equal(started[path], array)


@pytest.mark.parametrize("name", ["run", "base"])
def test_adapters_and_hugging_face_folders_are_written_for_megatron(
    name, home, tmp_path, monkeypatch
):
    out = tmp_path / "megatron"
    words = "export", "--dtype", "float32", "--ckpt", home / name, "--megatron", out
    run_convert(monkeypatch, *words)
    back, expected = weights_in(source_of(out)), weights_in(source_of(home / name))
    for path, array in expected.items():
        np.testing.assert_array_equal(back[path], array, err_msg=str(path))


def require_weights_of(trainer: Trainer, run: Path) -> dict:
    """The weights in the folder of a run, which must be those that its trainer computes with."""
    params = jax.device_get(trainer.params())
    expected = flatten_dict(adapted_values(params, trainer.specs))
    found = weights_in(source_of(run))
    for path, array in expected.items():
        if path in found:  # not of NF4
            wanted = np.asarray(array, np.float32)
            np.testing.assert_allclose(found[path], wanted, rtol=2e-6, atol=2e-6, err_msg=str(path))
    return found


NF4 = ["lora.base=nf4", "model.hidden_size=64", "model.intermediate_size=128"]


EXPERTS = [
    "model.model_type=qwen3_moe",
    "model.layer_pattern='full+experts'",
    "model.moe.num_experts=4",
    "model.moe.num_experts_per_tok=2",
    "model.moe.moe_intermediate_size=8",
]


@exhaustive
def test_lengths_of_experts_are_merged_into_the_models_logits(tmp_path):
    """Those of the run's base and adapters; PEFT has no file of them."""
    write_base(tmp_path / "base", EXPERTS)
    trainer = save_run(tmp_path, *EXPERTS, "lora.dora=true", "train.experts=xla")
    require_weights_of(trainer, tmp_path / "run")
    ids = np.arange(32, dtype=np.int32).reshape(2, 16)
    found = from_pretrained(tmp_path / "run").model(ids)
    wanted = jax.jit(lambda params: trainer.definition.bind(params)(ids))(trainer.params())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="PEFT has no DoRA for experts.*; merge it"):
        extract(tmp_path / "run", tmp_path / "adapter")


@slow
@pytest.mark.parametrize(
    "keys",
    quick([["lora.init=pissa"], [*NF4, "lora.init=pissa"], [*NF4, "lora.dora=true"]], 0),
)
def test_a_run_that_changed_its_base_is_weights_too(keys, tmp_path):
    """Its adapters, written for others, are for the weights that it began with."""
    sizes = [key for key in keys if key.startswith("model.")]
    cfg = write_base(tmp_path / "base", sizes)
    trainer = save_run(tmp_path, *keys)
    found = require_weights_of(trainer, tmp_path / "run")
    if "lora.base=nf4" not in keys:
        extract(tmp_path / "run", tmp_path / "adapter")
        others = weights_in(source_of(tmp_path / "adapter"))
        for path in found:
            np.testing.assert_allclose(others[path], found[path], rtol=1e-4, atol=1e-4)
    base = tmp_path / "base" / "model.safetensors"
    change_a_number(base)
    with pytest.raises(UserError, match="its adapters were trained on other weights"):
        source_of(tmp_path / "run").check()
    assert cfg.hidden_size in found["dense", "attention", "q"].shape


@slow
def test_merged_weights_are_those_of_the_run_and_come_apart(home, tmp_path, monkeypatch, capsys):
    out, again = tmp_path / "merged", tmp_path / "again"
    run_convert(monkeypatch, "merge", home / "base", home / "run", out, "--dtype=float32")
    wanted, found = (weights_in(source_of(folder)) for folder in (home / "run", out))
    for path in wanted:
        np.testing.assert_array_equal(found[path], wanted[path].astype(np.float32))
    run_convert(monkeypatch, "unmerge", out, again)
    files = sorted(file.name for file in again.iterdir())
    assert files == sorted(file.name for file in (home / "base").iterdir())
    for name in files:
        assert (again / name).read_bytes() == (home / "base" / name).read_bytes()
    run_convert(monkeypatch, "merge", home / "base", home / "run", tmp_path / "rounded")
    rounded = weights_in(source_of(tmp_path / "rounded"))
    for path in wanted:
        np.testing.assert_array_equal(rounded[path], wanted[path].astype("bfloat16"))


def test_a_merged_model_has_the_chat_template_of_its_adapter(home, tmp_path, monkeypatch):
    base, cfg = tmp_path / "base", load(None, MODEL).model
    shutil.copytree(home / "base", base)
    write_tokenizer(base, MARKED)
    (base / "README.md").write_text("base")
    (base / "special_tokens_map.json").write_text("{}")
    own = write_tokenizer(tmp_path / "own", CHATML)
    files = {file.name: file.read_bytes() for file in Path(own).iterdir()}
    specs = definition_of(cfg).specs
    write_adapter(tmp_path / "adapter", cfg, specs, drawn_adapters(specs), files)
    run_convert(monkeypatch, "merge", base, tmp_path / "adapter", tmp_path / "merged")
    found = {file.name: file.read_bytes() for file in (tmp_path / "merged").iterdir()}
    assert files.items() <= found.items() and "special_tokens_map.json" not in found
    assert found["README.md"] == b"base" and found["generation_config.json"]


@slow
def test_a_merged_checkpoint_of_mjax_comes_apart(home, tmp_path, monkeypatch):
    base, out, again = (tmp_path / name for name in ("base", "merged", "again"))
    run_convert(monkeypatch, "import", "--hf", home / "base", "--out", base, "--dtype=bfloat16")
    run_convert(monkeypatch, "merge", base, home / "run", out)
    wanted, found = (weights_in(source_of(folder)) for folder in (home / "run", out))
    for path in wanted:
        np.testing.assert_array_equal(found[path], wanted[path].astype("bfloat16"))
    run_convert(monkeypatch, "unmerge", out, again)
    files = {file.relative_to(base) for file in base.rglob("*") if file.is_file()}
    assert files == {file.relative_to(again) for file in again.rglob("*") if file.is_file()}
    assert all((base / name).read_bytes() == (again / name).read_bytes() for name in files)


@slow
def test_an_extracted_adapter_is_that_of_the_run(home, tmp_path, monkeypatch):
    run_convert(monkeypatch, "extract", home / "run", tmp_path / "adapter")
    run = read_adapter_run(adapter_step(home / "run"))
    back = read_adapter(tmp_path / "adapter", run.cfg, definition_of(run.cfg).specs)
    assert back.base == str(home / "base") and back.scales.keys() == run.adapters().scales.keys()
    for path, array in starting_arrays(back, run.specs).items():
        np.testing.assert_array_equal(array, run.adapters().arrays[path])
    wanted, found = (weights_in(source_of(f)) for f in (home / "run", tmp_path / "adapter"))
    for path in wanted:
        np.testing.assert_array_equal(found[path].astype(np.float32), wanted[path].astype("f4"))
    keys = f"run.dir={tmp_path}/next", f"checkpoint.init_from={home}/base"
    trainer = trainer_at(home, *keys, *LORA, f"lora.init={tmp_path}/adapter")
    for path, array in flatten_dict(jax.device_get(trainer.params())).items():
        if is_of_adapter(path) or path == ("final_norm", "gain"):
            np.testing.assert_array_equal(array, run.adapters().arrays[path])
    for key, message in (("lora.rank=4", "lora.rank"), ("lora.alpha=6", "alpha=5, rslora=False")):
        trainer = Trainer(load(None, [*MODEL, *LORA, key]), devices=jax.devices()[:1])
        with pytest.raises(UserError, match=message):
            starting_arrays(back, flat(trainer.specs))
        given = *keys, key, f"lora.init={tmp_path}/adapter", "train.global_batch_size=8"
        planned = load(None, [*MODEL, *LORA, *given])
        with pytest.raises(UserError, match=message):
            dry_run(planned, compiles=False)


@slow
def test_several_adapters_in_slots_are_those_of_their_folders(home, tmp_path):
    """A run in slot 1, and a folder of PEFT with another rank in slot 2."""
    write_base(tmp_path / "base")
    save_run(tmp_path, "lora.trained=[]", "lora.targets=[q,down]")
    cfg = source_of(home / "base").cfg
    specs = definition_of(cfg).specs
    drawn = drawn_adapters(specs, rank=2, base=str(home / "base"))
    write_adapter(tmp_path / "adapter", cfg, specs, drawn)
    folders = tmp_path / "run", tmp_path / "adapter"
    lm = from_pretrained(home / "base")
    declared, arrays = stack_adapters(folders, lm.cfg, lm.definition.specs)
    definition, params = with_specs(lm.definition, declared), joined_trees(lm.params, arrays)
    ids = np.random.default_rng(0).integers(1, 250, (3, 8), np.int32)
    info = replace(tokens_of(ids.shape), adapters=jnp.array([2, 0, 1]))
    found = definition.bind(params).hidden(ids, info, Context())[0]
    for row, folder in ((0, folders[1]), (1, home / "base"), (2, folders[0])):
        model = from_pretrained(folder).model
        wanted = model.hidden(ids, tokens_of(ids.shape), Context())[0][row]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)
    whole = "final_norm.gain was trained whole"
    with pytest.raises(UserError, match=rf"run \(slot 1\): {whole}"):
        stack_adapters([home / "run"], cfg, specs)


@slow
def test_another_base_and_changed_weights_are_one_line(home, tmp_path, monkeypatch):
    base, out = tmp_path / "base", tmp_path / "merged"
    shutil.copytree(home / "base", base)
    run_convert(monkeypatch, "merge", base, home / "run", out)
    change_a_number(base / "model.safetensors")
    assert "the base has changed since it was merged" in refused(
        monkeypatch, "unmerge", out, tmp_path / "again"
    )
    assert "its adapters were trained on other weights" in refused(
        monkeypatch, "merge", base, home / "run", tmp_path / "again"
    )
    change_a_number(out / "model.safetensors")
    assert "weights have changed since they were merged" in refused(
        monkeypatch, "unmerge", out, tmp_path / "again"
    )
    (out / RECORD).unlink()
    assert "has no merge.json" in refused(monkeypatch, "unmerge", out, tmp_path / "again")
    assert "holds no adapters" in refused(monkeypatch, "extract", home / "base", tmp_path / "again")
    best = refused(monkeypatch, "extract", home / "run@best", tmp_path / "again")
    assert "has a held-out loss" in best
    shutil.copytree(home / "run", tmp_path / "run")
    record = next((tmp_path / "run").rglob("meta/metadata"))
    record.write_text(record.read_text().replace(str(home / "base"), "/nowhere"))
    (record.parents[1] / "digests.json").unlink()
    with pytest.raises(UserError, match="names the base /nowhere, which is not here"):
        source_of(tmp_path / "run")
    assert not (tmp_path / "again").exists()


def change_a_number(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for at in (0, 1):
        content[len(content) // 2 + at] ^= 0x40
    file.write_bytes(content)


def refused(monkeypatch, *argv: object) -> str:
    """The one line with which a command refuses."""
    with pytest.raises(UserError) as error:
        run_convert(monkeypatch, *argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_step_holds_adapters_alone(home):
    run = read_adapter_run(adapter_step(home / "run"))
    norm = ("final_norm", "gain")
    held = set(run.adapters().arrays)
    assert held == {path for path, spec in run.specs.items() if spec.is_trained}
    assert all(is_of_adapter(path) or path == norm for path in held) and len(held) == 1 + 2 * 5
