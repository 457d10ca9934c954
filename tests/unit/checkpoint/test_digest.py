"""Laws of digests: what was damaged on disk is named and passed over, never loaded."""

import json
import logging
import shutil
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.checkpoint.base import digest
from mjax.checkpoint.base.digest import DamagedCheckpoint, read_digests
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.store import Store
from mjax.checkpoint.weights import read_weights, write_weights
from mjax.config import load
from mjax.errors import UserError
from mjax.models import definition_of
from tests.marks import quick
from tests.sources import restore_params

CFG = load(
    None,
    """data.mock=true model.vocab_size=97 model.hidden_size=32 model.attention.num_attention_heads=4
    model.intermediate_size=48 model.num_hidden_layers=2""".split(),
)
SPECS = definition_of(CFG.model).specs
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
KINDS = ("bit", "bit", "bit", "zeros", "noise", "swap", "cut", "longer", "gone")


def make_params(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    leaves = lambda s: jnp.asarray(rng.normal(size=s.shape), jnp.float32)  # noqa: E731
    return jax.tree.map(leaves, SPECS, is_leaf=lambda s: hasattr(s, "axes"))


def make_state(step: int) -> dict:
    params = make_params(step)
    return {
        "params": params,
        "opt": {"mu": jax.tree.map(lambda p: (p / 3).astype(jnp.bfloat16), params)},
        "step": jnp.int32(step),
    }


def abstract(tree: dict) -> dict:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=ONE), tree)


def open_store(folder: Path, digests: bool = True) -> Store:
    return Store(folder, CFG, keep=3, keep_every=None, async_save=False, digests=digests)


def is_same(a: dict, b: dict) -> bool:
    equal = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(equal))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    store = open_store(folder)
    for step in (1, 2, 3):
        store.save(step, make_state(step))
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "w"
    side = {"tokenizer.json": b"{}" * 40, "generation_config.json": b'{"eos_token_id": 7}'}
    write_weights(folder, array_source(CFG.model, make_params(9)), SPECS, extras=side)
    return folder


def damage(step: Path, seed: int) -> str:
    """Damage one file of a step as `seed` says; returns what was done."""
    rng = np.random.default_rng(seed)
    files = sorted(p for p in step.rglob("*") if p.is_file())
    sizes = np.array([p.stat().st_size for p in files], float)
    by_size = seed % 2  # half of the time every byte is as likely, else every file
    file = files[rng.choice(len(files), p=sizes / sizes.sum() if by_size else None)]
    content = np.fromfile(file, np.uint8)
    before = content.tobytes()
    size, kind = len(content), KINDS[rng.integers(len(KINDS))]
    at = int(rng.integers(size))
    end = min(size, at + int(rng.integers(1, 5000)))
    if kind == "bit":
        content[at] ^= 1 << rng.integers(8)
    elif kind == "zeros":
        content[at:end] = 0
    elif kind == "noise":
        content[at:end] = rng.integers(0, 256, end - at)
    elif kind == "swap":  # the two halves, as a storage that mixes up its blocks
        content = np.roll(content, size // 2)
    elif kind == "cut":
        content = content[:at]
    elif kind == "longer":
        content = np.concatenate([content, content[at:end]])
    content.tofile(file)
    if kind == "gone":
        file.unlink()
    same = " (no change)" if kind != "gone" and content.tobytes() == before else ""
    return f"{kind} of {file.relative_to(step)} at {at}{same}"


def restored_step(folder: Path) -> int:
    """The step that a start finds; fails unless its state is bit for bit what was saved."""
    state = open_store(folder).restore(abstract(make_state(0)))
    step = int(state["step"])
    assert is_same(state, make_state(step)), "silently wrong"
    return step


@pytest.mark.parametrize("seed", quick(range(200), *range(8)))
def test_a_damaged_step_is_passed_over_for_the_newest_intact_one(trained, tmp_path, seed, caplog):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained, folder)
    what = damage(folder / "3", seed)
    found = restored_step(folder)
    assert found in (2, 3), what
    if found == 2:
        assert (folder / "damaged-3").is_dir() and not (folder / "3").exists()
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("mjax")]
        assert str(folder / "3") in line and "\n" not in line
    else:  # orbax's own notes on times and handlers, which nothing that is restored depends on
        assert Path(what.split()[2]).name in digest.UNLISTED or "no change" in what, what


