"""Traces are files that fine-tuning reads."""

import json
import sys

from mjax.data.conversations.formats import parse_record
from tools import countdown_traces


def test_a_file_of_traces_is_one_of_conversations(tmp_path, monkeypatch):
    out = tmp_path / "traces.jsonl"
    monkeypatch.setattr(sys, "argv", ["traces", "--out", str(out), "--count", "5"])
    assert countdown_traces.main() == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 5
    for record in records:
        assert parse_record(record, "here").plain == (record["prompt"], record["completion"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--chat"])
    countdown_traces.main()
    for line, record in zip(out.read_text().splitlines(), records, strict=True):
        conversation = parse_record(json.loads(line), "here")
        assert [m["content"] for m in conversation.messages] == [*record.values()]
        assert conversation.answers == [1]
