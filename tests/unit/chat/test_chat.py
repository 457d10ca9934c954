"""`mjax chat`: one question through a pipe, many in a terminal, on a server and in the process."""

import asyncio
import io
import json
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from rich.console import Console

import mjax.interop.random_weights
from mjax.chat import __main__ as command
from mjax.chat.models import ChatPiece
from mjax.chat.screen import AnswerView, whole_blocks
from mjax.chat.session import Session, Talk, setting_of
from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import INTERRUPTED, UserError
from mjax.interop.pretrained import Pretrained
from mjax.models import build, split
from tests.generation import complete

pytest.importorskip("httpx", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
from tests.marks import slow
from tests.openai_fake import fake_server  # noqa: E402

CFG = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=1,
    attention={"num_attention_heads": 4},
    initializer_range=0.3,
    max_position_embeddings=128,
)
BYTES = load_tokenizer("byte")
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"


@pytest.fixture
def piped(monkeypatch, capsys):
    """Call the command with a question on standard input; returns what it prints."""

    def call(question, *argv):
        monkeypatch.setattr(sys, "stdin", io.StringIO(question))
        assert command.main([*argv]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def model(monkeypatch, tmp_path):
    """What every path holds: a tiny model with a chat template, as (definition, params, config)."""
    definition, params = split(build(CFG, nnx.Rngs(0)))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def load(path, mesh=None, dtype="float32", apart=False):
        copied = jax.tree.map(jnp.copy, params)  # the engine takes them
        return Pretrained(CFG, definition, copied, mesh, tmp_path)

    monkeypatch.setattr(mjax.interop.random_weights, "from_pretrained", load)
    return definition, params, CFG


class Fixed:
    """Answers with its pieces; asked: the messages of each answer; given: pieces so far."""

    def __init__(self, *pieces, delay=0.0, fails=()):
        self.pieces, self.delay, self.fails, self.asked = pieces, delay, list(fails), []
        self.given = 0

    def check(self, settings):
        if settings.get("temperature", 0) < 0:
            raise UserError("temperature: give 0 or more")

    async def stream(self, messages, settings):
        self.asked.append([*messages])
        if self.fails:
            raise UserError(self.fails.pop())
        for piece in self.pieces:
            await asyncio.sleep(self.delay)
            self.given += 1
            yield piece if isinstance(piece, ChatPiece) else ChatPiece(piece, tokens=1)


def talked(model, *lines, talk=None):
    """(the talk after lines of a user, what a terminal of 60 x 12 shows)."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=60, height=12, color_system=None
    )
    given = iter(lines)

    def read(prompt):
        line = next(given, None)
        if line is None:
            raise EOFError
        return line

    with asyncio.Runner() as runner:
        session = Session(model, talk or Talk(), console, runner.run)
        session.loop(read)
    return session.talk, console.file.getvalue()


def turns_of(*texts):
    roles = "user", "assistant"
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_piped_question_is_answered_by_a_server(piped):
    with fake_server(pieces={"tiny": ["Hello", " \u2028there"]}) as fake:
        assert piped("Who?\n", fake.url, "--system", "Be brief.") == "Hello \u2028there\n"
        settings = ["--temperature", "0.5", "--max-tokens", "7", "--stop", '["a", "b"]']
        piped("Who?", f"{fake.url}/v1/", "--model", "tiny", *settings)
        assert piped("Who", fake.url, "--raw") == "Hello \u2028there\n"
    first, second, raw = fake.asked
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert first == {
        "model": "tiny",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    expected = {"temperature": 0.5, "max_tokens": 7, "stop": ["a", "b"]}
    assert expected.items() <= second.items() and second["messages"] == messages[1:]
    assert raw["prompt"] == "Who" and "messages" not in raw


def test_what_goes_wrong_on_a_server_is_one_line(piped):
    with fake_server(key="secret") as fake:
        with pytest.raises(UserError, match="401: a key is needed$"):
            piped("Hi", fake.url)
        assert piped("Hi", fake.url, "--api-key", "secret") == "Hello there\n"
        fake.error = "the engine has ended"
        with pytest.raises(UserError, match=f"^{fake.url}: the engine has ended$"):
            piped("Hi", fake.url, "--api-key", "secret")
        fake.refusal = 503, "the queue is full"
        with pytest.raises(UserError, match="503: the queue is full$"):
            piped("Hi", fake.url, "--api-key", "secret")
    with pytest.raises(UserError, match="does a server run there"):
        piped("Hi", fake.url)
    with pytest.raises(UserError, match="standard input is empty"):
        piped("  \n", fake.url)
    for option, words in (("--temperature", "give a number"), ("--seed", "give a number")):
        with pytest.raises(UserError, match=words):
            piped("Hi", fake.url, option, "warm")


@slow
def test_a_model_in_the_process_answers_through_its_template(model, piped):
    given = ["X", "--tokenizer", "byte", "--max-tokens", "12"]
    for question, argv, prompt in (
        ("Hi", ["--system", "S"], "<s>S<u>Hi<a>"),
        ("Hi", ["--raw"], "Hi"),
    ):
        out = complete(model, [BYTES.encode(prompt)], 12)[0].token_ids
        assert piped(question, *given, *argv) == BYTES.decode(out) + "\n"
    with pytest.raises(UserError, match="temperature=-1"):
        piped("Hi", *given, "--temperature", "-1")


def test_what_a_model_thinks_is_no_answer(model, piped, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + "{# </think> #}<think>")
    assert piped("Hi", "X", "--tokenizer", "byte", "--max-tokens", "12") == "\n"


def test_a_model_without_template_says_how_to_go_on(model, piped, tmp_path):
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="^X: .*--raw continues plain text"):
        piped("Hi", "X", "--tokenizer", "byte")


def test_turns_go_on_and_commands_change_them(tmp_path):
    model, file = Fixed("One", " two"), tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "Who",
        "So\\",
        "what?",
        "/retry",
        f"/save {file}",
        "/undo",
        "/set",
    ]
    talk, shown = talked(model, *lines, "/set temperature 0.5", '/set stop ["x"]', "/help", "")
    system = [{"role": "system", "content": "Be brief."}]
    answered = turns_of("Who", "One two", "So\nwhat?")
    assert model.asked == [system + answered[:1], system + answered, system + answered]
    assert talk == Talk("Be brief.", {"temperature": 0.5, "stop": ["x"]}, answered[:2])
    assert "nothing is set" in shown and "/load FILE" in shown and "2 tokens" in shown

    saved = json.loads(file.read_text())
    assert saved == {"messages": system + answered + turns_of("", "One two")[1:], "settings": {}}
    talk, _ = talked(model, f"/load {file}", "/quit", "never")
    assert talk.messages == saved["messages"] and talk.system == "Be brief."
    talk, _ = talked(model, "/set temperature", talk=Talk(settings={"temperature": 0.5}))
    assert talk.settings == {}


@pytest.mark.parametrize(
    "line, words",
    [
        ("/set temprature 1", "no setting 'temprature'; one of temperature"),
        ("/set temperature -1", "give 0 or more"),
        ("/set seed now", "give a number"),
        ("/undo", "there is no question yet"),
        ("/retry", "there is no question yet"),
        ("/save", "name a file"),
        ("/load /none/there.json", "No such file"),
        ("/save /none/there.json", "cannot be written"),
        ("/bye", "no command /bye"),
        ("fails", "the queue is full"),
    ],
)
def test_a_mistake_is_a_line_and_the_talk_goes_on(line, words):
    model = Fixed("Good", fails=["the queue is full"] if line == "fails" else [])
    talk, shown = talked(model, line, "next")
    assert words in " ".join(shown.split()) and talk.turns == turns_of("next", "Good")


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"messages": [{"role": "user"}]}'])
def test_a_file_that_is_no_conversation_is_refused(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(UserError, match="x: "):
        Talk.load(tmp_path / "x")
    assert setting_of("stop", "end") == "end"


@pytest.fixture
def interruptible():
    """Ctrl-C works, also where tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_answer_and_not_the_program(monkeypatch, interruptible):
    def interrupt_once(begun):
        def work():
            deadline = time.monotonic() + 30
            while not begun() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=work).start()

    model = Fixed(*map(str, range(1000)), delay=0.02)
    interrupt_once(lambda: model.given > 4)
    talk, _ = talked(model, "count")
    assert talk.turns[0]["content"] == "count"
    assert talk.turns[1]["content"].startswith("0123") and len(talk.turns[1]["content"]) < 2000

    with fake_server(pieces={"tiny": ["x"] * 1000}, delay=0.02) as fake:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
        interrupt_once(lambda: fake.made > 3)
        assert command.main([fake.url]) == INTERRUPTED
        deadline = time.monotonic() + 10
        while not fake.left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert fake.left == 1