@pytest.mark.parametrize("seed", quick(range(200), *range(8)))
def test_damaged_weights_are_refused_in_one_line(weights, tmp_path, seed):
    shutil.copytree(weights, tmp_path / "w")
    what = damage(tmp_path / "w" / "0", seed)
    try:
        params = restore_params(tmp_path / "w", abstract(make_params(0)))
    except DamagedCheckpoint as e:
        assert "\n" not in str(e) and str(tmp_path / "w" / "0") in str(e)
        return
    assert is_same(params, make_params(9)), f"silently wrong: {what}"
    assert "no change" in what


def flip(file: Path, at: int = 100) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_step_asked_for_by_number_is_not_replaced_by_another(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "c")
    flip(largest(tmp_path / "c" / "2"))
    with pytest.raises(DamagedCheckpoint, match=r"c/2 is damaged: bytes 0 to [\d,]+ of state/.*ch"):
        open_store(tmp_path / "c").restore(abstract(make_state(0)), step=2)
    assert (tmp_path / "c" / "2").is_dir()
    assert restored_step(tmp_path / "c") == 3


def test_weights_are_not_taken_from_a_damaged_training_checkpoint(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "c")
    flip(largest(tmp_path / "c" / "3"))
    with pytest.raises(UserError, match="c/3 is damaged: bytes"):
        read_weights(tmp_path / "c").check()
    read_weights(tmp_path / "c" / "2").check()


def test_a_list_covers_every_file_and_every_block(trained, monkeypatch, tmp_path):
    monkeypatch.setattr(digest, "DIGEST_BLOCK", 1000)
    shutil.copytree(trained / "3", tmp_path / "3")
    digest.write_digests(tmp_path / "3")
    found = read_digests(tmp_path / "3").files
    names = {p.relative_to(tmp_path / "3").as_posix() for p in (tmp_path / "3").rglob("*")}
    assert set(found) <= names
    for name in names - set(found):
        assert (tmp_path / "3" / name).is_dir() or Path(name).name in digest.UNLISTED
    for name, one in found.items():
        content = (tmp_path / "3" / name).read_bytes()
        assert one.bytes == len(content)
        parts = [content[i : i + 1000] for i in range(0, len(content), 1000)]
        assert list(one.blocks) == [zlib.crc32(part) for part in parts]
        assert one == digest.digest_bytes(memoryview(content))


def test_processes_share_the_blocks_and_together_check_all(trained, tmp_path):
    shutil.copytree(trained / "3", tmp_path / "3")
    files = read_digests(tmp_path / "3").files
    for name in files:
        file = tmp_path / "3" / name
        content = file.read_bytes()
        flip(file, len(content) // 2)
        caught = 0
        for process in range(3):
            try:
                read_digests(tmp_path / "3").verify(process=process, processes=3)
            except DamagedCheckpoint:
                caught += 1
        assert caught == 1, name
        file.write_bytes(content)


def test_checkpoints_without_digests_load_and_say_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        open_store(tmp_path, digests=False).save(1, make_state(1))
    assert "checkpoint.digests=false" in caplog.text and not (tmp_path / "1" / digest.LIST).exists()
    caplog.clear()
    assert restored_step(tmp_path) == 1
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("mjax")]
    assert line.startswith(f"checkpoint {tmp_path / '1'} has no digests")


def test_a_list_that_was_there_may_not_be_missing(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "c")
    (tmp_path / "c" / "3" / digest.LIST).unlink()
    with pytest.raises(DamagedCheckpoint, match="its digests are gone"):
        open_store(tmp_path / "c").restore(abstract(make_state(0)), step=3)
    assert restored_step(tmp_path / "c") == 2


def test_an_intact_step_that_cannot_be_loaded_is_not_set_aside(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "c")
    wanted = abstract(make_state(0) | {"more": jnp.ones(3)})
    with pytest.raises(UserError, match="c/3 is intact but cannot be loaded: "):
        open_store(tmp_path / "c").restore(wanted)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2", "3"]


def test_digests_of_a_later_mjax_are_no_damage(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "c")
    file = tmp_path / "c" / "3" / digest.LIST
    text = json.dumps({"format": "xxh9", "files": {}})
    file.write_text(f"{zlib.crc32(text.encode()):08x}\n{text}\n")
    with pytest.raises(UserError, match="digests of an unknown format 'xxh9'"):
        open_store(tmp_path / "c").restore(abstract(make_state(0)))
    assert (tmp_path / "c" / "3").is_dir()
