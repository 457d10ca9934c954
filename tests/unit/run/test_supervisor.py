"""Laws of the supervisor: it starts again what a fault ended, that alone, and not for ever."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mjax.run.faults import rendezvous, supervisor
from mjax.run.faults.rendezvous import Rendezvous, Round
from mjax.run.faults.supervisor import Supervisor, arguments_of
from mjax.sharding.processes.launcher import Processes
from tests.marks import slow
from tests.processes import start_process

# A child that does what the n-th word of its plan says: exits with a code, dies, or saves and dies.
CHILD = """
    import os, signal, sys, time
    from pathlib import Path
    home = Path(sys.argv[1])
    lives = home / "lives"
    number = len(lives.read_text().splitlines()) if lives.exists() else 0
    with open(lives, "a") as f:
        f.write(os.environ["MJAX_RESTART_NOTE"] + "\\n")
    word = sys.argv[2].split()[number]
    if word.startswith("save"):
        (home / "checkpoints" / word[4:] / "state").mkdir(parents=True)
        word = "-9"
    if word == "wait":
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda n, f: open(home / "signals", "a").write(f"{n} "))
        (home / "ready").touch()
        while "15" not in ((home / "signals").read_text() if (home / "signals").exists() else ""):
            time.sleep(0.05)
        sys.exit(0)
    if int(word) < 0:
        if word != "-9":
            signal.signal(-int(word), signal.SIG_DFL)  # a shell's & lets children ignore SIGINT
        os.kill(os.getpid(), -int(word))
    sys.exit(int(word))
"""


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(rendezvous, "LOOK", 0.02)
    handlers = {number: signal.getsignal(number) for number in supervisor.FORWARDED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def lives(home) -> list[str]:
    """The note that each start was given."""
    return (home / "lives").read_text().split("\n")[:-1]


def run(home, plan, restarts) -> int:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(home), plan]
    return Supervisor(command, restarts, home).run()


@pytest.mark.parametrize("code", [0, 1, 2, 130, -15, -2])
def test_what_has_ended_or_needs_a_person_is_not_started_again(tmp_path, code):
    assert run(tmp_path, f"{code} 0", 5) == (code if code >= 0 else 128 - code)
    assert lives(tmp_path) == [""]


@pytest.mark.parametrize("code", [3, -9, -11, -6, -7])
def test_what_a_fault_ended_is_started_again_and_told_why(tmp_path, code, capfd):
    assert run(tmp_path, f"{code} 0", 1) == 0
    first, second = lives(tmp_path)
    assert first == "" and second.startswith("restart 1 (1 of 1 without a new checkpoint): ")
    assert ("exit code 3" if code == 3 else signal.Signals(-code).name) in second
    assert f"mjax: {second}; starting again in 0.05 s" in capfd.readouterr().err


def test_a_fault_that_recurs_ends_the_job_with_the_last_exit_code(tmp_path, capfd):
    assert run(tmp_path, "-9 -9 -11 0", 2) == 128 + signal.SIGSEGV
    assert len(lives(tmp_path)) == 3
    assert "2 restarts in a row have brought no new checkpoint" in capfd.readouterr().err


@slow
def test_a_new_checkpoint_starts_the_count_anew(tmp_path):
    assert run(tmp_path, "-9 save2 3 save4 -9 0", 2) == 0
    counts = [note.split("(")[1].split(" ")[0] for note in lives(tmp_path)[1:]]
    assert counts == ["1", "1", "2", "1", "2"]


def test_pauses_double_up_to_a_limit(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.15)
    assert run(tmp_path, "3 3 3 3 0", 4) == 0
    said = capfd.readouterr().err
    assert [f"in {x} s" in said for x in ("0.05", "0.1", "0.15", "0.2")] == [
        True,
        True,
        True,
        False,
    ]


SUPERVISE = """
    import sys
    from pathlib import Path
    from mjax.run.faults.supervisor import Supervisor
    sys.exit(Supervisor(sys.argv[2:], 3, Path(sys.argv[1])).run())
"""


def start_supervised(home, plan) -> subprocess.Popen:
    child = [sys.executable, "-c", textwrap.dedent(CHILD), str(home), plan]
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISE), str(home), *child]
    process = start_process(command, stderr=subprocess.PIPE, text=True)
    wait_for(home / "ready")
    return process


def wait_for(path, what="") -> None:
    until = time.monotonic() + 60
    while not path.exists() or what not in path.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_signals_reach_the_child_and_one_that_stops_is_the_end(tmp_path):
    process = start_supervised(tmp_path, "wait 0")
    process.send_signal(signal.SIGUSR2)
    wait_for(tmp_path / "signals", "12 ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0 and len(lives(tmp_path)) == 1
    assert (tmp_path / "signals").read_text() == "12 15 "


def test_a_child_is_asked_to_stop_when_its_supervisor_dies(tmp_path):
    start_supervised(tmp_path, "wait 0").kill()
    wait_for(tmp_path / "signals", "15 ")


def test_the_supervisor_needs_no_jax():
    script = """
        import sys
        import mjax.train.__main__, mjax.run.faults.supervisor
        assert "jax" not in sys.modules and "orbax" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@slow
