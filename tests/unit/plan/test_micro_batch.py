"""`train.micro_batch_size: auto` and `mesh.zero: auto`: what is chosen for which devices."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from mjax.bench.train import batch_of
from mjax.config import load
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.errors import UserError
from mjax.models import definition_of
from mjax.objectives.next_token import NextToken
from mjax.plan.absent_devices import as_on, described_devices, parse_described
from mjax.plan.auto import FRACTION, choose_memory_policy, choose_zero, propose_mesh, resolve_auto
from mjax.plan.chips import named_chips
from mjax.plan.execution import micro_batch_sizes
from mjax.plan.memory import bytes_per_device
from mjax.run.training_run import write_config
from mjax.train import Trainer
from tests.marks import exhaustive, slow
from tests.tiny import TINY

CONFIGS = Path("configs")
QUICKSTARTS = sorted(CONFIGS.glob("quickstart*.yaml"))
LLAMA = CONFIGS / "models/llama3_8b.yaml"
SPECS = definition_of(load(LLAMA).model).specs
SMALL = ["model.hidden_size=48", "model.num_hidden_layers=1", "data.seq_length=16"]
COUNTS = 1, 2, 4, 8


class Together(NextToken):
    """An objective of one's own that compares rows."""

    one_micro_batch = True


def sizes_to_try(*keys: str, devices: int = 1) -> list[int]:
    cfg = load(None, [*TINY, "train.micro_batch_size=auto", *keys])
    return micro_batch_sizes(cfg, mesh_sizes(cfg.mesh, devices))


def test_a_size_divides_a_device_s_share_of_every_step():
    assert sizes_to_try("train.global_batch_size=24") == [24, 12, 8, 6, 4, 3, 2, 1]
    assert sizes_to_try("train.global_batch_size=24", devices=4) == [6, 3, 2, 1]
    ramp = ["train.global_batch_size=24", "train.rampup_batch_size=[8, 4, 100]"]
    assert sizes_to_try(*ramp) == [4, 2, 1]  # of 8, 12, 16, 20 and 24 rows
    assert sizes_to_try("train.micro_batch_size=4", "train.global_batch_size=24") == [4]


def test_a_pipeline_has_four_micro_batches_a_stage_if_the_batch_has():
    two = "model.num_hidden_layers=2", "mesh.pp=2"
    assert sizes_to_try(*two, "train.global_batch_size=64", devices=2) == [8, 4, 2, 1]
    assert sizes_to_try(*two, "train.global_batch_size=4", devices=2) == [1]


@pytest.mark.parametrize(
    "keys",
    [
        [f"train.objective={__name__}:Together"],
        ["model.layer_pattern=E", "model.moe.num_experts=4", "model.moe.router_aux_loss_coef=0.1"]
        + ["model.moe.router_aux_loss_over=global_batch"],
    ],
)
def test_what_counts_all_rows_together_is_one_micro_batch(keys):
    assert sizes_to_try("train.global_batch_size=24", *keys, devices=4) == [6]


