"""The safetensors format: tensors by byte range, and files written tensor by tensor.

A file is eight bytes of length, a JSON header of that length, then the tensors' bytes in row-major
order. Invariant: a header is believed only after it agrees with the size of its file, so a
truncated file is named before any weight is read. Follows the format description of
github.com/huggingface/safetensors; its numpy interface knows no bfloat16, hence this module.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import ml_dtypes
import numpy as np

from mjax.errors import UserError, or_user_error
from mjax.json_file import parse_json

DTYPES_BY_NAME = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
# With those that only tensors have which no model reads.
KINDS = DTYPES_BY_NAME | {
    "BOOL": np.dtype(bool),
    "F64": np.dtype(np.float64),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{sign}{8 * n}": np.dtype(f"{sign.lower()}{n}") for sign in "IU" for n in (1, 2, 4, 8)},
}
NAMES_BY_DTYPE = {dtype: name for name, dtype in KINDS.items()}
INDEX = "model.safetensors.index.json"
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)  # what reading others' JSON raises
_LONGEST_HEADER = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class Tensor:
    """A tensor of `file`, its bytes from `offset` on; `DTYPES_BY_NAME` has the readable kinds."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> np.dtype:
        if self.kind not in DTYPES_BY_NAME:
            raise UserError(
                f"{self.file}: tensor {self.name} is {self.kind}, which is not one of "
                f"{', '.join(DTYPES_BY_NAME)}; save the model in bfloat16 or float32"
            )
        return DTYPES_BY_NAME[self.kind]

    def whole(self) -> np.ndarray:
        """The tensor as it is stored, of any kind that the format has but numbers of 4 or 6 bits.

        Raises `UserError` for those.
        """
        dtype = KINDS.get(self.kind)
        if dtype is None:
            raise UserError(f"{self.file}: tensor {self.name} is {self.kind}, which cannot be kept")
        raw = np.empty(dtype.itemsize * math.prod(self.shape), np.uint8)
        with open(self.file, "rb", buffering=0) as f:
            self._fill(f.fileno(), raw, self.offset)
        return raw.view(dtype).reshape(self.shape)

    def read(self, file: int, first: int, width: int, rows: slice, cols: slice) -> np.ndarray:
        """Rows and columns of the matrix of `width` columns that begins at element `first`.

        `file`: a descriptor of `self.file`, which is read nowhere else than in these ranges.
        """
        return self.read_bytes(file, self.dtype.itemsize, first, width, rows, cols).view(self.dtype)

    def read_bytes(
        self, file: int, size: int, first: int, width: int, rows: slice, cols: slice
    ) -> np.ndarray:
        """The bytes of the part that `read` reads, uint8; an element has `size` bytes."""
        n, m = rows.stop - rows.start, cols.stop - cols.start
        raw = np.empty((n, m * size), np.uint8)
        at = self.offset + size * (first + rows.start * width + cols.start)
        if m == width:
            self._fill(file, raw.reshape(-1), at)
        else:
            for i in range(n):
                self._fill(file, raw[i], at + i * width * size)
        return raw

    def _fill(self, file: int, out: np.ndarray, at: int) -> None:
        done = 0
        while done < out.size:
            got = os.preadv(file, [out[done:]], at + done)  # at most 2 GiB a call
            if got == 0:
                raise UserError(f"{self.file}: ends within tensor {self.name}; copy it again")
            done += got


def open_folder(folder: str | Path) -> dict[str, Tensor]:
    """Name -> tensor, of model.safetensors or of the files that the index beside it names.

    Reads headers only. Raises `UserError` for a missing, damaged or truncated file.
    """
    folder = Path(folder)
    index, single = folder / INDEX, folder / "model.safetensors"
    if not index.is_file() and not single.is_file():
        if list(folder.glob("*.bin")):
            raise UserError(
                f"{folder} holds pytorch_model.bin, whose pickles mjax does not run; save it as "
                "safetensors: model.save_pretrained(folder, safe_serialization=True)"
            )
        raise UserError(f"{folder}: no model.safetensors and no {INDEX}; give a model's folder")
    if not index.is_file():
        return read_header(single)
    where, files = files_of_index(index)
    tensors: dict[str, Tensor] = {}
    for name in files:
        found = read_header(folder / name)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise UserError(f"{folder / name}: tensor {twice[0]} is also in another file")
        tensors |= found
    for name, file in where.items():
        if name not in tensors:
            raise UserError(f"{folder / file}: has no tensor {name}, which {index.name} puts there")
    return tensors


