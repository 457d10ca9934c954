"""`mjax bench serve --url http://localhost:8000 [options]`: a server of OpenAI's form under load.

The server is any: ours, vLLM, SGLang. Each request streams. Figures, of requests without an error:

- `first_ms`: from sending a request, its connection included, to its first token.
- `between_ms`: from one token, or several that came together, to the next of the same request.
- `tpot_ms`: (last token - first token) / (tokens - 1). `e2e_ms`: from sending to the last token.
- `tokens_per_second`, `requests_per_second`: over the time from the first arrival to the last end.
- `goodput`: requests a second within `--ttft` and `--tpot`.
- `late_ms`: from when a request was due to when it was sent, waits for `--concurrency` included.
- `busy`: the share of a core that this program took; a line warns where it is above 0.7. It was
  0.18 for 40,000 tokens a second in 256 streams, all that a server of plain writes could send.

Lengths (`--prompt`, `--new`) are a number, LEAST-MOST (uniform) or lognormal:MEAN:SIGMA:MOST.
lognormal:161:1:1024 and lognormal:338:0.9:1024 have the means of ShareGPT's prompts and replies.
Requests are greedy, as those of `mjax bench engine`: `--body '{"temperature": 1}'` draws.
`--file` holds ShareGPT's conversations, whose replies count a token for four letters, or lines of
JSON with `prompt` (text or ids) and maybe `max_tokens`. `--new` has precedence.

Several of `--rate` or `--concurrency` are a sweep, one JSON line a point. Each point has prompts of
its own, which no prefix cache knows. Arrivals, lengths and prompts depend on `--seed` alone.
"""

import argparse
import asyncio
import datetime
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mjax.bench.report import own_commit, rounded, show_table
from mjax.config.languages.paths import as_path
from mjax.errors import UNREADABLE, CommandParser, UserError, at_least, or_user_error, read_numbers

SHORT_WORDS = "the of and to in is you that it he was for on are as with his they at be".split()
APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FIGURES = ("first_ms", "between_ms", "tpot_ms", "e2e_ms", "late_ms")


