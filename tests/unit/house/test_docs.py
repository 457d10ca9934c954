"""The examples of pages run, in their order, as they stand; links and names lead somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from flax import nnx

from mjax import convert
from mjax.checkpoint.base.source import array_source
from mjax.checkpoint.weights import write_weights
from mjax.config import load
from mjax.config.languages.layer_pattern import BRANCHES, expand
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.pretrained import source_of
from mjax.models import build, definition_of, split
from mjax.run.loop import train
from mjax.sharding.processes.fake_devices import fake_devices
from tests.marks import slow

DOCS = Path(__file__).parents[3] / "docs"
TINY = ModelConfig(
    model_type="llama",
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=3,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2},
    initializer_range=0.2,
    max_position_embeddings=64,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a Hugging Face model `Llama-3.2-1B` in it."""
    definition, params = split(build(TINY, nnx.Rngs(0)))
    write_weights(tmp_path / "ckpt", array_source(TINY, params), definition.specs)
    target = str(tmp_path / "Llama-3.2-1B")
    argv = ["export", "--ckpt", str(tmp_path / "ckpt"), "--hf", target, "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["convert", *argv])
    convert.main()
    monkeypatch.chdir(tmp_path)


@slow
def test_the_research_examples_run(folder, capsys):
    text = (DOCS / "develop/research.md").read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) >= 8
    names: dict = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(DOCS / "develop/research.md"), "exec"), names)
    assert capsys.readouterr().out.count("logits still differ") == TINY.num_hidden_layers


@pytest.mark.parametrize("page", ["models/families.md", "develop/research.md"])
def test_links_and_named_files_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and all(
        ((DOCS / page).parent / link).exists() for link in links if "://" not in link
    ), links
    named = re.findall(r"`((?:tests|configs|mjax)/[\w/.]+\.(?:py|yaml))`", text)
    assert named and all((DOCS.parent / name).is_file() for name in named), named


def test_the_code_of_adding_a_model_is_what_the_laws_train():
    laws = DOCS.parent / "tests" / "laws"
    files = "toy_recurrence.py", "training/test_objective.py"
    trained = [(laws / name).read_text() for name in files]
    page = (DOCS / "develop/adding-a-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 3
    parts = [
        re.split(r"^(?=class |    module=)", block, maxsplit=1, flags=re.M)[1] for block in blocks
    ]
    parts[0] = parts[0].replace("my_mixer", "tests.laws.toy_recurrence")
    assert all(any(part in text for text in trained) for part in parts)
    table = re.search(r"\| pattern \| layers \|\n\|---\|---\|\n(.*?)\n\n", page, re.S)
    patterns = re.findall(
        r"`([^`]+)`", "".join(row.split(" | ")[0] for row in table[1].split("\n"))
    )
    assert len(patterns) >= 8
    for pattern in patterns:
        expand(pattern.replace("\\|", "|"), 26)


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """The files that docs/develop/adding-a-model.md has a user write, where Python finds them."""
    page = (DOCS / "develop/adding-a-model.md").read_text(encoding="utf-8")
    row, mixer, objective = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "my_mixer.py").write_text(row + mixer)
    (tmp_path / "my_objective.py").write_text(objective)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    BRANCHES.pop("recurrence", None)
    for name in ("my_mixer", "my_objective"):
        sys.modules.pop(name, None)


@slow
def test_the_code_of_adding_a_model_trains_as_it_stands(own_modules):
    keys = """data.mock=true data.seq_length=16 model.hidden_size=32 model.num_hidden_layers=2
        model.attention.num_attention_heads=2 train.global_batch_size=8 train.micro_batch_size=1
        train.steps=2 precision.compute=float32 train.objective=my_objective:Denoise
        run.imports=[my_mixer]""".split()
    pattern = "model.layer_pattern='recurrence+mlp, full+mlp'"
    run = own_modules / "run"
    with pytest.raises(UserError, match="has no block called 'recurrence'"):
        load(None, [*keys[:-1], pattern])
    train(load(None, [*keys, pattern, f"run.dir={run}"]))
    assert source_of(run).cfg.layer_kinds == ("recurrence+mlp", "full+mlp")
    BRANCHES.pop("recurrence")  # as in another process, which knows the run's record alone
    del sys.modules["my_mixer"]
    assert "recurrence" in definition_of(source_of(run).cfg).specs["recurrence_mlp"]