def files_of_index(index: Path) -> tuple[dict[str, str], list[str]]:
    """(the file of each tensor, the files) that an index names. Raises `UserError` for damage."""
    wrong = f"{index}: not an index with a weight_map; copy it again"
    with or_user_error(wrong, (*_MALFORMED, OSError)):
        where = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(where.values()))
    for name in files:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{index}: {name!r} is not the plain name of a file; copy it again")
    return where, files


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name. Raises `UserError` naming the file."""
    with (
        or_user_error(f"{file}: {{reason}}; copy the file again"),
        or_user_error(f"{file}: damaged safetensors header; copy the file again", _MALFORMED),
    ):
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            text = f.read(length) if length <= min(size, _LONGEST_HEADER) else b""
        header = parse_json(text)
        header.pop("__metadata__", None)
        tensors = {}
        ends = {}
        for name, entry in header.items():
            shape, (first, last) = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
            tensor = Tensor(name, file, str(entry["dtype"]), shape, 8 + length + first)
            if 8 + length + last > size:
                raise UserError(f"{file}: ends within tensor {name}; copy the file again")
            wanted = KINDS.get(tensor.kind)
            if wanted is not None and last - first != wanted.itemsize * math.prod(shape):
                raise UserError(f"{file}: tensor {name} has {last - first} bytes for {shape}")
            tensors[name] = tensor
            ends[name] = (first, last)
        _require_no_gaps(file, ends, size - 8 - length)
    return tensors


def _sizes(values: list) -> tuple[int, ...]:
    """The numbers of a shape or range; raises `ValueError` unless they are whole and >= 0."""
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(values)
    return tuple(values)


def _require_no_gaps(file: Path, ranges: Mapping[str, tuple[int, int]], size: int) -> None:
    """Tensors cover the bytes after the header exactly, each byte once."""
    at = 0
    for name, (first, last) in sorted(ranges.items(), key=lambda item: item[1]):
        if first != at or last < first:
            what = "overlaps another" if first < at else "leaves a gap before it"
            raise UserError(f"{file}: tensor {name} {what}; copy the file again")
        at = last
    if at != size:
        raise UserError(f"{file}: {size - at} bytes belong to no tensor; copy the file again")


def write_file(
    file: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    parts: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write tensors, name -> (shape, dtype), in that order; `parts(name)` is called as needed and
    gives arrays whose bytes, one after the other, are the tensor's in row-major order.
    """
    with open(file, "wb", buffering=0) as f:
        write_array(f, np.frombuffer(_header(tensors), np.uint8))
        for name, (shape, dtype) in tensors.items():
            size = 0
            for part in parts(name):
                assert part.dtype == dtype, (name, part.dtype)
                write_array(f, part)
                size += part.size
                del part  # before the next one is made
            assert size == math.prod(shape), (name, size, shape)


def _header(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], said: Mapping[str, str] | None = None
) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(said or {})}}
    at = 0
    for name, (shape, dtype) in tensors.items():
        end = at + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES_BY_DTYPE[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pack(tensors: Mapping[str, np.ndarray], said: Mapping[str, str] | None = None) -> bytes:
    """A file of small tensors of any kind, by name; `said`: texts that it holds besides."""
    entries = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    header = _header(entries, said)
    return b"".join([header, *(array.tobytes() for array in tensors.values())])


def said_in(content: bytes) -> dict[str, str]:
    """The texts of a file that `pack` made."""
    start = 8 + int.from_bytes(content[:8], "little")
    said = json.loads(content[8:start]).get("__metadata__", {})
    return {name: text for name, text in said.items() if name != "format"}


def unpack(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file that `pack` made, by name, as views of `content`."""
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = (start + at for at in entry["data_offsets"])
            flat = np.frombuffer(content[first:last], KINDS[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def require_fp16_range(array: np.ndarray, name: str) -> None:
    """Raise `UserError` if an array of float16, rounded from weights, holds inf or NaN."""
    if array.dtype == np.float16 and not np.isfinite(array).all():
        raise UserError(
            f"weight {name}: holds numbers beyond 65504, the largest of float16, or NaN; take "
            "bfloat16 or float32"
        )


def write_array(f: FileIO, array: np.ndarray) -> None:
    """The bytes of `array` in row-major order, to a file without a buffer."""
    part, done = np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0
    while done < part.size:
        done += f.write(part[done:])  # at most 2 GiB a call
