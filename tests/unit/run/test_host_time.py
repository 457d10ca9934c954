"""Laws of host times: they count what this host does alone, and name one that is slow."""

import time

import jax
import numpy as np

from mjax.run.monitor.host_time import SUSPICIONS, HostFigures, HostTime, figures_of


def test_waiting_for_data_and_dispatching_are_measured_apart():
    host = HostTime()

    def batches():
        for i in range(5):
            time.sleep(0.02)
            yield i

    seen = []
    for batch in host.waiting(batches()):
        seen.append(batch)
        time.sleep(0.01)  # what the device computes counts for neither
        with host.dispatching():
            time.sleep(0.03)  # waiting for other processes counts for neither
            began = time.thread_time()
            while time.thread_time() < began + 0.002:
                pass
        if batch == 0:
            assert figures_of(host.gather(jax.devices())) is None  # that step was compiled
    assert seen == list(range(5))
    figures = figures_of(host.gather(jax.devices()))
    assert figures.data.shape == figures.dispatch.shape == (1,)
    assert figures.data[0] >= 20 and 2 <= figures.dispatch[0] < 30
    assert figures_of(host.gather(jax.devices())).data[0] == 0  # counted from the call before


def test_a_record_of_one_process_has_no_slowest_one():
    figures = HostFigures(np.array([30.0]), np.array([5.0]))
    assert figures.record(100.0) == {"host_ms": 35.0, "data_wait": 0.3}
    assert figures.record(None) == {"host_ms": 35.0}


def test_the_slowest_of_several_is_named_once_and_only_if_it_costs_time():
    host = HostTime()
    figures = HostFigures(np.array([1.0, 2.0, 80.0, 1.0]), np.array([5.0, 5.0, 5.0, 6.0]))
    record = figures.record(100.0)
    assert record["slowest_host"] == 2 and record["slowest_host_ms"] == 85.0
    assert record["host_ms"] == 7.0 and record["data_wait"] == 0.01
    lines = [host.slow_process(figures, 100.0) for _ in range(SUSPICIONS + 3)]
    (line,) = filter(None, lines)
    assert lines.index(line) == SUSPICIONS - 1
    assert line.startswith("process 2 is slow: its host takes 85 ms a step (80 of them for data)")
    assert not any(host.slow_process(figures, 10_000.0) for _ in range(9))
