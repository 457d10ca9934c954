"""Measurements: the bench writes them, the page's table says what they say, the commit is ours."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measurements, record, table
from mjax.bench import report, train
from mjax.errors import UserError
from tests.marks import slow
from tests.unit.commands.test_bench import TINY

ROOT = Path(__file__).parents[3]
FILE, PAGE = ROOT / "benchmarks" / "measurements.jsonl", ROOT / "docs" / "performance.md"
FULL = ROOT / "benchmarks" / "README.md"
LINE = {"workload": "w", "bench": "train", "gpus": 1, "date": "2026-01-02", "commit": "abc"}


def never(line: dict) -> bool:
    return False


def test_the_pages_show_the_file():
    """But for the marks, which depend on the commits since."""
    lines = measurements.read_measurements(FILE)
    page, full = PAGE.read_text(encoding="utf-8"), FULL.read_text(encoding="utf-8")
    assert measurements.page_of_headlines(page, lines) == page
    new = measurements.page_of_all(full, lines, never)
    assert new.replace(measurements.STALE, "") == full.replace(measurements.STALE, "")


def test_the_page_for_users_is_short_and_says_when_its_rows_were_measured():
    page = PAGE.read_text(encoding="utf-8")
    rows = page.split(measurements.BEGIN)[1].split(measurements.END)[0].strip().splitlines()[2:]
    assert len(rows) == 10 and len(page.splitlines()) <= 60
    assert all(re.search(r"\| \[20\d\d-\d\d-\d\d\]\(.*#.*\) \|$", row) for row in rows)


def test_every_line_says_how_to_repeat_it_and_links_its_public_figure():
    known = {"workload", "bench", "gpus", "machine", "command", "date", "commit", "page", "other"}
    known |= {"tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "gb", "ms"}
    known |= {"best_public", "best_public_link"}
    for line in measurements.read_measurements(FILE):
        assert set(line) <= known
        assert line["command"].startswith(f"python -m mjax.bench {line['bench']}")
        assert ("best_public" in line) == ("best_public_link" in line)
        if "page" in line:
            assert (ROOT / "docs" / line["page"]).is_file()


def test_the_newest_line_of_a_workload_and_number_of_gpus_is_shown():
    old, new = LINE | {"gb": 1.0}, LINE | {"gb": 2.0, "date": "2026-01-03"}
    other, told_elsewhere = LINE | {"gpus": 2}, LINE | {"workload": "x", "page": "lab/x.md"}
    lines = [old, other, new, told_elsewhere]
    assert measurements.newest(lines) == [new, other]
    assert measurements.newest([new, old]) == [new]
    rows = measurements.table(lines, lambda line: line is other)
    assert len(rows) == 4
    assert "| 2 |" in rows[2] and rows[2].endswith("| 2026-01-03, abc |")
    assert rows[3].endswith(f"| 2026-01-02, abc{measurements.STALE} |")


def test_what_is_not_known_is_left_out_of_line_and_table():
    found = {
        "bench": "train",
        "case": {"devices": 2},
        "ms": 12.5,
        "tokens_per_second": 1234.56,
        "tflops": 1.23456,
        "mfu": None,
        "memory_gb": None,
        "device": "H",
        "date": "2026-01-02",
        "commit": None,
    }
    line = measurements.line_of(found, "w", ["a.b=c d", "--steps", "2"])
    assert line == {
        "workload": "w",
        "bench": "train",
        "gpus": 2,
        "machine": "H",
        "command": "python -m mjax.bench train 'a.b=c d' --steps 2",
        "tokens_per_second_per_gpu": 1235,
        "tflops_per_gpu": 1.2,
        "ms": 12.5,
        "date": "2026-01-02",
    }
    (row,) = measurements.table([line], never)[2:]
    assert row == "| w | 2 | 1,235 | 1 |  |  | 12.5 |  |  | 2026-01-02 |"


def test_a_record_is_a_line_that_takes_over_the_public_figure(tmp_path, monkeypatch, capsys):
    file = tmp_path / "m.jsonl"
    public = {"best_public": "9 tok/s", "best_public_link": "https://x"}
    file.write_text(json.dumps(LINE | {"workload": "tiny"} | public) + "\n")
    argv = [*TINY, "--steps=1", "--warmup=0"]
    made = {"bench": "train", "case": {"devices": 8}, "ms": 2.0, "tokens_per_second": 4.0}
    made |= {"tflops": 0.5, "mfu": None, "memory_gb": None}
    monkeypatch.setattr(train, "measure_training", lambda *_: made)

    def run(command, **_):
        assert command[1:4] == ["-m", "mjax.bench", "train"]
        capsys.readouterr()
        code = train.main(command[4:])
        return SimpleNamespace(returncode=code, stdout=capsys.readouterr().out)

    monkeypatch.setattr(record, "subprocess", SimpleNamespace(run=run, PIPE=None))
    assert record.main([f"--to={file}", "--workload=tiny", "train", *argv]) == 0
    assert record.main([f"--to={file}", "train", *argv]) == 0
    _, tiny, unnamed = measurements.read_measurements(file)
    assert tiny["command"] == f"python -m mjax.bench train {' '.join(argv)}"
    assert {k: tiny[k] for k in public} == public
    assert tiny["gpus"] == 8 and tiny["tokens_per_second_per_gpu"] == 4 and tiny["ms"] == 2.0
    assert tiny["commit"] == report.own_commit() and tiny["machine"] == "cpu"
    assert unnamed["workload"] == " ".join(argv) and "best_public" not in unnamed
    with pytest.raises(UserError, match="its folder does not exist"):
        record.main([f"--to={tmp_path / 'no' / 'm.jsonl'}", "train", *argv])
    with pytest.raises(UserError, match="no benchmark; give what follows"):
        record.main([f"--to={file}"])


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_of(folder: Path) -> str:
    """What `own_commit` says of the copy of mjax in a folder."""
    code = "from mjax.bench.report import own_commit; print(own_commit())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@slow
def test_the_commit_is_mjax_s_own_and_not_that_of_an_enclosing_repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("x")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "another project")
    copy = tmp_path / "mjax"
    shutil.copytree(ROOT / "mjax", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert commit_of(tmp_path) == "None"
    git(tmp_path, "add", "mjax")
    git(tmp_path, "commit", "-qm", "mjax itself")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "other").write_text("y")  # not mjax's
    assert commit_of(tmp_path) == head
    (copy / "errors.py").write_text("# changed\n" + (copy / "errors.py").read_text())
    assert commit_of(tmp_path) == f"{head}+"


def test_a_row_is_stale_by_the_code_that_it_runs(tmp_path, monkeypatch):
    package = tmp_path / "mjax"
    for room in ("models", "kernels", "data"):
        (package / room).mkdir(parents=True)
        (package / room / "a.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "mjax")
    git(tmp_path, "commit", "-qm", "first")
    first = git(tmp_path, "rev-parse", "--short", "HEAD")
    monkeypatch.setattr(measurements, "PACKAGE", package)
    monkeypatch.setattr(measurements, "own_commit", lambda: first)

    def stale(bench: str, commit: str = first) -> bool:
        return measurements.changed_since(LINE | {"bench": bench, "commit": commit})

    assert not stale("train") and not stale("kernel")
    (package / "models" / "a.py").write_text("x = 2\n")
    assert stale("train") and not stale("kernel") and not stale("data")
    assert stale("kernel", "") and stale("kernel", f"{first}+") and stale("kernel", "0000000")
    monkeypatch.setattr(measurements, "own_commit", lambda: None)
    with pytest.raises(UserError, match="not in a git checkout"):
        stale("train")


def test_the_command_writes_between_the_marks_and_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "changed_since", never)
    headline = measurements.Headline("what: 1", "w", 1, "{:.1f} ms")
    monkeypatch.setattr(measurements, "HEADLINES", (headline,))
    file, page, full = (tmp_path / name for name in ("m.jsonl", "p.md", "f.md"))
    line = LINE | {"ms": 2.0, "command": "run it", "machine": "H"}
    file.write_text(json.dumps(line) + "\n")
    empty = f"a\n{measurements.BEGIN}\nold\n{measurements.END}\nb\n"
    page.write_text(empty)
    full.write_text(f"{empty}{measurements.COMMANDS_BEGIN}\n{measurements.COMMANDS_END}\n")
    paths = ["--measurements", str(file), "--page", str(page), "--full-page", str(full)]
    assert table.main([*paths, "--check"]) == 1
    assert table.main(paths) == 0 == table.main([*paths, "--check"])
    text = page.read_text()
    assert text.startswith("a\n<!--") and text.endswith("-->\nb\n") and "old" not in text
    assert "| what: 1 | 2.0 ms |  | [2026-01-02](../benchmarks/README.md#what-1) |" in text
    assert "| w | 1 |" in full.read_text() and "### what: 1\n" in full.read_text()
    assert "```bash\nrun it\n```" in full.read_text()
    page.write_text("no marks")
    with pytest.raises(UserError, match="--page: it must hold one line"):
        table.main(paths)
    file.write_text(json.dumps(line | {"gpus": 2}) + "\n")
    page.write_text(empty)
    with pytest.raises(UserError, match="no line of 'w' on 1 GPUs; measure it"):
        table.main(paths)
    file.write_text('{"gpus": 1}\n')
    with pytest.raises(UserError, match="m.jsonl:1: lacks bench, date, workload; add it"):
        table.main(paths)


def test_report_s_stamp_carries_that_commit():
    assert report.stamp()["commit"] == report.own_commit()
