"""Chat templates: messages to text, by the jinja program that travels with a model.

Templates are other people's code, so they run in jinja's sandbox on plain data only. Invariant: the
text is that of `apply_chat_template` of `transformers`, whose places and rules are followed:
`chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `chat_template` in
tokenizer_config.json, a string or a list of named ones; special tokens are variables.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mjax.data.base.time_limit import time_limit
from mjax.data.base.tokenizer import token_text
from mjax.errors import UNREADABLE, UserError, or_user_error
from mjax.json_file import read_json

LONGEST_RENDERING = 5.0  # seconds; real templates take milliseconds
LONGEST_PRODUCT = 10_000_000  # characters or digits that a template may make of one operator
TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TimeoutError,
    TypeError,
    ValueError,
)
MARKS = "\ufdd0", "\ufdd1"  # of Unicode's codes that no text has
TOKENS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class ChatTemplate:
    """One template: its source, where it came from, and the special tokens it may name."""

    source: str
    origin: str
    tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        marked: bool = False,
        **variables: Any,
    ) -> str:
        """Text of `messages` ({"role": ..., "content": ...}, JSON values), which holds its special
        tokens: encode it without adding any. `add_generation_prompt`: open the reply. `tools` are
        JSON schemas; `variables` are further ones that the template reads. `marked`: put `MARKS`
        around the text of `{% generation %}` blocks. Raises `UserError` for messages that it
        refuses."""
        with or_user_error("chat templates need jinja2: `pip install 'mjax[chat]'`", ImportError):
            import jinja2
        wrong = (
            f"{self.origin}: the chat template cannot render these messages: {{reason}}; mend the "
            "messages (roles, their order, content) or the template"
        )
        with or_user_error(wrong, (jinja2.TemplateError, *TEMPLATE_ERRORS)):
            given = json.loads(json.dumps([list(messages), tools, variables]))
            chat = [{k: v for k, v in message.items() if v is not None} for message in given[0]]
            with time_limit(LONGEST_RENDERING):
                return _compiled(self.source, marked).render(
                    **{**self.tokens, **given[2]},
                    messages=chat,
                    tools=given[1],
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )

    @property
    def marks_answers(self) -> bool:
        """Whether the template says which text is an answer's, by `{% generation %}`."""
        return re.search(r"{%[-+]?\s*generation\b", self.source) is not None

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """(the text of `messages`, [begin, end) of its characters in `{% generation %}` blocks).

        Raises `UserError` for messages that the template refuses, or if the blocks cannot be found.
        """
        begin, end = MARKS
        text = self.render(messages, False, tools, **variables)
        marked = self.render(messages, False, tools, marked=True, **variables)
        parts = re.split(f"([{begin}{end}])", marked)
        if "".join(parts[::2]) != text or parts[1::2] != [begin, end] * (len(parts) // 4):
            raise UserError(
                f"{self.origin}: the {{% generation %}} blocks of the chat template cannot be "
                "found in its text; take filters and `continue` out of them"
            )
        bounds = [*itertools.accumulate(map(len, parts[:-1:2]))]
        return text, list(zip(bounds[::2], bounds[1::2], strict=True))


def load_chat_template(place: str | os.PathLike, name: str | None = None) -> ChatTemplate:
    """The template in a model folder or beside a tokenizer's file: `name`, or the default one.

    Raises `UserError` for none.
    """
    folder = Path(place).parent if Path(place).is_file() else Path(place)
    path = folder / "tokenizer_config.json"
    config = read_json(path, missing={})
    named = config.get("chat_template") or {}
    if isinstance(named, str):
        named = {"default": named}
    if isinstance(named, list) and all(isinstance(t, dict) for t in named):
        named = {t.get("name"): t.get("template") for t in named}
    is_named = isinstance(named, dict)
    if not is_named or not all(isinstance(t, str) for pair in named.items() for t in pair):
        raise UserError(f"{path}: chat_template is neither a text nor named ones; mend it")
    files = {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        files["default"] = single
    if files:  # they replace what the configuration says
        with or_user_error(f"{folder}: a chat template cannot be read: {{reason}}", UNREADABLE):
            named = {key: p.read_text(encoding="utf-8") for key, p in files.items()}
    source = named.get(name or "default")
    if source is None:
        have = f"only {', '.join(sorted(named))}" if named else "none"
        raise UserError(
            f"{folder}: no chat template {name or 'default'!r} ({have}); put chat_template.jinja "
            "there, or give plain text"
        )
    tokens = read_json(folder / "special_tokens_map.json", missing={}) | config
    tokens = {key: token_text(tokens[key]) for key in TOKENS if tokens.get(key) is not None}
    return ChatTemplate(source, str(files.get(name or "default", path)), tokens)


def _repeated(what: object, count: object) -> int:
    """The length of `what` repeated `count` times; 0 if it is no sequence."""
    is_repeat = isinstance(what, (str, list, tuple)) and isinstance(count, int)
    return len(what) * count if is_repeat else 0


def _to_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of transformers, whose arguments templates also give by position."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(x, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=16)
def _compiled(source: str, marked: bool):
    """The template in the environment that Hugging Face gives its templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; the text is its body."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marked:
                begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in MARKS)
                body = [begin, *body, end]
            return nodes.Scope(body, lineno=line)

    def refuse(message: str):
        raise TemplateError(message)

    class Sandbox(ImmutableSandboxedEnvironment):
        """The sandbox, which also refuses operators whose result fills the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context, operator, left, right):
            if operator == "**":
                size = abs(right) * 16
            else:
                size = max(_repeated(left, right), _repeated(right, left))
            if size > LONGEST_PRODUCT:
                raise TemplateError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
