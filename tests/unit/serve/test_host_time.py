"""`benchmarks.host`: the work of the engine's thread in a step is split by part, and all of it."""

import json
import threading
from types import SimpleNamespace

import pytest

from benchmarks import host
from tests.marks import slow
from tests.unit.commands.test_bench import SMALL_MODEL


@slow
def test_host_time_is_split_and_a_step_is_launched_before_the_device_is_free(capsys):
    pytest.importorskip("zmq", reason="needs the extra serve")
    own = "--streams=3", "--prompt=5", "--new=100", "--device-ms=20", "--dtype=float32"
    assert host.main([*own, *SMALL_MODEL, "model.max_position_embeddings=128"]) == 0
    alone, served = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not alone["case"]["served"] and served["case"]["served"]
    assert {"plan", "records", "launch", "read", "rest"} == set(alone["parts_us"])
    assert set(served["parts_us"]) - set(alone["parts_us"]) == {"report", "send", "receive"}
    for found in (alone, served):
        assert sum(found["parts_us"].values()) == pytest.approx(1e3 * found["ms"], rel=1e-3)
        assert found["ms"] < 20 <= found["step_ms"] + 1 and found["idle_us"] < 10_000


def test_another_engine_s_server_in_the_process_does_not_count():
    runner = SimpleNamespace(prefills=0)
    times = host.StepTimes(SimpleNamespace(runner=runner, lanes=[]), 0, None)
    receive = times._timed(lambda: None, "receive")

    def turn(server):
        receive()
        if server.engine is times.engine:  # meanwhile the other one makes a step
            thread = threading.Thread(target=step, args=[SimpleNamespace(engine=None)])
            thread.start()
            thread.join()

    step = times._step(times._timed(turn, "rest"))
    step(SimpleNamespace(engine=times.engine))
    assert [set(parts) for *_, parts in times.steps] == [{"receive", "rest"}]
