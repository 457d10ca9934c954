"""Laws of device speed: a device that is slow in three checks is named once; sound ones never."""

import jax
import numpy as np

from mjax.run.monitor.device_speed import SlowDeviceWatch, seconds_of_matmul


def test_a_slow_device_is_named_once_after_three_checks():
    struck = jax.devices()[3]

    def time_device(device):
        return 0.002 if device == struck else 0.001

    speed = SlowDeviceWatch(5, time_device)
    assert [speed.is_due(step) for step in (4, 5, 10)] == [False, True, True]
    found = [speed.measure(jax.devices()[1:5]) for _ in range(5)]
    assert [bool(line) for _, line in found] == [False, False, True, False, False]
    record, line = found[2]
    assert record["slowest_device"] == 2 and np.isclose(record["slowest_device_ms"], 2.0)
    assert np.isclose(record["device_ms"], 1.0)
    assert line == (
        f"device {struck.id} of process 0 (cpu) is slow: a matmul takes it 2 ms, the median device "
        "1 ms"
    )


def test_devices_within_a_tenth_are_not_named():
    speed = SlowDeviceWatch(1)
    for _ in range(5):
        assert speed.judge(np.array([1.0, 1.09, 1.0, 0.5]))[1] == ""
    assert not SlowDeviceWatch(None).is_due(1)


def test_the_matmul_runs_on_the_device_that_is_timed():
    assert 0 < seconds_of_matmul(jax.devices()[2]) < 10
