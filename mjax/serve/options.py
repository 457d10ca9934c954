"""Options of `mjax serve`, which all of its processes know; names are vLLM's where it has one."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mjax.checkpoint.base.hub import hub_name, pinned
from mjax.config.languages.paths import path_text
from mjax.errors import CommandParser, UserError
from mjax.files import CONFIG_FILES
from mjax.serve.parsers.reply import REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True)
class ServeOptions:
    """Facts that all processes of a server know.

    - engine: arguments of `LLM` for each replica. name: of the model. chat_template: a file.
    - api: fields of `ApiOptions`. replicas, workers: engines, and processes that speak HTTP.
    - warm_up: whether programs are compiled before requests come.
    - shutdown_seconds: that running requests have to end in. stuck_seconds: after which an engine
      without a step is ended; 0: never.
    """

    model: str
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    engine: dict[str, Any] = field(default_factory=dict)
    api: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    replicas: int = 1
    workers: int = 1
    warm_up: bool = True
    shutdown_seconds: float = 30.0
    stuck_seconds: float = 300.0


# Arguments of `LLM` that an option gives as it is.
_LLM_ARGUMENTS = tuple(
    """tokenizer tensor_parallel_size pipeline_parallel_size dtype max_model_len max_num_seqs
    max_num_prefill_tokens kv_cache_dtype quantization enable_prefix_caching num_speculative_tokens
    speculative_method max_lora_rank max_queued load_format""".split()
)


def tell(line: str) -> None:
    """Print a line on standard error."""
    print(f"mjax: {line}", file=sys.stderr, flush=True)


def read_options(argv: list[str] | None) -> ServeOptions:
    """The options of a command line. Raises `UserError` for values that cannot be."""
    args = _serve_parser().parse_args(argv)
    adapters = dict(map(_adapter, args.lora_modules))
    if len(adapters) < len(args.lora_modules):
        raise UserError("--lora-modules: two adapters have one name; give each its own")
    loras = args.max_loras
    if loras is None and (adapters or args.enable_lora):
        loras = max(len(adapters), 1)
    sizes = "data_parallel_size", "api_server_count"
    for name in (*sizes, "tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {getattr(args, name)}: give 1 or more")
    engine = {name: getattr(args, name) for name in _LLM_ARGUMENTS}
    engine |= {"adapters": adapters, "max_loras": loras}
    api = {
        "api_keys": _keys(args.api_key, "MJAX_API_KEY"),
        "admin_keys": _keys(args.admin_key, "MJAX_ADMIN_KEY"),
        "deadline": args.request_timeout,
        "tool_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "origins": tuple(args.allowed_origins),
    }
    of_hub = hub_name(args.model)
    usual = of_hub.repo if of_hub else _name_of(args.model)
    return ServeOptions(
        model=pinned(args.model),  # all processes read one commit
        name=args.served_model_name or usual,
        host=args.host,
        port=args.port,
        engine=engine,
        api=api,
        chat_template=args.chat_template,
        replicas=args.data_parallel_size,
        workers=args.api_server_count,
        warm_up=args.warm_up,
        shutdown_seconds=args.shutdown_timeout,
        stuck_seconds=args.watchdog_timeout,
    )


def _name_of(path: str) -> str:
    """The name of a folder, or of a config file without its ending."""
    found = Path(path).absolute()
    return found.stem if found.suffix in CONFIG_FILES else found.name


def _keys(given: list[str], variable: str) -> tuple[str, ...]:
    """Keys of options, or of a variable of the environment, with commas."""
    return tuple(given or filter(None, os.environ.get(variable, "").split(",")))


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(f"--lora-modules {text}: give NAME=PATH")
    return name, path_text(path)


def _serve_parser() -> argparse.ArgumentParser:
    about = "Serve a model through an API of OpenAI's form."
    parser = CommandParser("serve", description=about)
    what = "a run, a checkpoint, RUN@best, org/name on the hub, a Hugging Face or Megatron folder"
    parser.add_argument("model", type=path_text, metavar="RUN_OR_FOLDER", help=what)
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the folder's")
    parser.add_argument("--tokenizer", type=path_text, help="default: the model's own")
    parser.add_argument("--chat-template", type=path_text, metavar="F", help="a file of Jinja")
    _add_http(parser.add_argument_group("HTTP"))
    _add_engine(parser.add_argument_group("engine"))
    _add_life(parser.add_argument_group("processes"))
    return parser


def _add_http(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all of this machine's")
    group.add_argument("--port", type=int, default=8000, help="0: a free one")
    many = {"action": "append", "default": [], "metavar": "KEY"}
    about = "repeat for several; or MJAX_API_KEY with commas; none: all may ask"
    group.add_argument("--api-key", **many, help=about)
    about = "for routes that change the server; or MJAX_ADMIN_KEY; none: these are closed"
    group.add_argument("--admin-key", **many, help=about)
    about = "web pages of others that may ask"
    group.add_argument("--allowed-origins", nargs="+", default=[], metavar="URL", help=about)
    about = "seconds until a request is answered; default: any number"
    group.add_argument("--request-timeout", type=float, metavar="S", help=about)
    about = "default: as the template suggests"
    group.add_argument("--tool-call-parser", choices=TOOL_PARSERS, help=about)
    group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help="likewise")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    kinds = ("float32", "bfloat16", "float16")
    group.add_argument("--dtype", choices=kinds, help="default: bfloat16, on a CPU float32")
    about = "dummy: random weights, for benchmarks; only a config is read, a YAML file too"
    group.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help=about)
    number = {"type": int, "metavar": "N"}
    group.add_argument("--max-model-len", **number, help="tokens of the longest text")

    def to(name: str) -> dict[str, Any]:
        """Arguments of an option that `LLM` calls otherwise."""
        return {**number, "dest": name, "help": about}

    about = "texts at a time; default: 256, on a CPU 16"
    group.add_argument("--max-num-seqs", **number, help=about)
    about = "tokens of prompts in a step; default: 2048, on a CPU 512"
    group.add_argument("--max-num-batched-tokens", **to("max_num_prefill_tokens"))
    about = "requests that may wait in an engine"
    group.add_argument("--max-queued-requests", **to("max_queued"), default=1024)
    group.add_argument("--kv-cache-dtype", choices=["fp8"], help="default: the model's")
    group.add_argument("--quantization", choices=["fp8"], help="of weights, as they are loaded")
    about = "tokens of a text that a step guesses and verifies"
    group.add_argument("--num-speculative-tokens", **number, default=0, help=about)
    about = "ngram: as texts repeat themselves; mtp: by layers of multi-token prediction"
    methods = {"choices": ["ngram", "mtp"], "default": "ngram"}
    group.add_argument("--speculative-method", **methods, help=about)
    about = "share the caches of equal beginnings"
    flag = argparse.BooleanOptionalAction
    group.add_argument("--enable-prefix-caching", action=flag, default=True, help=about)
    about = "adapters that requests may give as their model"
    more = {"nargs": "+", "default": [], "metavar": "NAME=PATH"}
    group.add_argument("--lora-modules", **more, help=about)
    group.add_argument("--enable-lora", action="store_true", help="keep a slot for an adapter")
    about = "adapters that may be there at a time; default: those of --lora-modules"
    group.add_argument("--max-loras", **number, help=about)
    group.add_argument("--max-lora-rank", **number, default=16, help="of the largest adapter")


def _add_life(group: argparse._ArgumentGroup) -> None:
    number = {"type": int, "default": 1, "metavar": "N"}
    group.add_argument("--tensor-parallel-size", "-tp", **number, help="devices of an engine")
    about = "stages of layers, of so many devices each"
    group.add_argument("--pipeline-parallel-size", "-pp", **number, help=about)
    group.add_argument("--data-parallel-size", "-dp", **number, help="engines")
    group.add_argument("--api-server-count", **number, help="processes that speak HTTP")
    about = "compile programs before requests come"
    flag = argparse.BooleanOptionalAction
    group.add_argument("--warm-up", action=flag, default=True, help=about)
    seconds = {"type": float, "metavar": "S"}
    about = "seconds that running requests have after SIGTERM"
    group.add_argument("--shutdown-timeout", **seconds, default=30.0, help=about)
    about = "seconds without a step after which an engine is ended; 0: never"
    group.add_argument("--watchdog-timeout", **seconds, default=300.0, help=about)
