"""The drawing of experts' loads: of a run's records, in the right places and colors."""

import json
import xml.etree.ElementTree as ET

import pytest

from mjax.errors import UserError
from tools.expert_load import color_of, drawing, main, read_loads

SVG = "{http://www.w3.org/2000/svg}"


def write_log(folder, *records):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "torn']))


def test_each_expert_of_each_record_has_its_place_and_color(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "load.svg"
    first, second = [4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 0.0]
    write_log(
        run,
        {"step": 1, "loss": 2.0},
        {"step": 2, "expert_load/layers.1": first, "expert_load/layers.10": first},
        {"step": 4, "expert_load/layers.1": second, "expert_load/layers.10": first},
    )
    assert list(read_loads(run)) == [1, 10]
    assert main([str(run), "--out", str(out)]) == 0
    assert "2 layers, 2 records to step 4" in capsys.readouterr().out
    panels = ET.parse(out).getroot().findall(f"{SVG}g")
    cells = [rect.get("fill") for rect in panels[0].findall(f"{SVG}rect")][:-1]  # and a frame
    assert cells == [color_of(load) for load in first + second]
    texts = [text.text for text in ET.parse(out).getroot().findall(f"{SVG}text")]
    assert {"layer 1", "layer 10", "4 experts", "first 4.00", "last 2.00", "step 4"} <= set(texts)


def test_the_mean_is_white_and_more_differs_from_less():
    assert color_of(1.0) == "#ffffff"
    assert color_of(4.0) == color_of(40.0) == "#d55e00" and color_of(0.0) == "#0072b2"
    assert color_of(2.0) not in (color_of(0.5), color_of(4.0))


def test_long_runs_are_thinned():
    loads = {0: {step: [1.0, 1.0] for step in range(1, 1001)}}
    assert drawing(loads).count("crispEdges") == 1
    assert drawing(loads).count("<rect") < 450


def test_a_run_without_loads_is_named(tmp_path):
    write_log(tmp_path / "run", {"step": 1, "loss": 2.0})
    with pytest.raises(UserError, match="has no loads of experts; train .*diagnostics_interval"):
        main([str(tmp_path / "run")])
    with pytest.raises(UserError, match="no such folder"):
        main([str(tmp_path / "none")])