def test_restarts_of_the_command_line_end_with_the_code_of_its_child(tmp_path):
    """A mistake is found by the parent; one that only a device shows by the child, once."""
    command = [sys.executable, "-m", "mjax.train", "--restarts", "3", f"run.dir={tmp_path / 'run'}"]
    for word, said in (
        ("train.step=1", "train.steps"),
        ("--restarts=-1", "--restarts -1 must be"),
        ("checkpoint.resume=never", "--restarts would at each restart"),
        ("mesh.dp=77", "mesh.dp"),
    ):
        wrong = subprocess.run([*command, "data.mock=true", word], capture_output=True, text=True)
        assert wrong.returncode == 2 and said in wrong.stderr
        assert wrong.stderr.count("mjax: error:") == 1


# ---- several processes -----------------------------------------------------------------------


def meet(folder, index, count, smallest=None, patience=60.0, batch=8) -> Rendezvous:
    fits = lambda size: batch % size == 0  # noqa: E731
    return Rendezvous(folder, index, count, patience, smallest or count, fits)


def meet_all(peers) -> list[Round | None]:
    found: dict[int, Round | None] = {}
    threads = [
        threading.Thread(target=lambda p=p: found.update({p.index: p.meet(lambda: False)}))
        for p in peers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[p.index] for p in peers]


def test_all_are_in_one_round_and_files_of_another_job_do_not_count(tmp_path):
    before = meet_all([meet(tmp_path, i, 3) for i in range(3)])
    peers = [meet(tmp_path, i, 3) for i in range(3)]
    found = meet_all(peers)
    assert found[0] == found[1] == found[2] != before[0] and found[0].members == (0, 1, 2)
    assert not any(p.why_broken() for p in peers) and not any(p.ended() for p in peers)


def test_a_round_ends_for_all_when_one_starts_again(tmp_path):
    peers = [meet(tmp_path, i, 3) for i in range(3)]
    first = meet_all(peers)[0]
    anew = threading.Thread(target=peers[1].meet, args=(lambda: bool(peers[0].ended()),))
    anew.start()
    wait_until(lambda: peers[0].why_broken() == "process 1 starts again")
    assert peers[2].why_broken() == ""
    second = meet_all([peers[0], peers[2]])
    anew.join(60)
    assert second[0] == second[1] != first and peers[2].why_broken() == ""


def test_one_that_has_ended_for_good_ends_the_others(tmp_path):
    peers = [meet(tmp_path, i, 2) for i in range(2)]
    meet_all(peers)
    peers[1].end(2)
    assert peers[0].ended() == (1, 2) and peers[0].why_broken() == ""
    assert peers[0].meet(lambda: False) is None  # at once, not after the patience


@slow
def test_too_few_end_after_the_patience_and_enough_go_on_if_the_batch_allows(tmp_path, capfd):
    assert meet_all([meet(tmp_path, i, 3, patience=3.0) for i in (0, 2)]) == [None, None]
    assert "2 of 3 processes came" in capfd.readouterr().err
    found = meet_all([meet(tmp_path, i, 4, smallest=2, patience=3.0) for i in (0, 3)])
    assert found[0].members == found[1].members == (0, 3)
    # Three of four are there, a batch of 8 is for two of them.
    peers = [meet(tmp_path, i, 4, smallest=2, patience=3.0) for i in (0, 1, 3)]
    first = threading.Thread(target=meet_all, args=(peers,))
    first.start()
    wait_until(lambda: peers[0]._round.members == (0, 1))
    peers[0].end(0)
    first.join(60)


@slow
def test_a_process_that_comes_back_is_seen(tmp_path):
    peers = [meet(tmp_path, i, 2, smallest=1, patience=3.0) for i in range(2)]
    assert peers[0].meet(lambda: False).members == (0,)
    assert not peers[0].could_grow() and not peers[0].why_broken()
    back = threading.Thread(target=peers[1].meet, args=(lambda: False,))
    back.start()
    wait_until(peers[0].could_grow)
    assert peers[0].meet(lambda: False).members == (0, 1)
    back.join(60)


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_smaller_round_numbers_its_processes_anew():
    last = Processes("a:1", 4, 3)
    assert arguments_of(last, Round("x", (0, 1, 2, 3))) == []
    said = " ".join(arguments_of(last, Round("x", (0, 1, 3))))
    assert said == "--coordinator a:1 --num-processes 3 --process-id 2"
