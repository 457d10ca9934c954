"""`mjax chat RUN_OR_FOLDER` or `mjax chat http://HOST:PORT`: talk to a model in the terminal.

A question on standard input, as from a pipe, is answered once.
"""

import argparse
import asyncio
import os
import sys
from typing import Any

from rich.console import Console

from mjax.chat.models import CHAT_SETTINGS
from mjax.chat.session import Session, Talk, setting_of
from mjax.config.languages.paths import path_text
from mjax.errors import INTERRUPTED, CommandParser, UserError, at_least, or_user_error, run_cli


def main(argv: list[str] | None = None) -> int:
    args = _read_arguments(argv)
    given = {name: getattr(args, name) for name in CHAT_SETTINGS}
    settings = {name: setting_of(name, text) for name, text in given.items() if text is not None}
    is_asked_once = not sys.stdin.isatty()
    question = sys.stdin.read().strip() if is_asked_once else ""
    if is_asked_once and not question:
        raise UserError("standard input is empty; pipe a question into it, or use a terminal")
    with Console(stderr=True).status(f"loading {args.model}"):
        model = _model(args)
    model.check(settings)
    with asyncio.Runner() as runner:
        runner.run(model.open())
        talk = Talk(args.system or "", settings)
        session = Session(model, talk, Console(), runner.run, is_markdown=not args.raw)
        try:
            if is_asked_once:
                return 0 if session.ask(question) else INTERRUPTED
            session.loop()
        finally:
            runner.run(model.close())
    return 0


def _model(args: argparse.Namespace) -> Any:
    if not args.model.startswith(("http://", "https://")):
        from mjax.chat.local import LocalTalker

        return LocalTalker(args)
    with or_user_error("a URL needs httpx; pip install 'mjax[serve]'", ImportError):
        from mjax.chat.remote import RemoteTalker
    return RemoteTalker(args.model, args.api_key, args.model_name, args.raw)


def _read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("chat", description="Talk to a model.")
    about = "a run, a checkpoint, org/name on the hub, a Hugging Face folder, or a server's URL"
    parser.add_argument("model", metavar="MODEL", type=path_text, help=about)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    about = "continue plain text, without a chat template: for models that were not taught to chat"
    parser.add_argument("--raw", action="store_true", help=about)
    server = parser.add_argument_group("of a server")
    about = "default: MJAX_API_KEY of the environment"
    server.add_argument("--api-key", default=os.environ.get("MJAX_API_KEY"), help=about)
    about = "one of its models; default: the first"
    server.add_argument("--model", dest="model_name", metavar="NAME", help=about)
    local = parser.add_argument_group("of a model in this process")
    local.add_argument("--tp", type=int, default=1, metavar="N", help="devices to split it over")
    kinds = ("float32", "bfloat16", "float16")
    local.add_argument("--dtype", choices=kinds, help="default: bfloat16, on a CPU float32")
    about = "default: the model's own; see data.tokenizer"
    local.add_argument("--tokenizer", type=path_text, help=about)
    about = "tokens of the longest conversation; default: the model's"
    local.add_argument("--max-model-len", type=at_least(1), metavar="N", help=about)
    sampling = parser.add_argument_group("how answers are drawn; default: as the model says")
    for name, about in CHAT_SETTINGS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=about)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(main)
