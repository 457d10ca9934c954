"""Sentences: ends of them, and full stops that are none."""

import re

import numpy as np
import pytest

from mjax.data.base.sentences import split_sentences
from mjax.data.corpus.indexed import IndexedDataset
from mjax.data.preprocess import main

CASES = {
    "plain": ["It rained.", "We stayed in!", "Why?", "Because."],
    "quotes": ['"Stop!" He did.'.split(" He")[0], "He did.", "(So they say.)", "“Then?”", "No."],
    "abbreviations": [
        "Dr. Smith met Mr. J. R. Jones, e.g. in the U.S. Senate.",
        "It was 3.5 p.m. by then.",
    ],
    "lower case": ["It is version 2. of the text, i.e. the newest... or so.", "1,000 remain."],
    "ellipsis": ["He waited…", "Then... Nothing.".split(" N")[0], "Nothing."],
    "accents": ["Il pleut.", "Écoute !", "¿Qué?", "Ähnlich.", "Да.", "Нет."],
    "Chinese": ["你好。", "是吗？", "好！"],
}


@pytest.mark.parametrize("name", CASES)
def test_sentences_end_where_they_do(name):
    assert split_sentences(" ".join(CASES[name])) == CASES[name]
    assert split_sentences("\n".join(CASES[name]) + "\n") == CASES[name]


def test_blank_lines_end_all_and_nothing_is_lost():
    assert split_sentences("a title\n\n  some text\nof two lines\n \n\nmore") == [
        "a title",
        "some text\nof two lines",
        "more",
    ]
    assert split_sentences("你好。是吗？好") == ["你好。", "是吗？", "好"]
    assert split_sentences(" \n\n ") == []
    text = " ".join(sentence for case in CASES.values() for sentence in case)
    assert re.sub(r"\s", "", "".join(split_sentences(text))) == re.sub(r"\s", "", text)


def test_preprocess_keeps_the_sentences_of_each_document(tmp_path, capsys):
    texts = ["One here. Two there.", "", "Only one", "Three. Are. Here."]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    out = tmp_path / "corpus"
    files = [str(tmp_path / f"{i}.txt") for i in range(4)]
    command = ["--input", *files, "--output", str(out), "--tokenizer", "byte", "--split-sentences"]
    for workers in ("1", "2"):
        main([*command, "--workers", workers])
        data = IndexedDataset(out)
        held = [bytes(data[i].astype(np.uint8)).decode() for i in range(len(data))]
        assert held == ["One here.", "Two there.", "Only one", "Three.", "Are.", "Here."]
        assert data.document_indices.tolist() == [0, 2, 3, 6]
    assert '"documents": 3' in capsys.readouterr().out
    main([*command, "--append-eod", "--workers", "1"])
    data = IndexedDataset(out)
    assert [int(data[i][-1]) == 256 for i in range(6)] == [False, True, True, False, False, True]
