"""Formats of tool calls, each a generator over a `Reader` that reads a whole reply.

Nothing is dropped: what does not read as a call is content, with its marks. A call is begun when
its name is certain; if the reply ends within it, its arguments end there, too.
"""

import ast
import json
import warnings
from collections.abc import Iterator

from mjax.serve.parsers.reader import Reader, Steps, as_json

_CALL_KEYS = {"name", "arguments", "parameters", "type", "id", "function", "description"}
_CALLS = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_ENDS = "<｜tool▁call▁end｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_LLAMA = "<|python_tag|>", "<|python_start|>"
_LISTS = *_LLAMA, "<function_calls>", "<|tool_call_start|>"
_LISTS_END = "<|python_end|>", "</function_calls>", "<|tool_call_end|>"


def hermes(reader: Reader) -> Steps[None]:
    """Read `<tool_call>{"name": .., "arguments": ..}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    while (yield from reader.prose("<tool_call>")):
        if (yield from _json_call(reader)):
            yield from reader.literal("</tool_call>")


def llama3_json(reader: Reader) -> Steps[None]:
    """Read `{"name": .., "parameters": ..}; {..}`: a whole reply, or what follows a tag."""
    found = (yield from reader.peek()) == "{" or (yield from reader.prose(*_LLAMA))
    while found:
        if (yield from _json_call(reader)):
            if (yield from reader.literal(";")) or (yield from reader.peek()) == "{":
                continue
            yield from reader.literal("<|python_end|>")
        found = yield from reader.prose(*_LLAMA)


def mistral(reader: Reader) -> Steps[None]:
    """Read `[TOOL_CALLS]` before a list of JSON calls or before `name[ARGS]{..}`."""
    while (yield from reader.prose("[TOOL_CALLS]")):
        if (yield from reader.literal("[")):
            yield from _json_calls(reader)
            continue
        name = yield from reader.word()
        if name and (yield from reader.literal("[CALL_ID]")):
            yield from reader.word()
        if name and (yield from reader.literal("[ARGS]", "{")) == "{":
            reader.text = "{" + reader.text
        if name and (yield from reader.peek()) == "{":
            reader.call(name)
            yield from reader.value(reader.arguments)
        else:
            reader.fail()


def deepseek(reader: Reader) -> Steps[None]:
    """Read calls between DeepSeek's marks: V3's and R1's have a type and a fence, V3.1's none."""
    while mark := (yield from reader.prose(_CALLS, _CALL)):
        is_call = mark == _CALL or (yield from reader.literal(_CALL))
        name = is_call and (yield from reader.word())
        if not name or not (yield from reader.literal(_SEPARATOR)):
            reader.fail()
            continue
        fenced = yield from reader.word()
        if fenced:
            yield from reader.literal("```json")
        if (yield from reader.peek()) != "{":
            reader.fail()
            continue
        reader.call(fenced or name)
        yield from reader.value(reader.arguments)
        if fenced:
            yield from reader.literal("```")
        yield from reader.literal(_CALL_ENDS)
        yield from reader.literal(_CALLS_END)


def qwen3_coder(reader: Reader) -> Steps[None]:
    """Read `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

    A value is JSON or Python where it reads as such and its type is not a string.
    """
    while mark := (yield from reader.prose("<tool_call>", "<function=")):
        begins = mark == "<function=" or (yield from reader.literal("<function="))
        name = begins and (yield from reader.word())
        if not name or not (yield from reader.literal(">")):
            reader.fail()
            continue
        reader.call(name)
        while (yield from reader.literal("<parameter=")):
            yield from _parameter(reader, name)
        if (yield from reader.literal("</function>")) or not reader.ended:
            reader.arguments("}" if reader.has_arguments else "{}")
        yield from reader.literal("</tool_call>")


def _parameter(reader: Reader, function: str) -> Steps[None]:
    """Read a parameter from its name on; a string comes as it is made, other values whole."""

    def escaped(text: str) -> None:
        reader.arguments(as_json(text)[1:-1])

    key: list[str] = []
    reader.arguments(', "' if reader.has_arguments else '{"')
    if not (yield from reader.upto((">",), lambda text: (key.append(text), escaped(text)))):
        return
    yield from reader.literal("\n", space=False)
    is_string = (function, "".join(key)) in reader.string_parameters
    reader.arguments('": "' if is_string else '": ')
    value: list[str] = []
    ends = "\n</parameter>", "</parameter>"
    end = yield from reader.upto(ends, escaped if is_string else value.append, trim=False)
    if not is_string:
        text = _python_as_json("".join(value))
        reader.arguments(text if end else text.removesuffix('"'))
    elif end:
        reader.arguments('"')


def pythonic(reader: Reader) -> Steps[None]:
    """Read `[f(a=1), g(b="x")]`: a whole reply, or what follows a tag (Llama 4, OLMo 3, LFM2)."""
    found = (yield from reader.peek()) == "[" or (yield from reader.prose(*_LISTS))
    while found:
        yield from reader.literal("[")
        before = reader.count
        while (yield from _python_call(reader)):
            yield from reader.literal(",")
        ended = yield from reader.literal("]", *_LISTS_END)
        yield from reader.literal(*_LISTS_END)
        if not ended or reader.count == before:
            reader.fail()
        found = yield from reader.prose(*_LISTS)


def json_calls(reader: Reader) -> Steps[None]:
    """Read a JSON list of calls, or one call: replies whose form is a schema of calls."""
    if (yield from reader.literal("[")):
        yield from _json_calls(reader)
    elif (yield from reader.peek()) == "{":
        yield from _json_call(reader)
    yield from reader.prose()


def _json_calls(reader: Reader) -> Steps[None]:
    """Read calls and the end of their list."""
    more = ","
    while more == "," and (yield from _json_call(reader)):
        more = yield from reader.literal(",", "]")


def _json_call(reader: Reader) -> Steps[bool]:
    """Read `{"name": .., "arguments": ..}`; returns False if something else came."""
    named, early = False, []
    mark = "," if (yield from reader.literal("{")) else None
    while mark == ",":
        mark = None
        key = yield from reader.string()
        if key is None or not (named or key in _CALL_KEYS) or not (yield from reader.literal(":")):
            break
        given = reader.has_arguments if named else early
        if key == "name" and not named:
            name = yield from reader.string()
            if name is None:
                break
            reader.call(name)
            named = True
            if early:
                reader.arguments("".join(early))
        elif key in ("arguments", "parameters") and not given:
            yield from reader.value(reader.arguments if named else early.append)
        else:
            yield from reader.value(lambda text: None)
        mark = yield from reader.literal(",", "}")
    if mark != "}" or not named:
        reader.fail()
    elif not reader.has_arguments:
        reader.arguments("{}")
    return named


def _python_call(reader: Reader) -> Steps[bool]:
    """Read `f(a=1, b="x")`; returns False if something else came."""
    name = yield from reader.word()
    if not name or not (yield from reader.literal("(")):
        reader.fail()
        return False
    before = reader.count
    closed = yield from reader.literal(")")
    if closed:
        reader.call(name)
    while not closed:
        key = yield from reader.word()
        if not key or not (yield from reader.literal("=")):
            reader.fail()
            break
        if reader.count == before:
            reader.call(name)
        value: list[str] = []
        whole = yield from reader.nested(value.append, python=True)
        text = _python_as_json("".join(value)) if whole else "".join(value)
        reader.arguments((", " if reader.has_arguments else "{") + f"{as_json(key)}: {text}")
        yield from reader.literal(",")
        closed = yield from reader.literal(")")
    if closed:
        reader.arguments("}" if reader.has_arguments else "{}")
    return reader.count > before


def _python_as_json(text: str) -> str:
    """The JSON of a value in JSON or Python; what is neither is a string."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "invalid decimal literal" and others
        literal, whole = ast.literal_eval, text.strip()
        lines = whole.replace("\n", "\\n")  # some templates break lines within strings
        for read, given in ((json.loads, whole), (literal, whole), (literal, lines)):
            try:
                return as_json(read(given))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                pass
    return as_json(text)


def string_parameters(definitions: object) -> Iterator[tuple[str, str]]:
    """Yield (function, parameter) of parameters that are strings, from a request's `tools`."""
    for tool in definitions if isinstance(definitions, list) else []:
        function = _item_of(tool, "function")
        properties = _item_of(_item_of(function, "parameters"), "properties")
        for name in properties if isinstance(properties, dict) else ():
            if _item_of(properties[name], "type") == "string":
                yield str(_item_of(function, "name")), name


def _item_of(group: object, key: str) -> object:
    return group.get(key) if isinstance(group, dict) else None
