"""What mjax writes for Megatron-LM comes back as it was, and an export that was killed goes on."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.base.stored import StoredArrays
from mjax.checkpoint.weights import StatePart, write_step
from mjax.config import Config
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron import data_files, writing
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.run_folder import import_run
from mjax.interop.megatron.stored import torch_pickle
from mjax.interop.megatron.writing import export_torch_dist
from mjax.interop.megatron.written_arguments import megatron_arguments
from mjax.interop.megatron.written_run import run_to_write
from mjax.interop.sources import source_of
from mjax.models import definition_of
from tests.marks import slow

MODEL = {"vocab_size": 64, "vocab_multiple": 64, "hidden_size": 8, "num_hidden_layers": 2}
RUN = {
    "model": MODEL | {"intermediate_size": 16, "max_position_embeddings": 8},
    "data": {"mock": True, "seq_length": 8},
    "train": {"steps": 20, "global_batch_size": 2},
    "schedule": {"lr": 1e-2, "min_lr": 1e-4, "warmup_steps": 3, "decay_steps": 16},
    "optimizer": {"weight_decay_end": 0.2, "weight_decay_style": "cosine"},
}


def write_run(folder: Path, **groups) -> None:
    """A run folder with random weights and moments at step 5."""
    cfg = Config.model_validate(RUN | {"run": {"dir": str(folder)}} | groups)
    specs = definition_of(cfg.model).specs
    single, parts = np.dtype(np.float32), {}
    for seed, place in enumerate([("params",), ("opt", "mu"), ("opt", "nu")]):
        rng = np.random.default_rng(seed)
        arrays = jax.tree.map(lambda spec, rng=rng: rng.random(spec.shape, single), specs)
        parts[place] = StatePart(array_source(cfg.model, arrays), specs, single)
    record = {"config": cfg.model_dump(mode="json"), "consumed_samples": 10}
    numbers = {("step",): 5, ("opt", "count"): 4}
    write_step(folder / "checkpoints/5", parts, record, None, numbers)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


def export(run: Path, out: Path) -> None:
    written = run_to_write(str(run), apart=False)
    export_torch_dist(source_of(run), out, "float32", "local", written, str(run))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    export(run, out)
    return out


@slow
def test_a_run_comes_back_with_its_optimizer_and_schedule(run, exported, tmp_path, caplog):
    assert (exported / "latest_checkpointed_iteration.txt").read_text() == "5"
    import_run(exported, tmp_path / "back")
    assert "optimizer.weight_decay is where the ramp starts" in caplog.text
    ours, back = (StoredArrays(folder / "checkpoints/5") for folder in (run, tmp_path / "back"))
    assert len(ours.paths()) == len(set(back.paths()) & set(ours.paths())) > 20
    for path in ours.paths():
        a, b = (stored.open(path).read().result() for stored in (ours, back))
        np.testing.assert_array_equal(a, b, str(path))
    configs = [
        json.loads((folder / "checkpoints/5/meta/metadata").read_text())["config"]
        for folder in (run, tmp_path / "back")
    ]
    for group in ("schedule", "optimizer", "model"):
        assert configs[0][group] == configs[1][group]


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Killed(BaseException):
    pass


@slow
def test_a_killed_export_goes_on_to_the_same_bytes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "FILE_BYTES", 8000)
    made, make, all_made = [], writing.tensor_archive, []
    monkeypatch.setattr(writing, "tensor_archive", lambda x: all_made.append(x) or make(x))
    export(run, tmp_path / "whole")
    want = bytes_of(tmp_path / "whole")
    assert sum(name.endswith(".distcp") for name in want) > 3

    def dies(x: np.ndarray) -> bytes:
        if len(made) == 30:
            (file,) = (tmp_path / ".out.unfinished").glob("iter_*/__0_3.distcp")
            with file.open("ab") as torn:
                torn.write(b"the start of a part")
            raise Killed
        made.append(x)
        return make(x)

    monkeypatch.setattr(writing, "tensor_archive", dies)
    with pytest.raises(Killed):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with (tmp_path / ".out.unfinished/.journal").open("a") as journal:
        journal.write('["torn')
    again = []
    monkeypatch.setattr(writing, "tensor_archive", lambda x: again.append(x) or make(x))
    export(run, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == want
    assert len(made) + len(again) == len(all_made)
    assert not (tmp_path / ".out.unfinished").exists()


@pytest.mark.slow
def test_what_a_killed_export_left_is_checked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_compare", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        export(run, tmp_path / "out")
    monkeypatch.undo()
    (file,) = (tmp_path / ".out.unfinished").glob("iter_*/*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(b"data/0") + 100
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="reads back differently; write again"):
        export(run, tmp_path / "out")
    export(run, tmp_path / "out")


def test_a_run_that_megatron_cannot_go_on_with_is_named(run, tmp_path):
    with pytest.raises(UserError, match="holds no optimizer"):
        run_to_write(str(tmp_path), apart=False)
    with pytest.raises(UserError, match="has no experts"):
        run_to_write(str(run), apart=True)
    write_run(tmp_path / "run", optimizer={"name": "muon"})
    with pytest.raises(UserError, match=r"no counterpart of optimizer.name='muon'"):
        run_to_write(str(tmp_path / "run"), apart=False)


SCHEDULERS = {
    "a list": [1],
    "an unknown style": {"lr_decay_style": "sine"},
    "a word as a number": {"max_lr": "fast"},
    "no number": {"lr_decay_steps": None},
    "a part of a step": {"lr_warmup_steps": 5},
    "another time of decay": {"wd_incr_steps": 4},
    "a sample that is not its own": {"num_steps": 9},
    "more samples than there were": {"num_steps": 12},
    "a word as samples": {"num_steps": "ten"},
}


OFTEN = ("a list", "a part of a step", "a sample that is not its own")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in SCHEDULERS]
)
def test_a_scheduler_that_is_damaged_is_one_line(run, exported, tmp_path, name):
    written, wrong = run_to_write(str(run), apart=False), SCHEDULERS[name]
    common = written.common(megatron_arguments(written.cfg.model, "local"))
    common["args"] = torch_pickle.namespace(common["args"])
    right = common["opt_param_scheduler"]
    common["opt_param_scheduler"] = wrong if isinstance(wrong, list) else right | wrong
    folder = shutil.copytree(exported / "iter_0000005", tmp_path / "c")
    (folder / "common.pt").write_bytes(torch_pickle.archive(common))
    with pytest.raises(UserError) as error:
        import_run(folder, tmp_path / "back")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "back").exists()


T5 = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8,
    "padded_vocab_size": 64, "position_embedding_type": "relative", "norm_epsilon": 1e-5,
    "normalization": "LayerNorm", "add_bias_linear": False, "ffn_hidden_size": 16,
}  # fmt: skip


T5_WRONG = {
    "num_experts": {"num_experts": 4, "moe_router_topk": 1},
    "qk_layernorm": {"qk_layernorm": True},
    "window_size": {"window_size": (4, 0)},
    "position_embedding_type": {},  # of a model that is no T5
}


@pytest.mark.parametrize("name", T5_WRONG)
def test_a_t5_that_mjax_lacks_is_one_line(name):
    assert model_config(T5, "x", "t5").layer_kinds[-1] == "full+cross+mlp"
    with pytest.raises(UserError, match=rf"x: args.{name}=.*cannot be imported"):
        model_config(T5 | T5_WRONG[name], "x", "t5" if T5_WRONG[name] else "gpt")


LLAVA = T5 | {
    "position_embedding_type": "rope", "add_bias_linear": True, "img_h": 8, "img_w": 8,
    "patch_dim": 4, "disable_vision_class_token": True, "ffn_hidden_size": 8,
}  # fmt: skip
UP = "vision_model.decoder.layers.mlp.linear_fc1.weight"
SHAPES = {"vision_model.conv1.weight": (8, 3, 4, 4), UP: (2, 16, 8)}
LLAVA_WRONG = {
    "disable_vision_class_token": {"disable_vision_class_token": False},
    "vision_model_type": {"vision_model_type": "internvit"},
    "position_embedding_type": {"position_embedding_type": "learned_absolute"},
    "img_h": {"img_w": 16},
    "swiglu": {"swiglu": True},
    "num_query_groups": {"group_query_attention": True, "num_query_groups": 1},
    "use_tiling": {"use_tiling": True},
    "encoder_num_layers": {UP: (10**9, 16, 8)},
}


@pytest.mark.parametrize("name", LLAVA_WRONG)
def test_a_llava_that_mjax_lacks_is_one_line(name):
    kinds = model_config(LLAVA, "x", "llava", SHAPES).layer_kinds
    assert kinds == ("vision+mlp",) * 2 + ("projector",) + ("full+mlp",) * 2
    wrong = LLAVA_WRONG[name]
    with pytest.raises(UserError, match=rf"x: args.{name}=.*cannot be imported"):
        model_config(LLAVA | wrong, "x", "llava", SHAPES | wrong)
    with pytest.raises(UserError, match="tensors of vision_model are missing"):
        model_config(LLAVA, "x", "llava", {})


@pytest.mark.slow
def test_layers_that_differ_come_back(tmp_path):
    pattern = "full+mlp, mlp@1, full+linear_mlp, linear+mlp@1, full@2"
    sizes = [{"intermediate_size": 8}, {"attention": {"num_key_value_heads": 1}}]
    base = MODEL | {"num_hidden_layers": 5, "intermediate_size": 16}
    cfg = ModelConfig(**base, layer_pattern=pattern, layer_sizes=sizes)
    specs = definition_of(cfg).specs
    arrays = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), specs)
    for impl in ("local", "transformer_engine"):
        export_torch_dist(array_source(cfg, arrays), tmp_path / impl, "float32", impl)
        assert source_of(str(tmp_path / impl)).cfg.layer_kinds == cfg.layer_kinds
    with pytest.raises(UserError, match="no arguments for"):
        turned = pattern.replace("@2", "@0").replace("@1", "@2").replace("@0", "@1")
        wrong = ModelConfig(**base, layer_pattern=turned, layer_sizes=sizes[::-1])
        megatron_arguments(wrong, "local")
