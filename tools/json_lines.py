"""Files of records, one JSON object a line, as `data.conversations.path` reads them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_records(file: Path, records: Iterable[Mapping]) -> None:
    """Write each record as a line of JSON."""
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
