"""The example of docs/train/reinforcement.md runs as it stands, and learns."""

import re
from pathlib import Path

from tests.marks import slow

PAGE = Path(__file__).parents[3] / "docs" / "train" / "reinforcement.md"


@slow
def test_the_example_of_the_docs_learns(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.25
    assert (tmp_path / "runs" / "by_hand" / "checkpoints" / "20").is_dir()
