"""Numbers for Prometheus, with the names and buckets that dashboards for vLLM read.

Requests are counted where they are answered. With several processes of HTTP the variable
PROMETHEUS_MULTIPROC_DIR must name an empty folder before this module is imported: a scrape of one
process then adds up all. Engines are asked at each scrape, so any process gives all of them.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

LABELS = "model_name", "engine"
_FIRST = """.001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"""
_BETWEEN = """.0005 .001 .002 .003 .004 .005 .006 .008 .01 .015 .02 .025 .03 .04 .05 .075 .1 .15 .2
.3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"""
_WHOLE = """.3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"""
_TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000"
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token", _FIRST),
    "inter_token_latency_seconds": ("Time between tokens", _BETWEEN),
    "request_time_per_output_token_seconds": ("Time between tokens of a request", _BETWEEN),
    "e2e_request_latency_seconds": ("Time of a request", _WHOLE),
    "request_decode_time_seconds": ("Time from the first token to the last", _WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens made for a request", _TOKENS),
    "request_params_n": ("Samples of a request", "1 2 5 10 20"),
    "request_params_max_tokens": ("Most tokens of a sample", _TOKENS),
}
# Of a replica: what it says of itself, its name here, and whether it only grows.
_OF_ENGINES = {
    "running": ("num_requests_running", False),
    "waiting": ("num_requests_waiting", False),
    "prompt_tokens": ("prompt_tokens", True),
    "generation_tokens": ("generation_tokens", True),
    "prefix_queries": ("prefix_cache_queries", True),
    "prefix_hits": ("prefix_cache_hits", True),
    "preemptions": ("num_preemptions", True),
    "drafts": ("spec_decode_num_drafts", True),
    "accepted": ("spec_decode_num_accepted_tokens", True),
    "steps": ("engine_steps", True),
    "compiles": ("engine_compiles", True),
    "seconds_since_step": ("engine_seconds_since_step", False),
}


class RequestTimes:
    """The life of one request, as its tokens come."""

    def __init__(self, metrics: "ApiMetrics", prompt: int, n: int, most: int | None):
        self._metrics, self._prompt = metrics, prompt
        self._begin = time.perf_counter()
        self._last: dict[int, float] = {}
        self._first: float | None = None
        self._tokens = 0
        metrics.observe("request_params_n", n)
        if most is not None:
            metrics.observe("request_params_max_tokens", most)

    def add(self, index: int, count: int, finish_reason: str | None) -> None:
        """Count new tokens of a sample."""
        now = time.perf_counter()
        if count:
            self._tokens += count
            if self._first is None:
                self._first = now
                self._metrics.observe("time_to_first_token_seconds", now - self._begin)
            if (last := self._last.get(index)) is not None:
                each = (now - last) / count
                for _ in range(count):
                    self._metrics.observe("inter_token_latency_seconds", each)
            self._last[index] = now
        if finish_reason is not None:
            self._metrics.success(finish_reason)

    def end(self, is_whole: bool) -> None:
        """Count the request; `is_whole`: whether all its samples have ended."""
        now, metrics = time.perf_counter(), self._metrics
        if not is_whole:
            metrics.success("abort")
        metrics.observe("e2e_request_latency_seconds", now - self._begin)
        metrics.observe("request_prompt_tokens", self._prompt)
        metrics.observe("request_generation_tokens", self._tokens)
        if self._first is not None:
            lasted = max(self._last.values()) - self._first
            metrics.observe("request_decode_time_seconds", lasted)
            if (pairs := self._tokens - len(self._last)) > 0:
                metrics.observe("request_time_per_output_token_seconds", lasted / pairs)


class ApiMetrics:
    """Histograms and counters of the requests of this process."""

    def __init__(self, model: str):
        self._model = model
        self._registry = registry = CollectorRegistry()
        given = {"labelnames": LABELS, "registry": registry}
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", about, buckets=[*map(float, buckets.split())], **given
            ).labels(model, "0")
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        given["labelnames"] = (*LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Samples that ended", **given)
        given["labelnames"] = LABELS
        rejected = Counter("vllm:admission_rejections", "Requests that met a full queue", **given)
        self.rejected = rejected.labels(model, "0")

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def success(self, reason: str) -> None:
        """Count a sample that has ended."""
        self._success.labels(self._model, "0", reason).inc()

    def exposed(self, stats: Sequence[Mapping[str, Any]]) -> bytes:
        """All numbers in Prometheus' text format; `stats`: those of the engines now."""
        of_requests = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            of_requests = CollectorRegistry()
            MultiProcessCollector(of_requests)
        of_engines = SimpleNamespace(collect=lambda: _of_engines(self._model, stats))
        return generate_latest(of_requests) + generate_latest(of_engines)


def _of_engines(model: str, stats: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the metrics of engines."""
    rows = [(str(number), row) for number, row in enumerate(stats)]
    for key, (name, grows) in _OF_ENGINES.items():
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = kind(f"vllm:{name}", f"{key} of an engine", labels=LABELS)
        for engine, row in rows:
            if row.get(key) is not None:
                family.add_metric((model, engine), row[key])
        yield family
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Pages in use, 0 to 1", labels=LABELS)
    for engine, row in rows:
        if row.get("pages"):
            usage.add_metric((model, engine), row["pages_used"] / row["pages"])
    yield usage