@pytest.mark.parametrize("name, rows", [("clip_vit_l14", 128), ("siglip_so400m", 64)])
def test_pairs_are_one_micro_batch_whatever_the_memory(name, rows):
    cfg = load(CONFIGS / f"models/{name}.yaml")
    for devices in COUNTS:
        assert micro_batch_sizes(cfg, mesh_sizes(cfg.mesh, devices)) == [rows // devices]


def llama(*keys: str):
    return load(LLAMA, ["train.micro_batch_size=auto", "train.global_batch_size=8", *keys])


@slow
def test_the_largest_that_fits_is_taken_and_said():
    """Of 64 sequences; just below what four need, it is two."""
    keys = "train.remat=dots", "optimizer.offload=true", "train.global_batch_size=64"
    four = llama(*keys, "train.micro_batch_size=4")
    need = sum(bytes_per_device(four, four.mesh, 1, SPECS).values())
    for memory, rows in ((need * 1.001, 4), (need * 0.999, 2)):
        cfg, why = choose_memory_policy(llama(*keys), 1, memory / FRACTION, SPECS)
        assert cfg.train.micro_batch_size == rows and f"train.micro_batch_size={rows}:" in why
    assert choose_memory_policy(llama(*keys), 1, 1e15, SPECS)[0].train.micro_batch_size == 64


@slow
def test_a_gpu_is_kept_busy_before_layers_keep_all():
    """One sequence of 128 tokens would leave room for all; a large micro-batch comes first."""
    keys = "data.seq_length=128", "train.global_batch_size=1024"
    one = llama(*keys, "train.micro_batch_size=1", "train.remat=none", "optimizer.offload=false")
    need = sum(bytes_per_device(one, one.mesh, 8, SPECS).values())
    cfg, _ = choose_memory_policy(llama(*keys), 8, need * 1.2 / FRACTION, SPECS)
    assert cfg.train.micro_batch_size * 128 >= 8192 and cfg.train.remat != "none"


def test_without_a_known_limit_a_micro_batch_is_8192_tokens():
    keys = [*TINY, "train.micro_batch_size=auto", "train.global_batch_size=64"]
    for length, rows in ((16, 64), (1024, 8), (3000, 4), (16384, 1)):
        lengths = [f"data.seq_length={length}", f"model.max_position_embeddings={length}"]
        cfg, why = choose_memory_policy(load(None, keys + lengths), 1, None, {})
        assert cfg.train.micro_batch_size == rows and f"micro_batch_size={rows}: the device" in why


@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda path: path.stem)
def test_a_quickstart_is_legal_as_it_is_on_1_to_8_devices(path):
    """Each takes its share of a step as one micro-batch."""
    cfg = load(path)
    specs = definition_of(cfg.model).specs
    for devices in COUNTS:
        chosen, _ = resolve_auto(cfg, jax.devices()[:devices], specs)
        assert chosen.train.micro_batch_size * devices == cfg.train.global_batch_size
        assert chosen.mesh.zero == 1


@exhaustive
@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda path: path.stem)
def test_a_quickstart_trains_as_it_is_on_1_to_8_devices(path):
    same_steps(path, COUNTS)


@exhaustive
def test_the_quickstart_trains_alike_on_1_and_8_devices():
    same_steps(QUICKSTARTS[0], (1, 8), *SMALL)


def same_steps(path: Path, counts: tuple[int, ...], *keys: str) -> None:
    """Loss and gradient norm of two steps do not depend on the devices, nor on micro-batches."""
    found = []
    for devices in counts:
        trainer = Trainer(load(path, keys), devices=jax.devices()[:devices])
        trainer.init()
        batch = batch_of(trainer, 1)
        metrics = [trainer.step(batch) for _ in range(2)][-1]
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-4)


def on(described: str, path: Path = LLAMA, *keys: str):
    """(what is chosen for a file on described devices, why)."""
    cfg, told = load(path, keys), parse_described(described)
    with as_on(told.chip):
        return resolve_auto(cfg, described_devices(told), definition_of(cfg.model).specs)


@slow
def test_llama_on_four_h100s_shards_more_before_moments_go_to_the_host():
    """Masters, moments, weights and sums of gradients of ZeRO-1 are 12/4 + 2 + 4 = 9 bytes a
    parameter, 72 GB: more than 95 % of 79 GB with what layers keep. ZeRO-3's are 18/4, 36 GB."""
    cfg, why = on("h100:4")
    assert cfg.mesh.zero == 3 and cfg.optimizer.offload is False and "NOT" not in why
    assert why.startswith("mesh: zero=3: the fastest that fits (estimates of a step: 2: ")
    need = bytes_per_device(cfg, cfg.mesh, 4, SPECS)
    assert need["moments"] == pytest.approx(8 * 8.03e9 / 4, rel=0.01)


@slow
def test_zero_1_stays_where_it_fits_and_the_host_is_last():
    cfg, why = on("h200:8")
    assert cfg.mesh.zero == 1 and cfg.optimizer.offload is False and "zero=1: it fits" in why
    cfg, _ = on("h100:2")
    assert cfg.optimizer.offload is True and cfg.mesh.zero == 3
    cfg, why = on("h200:1")  # nothing to shard over
    assert cfg.mesh.zero == 1 and "zero" not in why


