"""The estimate of what the head costs a pipeline, and the stages it proposes."""

import pytest

from mjax.config import load
from mjax.config.languages.layer_pattern import expand
from mjax.pipeline.layout import layout_of, make_layout
from mjax.pipeline.schedule import make_schedule
from mjax.plan.balance import advice, candidates, head_in_layers, step_time

LLAMA = ["model.num_hidden_layers=16", "mesh.pp=4", "mesh.dp=1", "data.mock=true"]


@pytest.mark.parametrize("pp,v,m", [(2, 1, 3), (4, 1, 8), (4, 2, 8), (2, 3, 4)])
def test_equal_stages_without_a_head_take_the_schedule_s_ticks(pp, v, m):
    layout, schedule = make_layout(expand("G", 2 * pp * v), pp, v), make_schedule(pp, v, m)
    assert step_time(layout, schedule, 0) == pytest.approx(2 * (v * m + pp - 1))


def test_the_head_lengthens_every_tick_that_has_it_unless_its_stage_is_shorter():
    schedule = make_schedule(4, 1, 8)
    even, short = (make_layout(["full+mlp"] * (15 + more), 4) for more in (1, 0))
    none, head = (step_time(even, schedule, h) for h in (0, 1.0))
    assert head == pytest.approx(none + 8)
    assert step_time(short, schedule, 1.0) <= none + 1


def test_head_in_layers_is_a_ratio_of_matmul_weights_where_attention_is_small():
    cfg = load(None, ["model.vocab_size=12288", "model.hidden_size=1024", "data.mock=true"]).model
    d, h = 1024, cfg.attention.head_dim
    attention = 2 * d * h * (cfg.attention.num_attention_heads + cfg.attention.num_key_value_heads)
    layer = attention + 3 * d * cfg.intermediate_size
    assert head_in_layers(cfg, 1) == pytest.approx(12288 * d / layer, rel=1e-3)


def test_advice_is_a_key_that_can_be_set_and_keeps_its_word():
    big = [*LLAMA, "model.vocab_size=128000"]
    said = advice(load(None, big), 16)
    assert len(said) == 2 and "layers of FLOPs on the last stage" in said[0]
    key, part = said[1].split(" would take ")
    better = load(None, [*big, key.strip()])
    schedule, head = make_schedule(4, 1, 16), head_in_layers(better.model, better.data.seq_length)
    times = [step_time(layout_of(c), schedule, head) for c in (better, load(None, big))]
    assert f"{times[0] / times[1]:.1%}" == part.split()[0] and times[0] < times[1]
    assert len(advice(load(None, [*LLAMA, "model.vocab_size=64"]), 16)) == 1, "nothing to gain"
    assert len(advice(better, 16)) == 1, "taken"


def test_candidates_place_every_layer_in_stages_that_can_run():
    mixed = [*LLAMA, "model.layer_pattern=GE", "model.moe.num_experts=4"]
    for cfg in (load(None, LLAMA), load(None, mixed)):
        for layout in candidates(cfg).values():
            assert sum(map(len, layout.stages)) == 16
