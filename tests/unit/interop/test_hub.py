"""Models of the Hugging Face hub, from a server of our own that speaks its protocol."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants, file_download
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mjax import convert
from mjax.checkpoint.base import hub as hub_module
from mjax.checkpoint.base.companion_files import tokenizer_dir
from mjax.checkpoint.base.hub import hub_name, model_folder, pinned, with_hub_tokenizer
from mjax.checkpoint.base.stored import read_record
from mjax.config import load
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.generate.__main__ import main as generate
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.pretrained import from_pretrained
from mjax.interop.sources import source_of
from mjax.models import definition_of
from mjax.post.sft import sft_defaults
from mjax.run.loop import train
from mjax.serve.options import read_options
from mjax.train.trainer import Trainer
from tests.hub_server import FakeModel, fake_hub
from tests.marks import exhaustive, slow

TINY = ModelConfig(
    model_type="llama",
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=2,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2},
    max_position_embeddings=64,
)
BESIDE = {
    "tokenizer.json": Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str().encode(),
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"x",
    "generation_config.json": b'{"eos_token_id": 119}',
    "README.md": b"---\nlicense: mit\n---\n# Tiny\n",
    "LICENSE.txt": b"MIT",
}
OTHERS = """pytorch_model.bin consolidated.safetensors onnx/model.onnx onnx/config.json modeling.py
    original/params.json original/model.safetensors training_args.bin figure.png""".split()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, bytes]:
    """The files of a tiny model, its weights in several files."""
    folder, specs = tmp_path_factory.mktemp("tiny") / "hf", definition_of(TINY).specs
    rng = np.random.default_rng(0)

    def read(_: tuple[str, ...], index: tuple[slice, ...]) -> np.ndarray:
        return 0.1 * rng.normal(size=[part.stop - part.start for part in index])

    config = {"config.json": json.dumps(config_to_hf(TINY)).encode()}
    export(read, TINY, specs, slots(TINY, specs), folder, "bfloat16", 20_000, config)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 2
    return files


@pytest.fixture
def hub(exported, tmp_path, monkeypatch):
    """A hub with the model org/tiny, an empty cache and no token."""
    with fake_hub() as hub:
        hub.models["org/tiny"] = FakeModel(
            {"main": exported | BESIDE | dict.fromkeys(OTHERS, b"not needed")}
        )
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        forget()
        yield hub
        forget()


def forget() -> None:
    """As in another process, which has read nothing of the hub yet."""
    hub_module._fetch_companions.cache_clear()
    hub_module._fetch_weights.cache_clear()


def say(*argv: str) -> None:
    """Run a command of `mjax convert`."""
    before, sys.argv = sys.argv, ["convert", *argv]
    try:
        convert.main()
    finally:
        sys.argv = before


def line_of(*argv: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(UserError) as e:
        say(*argv)
    assert "\n" not in str(e.value)
    return str(e.value)


def weights_of(files: dict[str, bytes]) -> set[str]:
    return {name for name in files if name.startswith("model-")}


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", "./org/tiny /org/tiny ../tiny a/b/c tiny org/ ~/tiny gs://bucket org/tiny/".split()
)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(text, hub):
    assert hub_name(text) is None
    if "://" not in text:  # a store is asked over the network
        with pytest.raises(UserError):
            source_of(text)
    assert not hub.asked


def test_a_path_that_exists_wins_and_a_path_object_is_a_path(hub):
    assert hub_name("org/tiny@v1") == ("org/tiny", "v1")
    assert hub_name("org/tiny@refs/pr/1") == ("org/tiny", "refs/pr/1")
    assert hub_name(Path("org/tiny")) is None and hub_name(None) is None
    Path("org/tiny").mkdir(parents=True)
    for text in ("org/tiny", "org/tiny@best", "org/tiny@v1"):
        assert hub_name(text) is None
        with pytest.raises(UserError, match="no weights here"):
            source_of(text)
    assert not hub.asked


# ---- fetching ------------------------------------------------------------------------------------


def test_an_import_takes_the_files_that_a_model_needs_and_no_others(hub, exported):
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    folder = model_folder("org/tiny")
    got = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert got == exported.keys() | BESIDE.keys()
    stored = Path("ckpt/0/hf")
    assert all((stored / name).read_bytes() == content for name, content in BESIDE.items())
    assert not hub.sent.keys() & set(OTHERS)
    assert pinned("org/tiny") == f"org/tiny@{hub.models['org/tiny'].commit_of('main')}"
    assert pinned("./runs/a") == "./runs/a"


def test_the_config_of_a_model_costs_no_weights(hub, exported, capsys):
    say("config", "--hf", "org/tiny")
    assert "hidden_size: 32" in capsys.readouterr().out
    assert tokenizer_dir("org/tiny") == model_folder("org/tiny")
    assert not hub.sent.keys() & weights_of(exported)


def test_a_family_that_is_not_read_is_refused_before_its_weights_are_fetched(hub, exported):
    files = hub.models["org/tiny"].revisions["main"]
    files["config.json"] = json.dumps({"model_type": "unheard_of"}).encode()
    assert "model_type='unheard_of'" in line_of("import", "--hf", "org/tiny", "--out", "ckpt")
    assert not hub.sent.keys() & weights_of(exported) and not Path("ckpt").exists()


def test_another_model_is_refused_by_its_config_before_its_weights_are_fetched(hub, exported):
    """Only what tensors decide waits for them: tied embeddings here, which the run has not."""
    run = {"checkpoint": {"init_from": "org/tiny"}, "data": {"mock": True, "seq_length": 16}}
    model = TINY.model_dump(exclude_defaults=True)
    Path("tiny.yaml").write_text(json.dumps(run | {"model": model}))

    def start(*keys: str) -> None:
        Trainer(load("tiny.yaml", [*keys])).checkpoints.start_sources()

    line = "the weights in org/tiny are of a model with hidden_size=32, but this run has "
    with pytest.raises(UserError, match=line):
        start("model.hidden_size=64")
    wider = "model.vocab_size=130", "model.vocab_multiple=1"
    with pytest.raises(UserError, match="or name vocab_size in checkpoint.init_changes"):
        start(*wider)
    assert not hub.sent.keys() & weights_of(exported)
    start(*wider, "checkpoint.init_changes=[vocab_size]", "model.tie_word_embeddings=true")
    assert hub.sent.keys() >= weights_of(exported)


def test_revisions(hub, exported):
    model = hub.models["org/tiny"]
    model.revisions["v1"] = model.revisions["main"] | {"generation_config.json": b'{"top_k": 7}'}
    say("import", "--hf", "org/tiny", "--revision", "v1", "--out", "ckpt")
    assert Path("ckpt/0/hf/generation_config.json").read_bytes() == b'{"top_k": 7}'
    commit = model.commit_of("v1")
    assert model_folder(f"org/tiny@{commit}").name == model_folder("org/tiny@v1").name == commit
    assert line_of("import", "--hf", "org/tiny", "--revision", "v2", "--out", "b") == (
        "org/tiny@v2: the hub has no such branch, tag or commit of it; give another revision"
    )
    wrong = line_of("config", "--hf", "./org/tiny", "--revision", "v1")
    assert wrong == "--revision v1: --hf ./org/tiny is not org/name on the hub"


@slow
def test_a_model_in_one_file_and_one_without_safetensors(hub, exported, tmp_path):
    specs = definition_of(TINY).specs
    source = source_of("org/tiny")
    export(source.read, TINY, specs, slots(TINY, specs), tmp_path / "one", "float32")
    one = (tmp_path / "one" / "model.safetensors").read_bytes()
    config = {"config.json": exported["config.json"]}
    hub.models["org/one"] = FakeModel({"main": {**config, "model.safetensors": one}})
    source_of("org/one").check()
    hub.models["org/old"] = FakeModel({"main": {**config, "pytorch_model.bin": b"pickle"}})
    said = line_of("import", "--hf", "org/old", "--out", "ckpt")
    assert (
        said.startswith("org/old: the hub has no safetensors of it")
        and not hub.sent["pytorch_model.bin"]
    )


def test_fine_tuning_and_a_server_take_names(hub):
    found = sft_defaults({"checkpoint": {"init_from": "org/tiny"}})
    assert found["model"]["hidden_size"] == 32
    assert found["data"]["tokenizer"] == str(model_folder("org/tiny"))
    options = read_options(["org/tiny"])
    assert options.model == pinned("org/tiny") and options.name == "org/tiny"
    Path("runs/a").mkdir(parents=True)
    assert read_options(["runs/a"]).name == "a"


@slow
def test_generation_takes_a_name(hub, capsys):
    generate(["--ckpt", "org/tiny", "--prompt", "b", "--max-new-tokens", "3", "--logprobs"])
    assert len(capsys.readouterr().out.splitlines()) == 3


# ---- a model card and a push ---------------------------------------------------------------------


def test_a_push_of_a_folder_and_of_a_checkpoint(hub, exported, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "right")
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    say("export", "--ckpt", "ckpt", "--hf", "out", "--dtype", "bfloat16")
    say("push", "out", "me/one", "--private", "--message", "First")
    assert f"{hub.url}/me/one/commit/" in capsys.readouterr().out
    one = hub.models["me/one"]
    sent = {path.relative_to("out").as_posix() for path in Path("out").rglob("*.*")}
    assert one.private and one.revisions["main"].keys() == sent and hub.messages == ["First"]
    say("push", "ckpt", "me/two", "--revision", "new")
    two = hub.models["me/two"]
    assert not two.private and two.revisions["new"] == one.revisions["main"]
    assert two.revisions["new"]["README.md"] == BESIDE["README.md"]  # no run changed the weights
    source_of("me/two@new").check()


@slow
def test_a_push_that_broke_off_sends_no_weights_again(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.setattr("time.sleep", lambda _: None)
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    say("export", "--ckpt", "ckpt", "--hf", "out")
    hub.refuses["POST /api/models/me/one/commit"] = 100
    said = line_of("push", "out", "me/one")
    assert said.startswith("me/one: ") and "500" in said
    assert not hub.models["me/one"].revisions["main"]
    hub.refuses.clear()
    hub.asked.clear()
    say("push", "out", "me/one")
    assert not any(line.startswith("PUT") for line in hub.asked)
    assert hub.models["me/one"].revisions["main"].keys() >= {"config.json", "model.safetensors"}


def test_a_push_that_is_refused(hub, monkeypatch):
    Path("out").mkdir()
    Path("out/config.json").write_text("{}")
    Path("me").mkdir()
    (Path("me") / "one").mkdir()  # a name to push to is no path
    asks = "set HF_TOKEN to a token that may, or log in with `hf auth login`"
    for token, status in (("wrong", 401), ("reads", 403)):
        monkeypatch.setenv("HF_TOKEN", token)
        said = line_of("push", "out", "me/one")
        assert said == f"me/one: {hub.url} refuses the token (HTTP {status}); {asks}"
    assert line_of("push", "out", "one") == "one: give org/name, the model's name on the hub"
    assert "no weights here" in line_of("push", "./nothing", "me/one")
    assert "me/one" not in hub.models
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = line_of("push", "out", "me/one")
    assert said.startswith("me/one: http://127.0.0.1:9 does not answer as it should: ")


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_connection_that_drops_goes_on_within_the_file(hub, exported, monkeypatch):
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    name = max(weights_of(exported), key=lambda n: len(exported[n]))
    hub.cuts[name] = [1000, 500]
    source_of("org/tiny").check()
    assert hub.sent[name] == len(exported[name])  # no byte was sent twice


@slow
def test_what_broke_off_goes_on_where_it_was(hub, exported, monkeypatch):
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    name = max(weights_of(exported))
    hub.cuts[name] = [100] + 10 * [0]
    said = line_of("import", "--hf", "org/tiny", "--out", "ckpt")
    assert said.startswith("org/tiny: ") and not Path("ckpt").exists()
    forget()
    hub.cuts.clear()
    before = dict(hub.sent)
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    again = {file for file in hub.sent if hub.sent[file] != before.get(file)}
    assert name in again and len(again & weights_of(exported)) < len(weights_of(exported))


def test_tokens(hub, monkeypatch):
    model = hub.models["org/tiny"]
    model.token = "right"
    line = f"org/tiny: no such folder, and {hub.url} shows no such model; if it is private, set "
    line += "HF_TOKEN to a token that may, or log in with `hf auth login`"
    assert line_of("config", "--hf", "org/tiny") == line
    assert line_of("config", "--hf", "runs/mistyped") == line.replace("org/tiny", "runs/mistyped")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "refuses the token (HTTP 401); set HF_TOKEN" in line_of("config", "--hf", "org/tiny")
    monkeypatch.setenv("HF_TOKEN", "right")
    say("config", "--hf", "org/tiny")
    forget()
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text("right")  # what `hf auth login` writes
    say("import", "--hf", "org/tiny", "--out", "ckpt")


def test_a_gated_model(hub):
    hub.models["org/tiny"].gated = True
    assert line_of("config", "--hf", "org/tiny") == (
        f"org/tiny: gated; accept its terms at {hub.url}/org/tiny, then set HF_TOKEN to a token "
        "that may, or log in with `hf auth login`"
    )


def test_a_file_that_the_index_names_is_missing(hub, exported):
    name = max(weights_of(exported))
    del hub.models["org/tiny"].revisions["main"][name]
    assert name in line_of("import", "--hf", "org/tiny", "--out", "ckpt")
    assert not Path("ckpt").exists()


def test_a_server_that_fails(hub, monkeypatch):
    hub.refuses["GET /api/models/org/tiny"] = 1000
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert "500" in line_of("config", "--hf", "org/tiny")


def test_offline_with_a_whole_copy_a_part_and_none(hub, exported, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = "org/tiny: no such folder, and it is not whole in the cache; unset HF_HUB_OFFLINE to "
    assert line_of("config", "--hf", "org/tiny") == f"{line}fetch it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    say("config", "--hf", "org/tiny")
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    say("config", "--hf", "org/tiny")
    assert line_of("import", "--hf", "org/tiny", "--out", "ckpt") == f"{line}fetch it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    forget()
    source_of("org/tiny")
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    assert len(hub.asked) == asked and not capsys.readouterr().err


def test_without_a_network_the_copy_in_the_cache_is_taken_and_said(hub, monkeypatch, capsys):
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    said = line_of("config", "--hf", "org/tiny")
    assert said.startswith(f"org/tiny: no such folder, and {nowhere} does not answer as it should")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    source_of("org/tiny")
    forget()
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    say("import", "--hf", "org/tiny", "--out", "ckpt")
    commit = hub.models["org/tiny"].commit_of("main")
    assert f"; taking its copy in the cache, {commit}\n" in capsys.readouterr().err
    forget()
    source_of(f"org/tiny@{commit}")  # which nothing can change: there is nothing to say
    assert not capsys.readouterr().err


def test_a_cache_that_cannot_be_written(hub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    said = line_of("import", "--hf", "org/tiny", "--out", "ckpt")
    assert said.startswith("org/tiny: ") and "HF_HUB_CACHE" in said

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_download, "http_get", full)
    said = line_of("import", "--hf", "org/tiny", "--out", "ckpt")
    assert "No space left on device; mend it, or set HF_HUB_CACHE" in said
    assert not Path("ckpt").exists()


def test_huggingface_hub_is_missing(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert line_of("config", "--hf", "org/tiny") == (
        "a model of the Hugging Face hub needs huggingface_hub: pip install 'mjax[hub]'"
    )


@exhaustive
def test_a_run_with_adapters_starts_from_the_hub_and_names_its_commit(hub, monkeypatch):
    keys = """data.mock=true data.seq_length=16 train.global_batch_size=8 train.micro_batch_size=1
        train.steps=2 precision.compute=float32 run.dir=run lora.rank=2
        checkpoint.init_from=org/tiny""".split()
    model = TINY.model_dump(exclude_defaults=True)
    Path("tiny.yaml").write_text(json.dumps({"model": model}))
    train(load("tiny.yaml", keys))
    first = pinned("org/tiny")
    assert read_record(Path("run/checkpoints/2"))["base"]["from"] == first
    before = logits_of("run")
    say("extract", "run", "adapter")
    said = json.loads(Path("adapter/adapter_config.json").read_text())
    assert f"{said['base_model_name_or_path']}@{said['revision']}" == first
    forget()
    # The branch moves on; the commit stays.
    files = hub.models["org/tiny"].revisions
    files["then"] = dict(files["main"])
    hub.models["org/tiny"].revisions["main"]["generation_config.json"] = b'{"eos_token_id": 1}'
    assert pinned("org/tiny") != first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    np.testing.assert_array_equal(logits_of("run"), before)
    np.testing.assert_allclose(logits_of("adapter"), before, atol=1e-5)
    say("export", "--ckpt", "run", "--hf", "out")
    assert "base_model: org/tiny\n" in Path("out/README.md").read_text()
    assert Path("out/BASE_README.md").read_bytes() == BESIDE["README.md"]


def logits_of(name: str) -> np.ndarray:
    lm = from_pretrained(name)
    return np.asarray(lm.logits(lm.params, np.arange(12).reshape(1, 12)))


@exhaustive
def test_the_variables_of_the_environment_count(hub, tmp_path):
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "right"}
    hub.models["org/tiny"].token = "right"
    command = [sys.executable, "-m", "mjax.convert", "import", "--hf", "org/tiny", "--out"]

    def run(out: str, **more: str) -> subprocess.CompletedProcess:
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | own | more
        return subprocess.run([*command, out], env=environ, capture_output=True, text=True)

    found = run("a", HF_HUB_OFFLINE="1")
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
    assert run("a").returncode == 0 and run("b", HF_HUB_OFFLINE="1").returncode == 0


def test_a_tokenizer_of_the_hub_is_its_folder_without_weights(hub):
    keys = ["data.text=a.txt", "data.tokenizer=org/tiny@main"]
    cfg = with_hub_tokenizer(load(None, keys))
    folder = Path(cfg.data.tokenizer)
    assert load_tokenizer(folder).vocab_size == 2 and (folder / "chat_template.jinja").is_file()
    assert not list(folder.glob("*.safetensors")) and with_hub_tokenizer(cfg) is cfg
    hub.asked.clear()
    for name in ("byte", "vocabularies/tokenizer.json"):
        assert (
            with_hub_tokenizer(load(None, [*keys, f"data.tokenizer={name}"])).data.tokenizer == name
        )
    assert not hub.asked
    with pytest.raises(UserError, match="org/other: no such folder, and .* shows no such model"):
        with_hub_tokenizer(load(None, [*keys, "data.tokenizer=org/other"]))
