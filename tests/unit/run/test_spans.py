"""Laws of spans: each part of a run is one, under the run's own; a place out of reach is a line."""

import time

import pytest

from mjax.errors import UserError
from mjax.run.monitor import spans
from mjax.run.monitor.goodput import WallTime
from mjax.run.monitor.spans import Spans, require_opentelemetry

needs_sdk = pytest.mark.skipif(
    not spans._is_installed("opentelemetry.sdk"), reason="needs the extra `otel`"
)


@needs_sdk
def test_parts_of_a_run_are_spans_of_one_trace(monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    wall = WallTime(Spans("runs/a"))
    wall.switch("training")
    with wall.spent("checkpoint", step=1):
        time.sleep(0.02)
    wall.trained(1)
    wall.close()
    found = {span.name: span for span in memory.get_finished_spans()}
    assert set(found) == {"checkpoint", "step", "run"}
    saved, whole = found["checkpoint"], found["run"]
    assert 0.02e9 <= saved.end_time - saved.start_time < 1e9
    assert saved.attributes["step"] == 1 and whole.attributes["run"] == "runs/a"
    assert saved.parent.span_id == whole.context.span_id


@needs_sdk
def test_a_place_out_of_reach_is_one_line(monkeypatch, capfd):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(spans, "CLOSING", 3.0)
    traced = Spans("runs/a")
    for _ in range(5):
        traced.add("step", 0.1)
    began = time.monotonic()
    traced.close()
    assert time.monotonic() - began < 8
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(said) == 1 and said[0].startswith("mjax: spans cannot be sent to http://127.0.0.1:9")


def test_without_the_sdk_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(spans, "find_spec", lambda name: None)
    require_opentelemetry(False)
    with pytest.raises(UserError, match=r"pip install 'mjax\[otel\]'"):
        require_opentelemetry(True)
    Spans(None).add("step", 1.0)