def test_a_stage_that_is_given_is_kept():
    cfg, why = on("h100:4", LLAMA, "mesh.zero=2")
    assert cfg.mesh.zero == 2 and "zero" not in why
    cfg = load(LLAMA, ["mesh={auto: true, zero: 3}", "train.global_batch_size=64"])
    assert propose_mesh(cfg, 8, 150e9, SPECS)[0].zero == 3


@slow
def test_a_chip_without_an_estimate_of_time_takes_the_first_stage_that_fits():
    cfg, _ = choose_zero(load(LLAMA), 4, named_chips()["h100"].details.usable, SPECS, None)
    assert cfg.mesh.zero == 2
    pipeline = load(LLAMA, ["mesh.pp=2", "train.global_batch_size=64"])
    cfg, _ = choose_zero(pipeline, 4, 1e9, SPECS, None)
    assert cfg.mesh.zero == 3  # gradients of a pipeline are never cut


def test_moments_of_muon_stay_on_the_device_whatever_the_stage():
    cfg, why = on("h100:2", LLAMA, "optimizer.name=muon")
    assert cfg.optimizer.offload is False and cfg.mesh.zero == 3 and "NOT fit" in why


FILES = sorted((CONFIGS / "models").glob("*.yaml"))
NEEDS_MOSAIC = "gemma2_9b", "gpt_oss_20b"  # for attention, which needs jax 0.11
has_mosaic = jax.__version_info__ >= (0, 11)


@slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_has_a_plan_on_1_to_8_devices_or_a_line_names_the_smallest_count(path):
    if has_mosaic or path.stem not in NEEDS_MOSAIC:
        require_plans(path, range(1, 9))


def test_a_file_has_a_plan_on_8_devices_and_a_line_for_3():
    require_plans(CONFIGS / "models/bert_base.yaml", (3, 8))


def require_plans(path: Path, counts: Iterable[int]) -> None:
    for devices in counts:
        try:
            cfg, why = on(f"h100:{devices}", path)
        except UserError as error:
            assert "\n" not in str(error)
            why = str(error)
        else:
            local = cfg.train.global_batch_size // (devices // cfg.mesh.tp)
            assert local % cfg.train.micro_batch_size == 0
            if "NOT fit" not in why:
                continue
        assert "; the smallest number of these devices that fits it is " in why, (devices, why)


@slow
def test_what_needs_more_devices_names_their_number():
    """Masters of Llama-3-405B, weights and sums of gradients alone are 10 x 405 GB in shards: 52
    H100s of 79 GB, so 7 whole nodes at least."""
    with pytest.raises(UserError) as error:
        on("h100:8", LLAMA, "mesh.tp=8", "mesh.pp=2")
    assert str(error.value).endswith("the smallest number of these devices that fits it is 16")
    _, why = on("h100:8", CONFIGS / "models/llama3_405b.yaml")
    assert 56 <= int(why.rsplit(" ", 1)[1]) <= 512


def test_an_error_names_a_count_that_mends_it_if_there_is_one():
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    for count, keys in ((6, ["mesh.tp=4"]), (8, ["mesh.dp=2", "mesh.tp=2"])):
        cfg = load(None, [*TINY, "train.micro_batch_size=1", *keys])
        with pytest.raises(UserError, match="devices.* fits it is 4$"):
            resolve_auto(cfg, [device] * count, definition_of(cfg.model).specs)
    too_many = load(
        None, [*TINY, "train.micro_batch_size=1", "train.global_batch_size=2048", "mesh.dp=2048"]
    )
    with pytest.raises(UserError, match="start that many$"):
        resolve_auto(too_many, [device] * 4, definition_of(too_many.model).specs)


def test_the_config_of_a_run_holds_what_was_chosen_and_says_that_it_was(tmp_path):
    cfg = load(None, [*TINY, "train.micro_batch_size=auto"])
    trainer = Trainer(cfg, devices=jax.devices()[:2])
    lock = SimpleNamespace(path=tmp_path / "run.lock")
    write_config(
        SimpleNamespace(trainer=trainer, cfg=trainer.cfg, saver=SimpleNamespace(lock=lock))
    )
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith("# memory: train.remat=dots optimizer.offload=false train.micro_batch")
    assert load(tmp_path / "config.yaml") == trainer.cfg
    assert (trainer.cfg.mesh.zero, trainer.cfg.train.micro_batch_size) == (1, 2)
