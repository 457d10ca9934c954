"""Parsers of replies: each format as the published templates write it, however it is cut."""

import ast
import json
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from mjax.errors import UserError
from mjax.serve.options import read_options
from mjax.serve.parsers.reader import Delta
from mjax.serve.parsers.reasoning import opens_reasoning
from mjax.serve.parsers.reply import REASONING_PARSERS, TOOL_PARSERS, guess_parsers, reply_parser

Call = tuple[str, dict]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_hermes(calls: Sequence[Call]) -> str:
    lines = [dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)


def in_qwen3_coder(calls: Sequence[Call]) -> str:
    def shown(value: object) -> str:
        return value if isinstance(value, str) else dumps(value)

    def one(name: str, given: dict) -> str:
        lines = [f"<parameter={k}>\n{shown(v)}\n</parameter>\n" for k, v in given.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def in_llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)


def in_mistral_list(calls: Sequence[Call]) -> str:
    listed = [{"name": n, "arguments": a, "id": f"call{i:05}"} for i, (n, a) in enumerate(calls)]
    return "[TOOL_CALLS] " + dumps(listed)


def in_mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls)


def in_mistral_with_ids(calls: Sequence[Call]) -> str:
    parts = (f"{name}[CALL_ID]a1B2c3D4e[ARGS]{dumps(given)}" for name, given in calls)
    return "".join(f"[TOOL_CALLS]{part}" for part in parts)


def in_mistral_bare(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{dumps(given)}" for name, given in calls)


def in_deepseek_v3(calls: Sequence[Call]) -> str:
    bodies = [f"function<｜tool▁sep｜>{n}\n```json\n{dumps(given)}\n```" for n, given in calls]
    marked = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{marked}<｜tool▁calls▁end｜>"


def in_deepseek_v31(calls: Sequence[Call]) -> str:
    bodies = [f"{name}<｜tool▁sep｜>{dumps(given)}" for name, given in calls]
    marked = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{marked}<｜tool▁calls▁end｜>"


def python_calls(calls: Sequence[Call]) -> list[str]:
    listed = [(name, ", ".join(f"{k}={v!r}" for k, v in given.items())) for name, given in calls]
    return [f"{name}({given})" for name, given in listed]


def in_pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(python_calls(calls))}]"


def in_lines(calls: Sequence[Call]) -> str:
    return "<function_calls>\n" + "\n".join(python_calls(calls)) + "\n</function_calls>"


def in_json(calls: Sequence[Call]) -> str:
    return dumps([{"name": name, "parameters": given} for name, given in calls])


FORMS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", in_hermes),
    "qwen3_coder": ("qwen3_coder", in_qwen3_coder),
    "llama3_json": ("llama3_json", in_llama3_json),
    "llama3_json after a tag": ("llama3_json", lambda c: "<|python_tag|>" + in_llama3_json(c)),
    "llama4": (
        "llama3_json",
        lambda c: f"<|python_start|>{in_llama3_json(c)}<|python_end|>",
    ),
    "mistral list": ("mistral", in_mistral_list),
    "mistral": ("mistral", in_mistral),
    "mistral with ids": ("mistral", in_mistral_with_ids),
    "mistral without a mark": ("mistral", in_mistral_bare),
    "deepseek_v3": ("deepseek_v3", in_deepseek_v3),
    "deepseek_v31": ("deepseek_v31", in_deepseek_v31),
    "pythonic": ("pythonic", in_pythonic),
    "pythonic after a tag": (
        "pythonic",
        lambda c: f"<|python_start|>{in_pythonic(c)}<|python_end|>",
    ),
    "olmo3": ("pythonic", in_lines),
    "lfm2": ("pythonic", lambda c: f"<|tool_call_start|>{in_pythonic(c)}<|tool_call_end|>"),
    "json": ("json", in_json),
}
WHOLE_REPLIES = {"llama3_json", "pythonic", "json"}  # no text before the calls
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "old" town\\', "days": 3, "units": None}),
    ("no-arguments", {}),
    ("search.files", {"query": "if (a[0] < b) { return '}'; }\n", "deep": {"a": [1, [True, {}]]}}),
]


def pythonic_names(calls: Sequence[Call]) -> list[Call]:
    return [(name.replace("-", "_"), given) for name, given in calls]


def read(parser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls) of deltas, checked by 7.3's rules of an index."""
    content, reasoning, calls = "", "", []
    for delta in [*map(parser.push, pieces), parser.close()]:
        content += delta.content
        reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.index == len(calls):
                assert part.name
                calls.append((part.name, ""))
            else:
                assert part.name is None and part.arguments
            assert part.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    assert parser.close() == Delta()
    return content, reasoning, calls


