"""`python -m mjax.bench decode --config X [a.b=c ...]`: milliseconds a token of generation.

A model of random weights continues random prompts greedily, on the engine of `infer/engine.py`.
`prefill_ms` is the median time until all rows have a token, `ms` that from one token to the next,
of all rows at once. Every token must read all weights and the filled part of the cache once:
`gb_read` is how much that is at the middle of the new tokens, and `bound_ms` how long it takes at
`--bandwidth`. Embeddings count if the head reads them too. `--transformers` runs the same shapes by
transformers first, with its static cache, which it compiles on GPUs. It runs in a process of its
own, which has ended, with the memory of the GPU, before JAX takes the GPU here.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from mjax.bench.report import model_to_measure, parse_with_config, report, rounded
from mjax.config.schema.model import ModelConfig
from mjax.errors import CommandParser, UserError, at_least, read_numbers
from mjax.infer.engine import Engine
from mjax.infer.records import bucket
from mjax.infer.requests import SamplingParams
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.huggingface.families.engine import config_to_hf
from mjax.interop.random_weights import random_params
from mjax.models import definition_of
from mjax.models.base.branch import cache_specs
from mjax.sharding.spec import is_spec

# prompts [B, S] -> seconds from the start to each of the new tokens
DecodeRun = Callable[[np.ndarray], list[float]]
_CHUNK = 8192  # tokens of prompts in a step


def main(argv: list[str]) -> int:
    parser = CommandParser("bench decode", description=__doc__)
    parser.add_argument("--batch", default="1,64", help="rows, with commas (default 1,64)")
    parser.add_argument("--prompt", type=at_least(1), default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=at_least(3), default=128, help="new tokens")
    parser.add_argument("--samples", type=at_least(1), default=3, help="runs after one to warm up")
    kinds = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=kinds, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--bandwidth", type=float, default=4800, help="GB/s of the device (default: an H200's)"
    )
    parser.add_argument("--transformers", action="store_true", help="run transformers first")
    parser.add_argument("--engine", choices=[*ENGINES], default="mjax", help="what to run alone")
    args = parse_with_config(parser, argv)
    batches = read_numbers("--batch", args.batch)
    check_sizes(batches, args)
    cfg = model_to_measure(args, "bench decode")
    if args.prompt + args.new > cfg.max_position_embeddings:
        raise UserError(
            f"--prompt {args.prompt} --new {args.new}: more than model.max_position_embeddings="
            f"{cfg.max_position_embeddings}; give fewer"
        )
    if args.transformers or args.engine == "transformers":
        require_transformers("--transformers", ", or leave the option out")
    first = in_own_process(args) if args.transformers else []
    return report(args, itertools.chain(first, measure_decode(cfg, batches, args)))


def in_own_process(args: argparse.Namespace) -> list[dict]:
    """The records of these arguments by transformers alone. Raises `UserError` where it fails."""
    command = [sys.executable, "-m", "mjax.bench", "decode", "--engine=transformers"]
    for name in ("batch", "prompt", "new", "samples", "dtype", "bandwidth", "config"):
        if (value := getattr(args, name)) is not None:
            command.append(f"--{name}={value}")
    command += args.overrides
    done = subprocess.run(  # where JAX is on the CPU, so that the GPU is left to torch
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise UserError(
            f"--transformers: its process ended with exit code {done.returncode}; it says why above"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_sizes(batches: list[int], args: argparse.Namespace) -> None:
    """Raise `UserError` for a number that is too small."""
    if min(batches) < 1:
        raise UserError(f"--batch {min(batches)}: give 1 or more")
    if not args.bandwidth > 0:
        raise UserError(f"--bandwidth {args.bandwidth}: give GB/s above 0")


def require_transformers(asked: str, otherwise: str = "") -> None:
    """Raise `UserError` where torch or transformers are not installed, which `asked` wants."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{asked}: {' and '.join(missing)} cannot be imported; pip install torch "
            f"transformers{otherwise}"
        )


