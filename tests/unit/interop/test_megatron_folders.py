"""Damaged and hostile torch_dist folders are one line each, and nothing in them runs."""

import json
import pickle
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.checkpoint.base.source import array_source
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.parameters import megatron_source
from mjax.interop.megatron.run_arguments import FLAGS
from mjax.interop.megatron.run_folder import import_run
from mjax.interop.megatron.stored import torch_pickle
from mjax.interop.megatron.writing import export_torch_dist
from mjax.interop.megatron.written_arguments import megatron_arguments
from mjax.models import build, split

CFG = ModelConfig(vocab_size=64, vocab_multiple=64, hidden_size=8, num_hidden_layers=2)
PAGE = Path(__file__).parents[3] / "docs/start/from-megatron.md"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    _, params = split(build(CFG, nnx.Rngs(0)))
    out = tmp_path_factory.mktemp("megatron") / "out"
    params = jax.tree.map(np.asarray, params)
    export_torch_dist(array_source(CFG, params), out, "float32", "local")
    return out


def copy(written: Path, to: Path) -> Path:
    folder = to / "c"
    folder.mkdir()
    for file in (written / "release").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def cut(name: str, keep: float):
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def replaced(name: str, old: bytes, new: bytes):
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new))

    return damage


def written_as(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def with_arguments(**values):
    def damage(folder: Path) -> None:
        args = megatron_arguments(CFG, "local") | values
        common = {"args": torch_pickle.namespace(args)}
        (folder / "common.pt").write_bytes(torch_pickle.archive(common))

    return damage


def differing(text: str):
    return with_arguments(heterogeneous_layers_config_encoded_json=text, add_bias_linear=False)


NOTHING = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
TEXTS = {"attention": {"n_heads_in_group": "many"}, "mlp": {"ffn_mult": "wide"}}


def told(**values) -> bytes:
    return json.dumps(values).encode()


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("bomb_ran"),)


DAMAGE = {
    "no metadata.json": lambda c: (c / "metadata.json").unlink(),
    "no common.pt": lambda c: (c / "common.pt").unlink(),
    "no .metadata": lambda c: (c / ".metadata").unlink(),
    "no data": lambda c: (c / "__0_0.distcp").unlink(),
    "empty metadata.json": written_as("metadata.json", b""),
    "list in metadata.json": written_as("metadata.json", b"[]"),
    "other format": written_as("metadata.json", told(sharded_backend="fsdp_dtensor")),
    "zarr": written_as("metadata.json", told(sharded_backend="zarr")),
    "empty .metadata": written_as(".metadata", b""),
    "half .metadata": cut(".metadata", 0.5),
    "number as .metadata": written_as(".metadata", pickle.dumps(3)),
    "bomb as .metadata": written_as(".metadata", pickle.dumps(Bomb())),
    "half common.pt": cut("common.pt", 0.5),
    "empty common.pt": written_as("common.pt", b""),
    "bomb as common.pt": written_as("common.pt", torch_pickle.archive({"args": 3})),
    "half data": cut("__0_0.distcp", 0.5),
    "file outside": replaced(".metadata", b"__0_0.distcp", b"../../passwd"),
    "other dtype": with_arguments(hidden_size="8"),
    "no heads": with_arguments(num_attention_heads=0),
    "negative layers": with_arguments(num_layers=-1),
    "many layers": with_arguments(num_layers=9),
    "other width": with_arguments(ffn_hidden_size=48),
    "experts that are not there": with_arguments(num_experts=4, moe_router_topk=2),
    "latents that are not there": with_arguments(multi_latent_attention=True, qk_layernorm=True),
    "unknown argument": with_arguments(attention_output_gate=True),
    "pattern of nothing": with_arguments(hybrid_layer_pattern="QQ"),
    "file of layers that is elsewhere": with_arguments(heterogeneous_layers_config_path="x.json"),
    "half JSON of layers": differing('{"block_configs": ['),
    "deep JSON of layers": differing("[" * 100_000),
    "no list of layers": differing('{"block_configs": 3}'),
    "too few layers": differing('{"block_configs": []}'),
    "layers that are numbers": differing('{"block_configs": [1, 2]}'),
    "layers without branches": differing(json.dumps({"block_configs": [NOTHING, NOTHING]})),
    "heads as a text": differing(json.dumps({"block_configs": [TEXTS, TEXTS]})),
    "list as a number": with_arguments(hidden_size=[8]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_and_nothing_runs(written, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = copy(written, tmp_path)
    DAMAGE[name](folder)
    with pytest.raises(UserError) as error:
        megatron_source(folder).check()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bomb_ran").exists()


def test_a_folder_without_optimizer_is_no_run(written, tmp_path):
    with pytest.raises(UserError, match="holds no state of Adam"):
        import_run(written, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_page_has_the_table_of_flags():
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| `([\w.]+)` \|$", PAGE.read_text(), re.M)
    assert rows == [(flag.group, flag.name, flag.key) for flag in FLAGS]
