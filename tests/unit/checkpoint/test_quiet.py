"""Law: nothing but mjax's own line is said about a failed save, also when its run has ended."""

import sys
from types import SimpleNamespace

from mjax.checkpoint.base.orbax_messages import quiet_saves


def test_writes_that_end_after_the_run_stay_silent_and_other_errors_do_not(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_value))
    for _ in range(2):
        with quiet_saves():
            pass
    other = RuntimeError("another")
    for error in (RuntimeError("Event loop is closed"), other):
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert seen == [other]
