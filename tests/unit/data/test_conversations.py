"""Conversations: formats, files, masks of answers, what is cut, and what is refused."""

import bz2
import gzip
import json
import logging

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from mjax.data import preview
from mjax.data.base.best_fit import packed
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.conversations.answer_records import PAIRS
from mjax.data.conversations.answer_rows import read_answers
from mjax.data.conversations.records import read_records, source_files
from mjax.errors import UserError
from tests.chats import (
    CHATML,
    END,
    MARKED,
    START,
    chat_config,
    chats,
    learned,
    turns,
    write_lines,
    write_tokenizer,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


PAIR = "chosen", "rejected"


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns)


@pytest.mark.parametrize(
    "record, text",
    [
        (turns("hi", "yo"), chatml(("user", "hi"), ("assistant", "yo"))),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "yo"},
                ],
                "system": "be",
            },
            chatml(
                ("system", "be"),
                ("user", "hi"),
                ("assistant", CALLED),
                ("tool", "3"),
                ("assistant", "yo"),
            ),
        ),
        (
            {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
            chatml(("user", "d"), ("assistant", "e"), ("user", "a\n\nb"), ("assistant", "c")),
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            chatml(("user", "a"), ("assistant", "b")),
        ),
    ],
)
def test_four_formats_become_one(record, text, tmp_path):
    data = chats(tmp_path, [record])
    assert learned(data)["1"][0] == text


def test_the_loss_is_on_answers_and_their_ends(tmp_path):
    plain = {"prompt": "2+2=", "completion": "4"}
    tools = turns("hi", "yo", "go", "") | {"tools": json.dumps(TOOLS)}
    tools["messages"][3]["tool_calls"] = [CALL]
    weighed = turns("hi", "no", "go", "yes")
    weighed["messages"][1]["weight"] = 0
    prompted = {
        "prompt": turns("a", "b", "c")["messages"],
        "completion": turns("", "d")["messages"][1:],
    }
    records = [turns("hi", "one", "go", "two 日本"), plain, tools, weighed, prompted]
    for template in CHATML, MARKED:
        for answers in "all", "last":
            key = f"data.conversations.answers={answers}"
            (folder := tmp_path / f"{template == CHATML}{answers}").mkdir()
            found = {
                k: v[1] for k, v in learned(chats(folder, records, key, template=template)).items()
            }
            first = {"all": f"one{END}", "last": ""}[answers]
            assert found["1"] == f"{first}two 日本{END}"
            assert found["2"] == f"4{END}"
            assert found["3"] == {"all": f"yo{END}", "last": ""}[answers] + CALLED + END
            assert found["4"] == f"yes{END}" and found["5"] == f"d{END}"


def test_reasoning_and_tools_reach_the_template(tmp_path):
    record = turns("hi", "yo") | {"tools": TOOLS}
    record["messages"][1]["reasoning_content"] = "hm"
    text, answer = learned(chats(tmp_path, [record], "data.seq_length=128", template=MARKED))["1"]
    assert text.startswith("<s>" + json.dumps(TOOLS)) and answer == f"(hm)yo{END}"


RECORDS = [turns("hi", "yo"), turns("go", "on"), {"instruction": "a", "input": None, "output": "b"}]


def saved_folder(folder, rows):
    """A folder as `datasets` writes it: `save_to_disk` of a data set with splits."""
    part = folder / "train"
    part.mkdir(parents=True)
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (part / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(part / "data-0.arrow"), "wb") as f,
        pa.ipc.new_stream(f, table.schema) as out,
    ):
        out.write_table(table)