def main(argv: list[str]) -> int:
    args = read_arguments(argv)
    with or_user_error("bench serve needs `pip install 'mjax[serve]'`", ImportError):
        import uvloop

        import mjax.bench.exchange  # noqa: F401
    if args.model is None:
        args.model = first_model(args)
    records = []
    for number, (rate, places) in enumerate(itertools.product(args.rate, args.concurrency)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            record, rows = runner.run(run_point(args, number, rate, places))
        records.append(record)
        print(json.dumps(record), flush=True)
        if args.out is not None:
            with or_user_error(f"--out {args.out}: {{reason}}"), args.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in (*rows, record))
        if record["busy"] > 0.7:
            print("mjax: the load generator was busy: times are too long", file=sys.stderr)
    show_table([table_row(record) for record in records])
    if args.plot is not None:
        with or_user_error(f"--plot {args.plot}: {{reason}}", (ImportError, OSError)):
            args.plot.write_text(page_of(records))
    return int(any(record["ok"] == 0 for record in records))


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Raises `UserError` for a number out of its range."""
    parser = CommandParser("bench serve", description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="of the server, with or without /v1")
    add("--model", help="default: the first that the server lists")
    add("--api", choices=tuple(APIS), default="completions", help="route that is asked")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    add("--requests", type=at_least(1), default=100, help="that count")
    add("--warmup", type=at_least(0), default=2, help="requests before them, which do not count")
    add("--rate", default="inf", help="requests a second, with commas; default: all at once")
    add("--burstiness", type=float, default=1, help="gamma's shape; 1 is Poisson, less is bursty")
    add("--concurrency", default="0", help="most requests at a time, with commas; 0: no limit")
    add("--prompt", default="1000", help="tokens of a prompt (1000)")
    add("--new", help="tokens of a reply (200)")
    add("--file", type=as_path, help="prompts: ShareGPT's JSON, or lines of JSON")
    add("--prefix", type=at_least(0), default=0, help="first tokens that a group shares")
    add("--groups", type=at_least(1), default=1, help="groups of prompts with one prefix")
    add("--text", action="store_true", help="prompts as text; default: ids where they are taken")
    add("--vocab", type=at_least(1), default=30000, help="ids are less")
    add("--stop-at-eos", action="store_true", help="replies may end early; default: ignore_eos")
    add("--body", type=json.loads, default={}, help="JSON of more fields of each request")
    add("--seed", type=at_least(0), default=0, help="of arrivals, lengths and prompts")
    add("--timeout", type=float, default=600, help="seconds of a request (600)")
    add("--ttft", type=float, default=math.inf, help="ms to the first token that are good")
    add("--tpot", type=float, default=math.inf, help="ms a further token that are good")
    add("--out", type=as_path, help="JSON lines of requests and points are added to this file")
    add("--plot", type=as_path, help="HTML page of times over tokens a second")
    args = parser.parse_args(argv)
    args.rate = read_numbers("--rate", args.rate, float)
    args.concurrency = read_numbers("--concurrency", args.concurrency)
    above_0 = *args.rate, args.burstiness, args.timeout, args.ttft, args.tpot
    if min(args.concurrency) < 0 or not min(above_0) > 0:
        raise UserError(
            "--concurrency is at least 0; --rate, --burstiness, --timeout, --ttft, --tpot above 0"
        )
    if not isinstance(args.body, dict):
        raise UserError(f"--body {args.body}: give a JSON object such as '{{\"temperature\": 0}}'")
    return args


def first_model(args: argparse.Namespace) -> str:
    """Return the name of the first model that the server lists."""
    import httpx

    url = f"{args.url.rstrip('/').removesuffix('/v1')}/v1/models"
    wrong = f"{url}: {{reason}}; is it a server of OpenAI's form? Else give --model"
    head = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with or_user_error(wrong, (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError)):
        reply = httpx.get(url, headers=head, timeout=min(args.timeout, 30)).raise_for_status()
        return reply.json()["data"][0]["id"]


# ---- what is asked -------------------------------------------------------------------------------


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds from the first arrival to each, fp64 [count], with gaps of a gamma distribution."""
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (burstiness * rate), count)
    return np.cumsum(gaps) - gaps[0]


def draw_lengths(spec: str, count: int, rng: np.random.Generator) -> list[int]:
    """Draw lengths as the module's docstring says. Raises `UserError` for another `spec`."""
    kind, *numbers = spec.split(":")
    wrong = f"length {spec!r}: give a number, LEAST-MOST or lognormal:MEAN:SIGMA:MOST"
    with or_user_error(wrong, ValueError):
        if kind == "lognormal":
            mean, sigma, most = map(float, numbers)
            drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
            return drawn.clip(1, most).astype(int).tolist()
        least, dash, most = spec.partition("-")
        if int(least) < 1:
            raise ValueError
        return rng.integers(int(least), int(most if dash else least) + 1, count).tolist()


