"""Oracle: rendered chats equal `apply_chat_template` of `transformers`, in four styles."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mjax.data.base.chat import load_chat_template
from mjax.errors import UserError

LLAMA3 = """{{- bos_token }}
{%- if not date is defined %}{% set date = "today" %}{% endif %}
{%- if messages[0].role == "system" %}
    {%- set first = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}
    {%- set first = "" %}{% set rest = messages %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nDate: " + date + "\\n" + first + "<|eot|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for m in rest %}
    {{- "<|start|>" + m.role + "<|end|>\\n\\n" + m["content"] | trim + "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant<|end|>\\n\\n" }}
{%- endif %}
"""
CHATML = """{% set state = namespace(n=0) %}
{% for message in messages %}
  {% if message.role == "system" %}
    {% continue %}
  {% endif %}
<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{{ message.tool_calls | tojson }}
{% endif %}
{% generation %}
{{ message.content }}{% endgeneration %}<|im_end|>
{% set state.n = state.n + 1 %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}({{ state.n }}{{ pad_token is defined }})"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('no system role') }}{% endif %}{% for m in messages -%}
    {%- if m.role == 'assistant' -%}{%- set role = 'model' -%}
    {%- else -%}{%- set role = m.role -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if m.content is string -%}{{ m.content | trim }}
    {%- else -%}{%- for part in m.content -%}{%- if part.type == 'text' -%}
        {{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TO_JSON = """{% for m in messages %}{{ m | tojson(false) }}{{ m | tojson(true) }}
{{ m | tojson(false, 2, [",", ": "], true) }}
{{ [m] | tojson(indent=1, sort_keys=true) }}{% endfor %}"""
TEMPLATES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "json": TO_JSON,
}

TURNS = [
    {"role": "user", "content": "  Grüße <b>\n'quoted' 日本 "},
    {"role": "assistant", "content": "An answer. "},
    {"role": "user", "content": "And then?", "name": None},
]
CHATS = {
    "turns": TURNS,
    "system": [{"role": "system", "content": " Be brief.\n"}, *TURNS],
    "calls": [*TURNS[:1], {**TURNS[1], "tool_calls": [{"f": "größe", "x": [1, None, "<"]}]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
    "two_users": [TURNS[0], TURNS[2]],
}
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": []}}}]


def save(folder, template):
    """A tokenizer of `transformers`, written as it writes it, with `template`."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?": 2}, unk_token="?"))
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="?")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_chats_equal_transformers(style, chat, opened, tmp_path):
    theirs = save(tmp_path, TEMPLATES[style])
    ours = load_chat_template(tmp_path)
    options = {"add_generation_prompt": opened, "tools": TOOLS if chat == "system" else None}
    try:
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, **options)
    except Exception as e:
        with pytest.raises(UserError, match="the chat template cannot render") as refused:
            ours.render(CHATS[chat], **options)
        assert str(e) in str(refused.value)
        return
    assert ours.render(CHATS[chat], **options) == expected and expected.strip()


def test_most_chats_render_and_some_are_refused(tmp_path):
    refused = {("mistral", "system"), ("mistral", "two_users"), ("mistral", "parts")}
    refused |= {("gemma", "system")}
    found = set()
    for style, template in TEMPLATES.items():
        save(tmp_path / style, template)
        for name, chat in CHATS.items():
            try:
                load_chat_template(tmp_path / style).render(chat)
            except UserError:
                found.add((style, name))
    assert found == refused


def test_variables_reach_the_template(tmp_path):
    theirs, ours = save(tmp_path, LLAMA3), load_chat_template(tmp_path)
    expected = theirs.apply_chat_template(TURNS, tokenize=False, date="1 May")
    assert ours.render(TURNS, False, date="1 May") == expected and "1 May" in expected


def test_named_templates_in_files_and_in_the_configuration(tmp_path):
    theirs = save(tmp_path / "files", {"default": MISTRAL, "tool_use": LLAMA3})
    expected = theirs.apply_chat_template(TURNS, chat_template="tool_use", tokenize=False)
    assert load_chat_template(tmp_path / "files", "tool_use").render(TURNS, False) == expected
    old = tmp_path / "old"
    save(old, MISTRAL)
    plain = load_chat_template(old).render(TURNS)
    (old / "chat_template.jinja").unlink()
    config = json.loads((old / "tokenizer_config.json").read_text())
    for value in (MISTRAL, [{"name": "default", "template": MISTRAL}]):
        tokens = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "chat_template": value}
        (old / "tokenizer_config.json").write_text(json.dumps({**config, **tokens}))
        reloaded = PreTrainedTokenizerFast.from_pretrained(old)
        assert load_chat_template(old).render(TURNS) == plain
        assert reloaded.apply_chat_template(TURNS, tokenize=False) == plain


def test_missing_and_broken_templates_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no chat template 'default'"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="chat_template.jinja: the chat template cannot render"):
        load_chat_template(tmp_path).render(TURNS)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(UserError, match="unsafe"):
        load_chat_template(tmp_path).render(TURNS)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match="tokenizer_config.json: not JSON"):
        load_chat_template(tmp_path)