def test_every_kind_of_file_gives_the_same_records(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "a.json").write_text("\ufeff\n" + json.dumps(RECORDS, indent=1))
    (tmp_path / "b.json").write_bytes(lines)
    keys = {key for record in RECORDS for key in record}
    parquet.write_table(
        pa.Table.from_pylist([{k: r.get(k) for k in keys} for r in RECORDS]), tmp_path / "a.parquet"
    )
    saved_folder(tmp_path / "saved", [{k: r.get(k) for k in keys} for r in RECORDS])
    wanted = [{k: v for k, v in r.items() if v is not None} for r in RECORDS]
    files = sorted(path for path in tmp_path.iterdir())
    assert len(files) == 8
    for file in files:
        rows = [row for _, row in read_records(source_files(str(file)))]
        assert [{k: v for k, v in row.items() if v is not None} for row in rows] == wanted, file


SAID = {"role": "assistant", "content": "yo"}
ASKED = {"role": "user", "content": "hi"}
CALLS = (
    [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": "f", "arguments": [1]}}],
)
# What stands in a line, and what is said of it.
BROKEN = [
    ("{", "not a JSON line"),
    ('"text"', "none of messages"),
    ("[1, 2]", "none of messages"),
    ("{}", "but nothing"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "not Unicode"),
    ("[" * 100_000, "nested too deeply"),
    ({"text": "a"}, "but 'text'"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'chosen', 'prompt'"),
    ({"messages": None}, "but nothing"),
    ({"messages": "hi"}, "messages: .* valid list"),
    ({"messages": []}, "messages: .* at least 1 item"),
    ({"messages": ["hi", "yo"]}, "messages.0: .* valid dictionary"),
    ({"messages": [ASKED]}, "says nothing"),
    ({"messages": [{"content": "a"}, SAID]}, "messages.0.role: Field required"),
    ({"messages": [{"role": "bot", "content": "a"}, SAID]}, "messages.0.role: .*'user'"),
    ({"messages": [{"role": ["user"], "content": "a"}, SAID]}, "messages.0.role"),
    ({"messages": [ASKED, {"role": "assistant"}]}, "an answer is empty"),
    ({"messages": [ASKED, {"role": "assistant", "content": ""}]}, "an answer is empty"),
    ({"messages": [ASKED, {"role": "assistant", "content": 7}]}, "1.content.* valid string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
        "text: Field required",
    ),
    ({"messages": [{"role": "user", "content": {"text": 1}}, SAID]}, "0.content.* valid string"),
    ({"messages": [ASKED, SAID | {"weight": 2}]}, "1.weight: Input should be 0 or 1"),
    ({"messages": [ASKED, SAID | {"weight": 0}]}, "says nothing that is trained on"),
    ({"messages": [ASKED, SAID | {"reasoning_content": 1}]}, "1.reasoning_content: .*string"),
    ({"messages": [ASKED | {"tool_calls": [CALL]}, SAID]}, "tool_calls of user"),
    ({"messages": [ASKED, SAID | {"tool_calls": "add"}]}, "1.tool_calls: .*list"),
    ({"messages": [ASKED, SAID | {"tool_calls": [{"id": "1"}]}]}, "0.function: Field required"),
    ({"messages": [ASKED, SAID | {"tool_calls": CALLS[0]}]}, "function.arguments.*Invalid JSON"),
    ({"messages": [ASKED, SAID | {"tool_calls": CALLS[1]}]}, "function.arguments.*dictionary"),
    ({"messages": [{"role": "tool", "content": "3"}, SAID]}, "before it is called"),
    ({"messages": [ASKED, SAID], "tools": "{"}, "tools.*Invalid JSON"),
    ({"messages": [ASKED, SAID], "tools": ["add"]}, "tools.*valid dictionary"),
    ({"messages": [ASKED, SAID], "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (
        {"messages": [ASKED, SAID], "chat_template_kwargs": [1]},
        "chat_template_kwargs: .*dictionary",
    ),
    ({"messages": [ASKED, SAID], "images": ["a.png"]}, "images: data.images.path"),
    ({"messages": [ASKED | {"content": f"a{END}b"}, SAID]}, "would become the eos_token"),
    ({"conversations": [{"from": "alice", "value": "a"}]}, "conversations.0.from: .*'human'"),
    ({"conversations": "hi"}, "conversations: .*list"),
    ({"conversations": ["hi"]}, "conversations.0: .*dictionary"),
    ({"conversations": []}, "at least 1 item"),
    ({"conversations": [{"from": "function_call", "value": "f("}]}, "Expecting value"),
    ({"conversations": [{"from": "function_call", "value": "7"}]}, "0.function: .*dictionary"),
    ({"conversations": [{"from": "gpt", "value": None}]}, "conversations.0.value: Field required"),
    ({"instruction": "a", "output": ""}, "an answer is empty"),
    ({"instruction": "", "output": "b"}, "instruction: .*at least 1 character"),
    ({"instruction": 1, "output": "b"}, "instruction: .*string"),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "history.0: .*tuple"),
    ({"instruction": "a", "output": "b", "system": 7}, "messages.0.content.*string"),
    ({"prompt": "a", "completion": ""}, "completion is empty"),
    ({"prompt": "a", "completion": [SAID]}, "neither two texts nor two lists"),
    ({"prompt": "<s>a", "completion": "b"}, "two BOS"),
    ({"prompt": [ASKED], "completion": [ASKED]}, "says nothing"),
]


def test_broken_records_are_one_line_each_or_counted_and_named(tmp_path, caplog):
    for number, (record, said) in enumerate(BROKEN):
        (folder := tmp_path / f"{number}").mkdir()
        with pytest.raises(UserError, match=rf"chats.jsonl:2: .*{said}") as e:
            chats(folder, [turns("hi", "yo"), record])
        assert "\n" not in str(e.value)
    records = [turns("hi", "yo"), *(record for record, _ in BROKEN), turns("go", "on")]
    with caplog.at_level(logging.WARNING):
        data = chats(tmp_path, records, "data.conversations.broken=skip")
    assert len(BROKEN) >= 40 and len(data.source.left_out) == len(BROKEN)
    assert learned(data).keys() == {"1", f"{len(records)}"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{len(BROKEN)} of {len(records)} records are left out" in line and ":2:" in line
    with pytest.raises(UserError, match=f"none of {len(BROKEN)} records can be used: .*:1: "):
        chats(tmp_path, records[1:-1], "data.conversations.broken=skip")


REWRITES = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' }}")
NO_END = CHATML.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    "template, key, said",
    [
        (REWRITES, "answers=all", "rewrites earlier turns"),
        (
            MARKED.replace("{{ m.content }}", "{{ m.content if loop.last }}"),
            "answers=all",
            "rewrites",
        ),
        (CHATML + "{% generation %}{% endgeneration %}", "answers=all", "marks no answer"),
        (MARKED.replace("m.role == 'assistant'", "false"), "answers=last", "no token to train on"),
        (NO_END, "answers=all", "never learn to stop"),
        (NO_END.replace("{% endfor %}", "\n\n{% endfor %}"), "answers=all", "never learn to stop"),
        (MARKED.replace("<|im_end|>{% endgen", "{% endgen"), "answers=all", "never learn to stop"),
        ("<s>" + MARKED, "answers=all", "two BOS"),
        ("{% for", "answers=all", "cannot render"),
        ("{{ raise_exception('no') }}", "answers=all", "cannot render these messages: no"),
        ("{% for i in range(99999999999) %}{% endfor %}", "answers=all", "cannot render"),
        (None, "answers=all", "no chat template"),
        (
            MARKED.replace(
                "{% generation %}", "{% generation %}a{% endgeneration %}{% generation %}"
            ),
            "answers=last",
            "marks 4 parts of 2 answers",
        ),
        (
            MARKED.replace("{% generation %}", "{% set x %}{% generation %} ").replace(
                "{% endgeneration %}", "{% endgeneration %}{% endset %}{{ x | trim | length }}"
            ),
            "answers=all",
            "blocks of the chat template cannot be found",
        ),
    ],
)
def test_templates_that_would_train_what_is_wrong_are_refused(template, key, said, tmp_path):
    records = [turns("hi", "one", "go", "two")]
    with pytest.raises(UserError, match=said) as e:
        chats(tmp_path, records, f"data.conversations.{key}", template=template)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("broken", ["refuse", "skip"])
def test_a_missing_template_is_no_fault_of_a_record_that_may_be_skipped(broken, tmp_path):
    records = [{"prompt": "a", "completion": "b"}, turns("hi", "yo")]
    key = f"data.conversations.broken={broken}"
    with pytest.raises(UserError) as e:
        chats(tmp_path, records, key, template=None)
    ways = "put chat_template.jinja there, or give plain text; texts of prompt and completion need"
    assert ways in str(e.value) and "broken=skip" not in str(e.value)
    path = write_lines(tmp_path / "pairs.jsonl", [{k: turns("hi", k)["messages"] for k in PAIR}])
    cfg = chat_config(tmp_path, path, key, template=None)
    with pytest.raises(UserError) as e:
        read_answers(path, cfg, load_tokenizer(cfg.data.tokenizer), PAIRS)
    assert ways in str(e.value) and "broken=skip" not in str(e.value)


def test_a_template_that_rewrites_may_train_the_last_answer(tmp_path):
    data = chats(
        tmp_path,
        [turns("a", "one", "b", "two")],
        "data.conversations.answers=last",
        template=REWRITES,
    )
    assert learned(data)["1"] == (
        chatml(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "two")),
        f"two{END}",
    )


def damaged(folder):
    """Files that cannot be read, and what is said of each."""
    whole = json.dumps(turns("hi", "yo")).encode() * 100
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(whole)[:-9])
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(whole)[:-9])
    (folder / "c.parquet").write_bytes(b"PAR1 no")
    (folder / "d.arrow").write_bytes(b"no")
    (folder / "e.json").write_text('[{"messages": ')
    (folder / "e2.json").write_text('[{"prompt": "\\ud800", "completion": "a"}]')
    (folder / "f.csv").write_text("a,b")
    (folder / "g").mkdir()
    (folder / "g" / "state.json").write_text("{}")
    (folder / "h").mkdir()
    (folder / "h" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    (folder / "i").mkdir()
    (folder / "i" / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    said = ["cannot be read"] * 4 + ["not JSON", "not Unicode", "no .jsonl, .json or .parquet"]
    said += ["not a folder of save_to_disk", "has no split train", "cannot be read"]
    names = sorted(path for path in folder.iterdir())
    return [*zip(names, said, strict=True), (folder / "none", "no such file")]


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    for file, said in damaged(tmp_path):
        with pytest.raises(UserError, match=said) as e:
            list(read_records(source_files(str(file))))
        assert "\n" not in str(e.value) and str(file) in str(e.value)


def test_what_is_too_long_is_cut_left_out_or_refused(tmp_path, caplog):
    records = [turns("q", "a" * 100), turns("q" * 100, "a"), turns("q", "short")]
    for policy, left in ("cut", 2), ("skip", 1):
        data = chats(tmp_path, records, f"data.conversations.too_long={policy}")
        assert len(data.numbers) == left
    assert data.counts.dropped == 2 and data.counts.lost_trained == 101 + 2
    data = chats(tmp_path, records)
    assert data.counts.cut == data.counts.dropped == 1
    tokens = sum(data.source.lengths) - 3
    assert sum(data.lengths) + data.counts.lost == tokens
    trained = sum(data.batch([n])["loss_mask"].sum() for n in range(len(data)))
    assert trained + data.counts.lost_trained == 101 + 2 + 6
    with pytest.raises(UserError, match=r"2 of 3 .*chats.jsonl:\d: 1\d\d\)"):
        chats(tmp_path, records, "data.conversations.too_long=refuse")


def random_records(count: int, longest: int = 40) -> list[dict]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, longest, (count, 2))
    return [turns("q" * a, f"{n:03}" + "a" * b) for n, (a, b) in enumerate(sizes)]


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_every_token_is_in_one_row_of_an_epoch(rows, tmp_path):
    keys = "data.seq_length=128", f"data.conversations.rows={rows}"
    data = chats(tmp_path, random_records(60), *keys)
    orders = []
    for epoch in range(3):
        first = epoch * len(data)
        batch = data.batch(np.arange(first, first + len(data)))
        found = []
        for row in range(len(data)):
            segments = batch["segment_ids"][row]
            for document in range(1, segments.max() + 1):
                at = np.flatnonzero(segments == document)
                np.testing.assert_array_equal(batch["positions"][row][at], np.arange(len(at)))
                ids = [*batch["tokens"][row][at], batch["labels"][row][at[-1]]]
                mask = batch["loss_mask"][row][at]
                np.testing.assert_array_equal(ids[1:], batch["labels"][row][at])
                found.append((tuple(ids), tuple(mask)))
            assert not batch["loss_mask"][row][segments == 0].any()
        wanted = [data.source[n] for n in range(60)]
        assert sorted(found) == sorted((tuple(i), tuple(m[1:].astype(float))) for i, m in wanted)
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]
    again = chats(tmp_path, random_records(60), *keys)
    for name, array in again.batch(np.arange(len(data))).items():
        np.testing.assert_array_equal(array, data.batch(np.arange(len(data)))[name])
    if rows == "packed":
        used = data.sizes(np.arange(len(data)))[:, 0]
        assert used.sum() / (128 * len(data)) > 0.9 and used.max() <= 128
        assert data.max_documents == 1 + max(map(len, data.ranks)) == 3


