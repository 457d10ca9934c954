"""Laws of text files: for every reader the same bytes are the same lines, however they are kept."""

import argparse
import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.data.base.documents import expand_paths, json_rows, read_documents, read_text
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.multimodal.sources import samples_of
from mjax.data.preprocess import read_texts
from mjax.data.sentences.labelled import read_lines
from mjax.errors import UserError
from mjax.generate.__main__ import read_prompts
from tests.marks import quick

# Characters at which Python cuts lines, and JSON lines do not.
TEXTS = ["one\u2028two\u2029three\x85four\x0bfive\x1csix", "naïve", "東京"]
MARK = b"\xef\xbb\xbf"


def rows(*texts: str) -> bytes:
    """JSON lines that every reader takes."""
    keys = ({"text": t, "prompt": t, "label": 0, "image": "x.png"} for t in texts)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in keys).encode()


def of_prompts(path: Path) -> list[str]:
    return read_prompts(argparse.Namespace(prompt=[], prompt_file=path))


def of_labelled(path: Path) -> list[str]:
    tokenizer = load_tokenizer("byte")
    return [tokenizer.decode(texts[0]) for texts, _ in read_lines(path, tokenizer, 1)]


def of_images(path: Path) -> list[str]:
    return [sample.facts["text"] for sample in samples_of(str(path), ["text"])]


READERS = {
    "preprocess and data.text": lambda path: list(read_texts([str(path)])),
    "prompts": of_prompts,
    "labelled": of_labelled,
    "images": of_images,
}
RAW = rows(*TEXTS)
FORMS = {
    "plain.jsonl": RAW,
    "MARKED.JSONL": MARK + RAW,
    "mark_on_each.ndjson": MARK + MARK.join(RAW.splitlines(keepends=True)),
    "windows.json": MARK + RAW.replace(b"\n", b"\r\n"),
    "old_mac.jsonlines": RAW.replace(b"\n", b"\r"),
    "mixed.jsonl": RAW.replace(b"\n", b"\r\n\n \t\r\r\n", 1).replace(b"\n", b"\r", 1),
    "blank.jsonl": b"\r\n \n" + MARK + b"\n" + RAW[:-1],
    "a.jsonl.gz": gzip.compress(MARK + RAW),
    "b.jsonl.GZ": gzip.compress(RAW[:20]) + gzip.compress(RAW[20:]),
    "c.jsonl.xz": lzma.compress(RAW),
    "d.json.bz2": bz2.compress(RAW),
    "e.jsonl.xz.gz": gzip.compress(lzma.compress(RAW)),
    "no_ending.jsonl": gzip.compress(RAW),  # as some servers hand them out
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_every_form_of_json_lines(tmp_path, reader):
    for name, raw in FORMS.items():
        (tmp_path / name).write_bytes(raw)
        assert READERS[reader](tmp_path / name) == TEXTS, name


@pytest.mark.parametrize("reader", READERS)
def test_a_bad_line_is_one_message_with_its_number(tmp_path, reader):
    begin = MARK + b"\r\n" + RAW.splitlines(keepends=True)[0].replace(b"\n", b"\r\n")
    for bad, message in [
        (b"{oops", r"x.jsonl:3: not a JSON line"),
        (b'{"text": "\xff"}', r"x.jsonl:3: not UTF-8"),
        (rows("x").replace(b'"x"', b'"\\ud800"'), r"x.jsonl:3: not Unicode"),
        *([(b"[1]", r"x.jsonl:3: n")] if reader != "images" else []),  # an item may lack all facts
    ]:
        (tmp_path / "x.jsonl").write_bytes(begin + bad + b"\n")
        with pytest.raises(UserError, match=message) as error:
            READERS[reader](tmp_path / "x.jsonl")
        assert "\n" not in str(error.value)
    (tmp_path / "x.jsonl").write_bytes(RAW.decode().encode("utf-16"))
    with pytest.raises(UserError, match=r"x.jsonl:1: not UTF-8 text but UTF-16: .*iconv"):
        READERS[reader](tmp_path / "x.jsonl")


def test_empty_files_are_empty_under_every_name(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d.jsonl.bz2", "e.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
        assert list(json_rows([str(tmp_path / name)])) == [], name
    (tmp_path / "f.jsonl").write_bytes(MARK)
    assert list(read_documents([str(tmp_path / "f.jsonl")])) == []


def test_damaged_compressions_are_named(tmp_path):
    for name, raw in [
        ("cut.jsonl.xz", lzma.compress(RAW * 50)[:-9]),
        ("cut.jsonl.bz2", bz2.compress(RAW * 50)[:-9]),
        ("cut.jsonl", gzip.compress(RAW * 50)[:-9]),
        ("none.jsonl.xz", RAW),
        ("none.jsonl.bz2", RAW),
    ]:
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=f"{name}: cannot be read"):
            list(json_rows([str(tmp_path / name)]))


def test_texts_lose_their_mark_and_keep_their_line_ends(tmp_path):
    text = "a\r\nb\rc\u2028\n"
    for name, raw in [("a.txt", text.encode()), ("b.TXT.gz", gzip.compress(MARK + text.encode()))]:
        (tmp_path / name).write_bytes(raw)
        assert read_text(tmp_path / name) == text
        assert of_prompts(tmp_path / name) == [text] == list(read_texts([str(tmp_path / name)]))


def test_marks_of_captions_and_classes_are_no_part_of_them(tmp_path):
    for name, content in [("a.txt", b"caption"), ("a.cls", b"3"), ("b.json", b'{"text": "x"}')]:
        (tmp_path / name).write_bytes(MARK + content)
    facts = [sample.facts for sample in samples_of(str(tmp_path), ["text"])]
    assert facts == [{"label": 3, "text": "caption"}, {"text": "x"}]


def test_labelled_lines_come_from_folders_as_other_texts_do(tmp_path):
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(rows("a")))
    (tmp_path / "2.jsonl").write_bytes(rows("b"))
    assert of_labelled(tmp_path) == of_labelled(tmp_path / "*.jsonl*") == ["a", "b"]
    assert len(expand_paths([str(tmp_path)])) == 2


STDIN = [
    ([MARK, RAW], TEXTS),  # parts that arrive one after the other
    ([b"\n \r\n", MARK + b"\r\n", RAW.replace(b"\n", b"\r\n")], TEXTS),
    ([gzip.compress(MARK + RAW)], TEXTS),
    ([MARK + b"a {text}\r\n"], ["a {text}\r\n"]),
]


@pytest.mark.parametrize("parts, texts", quick(STDIN, 0))
def test_stdin_is_told_by_its_first_brace(parts, texts):
    code = "import json; from mjax.data.preprocess import read_texts; "
    code += "print(json.dumps(list(read_texts(['-']))))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for part in parts:
            process.stdin.write(part)
            process.stdin.flush()
        out, _ = process.communicate()
    assert json.loads(out) == texts


def test_prompts_of_other_kinds_are_refused(tmp_path):
    for row in ({"prompt": 5}, {"messages": "hi"}, {"text": "a"}, {"prompt": None}):
        (tmp_path / "p.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError, match=r'p.jsonl:1: not {"prompt"'):
            of_prompts(tmp_path / "p.jsonl")