def test_a_terminal_shows_markdown_once_and_thoughts_before_it():
    parts = ["# Title\n\nSome **bold** text.\n\n```python\nx = 1\n\ny = 2\n", "```\n\nThe", " end."]
    pieces = [ChatPiece(reasoning="Let me think."), *parts, ChatPiece(call='f{"a": 1}')]
    console = Console(
        file=io.StringIO(), force_terminal=True, width=60, height=12, color_system=None
    )
    with AnswerView(console) as view:
        for piece in pieces:
            view.add(piece if isinstance(piece, ChatPiece) else ChatPiece(piece, tokens=3))
    shown = console.file.getvalue().rpartition("\x1b")[2]
    for words in ("Some bold text.", "x = 1", "y = 2", "The end.", 'f{"a": 1}', "9 tokens"):
        assert console.file.getvalue().count(words) >= 1, words
    assert "**" not in console.file.getvalue() and "The end." in shown


@pytest.mark.parametrize("is_markdown", [True, False])
def test_a_model_cannot_steer_the_terminal(is_markdown):
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    with AnswerView(console, is_markdown) as view:
        view.add(ChatPiece("a\x1b]0;title\x07b", "c\x1b[2Jd", "f\x9b5n"))
    shown = console.file.getvalue()
    assert "a]0;titleb" in shown and "f5n" in shown
    assert not [given for given in ("\x1b]", "\x1b[2J", "\x07", "\x9b") if given in shown]


def test_whole_blocks_end_where_no_later_text_can_reach():
    text = "One.\n\n- a\n\n- b\n\nTwo\n\n```\ncode\n\nmore\n```\n\nThree"
    for cut in range(len(text) + 1):
        done = whole_blocks(text[:cut])
        assert text[:done].count("```") in (0, 2)
        assert whole_blocks(text) >= done  # what was printed stays
    assert text[whole_blocks(text) :] == "Three"
    assert whole_blocks("- a\n\n- b\n\n  c") == 0
