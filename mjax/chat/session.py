"""A conversation in the terminal: questions, answers and commands."""

import asyncio
import json
import readline  # noqa: F401 - gives `input` its history and editing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mjax.chat.models import CHAT_SETTINGS
from mjax.chat.screen import AnswerView
from mjax.errors import UserError, or_user_error
from mjax.files import replace_text
from mjax.json_file import read_json

HELP = """\
/set NAME VALUE   a setting; without VALUE the model's own; without NAME all that are set
/system TEXT      the system prompt; without TEXT none
/retry            answer the last question again
/undo             forget the last question and its answer
/save FILE        write the conversation as JSON
/load FILE        go on with one
/help             these lines
/quit             end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


@dataclass
class Talk:
    """The messages so far but for the system prompt, and how answers are drawn."""

    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def last_question(self) -> int:
        """The place of the last question among the turns. Raises `UserError` for none."""
        places = [place for place, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not places:
            raise UserError("there is no question yet")
        return places[-1]

    @classmethod
    def load(cls, path: Path) -> "Talk":
        """Read what /save wrote. Raises `UserError`."""
        said = read_json(path)
        try:
            turns = [{"role": m["role"], "content": str(m["content"])} for m in said["messages"]]
            system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
            return cls(system, dict(said.get("settings", {})), turns)
        except (LookupError, TypeError, ValueError):
            form = '{"messages": [{"role": .., "content": ..}, ..]}'
            raise UserError(f"{path}: is no conversation, {form}") from None


def setting_of(name: str, text: str) -> Any:
    """The value of a setting that a user gives as text. Raises `UserError` for another name."""
    if name not in CHAT_SETTINGS:
        raise UserError(f"no setting {name!r}; one of {', '.join(CHAT_SETTINGS)}")
    try:
        return json.loads(text)
    except ValueError:
        if name == "stop":
            return text
        raise UserError(f"{name} {text!r}: give a number") from None


@dataclass
class Session:
    """Questions and commands of one conversation. `model`: see `models.py`. `run`: of a loop."""

    model: Any
    talk: Talk
    console: Console
    run: Callable[[Coroutine], Any]
    is_markdown: bool = True

    def loop(self, read: Callable[[str], str] = input) -> None:
        """Answer what `read` gives until it ends."""
        self._say("/help lists commands, Ctrl-D ends")
        while True:
            try:
                text = read("> ")
                while text.endswith("\\"):
                    text = f"{text[:-1]}\n{read('. ')}"
                if text.strip() == "/quit":
                    return
                if text.startswith("/"):
                    self._say(self.command(text))
                elif text.strip():
                    self.ask(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\nCtrl-D or /quit ends")
            except UserError as e:
                self._say(str(e), "red")

    def _say(self, text: str, style: str = "dim") -> None:
        if text:
            self.console.print(Text(text, style))

    def ask(self, question: str) -> bool:
        """Answer a question; False: it was stopped. Raises `UserError`."""
        turns = self.talk.turns
        if turns and turns[-1]["role"] == "user":
            turns.pop()  # its answer failed
        turns.append({"role": "user", "content": question})
        return self._answer()

    def command(self, line: str) -> str:
        """Obey a command; returns what to say. Raises `UserError`."""
        name, _, rest = line[1:].strip().partition(" ")
        rest, turns = rest.strip(), self.talk.turns
        if name in ("save", "load") and not rest:
            raise UserError(f"/{name} FILE: name a file")
        match name:
            case "help":
                return HELP
            case "set":
                return self._set(*rest.split(maxsplit=1))
            case "system":
                self.talk.system = rest
            case "retry":
                del turns[self.talk.last_question() + 1 :]
                self._answer()
            case "undo":
                del turns[self.talk.last_question() :]
            case "save":
                said = {"messages": self.talk.messages, "settings": self.talk.settings}
                with or_user_error(f"{rest}: cannot be written ({{reason}})"):
                    text = json.dumps(said, ensure_ascii=False, indent=1)
                    replace_text(Path(rest).expanduser(), text + "\n")
            case "load":
                talk = Talk.load(Path(rest).expanduser())
                self.model.check(talk.settings)
                self.talk = talk
            case _:
                raise UserError(f"no command /{name}; /help lists them")
        return "" if name == "retry" else f"done; {len(self.talk.messages)} messages"

    def _set(self, name: str = "", text: str = "null") -> str:
        settings = dict(self.talk.settings)
        if name:
            settings[name] = setting_of(name, text)
            settings = {key: value for key, value in settings.items() if value is not None}
            self.model.check(settings)
            self.talk.settings = settings
        return "\n".join(f"{key} {value!r}" for key, value in settings.items()) or "nothing is set"

    def _answer(self) -> bool:
        text, has_ended = self.run(self._streamed())
        if text:
            self.talk.turns.append({"role": "assistant", "content": text})
        return has_ended

    async def _streamed(self) -> tuple[str, bool]:
        """The answer, as far as it came, and whether it ended by itself."""
        text = ""
        with AnswerView(self.console, self.is_markdown) as view:
            try:
                async for piece in self.model.stream(self.talk.messages, self.talk.settings):
                    text += piece.text
                    view.add(piece)
            except asyncio.CancelledError:  # by Ctrl-C
                return text, False
        return text, True
