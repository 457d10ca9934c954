"""Models of the Hugging Face hub: the folder in its cache that a name such as org/name means.

A string is asked of the hub only if it cannot be a path: it has one slash, does not start with a
dot, and nothing of that name is on disk. org/name@REVISION is a branch, a tag or a commit of it.
huggingface_hub does the rest: its cache and token are those of transformers (HF_HOME, HF_TOKEN, the
login file), and it reads HF_HUB_OFFLINE and HF_ENDPOINT. Invariant: a process reads one commit of a
name, and of that only the files that a model needs.
"""

import functools
import glob
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import mjax
from mjax.checkpoint.base.mirror import fetched_weights
from mjax.checkpoint.base.safetensors import INDEX, files_of_index
from mjax.config.languages.paths import is_address
from mjax.config.schema.run import Config
from mjax.data.base.object_store import address_of
from mjax.errors import UserError, first_line, or_user_error

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What lies beside weights: config, tokenizer, chat templates, model card and license.
_BESIDE = "*.json *.jinja *.model *.tiktoken *.txt README.md LICENSE*".split()
# A star also matches a slash: all folders but additional_chat_templates are of other programs.
_FOLDERS = ["[!a]*/*", "a[!d]*/*"]
_VOCABULARIES = ".json", ".model", ".tiktoken", ".txt"  # of files, which are not on the hub
_WEIGHTS = "model.safetensors", "adapter_model.safetensors"


class HubName(NamedTuple):
    """A model of the hub and one of its branches, tags or commits."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def hub_name(path: str | Path | None) -> HubName | None:
    """The model of the hub that a string means; None for a path. A `Path` is never a name."""
    name = parse_hub_name(path) if isinstance(path, str) else None
    if name is None or Path(path).exists() or Path(name.repo).exists():
        return None
    return name


def parse_hub_name(text: str) -> HubName | None:
    """The name that a text is, whatever is on disk; None if it has not that form."""
    match = _HUB_NAME.fullmatch(text)
    return None if match is None else HubName(match[1], match[2] or "main")


def model_folder(path: str | Path, weights: bool = False) -> Path:
    """The folder that a path or a model's name on the hub means, fetched if it is not in the cache.

    An address in an object store means its copy in the cache (`mirror.py`). weights: fetch the
    weights too, not only what lies beside them. Raises `UserError` for what the hub or the store
    does not give.
    """
    if is_address(path):
        return fetched_weights(address_of(path))
    name = hub_name(path)
    if name is None:
        return Path(path).expanduser()
    folder = _fetch_companions(name)
    if weights:
        _fetch_weights(name, folder)
    return folder


def with_hub_tokenizer(cfg: Config) -> Config:
    """A config whose `data.tokenizer` is a folder of the cache, where it names a model of the hub.

    Raises `UserError` for what the hub does not give.
    """
    name = cfg.data.tokenizer
    if hub_name(name) is None or Path(name).suffix in _VOCABULARIES:
        return cfg
    data = cfg.data.model_copy(update={"tokenizer": str(model_folder(name))})
    return cfg.model_copy(update={"data": data})


def pinned(path: str | None) -> str | None:
    """The same with the commit that this process reads, org/name@COMMIT, if it is of the hub."""
    name = hub_name(path)
    return path if name is None else f"{name.repo}@{model_folder(path).name}"


@functools.cache
def _fetch_companions(name: HubName) -> Path:
    hub, trouble = import_hub(), None
    is_cached = hub.constants.HF_HUB_OFFLINE
    if not is_cached and not _COMMIT.fullmatch(name.revision):
        try:
            hub.HfApi(library_name="mjax").model_info(name.repo, revision=name.revision)
        except hub.errors.RevisionNotFoundError as e:
            raise UserError(_line_on(e, str(name))) from e
        except Exception as e:  # of huggingface_hub, httpx or requests: they share no base
            trouble, is_cached = e, True
    try:
        folder = _download(name, name.revision, _BESIDE, is_cached)
    except Exception as e:
        raise UserError(_line_on(trouble or e, str(name))) from e
    if trouble is not None:
        line = f"{_line_on(trouble, str(name))}; taking its copy in the cache, {folder.name}"
        print(f"mjax: {line}", file=sys.stderr, flush=True)
    return folder


@functools.cache
def _fetch_weights(name: HubName, folder: Path) -> None:
    index = folder / INDEX
    files = files_of_index(index)[1] if index.is_file() else _WEIGHTS
    hub = import_hub()
    is_cached = hub.constants.HF_HUB_OFFLINE
    with hub_errors(str(name)):
        # A file that the cache has is not asked for again, so a broken download goes on.
        _download(name, folder.name, [glob.escape(file) for file in files], is_cached)
        if is_cached and not any((folder / file).is_file() for file in files):
            raise hub.errors.LocalEntryNotFoundError("no weights")  # old versions do not look
    if not any((folder / file).is_file() for file in files):
        raise UserError(
            f"{name}: the hub has no safetensors of it, and mjax reads no other weights; give a "
            "model that was saved with safe_serialization=True"
        )


def _download(name: HubName, revision: str, patterns: list[str], is_cached: bool) -> Path:
    hub = import_hub()
    if not sys.stderr.isatty():  # a log has no bars
        hub.utils.disable_progress_bars()
    found = hub.snapshot_download(
        name.repo,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=_FOLDERS,
        local_files_only=is_cached,
        library_name="mjax",
        library_version=mjax.__version__,
    )
    return Path(found)


def import_hub() -> ModuleType:
    """The package huggingface_hub. Raises `UserError` where it is missing."""
    wrong = "a model of the Hugging Face hub needs huggingface_hub: pip install 'mjax[hub]'"
    with or_user_error(wrong, ImportError):
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    return huggingface_hub


@contextmanager
def hub_errors(name: str, sends: bool = False) -> Iterator[None]:
    """Raise whatever a call of huggingface_hub raises as a `UserError` on the model `name`.

    sends: the call writes to the hub.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # of huggingface_hub, httpx or requests: they share no base
        raise UserError(_line_on(e, name, sends)) from e


def _line_on(error: Exception, name: str, sends: bool = False) -> str:
    """One line on what the hub did not do, and how to mend it."""
    hub = import_hub()
    kinds, where = hub.errors, hub.constants.ENDPOINT
    token = "set HF_TOKEN to a token that may, or log in with `hf auth login`"
    status = getattr(getattr(error, "response", None), "status_code", None)
    start = f"{name}: " if sends else f"{name}: no such folder, and "
    if isinstance(error, kinds.GatedRepoError):
        return f"{name}: gated; accept its terms at {where}/{name.partition('@')[0]}, then {token}"
    if isinstance(error, kinds.RevisionNotFoundError):
        return f"{name}: the hub has no such branch, tag or commit of it; give another revision"
    if isinstance(error, kinds.RepositoryNotFoundError):
        return f"{start}{where} shows no such model; if it is private, {token}"
    if status in (401, 403):
        return f"{start}{where} refuses the token (HTTP {status}); {token}"
    if isinstance(error, kinds.LocalEntryNotFoundError) and hub.constants.HF_HUB_OFFLINE:
        return f"{start}it is not whole in the cache; unset HF_HUB_OFFLINE to fetch it"
    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or hub.constants.HF_HUB_CACHE
        return f"{name}: {place}: {error.strerror}; mend it, or set HF_HUB_CACHE to another folder"
    cause = error.__cause__ if isinstance(error, kinds.LocalEntryNotFoundError) else None
    return f"{start}{where} does not answer as it should: {first_line(cause or error)}"
