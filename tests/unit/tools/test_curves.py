"""The drawing of curves: of each run's records, in the right places and colors."""

import json
import xml.etree.ElementTree as ET

import pytest

from mjax.errors import UserError
from mjax.report.runs import COLORS
from tools.curves import HEIGHT, LEFT, TOP, WIDTH, main

SVG = "{http://www.w3.org/2000/svg}"


def write_run(folder, *losses):
    folder.mkdir()
    records = [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder)


def test_each_record_has_its_place_and_each_name_its_color(tmp_path, capsys):
    first, second = write_run(tmp_path / "a", 4.0, 2.0), write_run(tmp_path / "b", 3.0, 1.0)
    third, out = write_run(tmp_path / "c", 4.0, None, 5.0), tmp_path / "curves.svg"
    names = [f"dense={first}", f"dense={second}", f"a<b={third}"]
    assert main([*names, "--title", "held-out", "--out", str(out)]) == 0
    assert "eval_loss of 3 runs" in capsys.readouterr().out
    root = ET.parse(out).getroot()
    lines = root.findall(f"{SVG}polyline")
    assert [line.get("stroke") for line in lines] == [COLORS[0], COLORS[0], COLORS[1]]
    points = [[tuple(map(float, p.split(","))) for p in x.get("points").split()] for x in lines]
    assert points[1] == [(LEFT, TOP + HEIGHT / 2), (LEFT + WIDTH / 2, TOP + HEIGHT)]
    assert points[2] == [(LEFT, TOP + HEIGHT / 4), (LEFT + WIDTH, TOP)]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts[0] == "held-out" and texts[-2:] == ["dense: 1.5", "a<b: 5"]
    assert {"1", "3", "5", "0", "15", "20"} & set(texts) >= {"1", "3", "5", "0", "20"}


def test_equal_values_are_a_line(tmp_path):
    out = tmp_path / "curves.svg"
    assert main([f"flat={write_run(tmp_path / 'a', 2.0, 2.0)}", "--out", str(out)]) == 0
    assert len(ET.parse(out).getroot().findall(f"{SVG}polyline")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}"], "is not NAME=RUN"),
        (["a={run}", "--field", "los"], "logs eval_loss, step alone"),
        (["a={run}none"], "no such folder"),
        (["a={run}", "--out", "{run}"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, said):
    run = write_run(tmp_path / "a", 2.0)
    with pytest.raises(UserError, match=said):
        main([argument.format(run=run) for argument in arguments])