def prompts_in(path: Path) -> list[tuple[list[int] | str, int | None]]:
    """Read prompts and the lengths of their replies, where known. Raises `UserError`."""
    wrong = f"--file {path}: {{reason}}; give ShareGPT's JSON, or lines of JSON with a prompt"
    with or_user_error(wrong, (*UNREADABLE, LookupError, TypeError)):
        text = path.read_text()
        if text.lstrip().startswith("["):
            pairs = [one["conversations"][:2] for one in json.loads(text)]
            pairs = [[turn["value"] for turn in pair] for pair in pairs if len(pair) == 2]
            found = [(asked, max(1, len(reply) // 4)) for asked, reply in pairs]
        else:
            lines = map(json.loads, filter(str.strip, text.splitlines()))
            found = [(line["prompt"], line.get("max_tokens")) for line in lines]
        if not found:
            raise ValueError("no prompts")
        return found


def words_of(prompt: Sequence[int] | str) -> str:
    """Return a text with a word for each id, the same for the same ids."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(SHORT_WORDS[number % len(SHORT_WORDS)] for number in prompt)


def requests_of(args: argparse.Namespace, count: int, number: int) -> list[tuple[list | str, int]]:
    """Prompts and the lengths of replies of point `number`."""
    rng = np.random.default_rng([args.seed, number])
    shared = rng.integers(args.vocab, size=(args.groups, args.prefix)).tolist()
    groups = rng.integers(args.groups, size=count)
    new = draw_lengths(args.new or "200", count, rng)
    if args.file is None:
        sizes = draw_lengths(args.prompt, count, rng)
        prompts = [rng.integers(args.vocab, size=size).tolist() for size in sizes]
    else:
        found = prompts_in(args.file)
        chosen = [found[i] for i in np.resize(rng.permutation(len(found)), count)]
        prompts = [prompt for prompt, _ in chosen]
        if args.new is None:
            new = [length or 200 for _, length in chosen]
    prompts = [prefixed(shared[i], prompt) for i, prompt in zip(groups, prompts, strict=True)]
    return list(zip(prompts, new, strict=True))


def prefixed(prefix: list[int], prompt: list[int] | str) -> list[int] | str:
    """Put a prefix before a prompt, as words where the prompt is a text."""
    if isinstance(prompt, list):
        return prefix + prompt
    return f"{words_of(prefix)} {prompt}" if prefix else prompt


def body_of(args: argparse.Namespace, prompt: list[int] | str, new: int) -> bytes:
    """Return the JSON of a request."""
    body = {
        "model": args.model,
        "max_tokens": new,
        "ignore_eos": not args.stop_at_eos,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.api == "chat":
        body["messages"] = [{"role": "user", "content": words_of(prompt)}]
    else:
        body["prompt"] = words_of(prompt) if args.text else prompt
    return json.dumps(body | args.body).encode()


# ---- what comes ----------------------------------------------------------------------------------


async def run_point(
    args: argparse.Namespace, number: int, rate: float, places: int
) -> tuple[dict, list[dict]]:
    """Run a point of the sweep; its record, and a record of each request."""
    from mjax.bench.exchange import Endpoint, read_reply

    endpoint = Endpoint(args.url, APIS[args.api], args.api_key, args.timeout)
    asked = requests_of(args, args.warmup + args.requests, number)
    for prompt, new in asked[: args.warmup]:
        reply = read_reply(await endpoint.post(body_of(args, prompt, new)))
        if reply.error and reply.error.startswith("HTTP 4") and not args.text:
            args.text = True
            reply = read_reply(await endpoint.post(body_of(args, prompt, new)))
        if reply.error:
            raise UserError(f"{args.url}: a request to warm up failed: {reply.error}")
    bodies = [body_of(args, *one) for one in asked[args.warmup :]]
    due = arrivals(args.requests, rate, args.burstiness, args.seed).tolist()
    gate, tasks = asyncio.Semaphore(places or len(bodies)), []

    async def ask(body: bytes):
        async with gate:
            return await endpoint.post(body)

    began, used = time.perf_counter(), time.process_time()
    for when, body in zip(due, bodies, strict=True):
        await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(body)))
    exchanges = await asyncio.gather(*tasks)
    busy = (time.process_time() - used) / (time.perf_counter() - began)
    rows = []
    for when, exchange in zip(due, exchanges, strict=True):
        rows.append(times_of(exchange, read_reply(exchange), began, when))
    seconds = max(exchange.ended for exchange in exchanges) - began
    case = {name: vars(args)[name] for name in CASE_KEYS} | {"file": args.file and str(args.file)}
    case |= {"rate": rate if rate < math.inf else None, "concurrency": places}
    record = {"bench": "serve", "case": case} | summarize(rows, seconds, args.ttft, args.tpot)
    stamp = {"device": args.url, "date": datetime.date.today().isoformat()}
    return record | {"busy": rounded(busy), **stamp, "commit": own_commit()}, rows


CASE_KEYS = "model api requests prompt new prefix groups burstiness body".split()


def times_of(exchange, reply, began: float, due: float) -> dict:
    """The record of a request; `sent_s` is from the first arrival, None what is not known."""
    times, count = reply.times, reply.tokens_out
    row = {"sent_s": exchange.sent - began, "late_ms": 1e3 * (exchange.sent - began - due)}
    row |= {"tokens_in": reply.tokens_in, "tokens_out": count, "error": reply.error}
    if reply.error is not None:
        return row
    row["first_ms"] = 1e3 * (times[0] - exchange.sent)
    row["e2e_ms"] = 1e3 * (times[-1] - exchange.sent)
    row["tpot_ms"] = 1e3 * (times[-1] - times[0]) / (count - 1) if count > 1 else None
    row["between_ms"] = (1e3 * np.diff(times)).round(3).tolist()
    return row


def summarize(rows: list[dict], seconds: float, ttft: float, tpot: float) -> dict:
    """The figures of a point from those of its requests."""
    ok = [row for row in rows if row["error"] is None]
    good = [row for row in ok if row["first_ms"] <= ttft and (row["tpot_ms"] or 0) <= tpot]
    known = {name: [row[name] for row in ok if row[name] is not None] for name in FIGURES}
    known["between_ms"] = list(itertools.chain.from_iterable(known["between_ms"]))
    spreads = {name: percentiles(values) for name, values in known.items()}
    errors = Counter(row["error"] for row in rows if row["error"] is not None)
    tokens = sum(row["tokens_out"] for row in ok)
    return {
        "ms": (spreads["between_ms"] or {}).get("p50"),
        "ok": len(ok),
        "errors": errors,
        "seconds": rounded(seconds),
        "tokens_per_second": rounded(tokens / seconds),
        "requests_per_second": rounded(len(ok) / seconds),
        "goodput": rounded(len(good) / seconds),
        "tokens_in": sum(row["tokens_in"] or 0 for row in ok),
        "tokens_out": tokens,
        **spreads,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": rounded(float(np.percentile(values, q))) for q in (50, 90, 99)}


# ---- how it looks --------------------------------------------------------------------------------


def table_row(record: dict) -> dict:
    """The row of a point in the table on standard error."""
    row = {name: record["case"][name] for name in ("rate", "concurrency")}
    row |= {"ok": record["ok"], "errors": sum(record["errors"].values())}
    row |= {name: record[name] for name in ("tokens_per_second", "requests_per_second", "goodput")}
    for name in FIGURES[:3]:
        spread = record[name] or {}
        row |= {f"{name.removesuffix('_ms')} {q}": spread.get(q, "") for q in ("p50", "p99")}
    return row


def page_of(records: list[dict]) -> str:
    """Draw times (p50, p90, p99) over tokens a second, a chart for each kind, as a page of HTML."""
    from bokeh.embed import file_html
    from bokeh.layouts import row
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    known = [one for one in records if one["ms"] is not None]
    known.sort(key=lambda one: one["tokens_per_second"])
    across, charts = [one["tokens_per_second"] for one in known], []
    for name in FIGURES[:2]:
        chart = figure(title=name, width=520, height=400, y_axis_type="log")
        chart.xaxis.axis_label, chart.yaxis.axis_label = "tokens a second", "ms"
        for q, color in (("p50", "#0072b2"), ("p90", "#e69f00"), ("p99", "#d55e00")):
            times = [one[name][q] for one in known]
            chart.line(across, times, color=color, legend_label=q)
            chart.scatter(across, times, color=color)
        charts.append(chart)
    return file_html(row(*charts), INLINE, "mjax bench serve")
