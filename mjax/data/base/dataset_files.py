"""Places of text as lists of files: addresses, and Hugging Face data sets on disk or on the hub.

A place is PLACE[:SPLIT] or PLACE[:CONFIG:SPLIT]: an address (s3://, gs://,
hf://datasets/ORG/NAME[@REVISION][/FOLDER]) or a folder. Which files are a split's is said by
`save_to_disk` (state.json), or by the YAML on top of README.md, or else by their names, as in
`datasets`. Invariant: files of the hub are those of one commit, which their addresses name.
"""

import functools
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import yaml

from mjax.config.languages.paths import is_address
from mjax.data.base.object_store import address_of, attempt_often, list_objects, local_copy
from mjax.errors import UserError, or_user_error
from mjax.json_file import parse_json

TABLE_ENDINGS = (".parquet", ".arrow")
_TEXT_FILES = re.compile(
    r"\.(parquet|arrow|jsonl|json|ndjson|jsonlines|txt)(\.(gz|zst|bz2|xz))*$", re.I
)
_PLACE = re.compile(r"((?:\w+://?)?[^:]*)(?::([\w.-]+))?(?::([\w.-]+))?")
_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
_DESCRIPTIONS = "state.json", "dataset_dict.json", "dataset_infos.json", "dataset_info.json"
# Words of splits in names of files, as `datasets` knows them.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}

Read = Callable[[str], bytes]  # the content of a file by its name in the place


def dataset_files(name: str) -> list[str] | None:
    """The files of a place of text; None for what `documents.expand_paths` finds by itself.

    Raises `UserError` where the place has no such split, or no text.
    """
    place, config, split = _parts(name)
    if is_address(name):
        return _files_of_address(address_of(place), config, split)
    folder = Path(place)
    if not folder.is_dir() or (not split and not _is_dataset(folder)):
        return None
    below = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.as_posix() for path in below]

    def read(file: str) -> bytes:
        with or_user_error(f"{folder / file}: cannot be read: {{reason}}"):
            return (folder / file).read_bytes()

    return [str(folder / file) for file in files_of_split(names, read, config, split, name)]


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """(place, config, split) of a name."""
    found = _PLACE.fullmatch(name)
    if found is None:
        return name, None, None
    place, first, second = found.groups()
    return (place, first, second) if second else (place, None, first)


def _is_dataset(folder: Path) -> bool:
    """Whether a folder says that it is a data set of Hugging Face."""
    if any((folder / name).is_file() for name in _DESCRIPTIONS):
        return True
    card = folder / "README.md"
    return card.is_file() and "configs" in _card_of(card.read_bytes(), str(card))


def _files_of_address(address: str, config: str | None, split: str | None) -> list[str]:
    root = address
    if address.startswith("hf:"):
        root, address = _at_commit(address)
    elif "*" not in address:
        root = address = address.rstrip("/")
    found = [stored.address for stored in list_objects(address)]
    if found == [address] or (address != root and "*" in address):
        return found
    names = [file.removeprefix(f"{root}/") for file in found]
    if not any(map(_TEXT_FILES.search, names)):
        raise UserError(f"{address}: no file of text there (parquet, arrow, JSON lines, .txt)")
    if not (split or address.startswith("hf:") or {*names} & {*_DESCRIPTIONS}):
        return [file for file in found if not PurePosixPath(file).name.startswith((".", "_"))]

    def read(file: str) -> bytes:
        with local_copy(f"{root}/{file}") as copy:
            return Path(copy).read_bytes()

    return [f"{root}/{file}" for file in files_of_split(names, read, config, split, address)]


@functools.cache
def _at_commit(address: str) -> tuple[str, str]:
    """(root of a data set of the hub, the address within), both at the commit it has now."""
    with or_user_error("hf:// needs huggingface_hub: pip install 'mjax[hub]'", ImportError):
        import huggingface_hub
    found = _HUB.fullmatch(address)
    if found is None:
        raise UserError(f"{address}: write hf://datasets/ORG/NAME, and maybe @REVISION or :SPLIT")
    repo, revision, rest = found.groups()
    api = huggingface_hub.HfApi(library_name="mjax")
    commit = attempt_often(address, api.dataset_info, repo, revision=revision).sha
    root = f"hf://datasets/{repo}@{commit}"
    return root, f"{root}/{rest}".rstrip("/") if rest else root


