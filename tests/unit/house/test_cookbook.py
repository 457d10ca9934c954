"""The cookbook's scripts run, with tiny models; its notebooks run; its pages name what exists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mjax.config import load
from tests.chats import turns, write_lines
from tests.marks import exhaustive, slow
from tools.chat_lines import TEMPLATE

ROOT = Path(__file__).parents[3]
COOKBOOK = ROOT / "cookbook"
SCRIPTS = sorted(path.stem for path in COOKBOOK.glob("*.sh"))
TEXT = str(ROOT / "docs" / "train" / "*.md")
TINY = """model.num_hidden_layers=1 model.hidden_size=32 model.attention.num_attention_heads=2
    model.attention.num_key_value_heads=2 model.attention.head_dim=16 data.seq_length=64
    train.steps=2 train.global_batch_size=4 schedule.warmup_steps=0""".split()
SHORT = ["train.sample_tokens=2", "train.eval_steps=1", "train.eval_interval=1"]
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
done
wait -n && wait
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_valid_and_has_its_page(name):
    subprocess.run(["bash", "-n", COOKBOOK / f"{name}.sh"], check=True)
    page = (COOKBOOK / f"{name}.md").read_text(encoding="utf-8")
    assert f"]({name}.sh)" in page
    assert f"cookbook/{name}.md" in (COOKBOOK / f"{name}.sh").read_text(encoding="utf-8")
    assert f"]({name}.md)" in (COOKBOOK / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(COOKBOOK.glob("*.yaml")), ids=lambda path: path.name)
def test_each_config_loads(path, monkeypatch):
    for name in ("MODEL", "TOKENIZER"):
        monkeypatch.setenv(name, str(ROOT))
    cfg = load(path)
    assert cfg.data.text == "stdlib" and not cfg.data.mock


def test_commands_of_pages_name_files_that_exist():
    for page in COOKBOOK.glob("*.md"):
        blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        for name in re.findall(
            r"(?:cookbook|configs|tools)/[\w/.]+\.(?:sh|py|yaml)", "".join(blocks)
        ):
            assert (ROOT / name).is_file(), (page.name, name)


@pytest.fixture
def kitchen(tmp_path, monkeypatch):
    """A folder as a checkout's root is, in which `mjax` is this one."""
    for name in ("configs", "cookbook", "tools", "docs", "README.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "bin" / "mjax"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mjax.cli "$@"\n')
    program.chmod(0o755)
    python = program.with_name("python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(
        "PATH", f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax.devices()  # of this process, which later tests use
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bash(script: str, *keys: str, **variables: str) -> str:
    """What a script of the cookbook prints; it must succeed."""
    done = subprocess.run(
        ["bash", f"cookbook/{script}.sh", *keys],
        env=os.environ | variables,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def small_moe() -> None:
    said = bash(
        "small_moe", *TINY, *SHORT, "model.moe.moe_intermediate_size=16", f"data.text={TEXT}"
    )
    assert '"perplexity"' in said and "Qwen3MoeForCausalLM" in said
    assert Path("runs/small_moe/hf/config.json").is_file()


def continued() -> None:
    small_moe()
    keys = SHORT[1:], "train.steps=1", "schedule.warmup_steps=0", "data.seq_length=64"
    keys = *keys[0], *keys[1:], "precision.compute=float32", "train.attention=xla"
    said = bash(
        "continued", *keys, "train.global_batch_size=2", MODEL="runs/small_moe/hf", TEXT=TEXT
    )
    assert said.count('"perplexity"') == 2 and Path("runs/continued/hf/config.json").is_file()


def gpt2_124m() -> None:
    keys = "precision.compute=float32", "train.attention=xla", "model.vocab_size=300"
    keys = *keys, "data.split=[0.8,0.2,0]"
    said = bash("gpt2_124m", *TINY, *SHORT, *keys, "data.tokenizer=train:300", TEXT=TEXT)
    assert '"perplexity"' in said and Path("runs/gpt2_124m_text/report.html").is_file()


def images() -> None:
    keys = "train.steps=2", "schedule.warmup_steps=0", "train.eval_steps=1", "log.interval=1"
    assert "of" in bash("images", *keys, LINES_TO_LEARN="200")


def laptop() -> None:
    for name in ("configs", "tools"):
        Path(name).unlink()
    Path("configs").mkdir()
    for name in ("quickstart.yaml", "sft_quickstart.yaml"):
        text = (ROOT / "configs" / name).read_text()
        for key in ("steps", "num_hidden_layers", "eval_steps", "sample_tokens"):
            text = re.sub(rf"\b{key}: \d+", f"{key}: 2", text)
        text = re.sub("warmup_steps: .*", "warmup_steps: 0", text)
        Path("configs", name).write_text(
            text.replace("text: stdlib", f"text: {ROOT}/mjax/data/*/*.py")
        )
    Path("tools").symlink_to(ROOT / "tools")
    said = bash("laptop", PORT="8765")
    assert said.count("you: ") == 3 and '"exact_match"' in said


def lora_8b() -> None:
    small_moe()
    beside = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    Path("runs/small_moe/hf/tokenizer_config.json").write_text(json.dumps(beside))
    write_lines(Path("chats.jsonl"), [turns("a", "b"), turns("c", "d"), turns("e", "f")] * 20)
    Path("tiny.yaml").write_text("data: {seq_length: 64}\nlora: {rank: 2, alpha: 4}\n")
    keys = "checkpoint.init_from=runs/small_moe/hf", "train.steps=1", "train.global_batch_size=2"
    bash("lora_8b", *keys, "precision.compute=float32", "train.attention=xla", CONFIG="tiny.yaml")
    assert Path("runs/lora_8b/adapter/adapter_config.json").is_file()


def slurm() -> None:
    program = Path("bin/srun")
    program.write_text(SRUN)
    program.chmod(0o755)
    keys = (
        *TINY,
        "data.mock=true",
        "data.tokenizer=null",
        "data.text=null",
        "train.sample_prompt=null",
    )
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "77"}
    variables |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    variables |= {"SLURM_LOCALID": "0", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:8479"}
    said = bash("slurm", "configs/quickstart.yaml", *keys, *SHORT[1:], **variables)
    assert "connected to 1 peer ranks" in said  # two processes are one run, and one of them logs
    assert said.count("finished at step 2 of 2") == 1 and Path("runs/a/checkpoints/2").is_dir()


RECIPES = continued, small_moe, gpt2_124m, images, laptop, lora_8b, slurm


@exhaustive
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_each_script_runs_from_its_first_line_to_its_last(recipe, kitchen):
    assert sorted(recipe.__name__ for recipe in RECIPES) == SCRIPTS
    recipe()


@slow
def test_the_notebooks_run_from_their_first_cell_to_their_last(kitchen, monkeypatch, capsys):
    keys = *TINY, "train.sample_tokens=1", f"data.text={TEXT}", "run.dir=runs/quickstart"
    keys = *keys, "train.global_batch_size=8"  # the tests' devices are eight
    monkeypatch.setattr(sys, "argv", ["notebook"])
    from mjax.cli import run

    run(["train", "--config", "configs/quickstart.yaml", *keys, "checkpoint.interval=1"])
    for name in ("research", "inspect"):
        names: dict = {}
        for cell in json.loads((COOKBOOK / f"{name}.ipynb").read_text())["cells"]:
            assert not cell.get("outputs")
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert (
        "without layer 0" in said
        and "after layer 0" in said
        and "consumed_samples: 8 -> 16" in said
    )
