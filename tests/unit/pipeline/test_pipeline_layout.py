"""Layouts place every layer once; schedules run every unit after what it needs."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.languages.layer_pattern import expand, stack_of
from mjax.config.languages.pipeline_layout import EMPTY, parse_layout
from mjax.errors import UserError
from mjax.pipeline.layout import Layout, make_layout, stage_lines
from mjax.pipeline.schedule import UnitTable, make_schedule, timeline
from mjax.pipeline.storage import Storage, storage_specs, to_canonical, to_storage
from mjax.sharding.spec import ParamSpec

LAYOUTS = [
    (layers, pp, v, account_for)
    for layers, pp, v in itertools.product((4, 5, 7, 8, 13), (2, 4), (1, 2, 3))
    for account_for in ([], ["loss"], ["embedding", "loss"])
    if layers + len(account_for) >= pp * v
]
SHAPES = [(2, 1, 2), (2, 2, 4), (4, 1, 4), (4, 2, 8), (2, 1, 3), (4, 1, 6), (2, 3, 5), (4, 3, 2)]


@pytest.mark.parametrize("layers,pp,v,account_for", LAYOUTS)
def test_every_layer_has_one_slot(layers, pp, v, account_for):
    made = make_layout(["full+mlp"] * layers, pp, v, account_for=account_for)
    table = made.table()
    assert sorted(table[table >= 0]) == list(range(layers))
    for c, s in itertools.product(range(v), range(pp)):
        assert tuple(x for x in table[s, c] if x >= 0) == made.stages[c * pp + s]
    loads = [len(stage) for stage in made.stages]
    loads[0] += "embedding" in account_for
    loads[-1] += "loss" in account_for
    assert max(loads) - min(loads) <= 1


@pytest.mark.grid
@pytest.mark.parametrize("layers,pp,v,account_for", LAYOUTS)
def test_storage_is_a_round_trip_with_zero_padding(layers, pp, v, account_for):
    made = make_layout(["full+mlp"] * layers, pp, v, account_for=account_for)
    tree = {"dense": {"w": 1.0 + jnp.arange(2.0 * layers).reshape(layers, 2)}, "norm": jnp.ones(3)}
    stored = to_storage(Storage(made), tree)
    assert stored["dense"]["w"].shape == (pp * v * len(made.slots.stacks), 2)
    assert (stored["dense"]["w"] != 0).sum() == 2 * layers
    back = to_canonical(Storage(made), stored)
    np.testing.assert_array_equal(back["dense"]["w"], tree["dense"]["w"])
    np.testing.assert_array_equal(stored["norm"], tree["norm"])
    specs = {"dense": {"w": ParamSpec((layers, 2), ("layers", "embed"), "bias")}}
    assert storage_specs(made, specs)["dense"]["w"].shape == stored["dense"]["w"].shape


def test_layers_that_are_lost_or_repeated_are_a_defect():
    for stages in (((0, 1), (3,)), ((0, 1), (1, 2)), ((1, 0), (2,))):
        with pytest.raises(AssertionError):
            Layout(2, 1, stages, ("full+mlp",) * 3)


@pytest.mark.parametrize(
    "text,pp,sizes",
    [
        ("E|(tt|)*2,(t|)*4,L", 4, [0, 2, 2, 1, 1, 1, 1, 0]),
        ("Ett|tt|tt|ttL", 2, [2, 2, 2, 2]),
        ("E t*3 | (t)*5 L", 2, [3, 5]),
        ("E|((t|)*2,t|)*2,ttL", 4, [0, 1, 1, 1, 1, 1, 1, 2]),
        ("Et*8||L", 3, [8, 0, 0]),
    ],
)
def test_layout_strings(text, pp, sizes):
    assert parse_layout(text, 8, pp) == sizes
    assert [len(s) for s in make_layout(["full+mlp"] * 8, pp, layout=text).stages] == sizes


@pytest.mark.parametrize(
    "text,fault",
    [
        ("Etttt|ttL", "places 6 layers of model.num_hidden_layers=8"),
        ("Etttt|tttttL", "places 9 layers"),
        ("tttt|ttttL", "must have E once, at the start"),
        ("Etttt|tttt", "must have L once, at the end"),
        ("Etttt|LttttL", "must have L once"),
        ("Ett|ttt|tttL", "has 3 stages, which mesh.pp=2 does not divide"),
        ("Etttt|ttttmL", "no part called 'm'"),
        ("E(tttt|ttttL", "no part called '('"),
    ],
)
def test_bad_layout_strings_are_one_line(text, fault):
    with pytest.raises(UserError) as e:
        parse_layout(text, 8, 2)
    assert fault in str(e.value) and "\n" not in str(e.value)


def test_unlike_stages_share_slots_of_each_stack():
    """Every stage's layers lie in order in slots of their stacks, which are few."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = rng.choice(["full+mlp", "window+mlp", "full+experts", "mlp"], 12)
        made = make_layout(kinds, 2, 2)
        stacks, layers = made.slots
        assert len(stacks) <= 12 and made.slot_kinds() == made.slots.kinds(kinds)
        for stage, row in zip(made.stages, layers, strict=True):
            assert tuple(layer for layer in row if layer >= 0) == stage
            for stack, layer in zip(stacks, row, strict=True):
                assert layer < 0 or stack_of(kinds[layer]) == stack
        for stack in made.stacks:
            stored = made.storage_rows(stack)
            count = sum(stack_of(kind) == stack for kind in kinds)
            assert sorted(stored[stored >= 0]) == list(range(count))
    assert make_layout(expand("GEEE", 4), 2).slots.stacks == ("dense", "moe", "moe")


