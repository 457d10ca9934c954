"""Files of conversations as records: JSON lines, JSON, parquet, folders of Hugging Face datasets.

Invariant: records and their order are a function of the files, as the file system sorts their
names. A file that cannot be read is an error; a record that cannot is yielded as one.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mjax.data.base import documents
from mjax.errors import UserError, or_user_error
from mjax.json_file import parse_json, read_json

Record = tuple[str, dict | UserError]  # FILE:LINE, and what stands there

_ONE_JSON = re.compile(r"\.json(\.(gz|zst|bz2|xz))*$", re.IGNORECASE)
_ARROW, _PARQUET = ".arrow", ".parquet"
_UNREADABLE = OSError, ValueError, LookupError, TypeError


def source_files(path: str) -> list[str]:
    """The files of a source. Raises `UserError` where it has none with records."""
    folder = Path(path)
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _saved_files(folder)
    files = documents.expand_paths([path])
    for file in files:
        if not documents.is_json_lines(file) and Path(file).suffix not in (_ARROW, _PARQUET):
            raise UserError(
                f"data.conversations: {file} is no .jsonl, .json or .parquet, nor a folder of "
                "save_to_disk; give one, or a glob of those"
            )
    return files


def read_records(files: list[str]) -> Iterator[Record]:
    """Yield each record with its place. Raises `UserError` for a file that cannot be read."""
    for file in files:
        if Path(file).suffix in (_ARROW, _PARQUET):
            yield from _table_rows(file)
        elif _ONE_JSON.search(file) and (text := _unmarked_text(file)).startswith("["):
            yield from _list_rows(file, text)
        else:
            for document in documents.read_documents([file], all_lines=True):
                yield document.where, attempt(documents.json_row, document)


def attempt(function: Callable, given: object, *rest: object) -> Any:
    """The result of a function on what is given; or the `UserError` that was given, or raised."""
    if isinstance(given, UserError):
        return given
    try:
        return function(given, *rest)
    except UserError as e:
        return e


def _unmarked_text(file: str) -> str:
    """The text of a file without a byte-order mark and leading space."""
    return documents.read_text(file).removeprefix(documents.MARK).lstrip()


def _list_rows(file: str, text: str) -> Iterator[Record]:
    with or_user_error(f"{file}: not JSON ({{reason}}); mend it or copy it again", ValueError):
        rows = parse_json(text)
        documents.require_unicode(file, json.dumps(rows, ensure_ascii=False))
    for number, row in enumerate(rows):
        yield f"{file}:{number}", row if isinstance(row, dict) else {}


def _saved_files(folder: Path) -> list[str]:
    """The files of a data set, or of the training split of several, of `save_to_disk`."""
    wrong = f"{folder}: not a folder of save_to_disk ({{reason}}); save it again"
    with or_user_error(wrong, _UNREADABLE):
        if (folder / "dataset_dict.json").is_file():
            splits = read_json(folder / "dataset_dict.json")["splits"]
            if "train" not in splits:
                said = f"{folder} has no split train, only {', '.join(splits)}"
                raise UserError(f"data.conversations: {said}; give the folder of one")
            return _saved_files(folder / "train")
        state = read_json(folder / "state.json")
        if state.get("_indices_files"):
            raise ValueError("it is a selection of rows; save it with flatten_indices()")
        return [str(folder / entry["filename"]) for entry in state["_data_files"]]


def _table_rows(file: str) -> Iterator[Record]:
    """Rows of a parquet file or of an arrow stream."""
    with or_user_error(f"{file} needs pyarrow; install mjax[data]", ImportError):
        import pyarrow.ipc
        from pyarrow import parquet
    wrong = f"{file}: cannot be read: {{reason}}; mend it or copy it again"
    with or_user_error(wrong, _UNREADABLE), open(file, "rb") as opened:
        if file.endswith(_PARQUET):
            batches = parquet.ParquetFile(opened).iter_batches()
        else:
            batches = iter(pyarrow.ipc.open_stream(opened))
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows):
            yield f"{file}:{number}", row
