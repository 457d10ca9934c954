"""How Megatron-LM's files hold tensors: in 8 bits, in files by rank; damage is one line."""

import argparse
import io
import json
import shutil
import zipfile
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mjax.checkpoint.base.source import array_source, flat
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.optimizer_state import optimizer_state
from mjax.interop.megatron.parameters import megatron_source
from mjax.interop.megatron.run_folder import import_run
from mjax.interop.megatron.stored import torch_pickle as tp
from mjax.interop.megatron.stored.archives import MappedTensor, unpickled
from mjax.interop.megatron.stored.opening import open_checkpoint
from mjax.interop.megatron.stored.torch_dist import open_torch_dist
from mjax.interop.megatron.writing import export_torch_dist
from mjax.interop.megatron.written_arguments import megatron_arguments
from mjax.models import build, split

CFG = ModelConfig(vocab_size=64, vocab_multiple=64, hidden_size=64, num_hidden_layers=2)
TE = "transformer_engine.pytorch.tensor."
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    _, params = split(build(CFG, nnx.Rngs(0)))
    out = tmp_path_factory.mktemp("megatron") / "out"
    params = jax.tree.map(np.asarray, params)
    export_torch_dist(array_source(CFG, params), out, "float32", "local")
    return out / "release"


def often(names: dict, count: int) -> list:
    """The first of these cases, and the others as slow ones."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=[slow] * (i >= count)) for i, n in enumerate(names)]


# ---- archives by hand ---------------------------------------------------------------------------


class Archive:
    """A torch archive of several tensors."""

    def __init__(self):
        self.storages: list[np.ndarray] = []

    def tensor(self, x: np.ndarray, strides: tuple | None = None, offset: int = 0):
        kinds = {kind: name for kind, (_, name) in tp.TORCH_DTYPES.items()}
        kind = (kinds | {np.dtype(np.uint8): "ByteStorage"})[x.dtype]
        storage = tp.TorchStorage(kind, x.size, str(len(self.storages)))
        self.storages.append(np.ascontiguousarray(x))
        steps = tuple(s // x.itemsize for s in self.storages[-1].strides)
        hooks = tp.CallOf(tp.TorchName("collections", "OrderedDict"), ())
        rebuild = tp.TorchName("torch._utils", "_rebuild_tensor_v2")
        args = storage, offset, x.shape, strides or steps, False, hooks
        return tp.CallOf(rebuild, args)

    def bytes_of(self, obj: object) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
            file.writestr("archive/data.pkl", tp.pickled(obj))
            for key, x in enumerate(self.storages):
                file.writestr(f"archive/data/{key}", x.tobytes())
        return out.getvalue()


def rewritten(written: Path, to: Path, content) -> Path:
    """The folder with other chunks: `content(name, x)` is the archive of a whole tensor."""
    store, folder = open_torch_dist(written), to / "c"
    folder.mkdir()
    data, entries, places = b"", {}, []
    for name, tensor in store.tensors.items():
        x = store.read(name, tuple(map(slice, [0] * len(tensor.shape), tensor.shape)))
        x = x.view(store.dtype(name))
        made, start = content(name, x), (0,) * x.ndim
        entries[name] = tp.tensor_metadata(x.dtype, x.shape, [(start, x.shape)])
        places.append((name, start, "__0_0.distcp", len(data), len(made)))
        data += made
    extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
    entries[extra] = tp.object_metadata()
    places.append((extra, None, "__0_0.distcp", len(data), 9))
    (folder / "__0_0.distcp").write_bytes(data + b"not read.")
    (folder / ".metadata").write_bytes(tp.metadata_file(entries, places))
    for name in ("common.pt", "metadata.json"):
        (folder / name).write_bytes((written / name).read_bytes())
    return folder


def plain(name: str, x: np.ndarray) -> bytes:
    archive = Archive()
    return archive.bytes_of(archive.tensor(x))


# ---- in 8 bits ----------------------------------------------------------------------------------

OLD_NUMBER = tp.Instance(tp.TorchName("transformer_engine_torch", "DType"), 6)
NUMBER = tp.CallOf(tp.TorchName("transformer_engine_torch", "DType"), (7,))
ORDER = tp.Instance(tp.TorchName("transformer_engine_torch", "Float8BlockScaleTensorFormat"), 1)
SINGLE = tp.TorchName("torch", "float32")


def class_method(module: str, name: str) -> tp.CallOf:
    """What the pickle of a method of a class is."""
    getter = tp.TorchName("__builtin__", "getattr")
    return tp.CallOf(getter, (tp.TorchName(module, name), "_make_in_reduce_ex"))


def made(module: str, *args: object) -> tp.CallOf:
    """What the pickle of a function of newer versions is."""
    return tp.CallOf(tp.TorchName(TE + module, f"_make_{module}_in_reduce_ex"), args)


def bits(x: np.ndarray) -> np.ndarray:
    return x.astype(E4M3).view(np.uint8)


def whole(archive: Archive, x: np.ndarray, old: bool = False, turned: bool = False, **damage):
    """A tensor with one scale; x holds numbers that e4m3 has, times 2^-9."""
    number = damage.get("number", NUMBER)
    data = archive.tensor(damage.get("data", bits(x * 512)))
    scale = archive.tensor(damage.get("scales", np.full(1, 2.0**-9, np.float32)))
    if old:
        of = class_method("transformer_engine.pytorch.float8_tensor", "Float8Tensor")
        return tp.CallOf(of, (data, OLD_NUMBER, scale, SINGLE))
    shape = tp.CallOf(tp.TorchName("torch", "Size"), (x.shape,))
    columns = archive.tensor(bits(np.moveaxis(x, -1, 0) * 512)) if turned else None
    return made("float8_tensor", None if turned else data, number, scale, SINGLE, shape, columns)


def padded(scales: np.ndarray, *multiples: int) -> np.ndarray:
    """As Transformer Engine pads them; what is behind them is no number of theirs."""
    behind = [(0, -n % m) for n, m in zip(scales.shape, multiples, strict=True)]
    return np.pad(scales, behind, constant_values=99)


def scales_of(x: np.ndarray, *block: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers of two of blocks of a matrix, and as many as it has entries."""
    flat_x = x.reshape(-1, x.shape[-1])
    count = [-(-n // size) for n, size in zip(flat_x.shape, block, strict=True)]
    powers = np.arange(np.prod(count)).reshape(count) % 3 - 9
    every = np.repeat(np.repeat(powers, block[0], 0), block[1], 1)
    every = every[: len(flat_x), : flat_x.shape[1]].reshape(x.shape)
    return powers, (2.0**every).astype(np.float32)


def in_order_of_cublas(scales: np.ndarray) -> np.ndarray:
    """Tiles of 128 x 4, in each the four rows together that lie 32 apart (cuBLAS, its docs)."""
    rows, columns = scales.shape
    out = np.zeros(scales.size, np.uint8)
    for (row, column), value in np.ndenumerate(scales):
        tile = (row // 128) * (columns // 4) + column // 4
        out[tile * 512 + (row % 32) * 16 + row % 128 // 32 * 4 + column % 4] = value
    return out.reshape(rows, columns)


def by_rows(archive: Archive, x: np.ndarray, swizzled: bool = False, of_columns: bool = False):
    powers, every = scales_of(x, *((32, 1) if of_columns else (1, 32)))
    scales = padded((127 + powers).astype(np.uint8), *((4, 128) if of_columns else (128, 4)))
    if swizzled:
        turned = scales.T if of_columns else scales
        scales = in_order_of_cublas(turned).reshape(scales.shape)
    kept = archive.tensor(bits(x / every)), archive.tensor(scales)
    both = (None, None, *kept) if of_columns else (*kept, None, None)
    return made("mxfp8_tensor", *both, NUMBER, SINGLE, x.shape, None, swizzled)


def by_blocks(
    archive: Archive, x: np.ndarray, rows: int = 128, of_columns: bool = False, order: object = None
):
    powers, every = scales_of(x, *((128, rows) if of_columns else (rows, 128)))
    scales = (2.0**powers).astype(np.float32)
    turns = of_columns == (rows == 128)
    scales = padded(scales.T if turns else scales, 1, 4)
    values = x / every
    values = np.moveaxis(values, -1, 0) if of_columns else values
    kept = archive.tensor(bits(values)), archive.tensor(scales)
    both = (None, None, *kept) if of_columns else (*kept, None, None)
    kind = NUMBER, SINGLE, None, rows == 128, order
    return made("float8_blockwise_tensor", x.shape, *both, *kind)


FORMS = {
    "one scale": whole,
    "one scale, old": partial(whole, old=True),
    "one scale, columns alone": partial(whole, turned=True),
    "rows": by_rows,
    "columns": partial(by_rows, of_columns=True),
    "rows in the order of cuBLAS": partial(by_rows, swizzled=True),
    "columns in the order of cuBLAS": partial(by_rows, swizzled=True, of_columns=True),
    "squares": by_blocks,
    "squares, columns alone": partial(by_blocks, of_columns=True),
    "vectors": partial(by_blocks, rows=1, order=0),
    "vectors, columns alone": partial(by_blocks, rows=1, of_columns=True),
}


LINEAR = "q", "kv", "up", "down", "out"


def is_linear(name: str) -> bool:
    return "linear_" in name and name.endswith("weight") and "norm" not in name


def rounded(x: np.ndarray) -> np.ndarray:
    """Values that all forms hold exactly."""
    return (np.clip(np.rint(x * 100), -8, 8) / 128).astype(np.float32)


def in_8_bits(form):
    def content(name: str, x: np.ndarray) -> bytes:
        if not is_linear(name):
            return plain(name, x)
        archive = Archive()
        return archive.bytes_of(form(archive, rounded(x)))

    return content


@pytest.mark.parametrize("form", often(FORMS, 1))
def test_values_in_8_bits_are_read(written, tmp_path, form):
    source = megatron_source(rewritten(written, tmp_path, in_8_bits(FORMS[form])))
    source.check()
    truth, changed = megatron_source(written), 0
    specs = flat(split(build(CFG, nnx.Rngs(0)))[1])
    for path, spec in specs.items():
        box = tuple(map(slice, spec.shape))
        want, got = truth.read(path, box), source.read(path, box)
        assert got.dtype == np.float32
        if path[-1] in LINEAR:
            want = rounded(want)
            changed += 1
        np.testing.assert_array_equal(got, want, err_msg=str(path))
    assert changed == 5


def changed(**damage):
    return partial(whole, **damage)


def unknown(archive: Archive, x: np.ndarray):
    return tp.CallOf(class_method(TE + "nvfp4_tensor", "NVFP4Tensor"), (archive.tensor(x),))


def few_scales(archive: Archive, x: np.ndarray):
    scales = archive.tensor(np.ones((1, 4), np.float32))
    kept = x.shape, archive.tensor(bits(x)), scales, None, None, NUMBER, SINGLE, None, False, None
    return made("float8_blockwise_tensor", *kept)


def run_by_name(archive: Archive, x: np.ndarray):
    touch = tp.CallOf(tp.TorchName("__builtin__", "getattr"), (tp.TorchName("os", "system"), "x"))
    return tp.CallOf(touch, ("touch bomb_ran",))


def outside(archive: Archive, x: np.ndarray):
    return archive.tensor(x, strides=(1000, -1, 1)[-x.ndim :])


WRONG = {
    "type of 8 bits": (changed(number=tp.CallOf(NUMBER.function, (3,))), "FP8 weights of type 3"),
    "two scales": (changed(scales=np.ones(2, np.float32)), "2 scales where 1"),
    "no scales": (changed(scales=np.ones((0, 1), np.float32)), "0 scales where 1"),
    "half the bytes": (changed(data=np.ones((3, 5), np.uint8)), "cannot read"),
    "tiles that are cut": (
        lambda a, x: made(
            "mxfp8_tensor",
            a.tensor(bits(x)),
            a.tensor(np.ones((5, 7), np.uint8)),
            None,
            None,
            NUMBER,
            SINGLE,
            x.shape,
            None,
            True,
        ),
        "cannot read",
    ),
    "no rows, no columns": (
        lambda a, x: made("mxfp8_tensor", None, None, None, None, NUMBER, SINGLE, x.shape),
        "without numbers or scales; save the model in bf16",
    ),
    "another order": (partial(by_blocks, rows=1, order=ORDER), "in their compact order; save the"),
    "few scales of 1 x 128": (few_scales, "scales where"),
    "4 bits": (unknown, "NVFP4Tensor, which is no form"),
    "4 bits, newer": (
        lambda a, x: made("nvfp4_tensor", a.tensor(x)),
        "a nvfp4_tensor, which is no form.*in bf16",
    ),
    "a function by getattr": (run_by_name, "cannot read"),
    "strides that lead out": (outside, "by strides"),
}


@pytest.mark.parametrize("name", often(WRONG, 3))
def test_hostile_tensors_are_one_line(written, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    form, words = WRONG[name]
    source = megatron_source(rewritten(written, tmp_path, in_8_bits(form)))
    with pytest.raises(UserError, match=words) as error:
        source.check()
        for path, spec in flat(split(build(CFG, nnx.Rngs(0)))[1]).items():
            source.read(path, tuple(map(slice, spec.shape)))
    assert "\n" not in str(error.value) and "distcp" in str(error.value)
    assert not (tmp_path / "bomb_ran").exists()


# ---- files by rank ------------------------------------------------------------------------------

ROWS = "word_embeddings output_layer linear_qkv linear_fc1".split()
COLUMNS = "linear_proj linear_fc2".split()


def whole_tensors(written: Path) -> dict[str, np.ndarray]:
    """All tensors, those of layers under the layer's number."""
    store, found = open_torch_dist(written), {}
    for name, tensor in store.tensors.items():
        x = store.read(name, tuple(map(slice, [0] * len(tensor.shape), tensor.shape)))
        x, rest = x.view(np.float32), name.removeprefix("decoder.layers.")
        layers = {f"decoder.layers.{i}.{rest}": x[i] for i in range(2)}
        found |= {name: x} if rest == name else layers
    return found


def of_rank(name: str, x: np.ndarray, rank: int) -> np.ndarray:
    """What a rank of two has of a tensor."""
    module = name.split(".")[-2]
    if module == "linear_fc1" and x.ndim == 2 and "norm" not in name:
        return np.concatenate([half[: len(half) // 2] if not rank else half[len(half) // 2 :]
                               for half in np.split(x, 2)])  # fmt: skip
    if name.endswith(".weight") and module in ROWS + COLUMNS:
        return np.split(x, 2, axis=int(module in COLUMNS))[rank]
    return x


def by_rank(written: Path, to: Path, sizes: dict | None = None, form=None, **changes) -> Path:
    """The model as ranks of tp 2 and pp 2 save it; `form`: of linear weights."""
    axes = {f"{axis}_model_parallel_size": 2 for axis in ("tensor", "pipeline")}
    args = megatron_arguments(CFG, "local") | axes | (sizes or {})
    for tensor, stage in np.ndindex(2, 2):
        archive, model = Archive(), {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
        for name, x in whole_tensors(written).items():
            last = name.startswith(("output_layer", "decoder.final")) or ".layers.1." in name
            if last == bool(stage):
                own = name.replace(".layers.1.", ".layers.0.")
                x = of_rank(name, x, tensor)
                in_8 = form is not None and is_linear(name)
                model[own] = form(archive, rounded(x)) if in_8 else archive.tensor(x)
        state = {"args": tp.namespace(args), "iteration": 3, "model": model} | changes
        file = to / f"iter_0000003/mp_rank_{tensor:02d}_{stage:03d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        file.write_bytes(archive.bytes_of({k: v for k, v in state.items() if v is not None}))
    (to / "latest_checkpointed_iteration.txt").write_text("3")
    return to


def assert_equal_to(written: Path, source, in_8: bool = False) -> None:
    source.check()
    truth = megatron_source(written)
    for path, spec in flat(split(build(CFG, nnx.Rngs(0)))[1]).items():
        box = tuple(map(slice, spec.shape))
        want = truth.read(path, box)
        want = rounded(want) if in_8 and path[-1] in LINEAR else want
        np.testing.assert_array_equal(source.read(path, box), want, str(path))


@pytest.mark.parametrize("form", often(FORMS, 0))
def test_files_by_rank_hold_values_in_8_bits(written, tmp_path, form):
    folder = by_rank(written, tmp_path, form=FORMS[form])
    assert_equal_to(written, megatron_source(folder), in_8=True)


def test_files_by_rank_are_one_model(written, tmp_path):
    folder = by_rank(written, tmp_path)
    assert_equal_to(written, megatron_source(folder))
    with pytest.raises(UserError, match="numbers the optimizer's state by rank; convert it"):
        import_run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def first_file(folder: Path) -> Path:
    return folder / "iter_0000003/mp_rank_00_000/model_optim_rng.pt"


def without_a_rank(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000003/mp_rank_01_001")


def halved(folder: Path) -> None:
    content = first_file(folder).read_bytes()
    first_file(folder).write_bytes(content[: len(content) // 2])


LAYER, EMPTY = ({"attention": part, "ffn": part} for part in ({"no_op": False}, {"no_op": True}))
ONE = np.ones((1, 1), np.float32)
ALONE = {"conv1.weight": Archive().tensor(ONE)}


def of_another_version(folder: Path) -> None:
    """A zip file that asks for a version of zip that is not there, as one flipped bit does."""
    content = bytearray(first_file(folder).read_bytes())
    content[content.find(b"PK\x01\x02") + 6] = 150
    first_file(folder).write_bytes(content)


BOMB = tp.CallOf(tp.TorchName("os", "system"), ("touch bomb_ran",))
RANKS = {
    "a rank is missing": ({}, without_a_rank, "has 3 folders mp_rank_"),
    "half a file": ({}, halved, "cannot read it"),
    "an empty file": ({}, lambda c: first_file(c).write_bytes(b""), "cannot read it"),
    "a flipped bit": ({}, of_another_version, "cannot read it .NotImplementedError"),
    "no args": ({"args": None}, None, "holds no `args`"),
    "more ranks": ({"sizes": {"tensor_model_parallel_size": 4}}, None, "has 4 folders mp_rank_"),
    "ranks as text": ({"sizes": {"tensor_model_parallel_size": "2"}}, None, "no number of ranks"),
    "other experts' tp": (
        {"sizes": {"num_experts": 4, "expert_tensor_parallel_size": 3}}, None, "neither 1 nor tp",
    ),
    "an empty layer": (
        {"sizes": {"num_layers": 3, "heterogeneous_layers_config_encoded_json": json.dumps(
            {"block_configs": [LAYER, EMPTY, LAYER]})}}, None, "numbers layers by rank, empty ones",
    ),
    "a tower alone": ({"model": ALONE}, None, "of an image tower alone.*joined to"),
    "rows of another mixer": (
        {"model": {"decoder.layers.0.mixer.in_proj.weight": ALONE["conv1.weight"]}}, None,
        "has 1 rows, not the .* of the Mamba mixer",
    ),
    "4 bits": ({"model": {"x": made("nvfp4_tensor")}}, None, "a nvfp4_tensor, which is no form"),
    "a model before the core": ({"model": {"language_model": {}}}, None, "before its core"),
    "a model that is a list": ({"model": [1]}, None, "before its core"),
    "no tensors": ({"model": {}}, None, "is missing"),
    "more layers": ({"sizes": {"num_layers": 5}}, None, "is missing"),
    "a function": ({"model": BOMB}, None, "before its core"),
    "a function beside": ({"rng_state": BOMB, "model": {"x": BOMB}}, None, "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", often(RANKS, 3))
def test_damaged_ranks_are_one_line(written, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    changes, damage, words = RANKS[name]
    folder = by_rank(written, tmp_path / "c", **changes)
    if damage:
        damage(folder)
    with pytest.raises(UserError, match=words) as error:
        megatron_source(folder).check()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bomb_ran").exists()


# ---- Megatron-FSDP ------------------------------------------------------------------------------


def of_fsdp(written: Path, to: Path, **sizes) -> Path:
    """The nested state of torch's distributed checkpoint, names joined by dots."""
    args = megatron_arguments(CFG, "local") | {"ckpt_format": "fsdp_dtensor"} | sizes
    data, entries, places = b"", {}, []
    objects = {"args": tp.namespace(args), "iteration": 3, "rng_state.0": BOMB}
    objects["optimizer.param_groups"] = [{"lr": 1e-3, "step": 5}]
    objects["opt_param_scheduler.num_steps"] = 24
    for name, value in objects.items():
        content = tp.archive(value)
        entries[name] = tp.object_metadata()
        places.append((name, None, "__0_0.distcp", len(data), len(content)))
        data += content
    for name, x in whole_tensors(written).items():
        halves = zip(("_w", "_v"), np.split(x, 2), strict=True)
        is_up = name.endswith("linear_fc1.weight")
        for end, part in halves if is_up else [("", x)]:
            wrapped = f"module.module.{name}{end}"
            names = [f"model.{wrapped}"]
            names += [f"optimizer.state.{wrapped}.{word}" for word in ("exp_avg", "exp_avg_sq")]
            for factor, own in enumerate(names, 1):
                cut, chunks = max(1, len(part) // 3), []
                for start in range(0, len(part), cut):  # of uneven parts of rows
                    rows = part[start : start + cut] * np.float32(factor)
                    at, content = (start, *[0] * (x.ndim - 1)), plain(own, rows)
                    chunks.append((at, rows.shape))
                    places.append((own, at, "__0_0.distcp", len(data), len(content)))
                    data += content
                entries[own] = tp.tensor_metadata(part.dtype, part.shape, chunks)
    to.mkdir()
    (to / "__0_0.distcp").write_bytes(data)
    (to / ".metadata").write_bytes(tp.metadata_file(entries, places))
    return to


def test_the_state_of_megatron_fsdp_is_read(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = of_fsdp(written, tmp_path / "c")
    model = megatron_source(folder)
    assert_equal_to(written, model)
    state = optimizer_state(open_checkpoint(folder), CFG, model)
    box = slice(3, 6), slice(0, 64)
    assert state.steps == 5
    for source, factor in ((state.masters, 1), (state.mu, 2), (state.nu, 3)):
        want = model.read(("head",), box) * np.float32(factor)
        np.testing.assert_array_equal(source.read(("head",), box), want)
    assert not (tmp_path / "bomb_ran").exists()


@pytest.mark.parametrize(
    "sizes", [{"ckpt_format": "torch_dcp"}, {"pipeline_model_parallel_size": 2}]
)
def test_other_states_of_torch_are_refused_by_name(written, tmp_path, sizes):
    with pytest.raises(UserError, match="torch_dcp, fsdp_dtensor with a pipeline.*convert it with"):
        megatron_source(of_fsdp(written, tmp_path / "c", **sizes))


SETS = "}(S'__defaults__'\nI1\n\x85u\x86b."  # BUILD with attributes of what was named


def test_a_pickle_changes_nothing_but_its_own_objects():
    """Attributes that it sets on a function or class stay those of one pickle."""
    named = ["argparse\nNamespace", f"{TE}mxfp8_tensor\n_make_mxfp8_tensor_in_reduce_ex"]
    for name in named:
        found = [unpickled(io.BytesIO(f"c{name}\nN{SETS}".encode("latin1"))) for _ in range(2)]
        assert found[0] is not found[1] and found[0].__defaults__ == (1,)
        fresh = unpickled(io.BytesIO(f"c{name}\n.".encode("latin1")))
        assert getattr(fresh, "__defaults__", None) != (1,)
    assert not hasattr(argparse.Namespace, "__defaults__")


def test_an_empty_tensor_is_no_other_shape(tmp_path):
    empty = MappedTensor(np.dtype(np.float32), 0, (0,), (4,))
    assert empty.array(tmp_path, (0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="reshape"):
        empty.array(tmp_path, (3, 4))
