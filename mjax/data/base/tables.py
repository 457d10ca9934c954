"""Parquet and arrow files of texts: the column that holds the text, row by row."""

import itertools
from collections.abc import Iterator
from typing import Any

from mjax.errors import UserError, or_user_error

USUAL_COLUMNS = "text", "content"
_TABLE_ERRORS = OSError, ValueError, LookupError, TypeError


def table_texts(name: str, file: str, column: str | None) -> Iterator[tuple[str, str]]:
    """Yield (NAME:ROW, text) of the rows of `file` that have a text.

    column: None for the one that `text_column` finds. Raises `UserError`.
    """
    with or_user_error(f"{name} needs pyarrow; install mjax[data]", ImportError):
        import pyarrow.ipc
        from pyarrow import parquet
    wrong = f"{name}: cannot be read: {{reason}}; mend it or copy it again"
    with or_user_error(wrong, _TABLE_ERRORS), open(file, "rb") as opened:
        if file.endswith(".parquet"):
            table = parquet.ParquetFile(opened)
            column = text_column(table.schema_arrow, column, name)
            batches = table.iter_batches(columns=[column])
        else:
            is_stream = opened.peek(6)[:6] != b"ARROW1"
            read = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
            table = read(opened)
            column = text_column(table.schema, column, name)
            numbers = range(0 if is_stream else table.num_record_batches)
            batches = table if is_stream else map(table.get_batch, numbers)
        texts = itertools.chain.from_iterable(b.column(column).to_pylist() for b in batches)
        for number, text in enumerate(texts):
            if text is not None:
                yield f"{name}:{number}", text


def text_column(schema: Any, wanted: str | None, where: str) -> str:
    """The column of texts: the wanted one, one of the usual names, or the only one of strings."""
    import pyarrow

    strings = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    found = [field.name for field in schema if field.type in strings]
    usual = [name for name in USUAL_COLUMNS if name in found]
    choices = [wanted] if wanted else usual[:1] or found
    if len(choices) != 1 or choices[0] not in found:
        what = (
            f"no column of text {wanted!r}" if wanted else "which column is the text is not clear"
        )
        raise UserError(
            f"{where}: {what} (columns of text: {', '.join(found) or 'none'}); "
            "set data.text_key or --json-key"
        )
    return choices[0]
