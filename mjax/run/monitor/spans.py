"""Spans of a run for OpenTelemetry: steps, waiting for data, saves, evaluations, restarts.

A provider of spans that the program has set already is used as it is. Otherwise spans go to
OTEL_EXPORTER_OTLP_ENDPOINT by OTLP over HTTP, as OTEL_* variables say. Invariant: the loop never
waits for them, and a place that cannot be reached is one line.
"""

import logging
import threading
import time
from importlib.util import find_spec

import jax

from mjax.errors import UserError, reason
from mjax.run.monitor.log_writer import CLOSING, warn


class Spans:
    """Adds spans to a trace named `name`; None: to no trace."""

    def __init__(self, name: str | None) -> None:
        self._tracer = self._provider = None
        if name is None or jax.process_index() > 0:
            return
        from opentelemetry import trace

        self._provider = trace.get_tracer_provider()
        self._is_own = not hasattr(self._provider, "add_span_processor")
        if self._is_own:
            self._provider = _provider()
        self._tracer = self._provider.get_tracer("mjax")
        self._whole = self._tracer.start_span("run", attributes={"run": name})
        self._parent = trace.set_span_in_context(self._whole)

    def add(
        self, name: str, seconds: float, ended: float | None = None, **attributes: int | str
    ) -> None:
        """Add a span of so many seconds that has ended now, or at `ended` (since 1970)."""
        if self._tracer is None:
            return
        end = int(1e9 * (time.time() if ended is None else ended))
        start = end - int(1e9 * seconds)
        given = {"context": self._parent, "attributes": attributes, "start_time": start}
        self._tracer.start_span(name, **given).end(end_time=end)

    def close(self) -> None:
        """End the trace; its last spans have `CLOSING` seconds."""
        if self._tracer is None:
            return
        self._whole.end()
        end = self._provider.shutdown if self._is_own else self._provider.force_flush
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(CLOSING)


def require_opentelemetry(is_wanted: bool) -> None:
    """Raise `UserError` if spans are wanted and cannot be sent."""
    needed = "opentelemetry.sdk", "opentelemetry.exporter"
    if is_wanted and not all(map(_is_installed, needed)):
        raise UserError("log.opentelemetry needs its SDK; pip install 'mjax[otel]'")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _provider():
    """A provider that sends spans in batches, in a thread; a failure is said once."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    class SayingExporter(OTLPSpanExporter):
        is_said = False

        def export(self, spans):
            try:
                found, why = super().export(spans), "they are not taken"
            except Exception as e:
                found, why = SpanExportResult.FAILURE, reason(e)
            if found is not SpanExportResult.SUCCESS and not self.is_said:
                self.is_said = True
                warn(f"spans cannot be sent to {self._endpoint} ({why}); training goes on")
            return found

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says the same, many times
    provider = TracerProvider(resource=Resource.create({"service.name": "mjax"}))
    provider.add_span_processor(BatchSpanProcessor(SayingExporter()))
    return provider