def test_slot_kinds_and_description():
    full, windowed = "full+mlp", "window+mlp"
    made = make_layout(expand("GL", 5), 2)
    assert made.slot_kinds() == ((full, windowed), (full, windowed), (EMPTY, full))
    assert stage_lines(made) == [
        "stage 0  embedding + layers 0-2",
        "stage 1  layers 3-4 + loss",
    ]
    assert make_layout(expand("GL", 4), 2).slot_kinds() == ((full,), (windowed,))


@pytest.mark.parametrize("pp,v,m", SHAPES)
def test_units_follow_what_they_need(pp, v, m):
    """Activations and cotangents arrive exactly one tick before they are used."""
    made = make_schedule(pp, v, m)
    tables, when = {"f": made.forward, "b": made.backward}, {"f": {}, "b": {}}
    for d, t, s in itertools.product("fb", range(made.start + made.ticks), range(pp)):
        if tables[d].on[t, s]:
            unit = (int(tables[d].micro[t, s]), int(tables[d].chunk[t, s]), s)
            assert unit not in when[d], "a unit runs twice"
            when[d][unit] = t
    every = {(i, c, s) for i in range(m) for c in range(v) for s in range(pp)}
    assert set(when["f"]) == set(when["b"]) == every
    for i in range(m):
        path = [(i, c, s) for c in range(v) for s in range(pp)]
        forward, backward = ([when[d][unit] for unit in path] for d in "fb")
        assert np.diff(forward).tolist() == [1] * (pp * v - 1)
        assert np.diff(backward).tolist() == [-1] * (pp * v - 1)
        assert backward[-1] == forward[-1] + 1
    assert max(when["f"].values()) < made.ticks and min(when["b"].values()) >= made.start


@pytest.mark.parametrize("pp,v,m", SHAPES)
def test_no_live_slot_is_overwritten(pp, v, m):
    made, t = make_schedule(pp, v, m), None
    tables = made.forward, made.backward
    for s in range(pp):
        live = {}
        for t in range(made.start + made.ticks):
            f, b = (UnitTable(*(int(a[t, s]) for a in vars(d).values())) for d in tables)
            assert t >= made.ticks or f.slot not in live, "an idle tick writes too"
            if f.on:
                live[f.slot] = f.micro, f.chunk
            if b.on:
                assert live.pop(b.slot) == (b.micro, b.chunk)
            assert max(f.slot, b.slot) < made.slots
        assert not live and t is not None


@pytest.mark.parametrize("pp,v", [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_bubble_is_the_formula_and_slots_do_not_grow(pp, v):
    for m in (pp, 2 * pp, 5 * pp):
        assert make_schedule(pp, v, m).bubble == pytest.approx((pp - 1) / (m * v + pp - 1))
    slots = [make_schedule(pp, v, m).slots for m in (3 * pp, 6 * pp, 12 * pp + 1)]
    assert len(set(slots)) == 1 and slots[0] <= pp * v + pp
    assert make_schedule(4, 1, 6).ticks == 6 + 3
    assert make_schedule(4, 2, 6).ticks == 6 * 2 + 3 + 2


@pytest.mark.parametrize("pp, v, m", [(4, 2, 8), (2, 3, 5), (3, 2, 4), (4, 1, 6)])
def test_new_says_when_a_device_changes_its_chunk(pp, v, m):
    """Who takes a chunk where it is new, and holds it, has the chunk of every unit."""
    made = make_schedule(pp, v, m)
    for t in (made.forward, made.backward):
        held = np.full(pp, -1)
        for on, chunk, new in zip(t.on, t.chunk, t.new, strict=True):
            held = np.where(new, chunk, held)
            assert (held == chunk)[on == 1].all()
        assert (t.new <= t.on).all()
        assert t.new.sum() <= pp * (1 if v == 1 else v * -(-m // pp))


def test_timeline_shows_every_unit():
    made = make_schedule(4, 2, 4)
    lines = timeline(made)
    assert all(sum(ch.isdigit() for ch in line) == 8 for line in lines)
    assert all(sum(ch.isalpha() for ch in line) == 8 for line in lines)
    assert all(len(line) <= 60 for line in timeline(make_schedule(4, 2, 64), width=60))