def measure_decode(
    cfg: ModelConfig, batches: list[int], args: argparse.Namespace
) -> Iterator[dict]:
    """A record for each batch."""
    run = ENGINES[args.engine](cfg, max(batches), args)
    for batch in batches:
        yield {"bench": "decode"} | record(cfg, args.engine, run, batch, args)


def record(
    cfg: ModelConfig, engine: str, run: DecodeRun, batch: int, args: argparse.Namespace
) -> dict:
    """The times of one engine and batch, and what memory allows."""
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, args.prompt), np.int32)
    run(ids)
    runs = [run(ids) for _ in range(args.samples)]
    ms = 1e3 * statistics.median(s for times in runs for s in np.diff(times).tolist())
    read = bytes_read(cfg, batch, args.prompt + args.new // 2, args.dtype)
    bound = read / args.bandwidth / 1e6
    return {
        "case": {
            "engine": engine,
            "layers": cfg.num_hidden_layers,
            "hidden": cfg.hidden_size,
            "vocab": cfg.vocab_size,
            "batch": batch,
            "prompt": args.prompt,
            "new": args.new,
            "dtype": args.dtype,
        },
        "ms": rounded(ms),
        "prefill_ms": rounded(1e3 * statistics.median(times[0] for times in runs)),
        "tokens_per_second": rounded(1e3 * batch / ms),
        "gb_read": rounded(read / 1e9),
        "bandwidth_gb_per_s": args.bandwidth,
        "bound_ms": rounded(bound),
        "of_bound": rounded(bound / ms),
    }


def bytes_read(cfg: ModelConfig, batch: int, tokens: int, dtype: str) -> int:
    """Bytes that a token must read: the weights, and the cache of `tokens` in each row.

    A table of embeddings that is no head does not count: a token reads its own row only. All
    experts count.
    """
    specs = jax.tree.leaves(definition_of(cfg).specs, is_leaf=is_spec)
    lookups = () if cfg.tie_word_embeddings else ("embedding",)
    width = jnp.dtype(dtype).itemsize
    total = 0
    for spec in specs:
        if spec.role not in lookups:
            total += spec.size * width
    for spec in jax.tree.leaves(cache_specs(cfg, batch, tokens)):
        total += math.prod(spec.shape) * (4 if spec.dtype else width)
    return total


def ours(cfg: ModelConfig, rows: int, args: argparse.Namespace) -> DecodeRun:
    """Generation by mjax, on one device, of up to `rows` rows."""
    definition = definition_of(cfg)
    params = random_params(cfg, args.dtype, apart=True)
    chunk = min(bucket(rows * args.prompt), _CHUNK)
    limits = Limits(rows, rows + chunk, chunk, args.prompt + args.new)
    engine = Engine(
        definition,
        params,
        cfg,
        dtype=args.dtype,
        limits=limits,
        cache_prefixes=False,  # runs have the same prompts
        donate=True,
    )

    def run(ids: np.ndarray) -> list[float]:
        began, ends = time.perf_counter(), []
        for prompt in ids.tolist():
            last = engine.add(prompt, SamplingParams(max_tokens=args.new))
        while engine.has_work:
            for update in engine.step():
                if update.request is last:
                    ends.append(time.perf_counter() - began)
        return ends

    return run


def config_of_transformers(cfg: ModelConfig):
    """The config of transformers for the model that our weights export to."""
    import transformers

    found = config_to_hf(cfg)
    return transformers.AutoConfig.for_model(found.pop("model_type"), **found)


def theirs(cfg: ModelConfig, rows: int, args: argparse.Namespace) -> DecodeRun:
    """Generation by transformers with a static cache, on the first GPU where there is one."""
    import torch
    import transformers

    config, new = config_of_transformers(cfg), args.new
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, args.dtype)
        )
    model.eval()

    def run(ids: np.ndarray) -> list[float]:
        ends: list[float] = []

        def clock(rows, scores, **_):
            if device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter() - began)
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

        prompts = torch.tensor(ids.astype(np.int64), device=device)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        return ends

    return run


ENGINES = {"mjax": ours, "transformers": theirs}