def test_best_fit_packs_what_fits():
    costs = [(n,) for n in (5, 5, 4, 4, 3, 3)]
    rows = packed(costs, (8,))
    assert sorted(n for row in rows for n in row) == list(range(6)) and len(rows) == 3
    assert all(sum(costs[n][0] for n in row) == 8 for row in rows)


def test_the_tokens_are_kept_until_files_or_settings_change(tmp_path):
    folder = tmp_path / "run" / "conversations"
    chats(tmp_path, RECORDS[:2])
    chats(tmp_path, RECORDS[:2], "data.conversations.rows=padded")
    assert len(list(folder.iterdir())) == 2  # the file was written twice
    chats(tmp_path, RECORDS, "data.conversations.answers=last")
    chats(tmp_path, RECORDS, "data.conversations.answers=last", template=MARKED)
    assert len(list(folder.iterdir())) == 4


def test_the_preview_shows_the_mask_and_counts_what_is_lost(tmp_path, capsys):
    records = [turns("hi \x1b[31m", "yo", "go", "on"), turns("q", "a" * 100), {"messages": []}]
    path = write_lines(tmp_path / "chats.jsonl", [*records, turns("q" * 100, "a")])
    name = write_tokenizer(tmp_path / "tokenizer")
    keys = ["model.vocab_size=260", "data.seq_length=64", f"data.tokenizer={name}"]
    keys += [f"data.conversations.path={path}", f"run.dir={tmp_path}", "train.eval_interval=null"]
    keys += ["data.split=[1,0,0]", "data.conversations.broken=skip"]
    assert preview.main([*keys, "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert f"hi \\x1b[31m{END}\n{START}assistant\n«yo{END}»\n" in said and "\x1b" not in said
    assert "4 records, 1 left out as broken" in said and ":3: messages: List should" in said
    assert "2; 1 are cut to data.seq_length=64, 1 dropped;" in said and "58 of answers" in said
    assert "2 rows" in said
    with pytest.raises(UserError, match="a preview of -1 rows: give a number from 0"):
        preview.main([*keys, "--rows", "-1"])
    empty = write_lines(tmp_path / "empty.jsonl", [""])
    with pytest.raises(UserError, match="empty.jsonl: holds no record; give a file that has some"):
        preview.main([*keys, f"data.conversations.path={empty}"])
