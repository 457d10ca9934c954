"""Files of a model besides its weights: tokenizer, chat template, processors, token ids.

Every checkpoint of ours carries these files in STEP/hf, under the names that Hugging Face gives
them, so that it generates, exports and serves like the model it came from. All that lay beside the
weights travels, but for other weights and programs. Invariant: files of two tokenizers are never
mixed.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from mjax.checkpoint.base.digest import UNLISTED, digest_files
from mjax.checkpoint.base.hub import model_folder
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.base.stored import read_record
from mjax.config.schema.run import Config
from mjax.data.base.chat import load_chat_template
from mjax.data.base.chat_ids import answer_ends
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer, tokenizer_files, vocabulary_in
from mjax.data.corpus.text import digests_of_corpus
from mjax.errors import UserError, or_user_error
from mjax.json_file import read_json

log = logging.getLogger(__name__)

SIDE_FILES = "hf"  # item of a step: the folder of these files
UNREAD = "unread.safetensors"  # tensors of the imported files that the model does not read
_GENERATION = "generation_config.json"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
# Files of a tokenizer and of the chat that it is for.
SIDE_NAMES = (
    *TOKENIZERS,
    *"""generation_config.json tokenizer_config.json special_tokens_map.json
    added_tokens.json chat_template.jinja chat_template.json""".split(),
)
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
SIDE_PATTERNS = ("additional_chat_templates/*.jinja", "*.tiktoken")
WEIGHT_FILES = frozenset(
    """.safetensors .bin .pt .pth .ckpt .h5 .hdf5 .msgpack .ot .onnx .onnx_data .gguf .ggml .npz
    .npy .pkl .pickle .pb .tflite .mlmodel .nemo .distcp""".split()
)
PROGRAMS = frozenset(
    """.py .pyc .pyi .ipynb .sh .bash .bat .cmd .ps1 .js .so .dll .dylib .exe .c .cc .cpp .cu .cuh
    .h .hpp .jar .whl""".split()
)
STARTS_OF_PROGRAMS = (b"#!", b"\x7fELF")
LARGEST_COMPANION = 512 * 2**20  # bytes of all files that travel, the small ones first


def side_folders(path: str | Path) -> Iterator[Path]:
    """Folders that may have the side files of a model folder, a checkpoint or a run, best first.

    Older runs stored them next to the step folders; runs on `data.text` keep their own copy.
    """
    path = model_folder(path)
    yield path
    step = newest_step(path)
    if step is not None:
        yield step / SIDE_FILES
        yield step.parent / SIDE_FILES
        yield step.parent.parent / "data"
    yield path / "data"


def read_folder(folder: Path) -> dict[str, bytes]:
    """Name, with / for folders in it, -> content of the side files in one folder.

    A folder that is not a model's gives the files of a tokenizer only.
    """
    is_model = folder.name == SIDE_FILES or (folder / "config.json").is_file()
    files = _model_files(folder) if is_model else map(folder.glob, (*SIDE_NAMES, *SIDE_PATTERNS))
    wrong = f"{folder}: cannot read what lies beside the weights: {{reason}}; mend it"
    found, room = {}, LARGEST_COMPANION
    with or_user_error(wrong):
        sizes = {file: file.stat().st_size for some in files for file in some if file.is_file()}
        for file in sorted(sizes, key=sizes.get):
            room -= 0 if file.name == UNREAD else sizes[file]
            if room < 0:
                log.warning("%s stays behind: too large for a file beside weights", file)
            elif not (content := file.read_bytes()).startswith(STARTS_OF_PROGRAMS):
                found[file.relative_to(folder).as_posix()] = content
    return dict(sorted(found.items()))


def _model_files(folder: Path) -> Iterator[list[Path]]:
    """The files of a model but its weights and programs. Folders with weights hold other models."""
    for at, folders, files in os.walk(folder):
        if Path(at) != folder and any(map(_is_weights, files)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield [Path(at, name) for name in files if not (_is_weights(name) or _is_left(name))]


def _is_left(name: str) -> bool:
    is_hidden = name.startswith(".") or name in UNLISTED  # the latter are orbax's
    return is_hidden or Path(name).suffix.lower() in PROGRAMS


def _is_weights(name: str) -> bool:
    """Whether a file holds weights, or says in which file each of them is."""
    is_index = name.endswith(".index.json") or ".safetensors.index" in name
    return is_index or (Path(name).suffix.lower() in WEIGHT_FILES and name != UNREAD)


def is_of_tokenizer(name: str) -> bool:
    return any(PurePath(name).match(pattern) for pattern in (*SIDE_NAMES, *SIDE_PATTERNS))


def _is_template(name: str) -> bool:
    return any(PurePath(name).match(pattern) for pattern in TEMPLATES)


def _has_template(files: Mapping[str, bytes]) -> bool:
    said = files.get("tokenizer_config.json", b"")
    return any(map(_is_template, files)) or b'"chat_template"' in said


def _is_of_chat(name: str) -> bool:
    """Whether a file may hold a chat template."""
    return _is_template(name) or name == "tokenizer_config.json"


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write side files, by the names that `read_folder` gives them."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_side_files(path: str | Path | None) -> dict[str, bytes]:
    """Name -> content of the side files of a model folder, a checkpoint or a run."""
    folders = side_folders(path) if path is not None else ()
    return next(filter(None, map(read_folder, folders)), {})


def with_tokenizer_of(path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Side files with the tokenizer and chat template that lie beside adapters, if they have some.

    path: a run with adapters, or a folder of PEFT.
    """
    beside = {n: content for n, content in read_side_files(path).items() if is_of_tokenizer(n)}
    if beside.keys().isdisjoint(TOKENIZERS):
        return files
    kept = {n: c for n, c in files.items() if n == _GENERATION or not is_of_tokenizer(n)}
    return kept | beside