WRONG = [("", "No module named 'my_broken'"), ("1 / 0", "ZeroDivisionError: .*my_broken.py:1")]


@pytest.mark.parametrize("text, said", WRONG)
def test_a_module_that_cannot_be_imported_is_one_line(text, said, tmp_path, monkeypatch):
    if text:
        (tmp_path / "my_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said) as e:
        load(None, ["data.mock=true", "run.imports=[my_broken]"])
    assert str(e.value).startswith("run.imports='my_broken': ") and "\n" not in str(e.value)


@slow
def test_the_blocks_of_start_and_checkpoints_run_as_they_stand(tmp_path):
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    pages = [
        (DOCS / page).read_text("utf-8")
        for page in ("start/first-steps.md", "train/checkpoints.md")
    ]
    first, last = (re.findall(r"^```python\n(.*?)^```", p, re.M | re.S)[-1] for p in pages)
    config = "\nopen('runs/python/config.yaml', 'w').write(mjax.config.dump(cfg))\n"
    code = first + config + last.replace("runs/quickstart", "runs/python")  # a run that there is
    environ = os.environ | {"PYTHONPATH": str(DOCS.parent), "XLA_FLAGS": fake_devices(1)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True)
    steps = tmp_path / "runs" / "python" / "checkpoints"
    assert {"1", "2"} <= {path.name for path in steps.iterdir()}


ROOT = DOCS.parent
PAGES = [*DOCS.rglob("*.md"), *(ROOT / "mjax").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "cookbook").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page have in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_between_pages_work(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page if not path else page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme():
    reached, pending = set(), [DOCS.parent / "README.md"]
    while pending:
        page = pending.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                pending.append(page.parent / link)
    pages = [*DOCS.rglob("*.md"), *(ROOT / "cookbook").rglob("*.md")]
    assert {page.resolve() for page in pages} <= reached


def test_the_readme_is_at_most_100_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def require_tests(named: Iterable[tuple[str, str]]) -> None:
    """Each (file below tests/, function) exists."""
    for file, function in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}(" in source, (file, function)


def test_every_published_bug_has_a_report_and_a_test_that_exists():
    text = (DOCS / "develop/published-bugs.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ") and "reported" not in row]
    assert len(rows) > 20
    for row in rows:
        _, _, reports, ours, _ = re.split(r" ?\| ?", row)
        assert re.findall(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)", reports)
        named = re.findall(r"`(\S+\.py)::(test_\w+)`", ours)
        assert named, row
        require_tests(named)


def test_every_row_of_what_can_happen_names_a_test_that_exists():
    text = (DOCS / "train/failures.md").read_text(encoding="utf-8")
    tables = [table for table in text.split("\n\n") if table.startswith("| when |")]
    rows = [row for table in tables for row in table.splitlines()[2:]]
    named = {row: re.search(r"`(\S+\.py)::(test_\w+)` \|$", row) for row in rows}
    assert not [row for row, match in named.items() if match is None]
    found = [*named.values(), *re.finditer(r"`(\S+\.py)::(test_\w+)`", text)]
    assert len(rows) > 50
    require_tests((match[1], match[2]) for match in found)


def test_every_room_has_a_short_readme_whose_files_exist():
    small = "generate", "evaluate", "export", "__pycache__"
    rooms = [path for path in (ROOT / "mjax").iterdir() if path.is_dir() and path.name not in small]
    assert len(rooms) > 15
    for room in rooms:
        text = (room / "README.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {room.name}\n") and len(text.splitlines()) <= 20, room
        named = re.findall(r"`([\w/]+(?:\.py|/))`", text) + re.findall(r"\b(mjax/[\w/]+\.py)", text)
        missing = [name for name in named if not any((at / name).exists() for at in (room, ROOT))]
        assert named and not missing, (room.name, missing)
