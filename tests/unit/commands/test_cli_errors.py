"""Law: a mistake a user can mend is one line on standard error, exit code 2, and no run folder."""

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mjax.data import IndexedDatasetWriter
from mjax.errors import UserError, run_cli
from mjax.train.__main__ import main
from tests.marks import slow

TINY = [
    "model.hidden_size=32",
    "model.attention.num_attention_heads=4",
    "model.num_hidden_layers=1",
    "model.vocab_size=64",
    "data.seq_length=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.steps=1",
    "precision.compute=float32",
]


def corpus(prefix, high=50, documents=20):
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(documents):
            ids = np.random.default_rng(i).integers(0, high, 100)
            writer.add_document(ids.astype(np.uint16))


def damage(folder, name):
    prefix = folder / name
    corpus(prefix, high=60000 if name == "big" else 50, documents=0 if name == "empty" else 20)
    if name == "no_bin":
        (folder / "no_bin.bin").unlink()
    if name == "truncated":
        data = (folder / "truncated.bin").read_bytes()
        (folder / "truncated.bin").write_bytes(data[:100])
    if name == "lying":
        index = bytearray((folder / "lying.idx").read_bytes())
        index[34:38] = struct.pack("<i", 99999)
        (folder / "lying.idx").write_bytes(index)
    return prefix


@pytest.fixture
def start(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mjax.train", *TINY, *arguments])
        with pytest.raises(SystemExit) as end:
            run_cli(main)
        return end.value.code, capsys.readouterr().err

    return run


def test_a_warning_is_one_line_of_mjax_whatever_libraries_log(capfd):
    root = logging.getLogger()
    root.addHandler(other := logging.StreamHandler())
    try:
        with pytest.raises(SystemExit):
            run_cli(lambda: logging.getLogger("mjax.data").warning("%d bad", 3))
    finally:
        root.removeHandler(other)
    assert capfd.readouterr().err == "mjax: 3 bad\n"


CONFIG = {
    "misspelled key": (["data.mock=true", "model.hiden_size=3"], "did you mean model.hidden_size"),
    "wrong type": (["data.mock=true", "train.steps=many"], "train.steps='many'"),
    "impossible mesh": (["data.mock=true", "mesh.dp=3"], "mesh"),
    "unwritable folder": (["data.mock=true", "run.dir=/proc/x"], "cannot write in folder"),
}
DATA = {
    "no_bin": "no_bin.bin: no such file",
    "truncated": "truncated.bin: truncated",
    "lying": "lying.idx: lengths and offsets disagree",
    "big": "outside the vocabulary of 64",
    "empty": "the corpus is empty",
}


@pytest.mark.parametrize("case", CONFIG)
def test_config_mistakes(case, start, tmp_path):
    arguments, words = CONFIG[case]
    folder = [] if "run.dir" in arguments[-1] else [f"run.dir={tmp_path}/run"]
    code, err = start(*arguments, *folder)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", DATA)
def test_data_mistakes(name, start, tmp_path):
    code, err = start(f"data.paths=[{damage(tmp_path, name)}]", f"run.dir={tmp_path}/run")
    assert code == 2 and DATA[name] in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@slow
def test_checkpoint_of_another_architecture_names_the_first_differing_field(start, tmp_path):
    corpus(tmp_path / "good")
    data = f"data.paths=[{tmp_path}/good]", f"run.dir={tmp_path}/run"
    assert start(*data)[0] == 0
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    code, err = start(*data, "model.intermediate_size=48")
    assert code == 2 and "model.intermediate_size=128" in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == kept
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_line(unbuffered):
    command = [sys.executable, "-m", "mjax.cli", "--help"]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ)
    line = "mjax: error: the output: No space left on device; make room\n"
    assert (run.returncode, run.stderr) == (2, line)


UNWRITTEN = """
import errno, os, sys, threading
from mjax import errors

def a_full_cache():
    with open("/dev/full", "w") as file:
        file.write("x")

def watches_run_out():  # inotify
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def a_mistake():
    print("unwritten")
    raise errors.UserError("mend it")

def a_defect_of_one_of_several():
    errors._is_one_of_several = lambda: True
    threading.Thread(target=threading.Event().wait).start()  # as one waits for the others
    raise RuntimeError

def a_closed_output():
    sys.stdout.close()

def no_output():
    sys.stdout = None

def a_mistake_after_a_closed_output():
    sys.stdout.close()
    raise errors.UserError("mend it")

errors.run_cli(globals()[sys.argv[1]])
"""


