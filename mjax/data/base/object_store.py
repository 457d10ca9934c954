"""Files in object stores (s3://, gs://) and on the Hugging Face hub (hf://), through fsspec.

Invariants: what is read is whole and of one version of the object; a copy on disk gets its name
last. A request that fails, comes short or takes too long is made again after a pause that doubles;
what no repetition mends, such as a missing permission, is one line at once.
"""

import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mjax.config.languages.paths import is_address
from mjax.errors import UserError, or_user_error, reason

log = logging.getLogger(__name__)

TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds
REQUEST_BYTES = 2**23  # bytes of one request
PARTS_AT_ONCE = 4
LONGEST_REQUEST = 120.0  # seconds that one request may take, however slowly it goes on

# Protocols with the extra of mjax that reads them, and what gives permission. memory: for tests.
EXTRAS = {"s3": "s3", "gs": "gcs", "hf": "hub", "memory": "hub"}
LOGINS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or FSSPEC_S3_ANON=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`",
    "hf": "HF_TOKEN or `hf auth login`",
}
_MISSING = FileNotFoundError, IsADirectoryError, NotADirectoryError
_DEFECTS = UserError, TypeError, AttributeError, AssertionError
_RETRIED = (408, 425, 429)  # HTTP codes below 500 that may pass


@dataclass(frozen=True)
class StoredObject:
    """An object as it was when it was found. version: its ETag, generation or time of change."""

    address: str
    size: int
    version: str


def address_of(path: str | os.PathLike) -> str:
    """An address with both of its slashes, which `Path` makes one."""
    protocol, _, rest = str(path).partition(":")
    return f"{protocol}://{rest.lstrip('/')}"


@functools.cache
def file_system(protocol: str) -> Any:
    """The file system of fsspec for addresses of a protocol. Raises `UserError` without one."""
    if protocol not in EXTRAS:
        raise UserError(f"{protocol}:// is no store that mjax reads; give s3://, gs:// or hf://")
    wrong = f"{protocol}:// needs another package: pip install 'mjax[{EXTRAS[protocol]}]'"
    options: dict = {} if protocol in ("hf", "memory") else {"use_listings_cache": False}
    if protocol == "s3":
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "read_timeout": 60}
    with or_user_error(wrong, ImportError):
        import fsspec

        made = fsspec.filesystem(protocol, **options)
    if protocol == "s3":
        made.retries = 1  # ours are enough, and they are in the log
    return made


def attempt_often(address: str, function: Callable, *given: object, **named: object) -> Any:
    """The result of a function on the file system of an address, which is called until it works.

    Raises `UserError` where it cannot work, or does not after `TRIES` calls.
    """
    pause = FIRST_PAUSE
    for number in range(1, TRIES + 1):
        try:
            return function(*given, **named)
        except _DEFECTS:
            raise
        except Exception as e:  # the packages share no base of their errors
            if _is_final(e):
                raise UserError(f"{address}: {_what_is_wrong(address, e)}") from e
            if number == TRIES:
                raise UserError(
                    f"{address}: {_words_of(e)}, {TRIES} times in a row; start again when the "
                    "store answers"
                ) from e
            log.info("%s: %s; trying again in %g s", address, _words_of(e), pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError


def _is_final(error: Exception) -> bool:
    """Whether another attempt would fail likewise."""
    status = _status(error)
    is_refused = status is not None and 400 <= status < 500 and status not in _RETRIED
    return is_refused or isinstance(error, (PermissionError, *_MISSING)) or _lacks_login(error)


def _lacks_login(error: Exception) -> bool:
    """Whether an error without a code says that one may not."""
    said = f"{type(error).__name__} {error}"
    return any(word in said for word in ("redential", "ExpiredToken", "Forbidden"))


def _status(error: Exception) -> int | None:
    """The HTTP code that an error of any of the packages tells."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = getattr(response, "status_code", None) or getattr(error, "code", None)
    return int(found) if str(found).isdecimal() else None


def _what_is_wrong(address: str, error: Exception) -> str:
    if isinstance(error, _MISSING) or _status(error) == 404:
        return "the store has no such bucket, folder or object; check the address"
    login = LOGINS.get(address.partition(":")[0], "credentials")
    return f"the store refuses it ({_words_of(error)}); set {login}, of one who may"


def _words_of(error: Exception) -> str:
    return reason(error).rstrip(".")[:200]


def stored_object(address: str) -> StoredObject:
    """The object at an address as it is now."""
    fs = file_system(address.partition(":")[0])
    named = {"refresh": True} if address.startswith("hf:") else {}
    return _stored_object(address, attempt_often(address, fs.info, address, **named))


def _stored_object(address: str, info: dict) -> StoredObject:
    keys = "ETag", "etag", "generation", "blob_id", "LastModified", "mtime", "created"
    version = next((info[key] for key in keys if info.get(key)), "")
    if hasattr(version, "timestamp"):
        version = version.timestamp()
    return StoredObject(address, int(info["size"] or 0), str(version))


def list_objects(address: str) -> list[StoredObject]:
    """The objects that an address names, in sorted order: itself, those below it or of its glob."""
    fs = file_system(address.partition(":")[0])
    is_glob = any(sign in address for sign in "*?[")
    find = fs.glob if is_glob else fs.find
    found = attempt_often(address, find, address, detail=True)
    files = []
    for name, info in found.items():
        if info["type"] == "file":
            full = address_of(fs.unstrip_protocol(name))
            files.append(_stored_object(full, info))
    return sorted(files, key=lambda file: file.address)


def read_range(found: StoredObject, begin: int, size: int) -> bytes:
    """Bytes [begin, begin + size) of an object."""
    fs = file_system(found.address.partition(":")[0])
    named = {"timeout": LONGEST_REQUEST} if getattr(fs, "async_impl", False) else {}

    def read() -> bytes:
        content = fs.cat_file(found.address, start=begin, end=begin + size, **named)
        if len(content) != size:
            require_unchanged(found)
            raise OSError(f"{len(content)} bytes came where {size} were asked for")
        return content

    return attempt_often(found.address, read) if size else b""


def require_unchanged(found: StoredObject) -> None:
    """Raise `UserError` if an object is not the one that was found, by two looks at it."""
    now = stored_object(found.address)
    if now != found and (now := stored_object(found.address)) != found:
        raise UserError(
            f"{found.address}: changed while it was read, from {found.size} bytes to {now.size}; "
            "leave objects as they are while runs read them, and start again"
        )


def fetch(found: StoredObject, path: Path) -> Path:
    """Copy an object to `path`, which appears when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    wrong = f"{path}: cannot be written: {{reason}}; free space or choose another folder"
    starts = list(range(0, found.size, REQUEST_BYTES))
    with or_user_error(wrong), ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                for first in range(0, len(starts), PARTS_AT_ONCE):
                    some = starts[first : first + PARTS_AT_ONCE]
                    sizes = [min(REQUEST_BYTES, found.size - begin) for begin in some]
                    file.writelines(pool.map(functools.partial(read_range, found), some, sizes))
            require_unchanged(found)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def send_file(path: Path, address: str) -> None:
    """Copy a file to an address. Stores show an object when it is whole."""
    fs = file_system(address.partition(":")[0])

    def put() -> None:
        fs.put_file(str(path), address)
        size = int(fs.info(address)["size"])
        if size != path.stat().st_size:
            raise OSError(f"the store has {size} bytes of {path.stat().st_size}")

    attempt_often(address, put)


def remove_objects(addresses: list[str]) -> None:
    """Remove objects, one after the other; those that are gone are fine."""
    for address in addresses:
        fs = file_system(address.partition(":")[0])
        with contextlib.suppress(FileNotFoundError):
            attempt_often(address, _remove_one, fs, address)


def _remove_one(fs: Any, address: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(address)


def store_cache() -> Path:
    """The folder for copies that outlast a process: MJAX_CACHE, by default ~/.cache/mjax."""
    return Path(os.environ.get("MJAX_CACHE") or Path.home() / ".cache" / "mjax")


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """A file as one on disk: itself, or a copy of an object that is removed after the block."""
    if not is_address(path):
        yield path
        return
    if (cached := _in_cache_of_hub(path)) is not None:
        yield cached
        return
    with tempfile.TemporaryDirectory(prefix="mjax-") as folder:
        yield str(fetch(stored_object(path), Path(folder) / path.rpartition("/")[2]))


def _in_cache_of_hub(address: str) -> str | None:
    """The file of the hub's own cache that hf://datasets/ORG/NAME@COMMIT/FILE means, if any."""
    if not address.startswith("hf://datasets/"):
        return None
    import huggingface_hub

    org, name, file = address.removeprefix("hf://datasets/").split("/", 2)
    name, _, commit = name.partition("@")
    where = {"repo_type": "dataset", "revision": commit or None}
    found = huggingface_hub.try_to_load_from_cache(f"{org}/{name}", file, **where)
    return found if isinstance(found, str) else None
