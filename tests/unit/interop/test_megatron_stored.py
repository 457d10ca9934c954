"""How Megatron-LM's files hold tensors: in 8 bits, in files by rank; damage is one line."""

import io
import shutil
import zipfile
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
SINGLE = tp.TorchName("torch", "float32")


def class_method(module: str, name: str) -> tp.CallOf:
    """What the pickle of a method of a class is."""
    getter = tp.TorchName("__builtin__", "getattr")
    return tp.CallOf(getter, (tp.TorchName(module, name), "_make_in_reduce_ex"))


def whole(archive: Archive, x: np.ndarray, old: bool = False, **damage):
    """A tensor with one scale; x holds numbers that e4m3 has, times 2^-9."""
    number = damage.get("number", NUMBER)
    data = archive.tensor(damage.get("data", (x * 512).astype(E4M3).view(np.uint8)))
    scale = archive.tensor(damage.get("scales", np.full(1, 2.0**-9, np.float32)))
    if old:
        of = class_method("transformer_engine.pytorch.float8_tensor", "Float8Tensor")
        return tp.CallOf(of, (data, OLD_NUMBER, scale, SINGLE))
    of = tp.TorchName(TE + "float8_tensor", "_make_float8_tensor_in_reduce_ex")
    shape = tp.CallOf(tp.TorchName("torch", "Size"), (x.shape,))
    return tp.CallOf(of, (data, number, scale, SINGLE, shape, None))


def by_rows(archive: Archive, x: np.ndarray, swizzled: bool = False):
    flat_x = x.reshape(-1, x.shape[-1])
    powers = np.arange(flat_x.shape[0])[:, None] % 3 + np.zeros((1, x.shape[-1] // 32), int)
    scales = np.zeros((-(-len(flat_x) // 128) * 128, -(-x.shape[-1] // 128) * 4), np.uint8)
    scales[: len(flat_x), : powers.shape[1]] = 127 - 9 + powers
    values = flat_x * 512.0 / np.repeat(2.0**powers, 32, 1)
    data = archive.tensor(values.astype(E4M3).view(np.uint8).reshape(x.shape))
    of = tp.TorchName(TE + "mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex")
    args = data, archive.tensor(scales), None, None, NUMBER, SINGLE, x.shape, None, swizzled
    return tp.CallOf(of, args)


def by_squares(archive: Archive, x: np.ndarray, is_square: bool = True):
    flat_x = x.reshape(-1, x.shape[-1])
    scales = np.zeros((-(-len(flat_x) // 128), -(-x.shape[-1] // 512) * 4), np.float32)
    scales[:] = 2.0 ** (np.arange(len(scales))[:, None] % 3 - 9)
    columns = np.repeat(scales[:, :1], 128, 0)[: len(flat_x)]
    data = archive.tensor((flat_x / columns).astype(E4M3).view(np.uint8).reshape(x.shape))
    name = "float8_blockwise_tensor"
    of = tp.TorchName(TE + name, f"_make_{name}_in_reduce_ex")
    kept = x.shape, data, archive.tensor(scales), None, None, NUMBER, SINGLE, None, is_square, None
    return tp.CallOf(of, kept)


FORMS = {
    "one scale": whole,
    "one scale, old": lambda archive, x: whole(archive, x, old=True),
    "rows": by_rows,
    "squares": by_squares,
}


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
        if path[-1] in ("q", "kv", "up", "down", "out"):
            want = rounded(want)
            changed += 1
        np.testing.assert_array_equal(got, want, err_msg=str(path))
    assert changed == 5


def changed(**damage):
    return lambda archive, x: whole(archive, x, **damage)


def unknown(archive: Archive, x: np.ndarray):
    return tp.CallOf(class_method(TE + "nvfp4_tensor", "NVFP4Tensor"), (archive.tensor(x),))


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
    "scales of a kernel": (lambda a, x: by_rows(a, x, swizzled=True), "in the order of a kernel"),
    "scales of rows": (lambda a, x: by_squares(a, x, is_square=False), "scales of 1 x 128"),
    "4 bits": (unknown, "NVFP4Tensor, which is no form"),
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


def by_rank(written: Path, to: Path, sizes: dict | None = None, **changes) -> Path:
    """The model as ranks of tp 2 and pp 2 save it."""
    axes = {f"{axis}_model_parallel_size": 2 for axis in ("tensor", "pipeline")}
    args = megatron_arguments(CFG, "local") | axes | (sizes or {})
    for tensor, stage in np.ndindex(2, 2):
        archive, model = Archive(), {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
        for name, x in whole_tensors(written).items():
            last = name.startswith(("output_layer", "decoder.final")) or ".layers.1." in name
            if last == bool(stage):
                own = name.replace(".layers.1.", ".layers.0.")
                model[own] = archive.tensor(of_rank(name, x, tensor))
        state = {"args": tp.namespace(args), "iteration": 3, "model": model} | changes
        file = to / f"iter_0000003/mp_rank_{tensor:02d}_{stage:03d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        file.write_bytes(archive.bytes_of({k: v for k, v in state.items() if v is not None}))
    (to / "latest_checkpointed_iteration.txt").write_text("3")
    return to


def assert_equal_to(written: Path, source) -> None:
    source.check()
    truth = megatron_source(written)
    for path, spec in flat(split(build(CFG, nnx.Rngs(0)))[1]).items():
        box = tuple(map(slice, spec.shape))
        np.testing.assert_array_equal(source.read(path, box), truth.read(path, box), str(path))


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


BOMB = tp.CallOf(tp.TorchName("os", "system"), ("touch bomb_ran",))
RANKS = {
    "a rank is missing": ({}, without_a_rank, "has 3 folders mp_rank_"),
    "half a file": ({}, halved, "cannot read it"),
    "an empty file": ({}, lambda c: first_file(c).write_bytes(b""), "cannot read it"),
    "no args": ({"args": None}, None, "holds no `args`"),
    "more ranks": ({"sizes": {"tensor_model_parallel_size": 4}}, None, "has 4 folders mp_rank_"),
    "ranks as text": ({"sizes": {"tensor_model_parallel_size": "2"}}, None, "no number of ranks"),
    "other experts' tp": (
        {"sizes": {"num_experts": 4, "expert_tensor_parallel_size": 3}}, None, "neither 1 nor tp",
    ),
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
