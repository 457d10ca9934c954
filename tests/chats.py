"""Conversations for tests: tokenizers with a chat template, and files of records."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mjax.config import load
from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.conversations.rows import ConversationDataset
from tests.tiny import TINY

START, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = CHATML, bos: bool = True) -> str:
    """A folder with 256 bytes, <s>, <|im_start|>, <|im_end|> and a template; its path."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([BOS, START, END])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    said = {"bos_token": BOS, "eos_token": END, "add_bos_token": bos}
    said |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return str(folder)


def write_lines(path: Path, records: Sequence) -> str:
    """JSON lines; texts stand as they are."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def turns(*texts: str) -> dict:
    """A record of messages: user, assistant, user, .."""
    roles = "user", "assistant"
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)]}


def chat_config(folder: Path, path: str, *keys: str, template: str | None = CHATML) -> Config:
    """A tiny run on conversations, whose tokenizer is written to `folder`/tokenizer."""
    name = write_tokenizer(folder / "tokenizer", template)
    own = [key for key in TINY if not key.startswith(("data.mock", "model.vocab_size"))]
    given = ["model.vocab_size=260", f"data.tokenizer={name}", f"data.conversations.path={path}"]
    given += ["data.seq_length=64", f"run.dir={folder / 'run'}", "train.eval_interval=null"]
    return load(None, [*own, *given, *keys])


def chats(folder: Path, records: Sequence, *keys: str, template: str | None = CHATML, size=None):
    """The dataset of records."""
    path = write_lines(folder / "chats.jsonl", records)
    cfg = chat_config(folder, path, *keys, template=template)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    return ConversationDataset(path, "train", [1, 0, 0], size, cfg, tokenizer)


def learned(data: ConversationDataset) -> dict[str, tuple[str, str]]:
    """By the line of each conversation: its text, and the text that the loss is on."""
    folder = Path(data.path).parent / "tokenizer"
    decode, found = load_tokenizer(folder).decode_whole, {}
    for number, name in enumerate(data.source.names):
        ids, is_answer = data.source[number]
        line = name.rpartition(":")[2]
        found[line] = decode(ids.tolist()), decode(ids[is_answer].tolist())
    return found
