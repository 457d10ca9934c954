"""The notebook of fine-tuning runs from its first cell to its last."""

import json
import re
import sys
from pathlib import Path

from tests.marks import exhaustive

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "train" / "fine_tuning.ipynb"
SMALL = {"num_hidden_layers": 1, "eval_steps": 1, "sample_tokens": 2, "seq_length": 128}
# A corpus of a few files, and a step of each run.
TINY = {
    "TEXT": str(ROOT / "mjax" / "train" / "*.py"),
    "PRETRAINING": 1,
    "FINE_TUNING": 1,
    "ANSWERS": 2,
}


@exhaustive
def test_the_notebook_goes_from_text_to_answers(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    for name in ("quickstart.yaml", "lora_quickstart.yaml"):
        text = (ROOT / "configs" / name).read_text()
        for key, value in SMALL.items():
            text = re.sub(rf"{key}: \d+", f"{key}: {value}", text)
        (tmp_path / "configs" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["notebook"])
    first, *cells = code_cells()
    names = {}
    exec(first, names)
    assert names.keys() >= TINY.keys() and Path.cwd() == tmp_path
    names |= TINY
    for cell in cells:
        exec(cell, names)
    said = capsys.readouterr().out
    assert re.search(r"\n«(function|class|module|variable) \w+<\|endoftext\|>»", said)
    assert "runs/notebook_merged: runs/quickstart with the adapters in runs/notebook@best" in said
    assert json.loads(said.splitlines()[-1])["answers"] == 2


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
