"""`python -m mjax.bench engine --config X [a.b=c ...]`: the engine under load.

A model of random weights continues random prompts to a fixed length. Without `--rate` all requests
come at once: `tokens_per_second` counts new tokens until the last one. With it they come at random
times, so many a second on average. `first_ms` is the time from a request's arrival to its first
token, `between_ms` from one token to the next of the same request; both as median and 99th
percentile. `ms` is the median time of a step in which nothing else than decoding ran. Compiling and
one short request come before all clocks.

With `--drafts k` the engine guesses up to k tokens of each row and verifies them in one step;
`accepted` is the mean number of right ones in a row with guesses, and `acceptance_rate` the part
of guesses that were right. `--drafter ngram` guesses as the text repeats itself: with `--repeat p`
each prompt repeats p random tokens, and a random model soon repeats itself after it. `--drafter
mtp` takes the model's layers of multi-token prediction. With random weights they are right by
chance alone. So such a record times guesses, and its `acceptance_rate` says nothing.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from mjax.bench.report import model_to_measure, parse_with_config, report, rounded
from mjax.config.schema.model import ModelConfig
from mjax.errors import CommandParser, UserError, at_least
from mjax.infer.checks import DRAFTERS
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import draws_of
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.random_weights import random_params
from mjax.models import definition_of
from mjax.run.monitor.metrics import peak_memory_gb
from mjax.sharding.mesh import tensor_parallel_mesh


def main(argv: list[str]) -> int:
    parser = CommandParser("bench engine", description=__doc__)
    add = parser.add_argument
    add("--requests", type=at_least(1), default=64, help="requests")
    add("--prompt", type=at_least(1), default=1000, help="tokens of a prompt")
    add("--new", type=at_least(2), default=200, help="new tokens of each")
    add("--rows", type=at_least(1), default=256, help="requests that run at a time")
    add("--chunk", type=at_least(1), default=2048, help="prompt tokens in a step")
    add("--tp", type=at_least(1), default=1, help="GPUs that share each layer")
    add("--rate", type=float, help="requests a second; default: all at once")
    add("--temperature", type=float, default=0.0, help="default 0: greedy")
    add("--shared", type=at_least(0), default=0, help="first tokens that all prompts share")
    add("--drafts", type=at_least(0), default=0, help="tokens guessed a row and step")
    add("--drafter", choices=[*DRAFTERS], default="ngram", help="guesses (ngram)")
    add("--repeat", type=at_least(1), help="tokens that each prompt repeats; default: none")
    add("--cache-dtype", choices=("fp8",), help="default: the model's dtype")
    add("--weight-dtype", choices=("fp8",), help="default: the model's dtype")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights")
    args = parse_with_config(parser, argv)
    if (args.rate is not None and args.rate <= 0) or args.shared > args.prompt:
        raise UserError("bench engine: --rate is above 0, --shared at most --prompt")
    return report(args, measure_engine(model_to_measure(args, "bench engine"), args))


def measure_engine(cfg: ModelConfig, args: argparse.Namespace) -> Iterator[dict]:
    """One record of the load that the arguments describe."""
    began = time.perf_counter()
    mesh = tensor_parallel_mesh(args.tp, f"--tp {args.tp}")
    engine = Engine(
        definition_of(cfg),
        random_params(cfg, args.dtype, mesh, apart=True),
        cfg,
        dtype=args.dtype,
        limits=Limits(rows=args.rows, chunk=args.chunk, length=args.prompt + args.new),
        cache_dtype=args.cache_dtype,
        weight_dtype=args.weight_dtype,
        donate=True,
        drafts=args.drafts,
        drafter=args.drafter,
    )
    made = time.perf_counter()
    wanted = SamplingParams(max_tokens=args.new, ignore_eos=True, temperature=args.temperature)
    programs = engine.warm_up([draws_of([wanted.sampling])])
    ready = time.perf_counter()
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, cfg.vocab_size, (args.requests + 1, args.prompt))
    if args.repeat is not None:
        prompts = prompts[:, np.arange(args.prompt) % args.repeat]
    prompts[:, : args.shared] = prompts[0, : args.shared]
    run_load(engine, prompts[-1:], wanted, None)
    times = run_load(engine, prompts[:-1], wanted, args.rate)
    yield {
        "bench": "engine",
        "case": {
            "layers": cfg.num_hidden_layers,
            "hidden": cfg.hidden_size,
            "dtype": args.dtype,
            **{name: getattr(args, name) for name in _CASE},
        },
        **times,
        "pages": engine.programs.sizes.pages,
        "programs": programs,
        "compiled_later": len(engine.runner.compiled) - programs,
        "start_s": rounded(made - began),
        "compile_s": rounded(ready - made),
        "memory_gb": peak_memory_gb(),
    }


_CASE = "requests prompt new rows chunk tp rate temperature shared drafts drafter repeat".split()
_CASE += ["cache_dtype", "weight_dtype"]


def run_load(
    engine: Engine, prompts: np.ndarray, wanted: SamplingParams, rate: float | None
) -> dict:
    """Serve all prompts; the figures of the module's docstring."""
    rng = np.random.default_rng(1)
    gaps = np.zeros(len(prompts)) if rate is None else rng.exponential(1 / rate, len(prompts))
    arrivals = np.cumsum(gaps) - gaps[0]
    waiting = list(zip(arrivals, prompts.tolist(), strict=True))[::-1]
    came: dict[str, float] = {}
    ends: dict[str, list[float]] = {}
    verified, guessed, accepted = engine.verified, engine.guessed, engine.accepted
    steps, began = [], time.perf_counter()
    while waiting or engine.has_work:
        while waiting and waiting[-1][0] <= time.perf_counter() - began:
            arrival, prompt = waiting.pop()
            name = engine.add(prompt, wanted).output.request_id
            came[name], ends[name] = arrival, []
        prefills = engine.runner.prefills
        start = time.perf_counter()
        updates = engine.step()
        now = time.perf_counter() - began
        if prefills == engine.runner.prefills and updates:
            steps.append(time.perf_counter() - start)
        for update in updates:
            ends[update.request.output.request_id].append(now)
    total = time.perf_counter() - began
    first = [1e3 * (times[0] - came[name]) for name, times in ends.items()]
    between = np.concatenate([1e3 * np.diff(times) for times in ends.values()])
    return {
        "ms": rounded(1e3 * float(np.median(steps))),
        "tokens_per_second": rounded(sum(map(len, ends.values())) / total),
        "seconds": rounded(total),
        "first_ms": _spread(first),
        "between_ms": _spread(between),
        "accepted": rounded(
            (engine.accepted - accepted) / max(engine.verified - verified, 1),
        ),
        "acceptance_rate": rounded(
            (engine.accepted - accepted) / max(engine.guessed - guessed, 1),
        ),
    }


def _spread(values) -> dict[str, float]:
    return {f"p{q}": rounded(float(np.percentile(values, q))) for q in (50, 99)}
