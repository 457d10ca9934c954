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
