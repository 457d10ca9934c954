"""Laws of the exchange of tokens over ep: an all-to-all equals the gather, and loses no token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mjax.config import load
from mjax.config.rules.mesh_rules import mesh_sizes
from mjax.config.schema.model import MoeConfig
from mjax.models.base.context import Documents
from mjax.models.moe import exchange
from mjax.models.moe.exchange import (
    bytes_of_token,
    choose_expert_exchange,
    make_route,
    rows_per_peer,
    send_tokens,
    sum_tokens,
)
from mjax.plan.execution import training_context
from mjax.plan.kernel_lines import branch_kernels
from mjax.prove import Cell, compare, holds, make_batch, make_trainer
from mjax.sharding.collectives import Parallel
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import parallel_of_run
from tests.marks import exhaustive
from tests.tiny import TINY

EP, HELD, T, D = 4, 2, 16, 6
RNG = np.random.default_rng(0)
NONE = EP * HELD  # a pair that was dropped
# Experts of the tokens of a group, and whether 8 rows for each pair of devices suffice.
ROUTINGS = {
    "spread": (np.stack([RNG.permutation(8)[:2] for _ in range(EP * 7)]), True),
    "all to one": (np.full((EP * T, 1), 5), False),
    "one device overflows": (np.repeat([[0, 1], [6, 7], [2, 3], [4, 5]], [9, 5, 3, 47], 0), False),
    "exactly full": (np.tile([[0], [2]], (EP * T // 2, 1)), True),
    "empty experts": (np.tile([[0], [NONE]], (EP * T // 2, 1)), True),
    "none goes anywhere": (np.full((EP * T, 2), NONE), True),
}
OVER_EP = Parallel(ep=EP)
FOLDED = Parallel(ep=EP // 2, tp=2, folds_experts=True)


def exchanged(parallel, experts, x, y, d_sent, d_sums, rows):
    """(sent, the gradient of x, sums, the gradient of y, whether rows suffice) of all devices.

    All are split by device. `rows` None: tokens are gathered.
    """
    over = parallel.expert_axes.over

    def local(experts, x, y, d_sent, d_sums):
        group = parallel.all_gather(experts[None], over, 0)
        route = None
        if rows is not None:
            route = make_route(group, experts, rows, HELD, parallel)
        here = jnp.any(group // HELD == parallel.index(over), 2)[..., None]
        # What has no expert here is neither read nor made.
        sent, send_vjp = jax.vjp(lambda x: here * send_tokens(parallel, x, route), x)
        sums, sum_vjp = jax.vjp(lambda y: sum_tokens(parallel, here * y, route), y)
        fits = jnp.bool_(True) if route is None else route.fits
        return sent, *send_vjp(d_sent), sums, *sum_vjp(d_sums), fits[None]

    mesh = Mesh(np.array(jax.devices()[:EP]).reshape([parallel.size(axis) for axis in over]), over)
    mapped = jax.shard_map(
        in_program_order(local), mesh=mesh, in_specs=P(over), out_specs=P(over), check_vma=False
    )
    return jax.jit(mapped)(experts, x, y, d_sent, d_sums)


EXCHANGES = [*((name, OVER_EP) for name in ROUTINGS), ("one device overflows", FOLDED)]
EXCHANGES += [("spread", FOLDED)]


@pytest.mark.parametrize("name,parallel", EXCHANGES)
def test_an_all_to_all_equals_the_gather_both_ways(name, parallel):
    numbers, fits = ROUTINGS[name]
    tokens = len(numbers) // EP
    experts = jnp.asarray(numbers, jnp.int32)
    shapes = (EP * tokens, D), (EP * EP, tokens, D), (EP * EP, tokens, D), (EP * tokens, D)
    arrays = [jnp.float32(RNG.normal(size=shape)) for shape in shapes]
    *want, _ = exchanged(parallel, experts, *arrays, None)
    *got, fitted = exchanged(parallel, experts, *arrays, min(8, tokens))
    assert fitted.tolist() == [fits] * EP  # one answer for all
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[0], want[0])


CASES = [
    ("experts", {"ep": 4, "tp": 2}, 1, 3, 1.5),
    ("experts", {"ep": 8}, 3, 1, 0.3),  # most exchanges overflow
    ("gpt-oss", {"pp": 2, "ep": 2, "tp": 2}, 1, 3, 0.6),
    ("routing", {"dp": 2, "ep": 2, "cp": 2}, 2, 2, 0.9),
]


@exhaustive
@pytest.mark.parametrize("feature,mesh,zero,micro_batches,room", CASES)
def test_every_mesh_equals_one_device(feature, mesh, zero, micro_batches, room, monkeypatch):
    monkeypatch.setattr(exchange, "ROOM", room)
    keys = "train.expert_exchange=all_to_all", "train.remat=full"
    record = compare(feature, Cell(mesh, zero, micro_batches), *keys, steps=2)
    assert holds(record), record


def moe(experts: int, k: int, **keys) -> MoeConfig:
    return MoeConfig(num_experts=experts, num_experts_per_tok=k, **keys)


def test_auto_takes_the_all_to_all_where_it_sends_much_less():
    mixtral = 8192, 2 * 4096
    assert choose_expert_exchange("auto", *mixtral, 2, moe(8, 2)).name == "all_gather"
    assert choose_expert_exchange("auto", *mixtral, 8, moe(8, 2)).name == "all_to_all"
    assert choose_expert_exchange("auto", 8192, 2 * 2048, 8, moe(128, 8)).name == "all_gather"
    assert choose_expert_exchange("auto", 8192, 2 * 7168, 64, moe(256, 8)).name == "all_to_all"
    assert choose_expert_exchange("auto", 64, 64, 8, moe(8, 2)).name == "all_gather"
    assert choose_expert_exchange("all_to_all", 64, 64, 8, moe(8, 2)).name == "all_to_all"
    assert rows_per_peer(8000, 8, moe(256, 8, n_group=8, topk_group=2)) == 3000
    assert rows_per_peer(7, 2, moe(8, 8)) == 7


def test_the_bytes_that_travel_decide_in_the_plan_as_in_the_step(monkeypatch):
    """`precision.fp8_dispatch` sends one of the four exchanges of a step in 8 bits."""
    assert bytes_of_token(1024, "bfloat16", False) == 2 * 1024
    assert bytes_of_token(1024, "bfloat16", True) == (3 * 2 * 1024 + 1024 + 8) / 4
    tokens, own = 8192, moe(64, 2)
    saved = 7 * (tokens - rows_per_peer(tokens, 8, own))
    monkeypatch.setattr(exchange, "LEAST_SAVED", saved * 1900)  # between 1800 bytes and 2048
    monkeypatch.setattr(exchange, "make_route", lambda *given: "all_to_all")
    keys = [f"data.seq_length={tokens}", "model.hidden_size=1024", "model.layer_pattern=E"]
    keys.append(f"model.max_position_embeddings={tokens}")
    keys += ["model.moe.num_experts=64", "model.moe.num_experts_per_tok=2", "mesh.ep=8"]
    keys += ["train.global_batch_size=8", "train.micro_batch_size=1", "precision.compute=bfloat16"]
    for rounds, name in (False, "all_to_all"), (True, "all_gather"):
        cfg = load(None, [*TINY, *keys, f"precision.fp8_dispatch={rounds}"])
        sizes = mesh_sizes(cfg.mesh, 8)
        assert branch_kernels(cfg, sizes)["tokens of experts"].name == name
        ctx = training_context(cfg, parallel_of_run(cfg, sizes), Documents(1))
        x = jax.ShapeDtypeStruct((tokens, 1024), jnp.bfloat16)
        assert (exchange.route_of(x, None, None, cfg.model.moe, ctx) or "all_gather") == name


@exhaustive
def test_the_log_has_the_share_of_exchanges_that_gathered():
    """A router of zeros sends all tokens to the first experts, which no all-to-all has room for."""
    trainer = make_trainer("experts", Cell({"ep": 4}, 1, 2), "train.expert_exchange=all_to_all")
    experts = trainer.state["params"]["moe"]["mlp"]
    experts["router"] = experts["router"] * 0
    assert float(trainer.step(make_batch(24))["gathered_share"]) == pytest.approx(1)