def tokenizer_dir(path: str | Path) -> Path | None:
    """The folder with the tokenizer of a model folder, a checkpoint or a run."""
    for folder in side_folders(path):
        if vocabulary_in(folder):
            return folder
    return None


def tokenizer_of(path: str | Path) -> Path | str | None:
    """The argument of `load_tokenizer` for a model folder, a checkpoint or a run."""
    folder = tokenizer_dir(path)
    step = newest_step(model_folder(path))
    if folder is None and step is not None:
        config = read_record(step)["config"]
        return "byte" if config.get("data", {}).get("tokenizer") == "byte" else None
    return folder


def side_files_of_run(cfg: Config, checkpoints: Path) -> dict[str, bytes]:
    """The side files for a run's checkpoints, from the origins of its weights and of its data.

    The weights come from its newest checkpoint, else from `checkpoint.init_from`. If `data` has
    another tokenizer than they, its files replace all files of a tokenizer. A chat template that
    conversations were written with replaces that of the weights, and its end of an answer ends a
    generation.
    """
    step = newest_step(checkpoints)
    of_weights = read_folder(step / SIDE_FILES) if step else {}
    of_weights = of_weights or read_side_files(cfg.checkpoint.init_from)
    of_data = _tokenizer_of_data(cfg)
    shared = of_data.keys() & of_weights.keys() & set(TOKENIZERS)
    if any(of_data[name] != of_weights[name] for name in shared):
        of_weights = {n: content for n, content in of_weights.items() if not is_of_tokenizer(n)}
        config = json.loads(of_weights.pop("config.json", b"{}"))
        config = {key: value for key, value in config.items() if not key.endswith("token_id")}
        if config:
            of_weights["config.json"] = json.dumps(config).encode()
    if cfg.data.conversations.path is not None and _has_template(of_data):
        of_weights = {n: content for n, content in of_weights.items() if not _is_template(n)}
        chat = {n: content for n, content in of_data.items() if _is_of_chat(n)}
        return _with_answer_ends(of_data | of_weights | chat, cfg.data.tokenizer)
    return of_data | of_weights


def _with_answer_ends(files: dict[str, bytes], spec: str) -> dict[str, bytes]:
    """Side files in whose generation_config.json the ends of answers end a generation."""
    try:
        tokenizer = load_tokenizer(spec)
        template = load_chat_template(spec)
    except UserError:  # then it makes no data of this run
        return files
    said = json.loads(files.get(_GENERATION, b"{}"))
    ids = said.get("eos_token_id", json.loads(files.get("config.json", b"{}")).get("eos_token_id"))
    known = [] if ids is None else ids if isinstance(ids, list) else [ids]
    ends = [id for id in answer_ends(tokenizer, template) if id not in known]
    if not ends:
        return files
    said = said or {"_from_model_config": True}
    content = json.dumps(said | {"eos_token_id": [*known, *ends]}, indent=2)
    return files | {_GENERATION: content.encode()}


def _tokenizer_of_data(cfg: Config) -> dict[str, bytes]:
    """The files of data.tokenizer and those beside it, without the config of a model."""
    name = cfg.data.tokenizer
    if name is None or name == "byte":
        return {}
    file = Path(name)
    if name.startswith("train:"):
        file = Path(cfg.run.dir) / "data" / "tokenizer.json"
    folder = file if file.is_dir() else file.parent
    files = {n: content for n, content in read_folder(folder).items() if is_of_tokenizer(n)}
    with contextlib.suppress(UserError):
        files |= {name: path.read_bytes() for name, path in tokenizer_files(file).items()}
    return files


def identify_text(cfg: Config) -> dict[str, str]:
    """Digests of the "tokenizer" and the "text" of a run's data, where it has them."""
    found = digests_of_corpus(Path(cfg.run.dir) / "data") if cfg.data.text else {}
    name = cfg.data.tokenizer
    if not found and name is not None:
        with contextlib.suppress(UserError):  # then it makes no data of this run
            found = {"tokenizer": load_tokenizer(name).digest}
    return found


def identify_data(cfg: Config) -> list[dict]:
    """Path, sizes and digest of the index of each corpus that a run reads."""
    prefixes = [*cfg.data.paths, *cfg.data.valid_paths]
    if cfg.data.text:
        prefixes.append(str(Path(cfg.run.dir) / "data" / "corpus"))
    found = []
    for prefix in prefixes:
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if index.is_file() and tokens.is_file():
            (digest,) = digest_files([index])
            size = tokens.stat().st_size
            found.append({"path": prefix, "bin_bytes": size, "idx_bytes": digest.bytes})
            found[-1]["idx_crc32"] = list(digest.blocks)
    return found


def end_ids(folder: Path | None, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Ids that end a text, by generation_config.json, config.json, or else the tokenizer."""
    names = () if folder is None else ("generation_config.json", "config.json")
    for file in (folder / name for name in names):
        ids = read_json(file, missing={}).get("eos_token_id")
        if ids is not None:
            found = ids if isinstance(ids, list) else [ids]
            if any(type(number) is not int for number in found):
                raise UserError(
                    f"{file}: eos_token_id={ids!r} is no id and no list of ids; mend it"
                )
            return found
    return () if tokenizer is None or tokenizer.eod_id is None else (tokenizer.eod_id,)