def unwritten(what, **files):
    files = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE} | files
    command = [sys.executable, "-c", UNWRITTEN, what]
    run = subprocess.run(command, text=True, check=False, timeout=60, **files)
    return run.returncode, run.stderr


@pytest.mark.parametrize("what", ["a_full_cache", "watches_run_out"])
def test_a_full_disk_elsewhere_is_not_blamed_on_standard_output(what):
    code, err = unwritten(what)
    assert code == 1 and "Traceback" in err and "the output" not in err


@pytest.mark.parametrize("what, code", [("a_mistake", 2), ("a_defect_of_one_of_several", 1)])
def test_the_exit_code_needs_no_standard_error(what, code):
    with open("/dev/full", "w") as full:
        assert unwritten(what, stdout=full, stderr=full)[0] == code


def test_a_closed_standard_output_changes_no_exit_code():
    assert unwritten("a_closed_output") == (0, "")
    assert unwritten("no_output") == (0, "")
    assert unwritten("a_mistake_after_a_closed_output") == (2, "mjax: error: mend it\n")


def hidden_behind_a_cause():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("not found") from ValueError()


def causes_in_a_circle():
    error = UserError("mend it")
    raise error from error


ENDS = [(hidden_behind_a_cause, 130, "interrupted"), (causes_in_a_circle, 2, "error: mend it")]


@pytest.mark.parametrize("main, code, line", ENDS)
def test_all_causes_of_an_error_are_looked_at_once(main, code, line, capsys):
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    assert (end.value.code, capsys.readouterr().err) == (code, f"mjax: {line}\n")


def test_a_command_within_a_command_leaves_its_settings(capsys):
    logger = logging.getLogger("mjax")

    def settings():
        return signal.getsignal(signal.SIGINT), sys.unraisablehook, logger.propagate

    def outer():
        before = settings()
        with pytest.raises(SystemExit):
            run_cli(lambda: logger.warning("inner"))
        assert settings() == before != outside
        logger.warning("outer")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outside = settings()
        with pytest.raises(SystemExit):
            run_cli(outer)
        assert settings() == outside
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "mjax: inner\nmjax: outer\n"


INTERRUPTED = """
import gc, logging, os, pathlib, signal, sys, time
from mjax.errors import or_user_error, run_cli

def interrupt(*_):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)

def in_the_command():
    interrupt()

def in_a_callback():  # where Python drops it
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(60)

def in_an_import():  # as of a module in C
    try:
        interrupt()
    except KeyboardInterrupt as e:
        raise ImportError("initialization failed") from e

def in_an_extra():
    with or_user_error("install it", ImportError):
        in_an_import()

def in_an_optional_import():
    struck = STRUCK + "struck()"
    pathlib.Path("struck.py").write_text(struck)
    pathlib.Path("package.py").write_text("try: import struck\\nexcept ImportError: pass")
    sys.path.append("")
    import package
    return 1

STRUCK = '''
import signal
def struck():
    try:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as e:
            raise ImportError from e
    except ImportError as e:
        raise RuntimeError if __name__ != "struck" else ImportError from e
'''

def start_jax_with(initialize):
    plugin = pathlib.Path("jax_plugins/plugin/__init__.py")
    plugin.parent.mkdir(parents=True)
    plugin.write_text(STRUCK + f"def initialize(): {initialize}")
    sys.path.append("")
    import jax
    jax.devices()
    return 1

def in_a_start():  # of jax, which logs whatever ends that of a plugin
    return start_jax_with("signal.raise_signal(signal.SIGINT)")

def in_a_start_as_another_error():
    return start_jax_with("struck()")

def in_a_quiet_start():  # even of its log
    os.environ.pop("JAX_PLATFORMS", None)
    logging.disable()
    register = "from jax._src.xla_bridge import register_backend_factory as register;"
    return start_jax_with(register + "register('struck', struck, fail_quietly=True)")

signal.signal(signal.SIGINT, signal.default_int_handler)
run_cli(globals()[sys.argv[1]])
"""


WHERE = "in_the_command in_a_callback in_an_import in_an_extra in_an_optional_import in_a_start"
WHERE += " in_a_start_as_another_error in_a_quiet_start"


@pytest.mark.parametrize("where", WHERE.split())
def test_an_interrupt_is_one_line_wherever_it_comes(where, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, where]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ
    )
    assert (run.returncode, run.stderr.lstrip()) == (130, "mjax: interrupted\n")