def files_of_split(
    names: list[str], read: Read, config: str | None, split: str | None, where: str
) -> list[str]:
    """The files of a split, by default train, among `names` of the files of a data set."""
    split = split or "train"
    if "dataset_dict.json" in names:
        kept = [name.removeprefix(f"{split}/") for name in names if name.startswith(f"{split}/")]
        inner = files_of_split(kept, lambda name: read(f"{split}/{name}"), None, split, where)
        return [f"{split}/{name}" for name in inner]
    if "state.json" in names:
        return _files_saved(parse_json(read("state.json")), where)
    texts = [name for name in names if _TEXT_FILES.search(name) and name not in _DESCRIPTIONS]
    card = _card_of(read("README.md"), where) if "README.md" in names else {}
    patterns = _declared_globs(card, config, split, where)
    if patterns is None:
        found = _files_named(texts, split)
    else:
        found = [name for name in texts if any(fnmatch(name, p) for p in patterns)]
    if not found:
        raise UserError(f"{where}: no file of text of split {split!r} there; give PLACE:SPLIT")
    return found


def _files_saved(state: dict, where: str) -> list[str]:
    wrong = f"{where}: state.json is not of save_to_disk ({{reason}}); save it again"
    with or_user_error(wrong, (LookupError, TypeError)):
        if state.get("_indices_files"):
            raise UserError(f"{where}: a selection of rows; save it with flatten_indices()")
        return [entry["filename"] for entry in state["_data_files"]]


def _card_of(content: bytes, where: str) -> dict:
    """The YAML on top of a data set's README.md."""
    text = content.decode(errors="replace")
    if not text.startswith("---"):
        return {}
    with or_user_error(f"{where}: the YAML of README.md: {{reason}}; mend it", yaml.YAMLError):
        found = yaml.safe_load(text.split("---", 2)[1])
    return found if isinstance(found, dict) else {}


def _declared_globs(card: dict, config: str | None, split: str, where: str) -> list[str] | None:
    """Globs of the files of a split, as a card says; None if it says nothing."""
    configs = {entry.get("config_name", "default"): entry for entry in card.get("configs") or []}
    if config is None and configs:
        config = next((c for c, e in configs.items() if e.get("default")), None)
        config = config or ("default" if "default" in configs else None)
        if config is None and len(configs) > 1:
            raise UserError(f"{where}: give one of its configs, PLACE:CONFIG:{split}: {[*configs]}")
    if config is not None and config not in configs:
        raise UserError(f"{where}: no config {config!r} there; it has {[*configs]}")
    if not configs:
        return None
    said = (configs[config] if config else next(iter(configs.values()))).get("data_files")
    if isinstance(said, dict):
        said = [{"split": key, "path": value} for key, value in said.items()]
    entries = said if isinstance(said, list) else [said]
    if all(isinstance(entry, str) for entry in entries):
        return entries if split == "train" else []
    paths = [e["path"] for e in entries if isinstance(e, dict) and e.get("split") == split]
    flat = [[path] if isinstance(path, str) else path for path in paths]
    return None if said is None else [path for some in flat for path in some]


def _files_named(names: list[str], split: str) -> list[str]:
    """The files of a split by words in their names; without any such word all are of train."""

    def says(name: str, words: tuple[str, ...]) -> bool:
        return bool(re.search(rf"(^|[^a-z])({'|'.join(words)})([^a-z]|$)", name.lower()))

    wanted = _SPLIT_WORDS.get(split, (re.escape(split),))
    found = [name for name in names if says(name, wanted)]
    if found or split != "train":
        return found
    every = tuple(word for words in _SPLIT_WORDS.values() for word in words)
    return [name for name in names if not says(name, every)]
