"""Exact matches: what is asked, what counts, and what cannot be asked."""

import argparse
import json
from types import SimpleNamespace

import jax
import pytest

from mjax.data.base.chat_ids import answer_ends
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.infer.requests import CompletionOutput, RequestOutput, SamplingParams
from mjax.interop.pretrained import from_pretrained
from mjax.post.answers import answered, chat_template_of, print_exact_matches, read_questions
from mjax.run.loop import train
from mjax.sharding.mesh import make_mesh
from tests.chats import END, START, chat_config, turns, write_lines, write_tokenizer
from tests.marks import exhaustive

RECORDS = [
    turns("hi", "one", "go", " two "),
    {"prompt": "2+2=", "completion": "4"},
    {"instruction": "a", "output": "b"},
]


@pytest.fixture
def place(tmp_path):
    """(a tokenizer's folder, a file of conversations)."""
    return write_tokenizer(tmp_path / "t"), write_lines(tmp_path / "a.jsonl", RECORDS)


class Parrot:
    """Answers the last letters of a prompt; keeps the parameters of requests."""

    def __init__(self, tokenizer):
        self.tokenizer, self.params, self.has_work = tokenizer, [], False

    def add(self, prompt, params, *, items):
        self.params.append(params)
        text = self.tokenizer.decode(prompt)[-4:]
        output = CompletionOutput(text=f"{text}\n", finish_reason="stop")
        return SimpleNamespace(output=RequestOutput("", None, prompt, [output]))


def test_the_last_answer_is_asked_for(place):
    folder, path = place
    tokenizer, template = load_tokenizer(folder), chat_template_of(folder)
    questions = read_questions(path, None, tokenizer, template)
    assert [question.answer for question in questions] == ["two", "4", "b"]
    texts = [tokenizer.decode_whole(question.ids) for question in questions]
    assert texts[0].endswith(f"one{END}\n{START}user\ngo{END}\n{START}assistant\n")
    assert texts[1] == "<s>2+2="
    assert len(read_questions(path, 2, tokenizer, template)) == 2
    assert answer_ends(tokenizer, template) == [tokenizer.id_of(END)]
    parrot = Parrot(tokenizer)
    assert answered(parrot, questions, 8) == ["ant", "2+2=", "ant"]
    assert parrot.params == [SamplingParams(max_tokens=8)] * 3, "the likeliest token each time"


@pytest.mark.parametrize(
    "record, said",
    [
        ("{", "not a JSON line"),
        ({"messages": [{"role": "user", "content": "a"}]}, "says nothing"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "last answer is a call",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(record, said, place, tmp_path):
    folder, _ = place
    path = write_lines(tmp_path / "b.jsonl", [record])
    with pytest.raises(UserError, match=f"b.jsonl:1: .*{said}") as e:
        read_questions(path, None, load_tokenizer(folder), chat_template_of(folder))
    assert "\n" not in str(e.value)


def test_without_a_template_pairs_of_texts_can_be_asked(tmp_path):
    folder = write_tokenizer(tmp_path / "bare", None)
    tokenizer, template = load_tokenizer(folder), chat_template_of(folder)
    path = write_lines(tmp_path / "a.jsonl", [RECORDS[1]])
    assert read_questions(path, None, tokenizer, template)[0].answer == "4"
    path = write_lines(tmp_path / "b.jsonl", [RECORDS[0]])
    with pytest.raises(UserError, match="no chat template"):
        read_questions(path, None, tokenizer, template)
    assert isinstance(chat_template_of("byte"), UserError)


@exhaustive
def test_a_model_that_knows_an_answer_gives_it(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", [turns("hi", "yo")] * 8)
    keys = "train.steps=40", "data.split=[1,0,0]", "mesh.dp=1", "schedule.lr=0.02"
    cfg = chat_config(tmp_path, path, *keys, "log.interval=40")
    train(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    model, tokenizer = from_pretrained(tmp_path / "run"), load_tokenizer(cfg.data.tokenizer)
    options = {"tokenizer": None, "file": path, "limit": 3, "max_new_tokens": 8}
    args = argparse.Namespace(**options, batch_size=2, show=1)
    capsys.readouterr()
    print_exact_matches(model, "float32", tokenizer, args)
    shown, found = capsys.readouterr().out.splitlines()
    assert shown == "wanted 'yo', answered 'yo'"
    assert json.loads(found) == {"answers": 3, "exact": 3, "exact_match": 1.0}
    args.batch_size = 0
    with pytest.raises(UserError, match="--batch-size 0"):
        print_exact_matches(model, "float32", tokenizer, args)