def parsed(text: str, tools: str | None, reasoning: str | None = None, **given):
    """What a reply is, after a check that it is the same however the text is cut."""

    def of(pieces: Sequence[str]):
        options = {"has_tools": True, "in_reasoning": False, **given}
        return read(reply_parser(tools, reasoning, **options), pieces)

    whole = of([text])
    assert of(list(text)) == whole
    random_cuts = random.Random(len(text))
    for _ in range(4):
        cuts = sorted(random_cuts.choices(range(len(text) + 1), k=1 + len(text) // 6))
        bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert of([text[a:b] for a, b in bounds]) == whole
    return whole


def meant(calls: Sequence[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", FORMS)
def test_calls_come_back_as_a_template_wrote_them(form):
    tools, write = FORMS[form]
    before = "" if tools in WHOLE_REPLIES else "Let me look.\n\n"
    for calls in (CALLS, CALLS[:1], CALLS[1:2]):
        content, _, found = parsed(before + write(calls) + "\n", tools)
        assert meant(found) == calls
        assert content == before.strip()


def test_every_parser_is_in_the_laws():
    assert {tools for tools, _ in FORMS.values()} == set(TOOL_PARSERS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab\"'\\<{[(,)]}=\n é", max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=4,
)
SOME_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_x", "a.b"]),
        st.dictionaries(st.sampled_from(["a", "b_1", "city"]), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@seed(0)
@settings(max_examples=60, deadline=None, database=None)
@given(SOME_CALLS, st.sampled_from(sorted(set(FORMS) - {"qwen3_coder"})))
def test_any_calls_come_back(calls, form):
    tools, write = FORMS[form]
    content, _, found = parsed(write(calls), tools)
    assert meant(found) == calls and content == ""


MARKS = sorted(
    {"<tool_call>", "</tool_call>", "<function=", "f", ">", "<parameter=", "</parameter>\n"}
    | {"</function>", "<|python_tag|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    | {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"}
    | {'{"name": "f", ', '"arguments": ', '"parameters"', ":", '{"a": 1}', "}", "]", "[", "f(", ")"}
    | {"a=", "'x'", '"', "\\", ",", ";", "\n", " ", "<", "<think>", "</think>", "[THINK]", "word"}
    | {"```json\n", "\n```", "null", "<function_calls>", "function", "1"}
)


@seed(1)
@settings(max_examples=400, deadline=None, database=None)
@given(
    st.lists(st.sampled_from(MARKS), max_size=14).map("".join),
    st.sampled_from(TOOL_PARSERS),
    st.sampled_from([None, *REASONING_PARSERS]),
    st.booleans(),
)
def test_nonsense_is_cut_alike_and_words_are_kept(text, tools, reasoning, is_open):
    content, thoughts, calls = parsed(text, tools, reasoning, in_reasoning=is_open)
    kept = content + thoughts + "".join(name + arguments for name, arguments in calls)
    assert kept.count("word") == text.count("word")


PLAIN = st.text("ab <[{(\"'\n\\;:=._-｜▁é", max_size=40).map(lambda text: f"Well, {text}")


@seed(2)
@settings(max_examples=150, deadline=None, database=None)
@given(PLAIN, st.sampled_from([None, *TOOL_PARSERS]), st.sampled_from([None, "qwen3"]))
def test_text_without_calls_passes_unchanged(text, tools, reasoning):
    assert parsed(text, tools, reasoning) == (text, "", [])


@pytest.mark.parametrize(
    "text",
    [
        "[1] a source",
        "[print('a')]",
        "[Note (draft)] text",
        '{"answer": 5}',
        "[]",
        "{",
        "",
        " \n",
        "[f",
    ],
)
@pytest.mark.parametrize("tools", sorted(WHOLE_REPLIES))
def test_text_that_begins_as_calls_do_passes_unchanged(text, tools):
    assert parsed(text, tools) == (text, "", [])


def test_text_comes_at_once_and_only_what_may_be_a_mark_waits():
    parser = reply_parser("hermes", None, has_tools=True, in_reasoning=False)
    assert parser.push("One, two").content == "One, two"
    assert parser.push(" <tool") == Delta()
    assert parser.push("_box> \n").content == " <tool_box>"
    assert parser.close().content == " \n"


@pytest.mark.parametrize("form", FORMS)
def test_arguments_come_while_they_are_made(form):
    """Before the text of the last argument has come whole; pythonic: each argument."""
    tools, write = FORMS[form]
    text = write([("f", {"first": [1, 2], "last": "xyz"})])
    parser = reply_parser(tools, None, has_tools=True, in_reasoning=False)
    (part,) = parser.push(text[: text.index("xyz") + 1]).tool_calls
    assert part[:2] == (0, "f") and part.arguments.startswith('{"first": [1, 2]')


@pytest.mark.parametrize("form", FORMS)
def test_a_reply_that_ends_early_loses_nothing(form):
    """Each cut gives the whole calls before it, then a beginning of arguments, or content."""
    tools, write = FORMS[form]
    calls = [("f", {"a": "hello"}), ("g", {"b": "world"})]
    text = write(calls)
    for end in range(len(text)):
        content, _, found = parsed(text[:end], tools)
        assert [name for name, _ in found] == ["f", "g"][: len(found)]
        for (_, arguments), (_, whole) in zip(found, calls, strict=False):
            # of Python, and a begun end mark of a value in XML
            is_other = tools == "pythonic" or arguments.startswith(dumps(whole)[:-2])
            assert is_other or dumps(whole).startswith(arguments)
        for word in ("hello", "world"):
            assert (word in text[:end]) == (word in content + "".join(a for _, a in found))


BROKEN = {
    "<tool_call>no json</tool_call>": "hermes",
    '<tool_call>{"name": 5}</tool_call>': "hermes",
    "<tool_call>": "hermes",
    "<tool_call>\n<function=f": "qwen3_coder",
    "<|python_tag|>import os": "llama3_json",
    '{"name": "f': "json",
    "[TOOL_CALLS]": "mistral",
    "[TOOL_CALLS]f[ARGS]": "mistral",
    "[TOOL_CALLS] [1, 2]": "mistral",
    "<｜tool▁calls▁begin｜>oh": "deepseek_v3",
    "[f(1, 2)]": "pythonic",
    '<|python_start|>print("hi")': "pythonic",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_call_that_cannot_be_read_is_content(text):
    assert parsed(text, BROKEN[text]) == (text, "", [])


def test_broken_calls_do_not_take_the_next_ones_along():
    broken = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}\n</tool_call>\n'
    content, _, calls = parsed(broken + in_hermes(CALLS[:1]) + "\nDone.", "hermes")
    assert [name for name, _ in calls] == ["f", "get_weather"] and "Done." in content
    late = '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>'
    assert parsed(late, "hermes")[2] == [("f", '{"a": 1}')]
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parsed(text, "hermes")[2] == [("f", '{"a": 1}')]
    assert parsed('<tool_call>{"name": "f"}</tool_call>', "hermes")[2] == [("f", "{}")]


def test_what_ends_within_a_call_is_kept_to_the_letter():
    begun = '{"a": "x\\'
    text = f'<tool_call>{{"name": "f", "arguments": {begun}'
    assert parsed(text, "hermes") == ("", "", [("f", begun)])
    text = "<function=f><parameter=a>1</parameter>junk"
    assert parsed(text, "qwen3_coder") == ("junk", "", [("f", '{"a": 1}')])
    assert parsed(text[:-4] + "</func", "qwen3_coder") == ("</func", "", [("f", '{"a": 1')])


def test_types_of_xml_parameters_follow_the_schema():
    schema = {"properties": {"code": {"type": "string"}, "n": {"type": "integer"}}}
    definitions = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = in_qwen3_coder([("f", {"code": "1", "n": "2", "more": "True", "other": "{'a': 1}"})])
    with_schema = parsed(text, "qwen3_coder", definitions=definitions)[2]
    assert meant(with_schema) == [("f", {"code": "1", "n": 2, "more": True, "other": {"a": 1}})]
    assert meant(parsed(text, "qwen3_coder")[2])[0][1]["code"] == 1
    parser = reply_parser(
        "qwen3_coder", None, has_tools=True, in_reasoning=False, definitions=definitions
    )
    made = parser.push("<function=f>\n<parameter=code>\n\n  if x:\n    print(").tool_calls
    assert made == ((0, "f", '{"code": "\\n  if x:\\n    print('),)
    for nonsense in (5, [None], [{"function": {"parameters": {"properties": [1]}}}]):
        assert meant(parsed(text, "qwen3_coder", definitions=nonsense)[2])[0][0] == "f"


def test_python_is_read_and_never_run():
    text = "[f(a=__import__('os').getpid(), b=-1.5, c=(1, 2), d=true, e={1})]"
    ((name, arguments),) = meant(parsed(text, "pythonic")[2])
    assert name == "f" and arguments["a"] == "__import__('os').getpid()"
    assert (arguments["b"], arguments["c"], arguments["d"]) == (-1.5, [1, 2], True)
    assert ast.literal_eval(arguments["e"]) == {1}
    text = "[f(a='one\ntwo', b=\"one\ntwo\", c=[\n1,\n2])]"
    ((_, arguments),) = meant(parsed(text, "pythonic")[2])
    assert arguments == {"a": "one\ntwo", "b": "one\ntwo", "c": [1, 2]}


def test_python_that_is_odd_warns_nobody(recwarn):
    assert meant(parsed("[f(a=0xfor x, b=1if 1else 2)]", "pythonic")[2])[0][1]["a"] == "0xfor x"
    assert not recwarn.list


def test_values_that_utf8_or_json_do_not_have_are_escaped():
    for text in ("[f(a='\\ud800')]", "[f(a=1e999)]", f"[f(a={'9' * 5000})]", f"[f(a={'(' * 9999}"):
        content, _, calls = parsed(text, "pythonic")
        (content + "".join(map("".join, calls))).encode()
        if text.endswith(")]"):
            assert "a" in json.loads(calls[0][1])
    assert parsed(f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}", "mistral")[2] == []
    name = parsed('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "hermes")[2][0][0]
    assert name.encode()


@pytest.mark.parametrize(
    "name, begin, end",
    [
        ("qwen3", "<think>\n", "\n</think>\n\n"),
        ("deepseek_r1", "<think>\n", "\n</think>\n\n"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("granite", "Here is my thought process:\n", "\nHere is my response:\n"),
    ],
)
def test_reasoning_is_split_off(name, begin, end):
    answer = "  An answer, with <think> in it.\n"
    for opened in (False, True):
        text = ("" if opened else begin) + "First.\n\n- <a>" + end + answer
        found = parsed(text, None, name, in_reasoning=opened)
        assert found == (answer, "First.\n\n- <a>", [])
    assert parsed(begin + "No end", None, name) == ("", "No end", [])
    assert parsed(begin + end, None, name) == ("", "", [])
    assert parsed(answer, None, name) == (answer, "", [])
    text = begin + "Why <tool_call> now?" + end + "Now.\n" + in_hermes(CALLS)
    content, thoughts, calls = parsed(text, "hermes", name)
    assert (content, thoughts) == ("Now.", "Why <tool_call> now?") and meant(calls) == CALLS
    assert opens_reasoning("<|im_start|>assistant\n" + begin, name)
    assert not opens_reasoning(begin + end, name) and not opens_reasoning(begin, None)


def test_without_tools_or_a_parser_everything_is_content():
    text = "<think>a</think>" + in_hermes(CALLS)
    assert parsed(text, "hermes", None, has_tools=False) == (text, "", [])
    parser = reply_parser("hermes", None, has_tools=False, in_reasoning=False)
    assert not parser.needs_special_tokens
    assert reply_parser("hermes", None, has_tools=True, in_reasoning=False).needs_special_tokens
    assert reply_parser(None, "qwen3", has_tools=True, in_reasoning=False).needs_special_tokens
    with pytest.raises(SystemExit):  # before the model is loaded
        read_options(["model", "--tool-call-parser", "herms"])
    assert read_options(["m", "--reasoning-parser", "qwen3"]).api["reasoning_parser"] == "qwen3"
    with pytest.raises(UserError, match="no parser 'herms'.*hermes"):
        reply_parser("herms", None, has_tools=True, in_reasoning=False)


def test_parsers_are_guessed_from_what_a_template_writes():
    templates = {
        "{{ '<tool_call>\\n' + (call | tojson) }} {{ '<think>' }}{{ '</think>' }}": (
            "hermes",
            "qwen3",
        ),
        "{{ '<tool_call>\\n<function=' + call.name }}{{ '<parameter=' }}": ("qwen3_coder", None),
        "{{ '<tool_call>' + name + '<arg_key>' }}</think>": (None, "qwen3"),
        "{{ '[TOOL_CALLS]' }} [THINK] [/THINK]": ("mistral", "mistral"),
        "{{- '\"parameters\": ' }}": ("llama3_json", None),
        "<｜tool▁sep｜>' + name + '\\n```json\\n' </think>": ("deepseek_v3", "deepseek_r1"),
        "<｜tool▁sep｜>{{ arguments }} </think>": ("deepseek_v31", "deepseek_r1"),
        "<function_calls>": ("pythonic", None),
        "<|tool_call_start|>": ("pythonic", None),
        "<seed:tool_call><function=f><parameter=a>": (None, None),
        "<function={{ name }}>{{ arguments }}</function>": (None, None),
        "{{ messages[0].content }}": (None, None),
    }
    assert {text: guess_parsers(text) for text in templates} == templates
