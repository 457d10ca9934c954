"""What belongs to a model besides its weights: tokenizer, chat template, token ids, its data.

Every checkpoint of ours carries these files in STEP/hf, under the names that Hugging Face gives
them, so that it generates, exports and serves like the model it came from. Invariant: files of two
tokenizers are never mixed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mjax.checkpoint.digest import digest_files
from mjax.checkpoint.steps import newest_step
from mjax.checkpoint.stored import read_record
from mjax.config.schema import Config
from mjax.data.text import read_digests
from mjax.data.tokenizer import load_tokenizer, tokenizer_files, vocabulary_in
from mjax.errors import UserError

SIDE_FILES = "hf"  # item of a step: the folder of these files
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
NAMES = (
    *TOKENIZERS,
    *"""config.json generation_config.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json merges.txt chat_template.jinja chat_template.json""".split(),
)


def side_folders(path: str | Path) -> Iterator[Path]:
    """Where the side files of a model folder, a checkpoint or a run may lie, the best first.

    They lay beside the steps before they lay in them, and a run on `data.text` has its own.
    """
    path = Path(path)
    yield path
    step = newest_step(path)
    if step is not None:
        yield step / SIDE_FILES
        yield step.parent / SIDE_FILES
        yield step.parent.parent / "data"
    yield path / "data"


def read_folder(folder: Path) -> dict[str, bytes]:
    """Name -> content of the side files in one folder."""
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}


def read_side_files(path: str | Path | None) -> dict[str, bytes]:
    """Name -> content of the side files of a model folder, a checkpoint or a run."""
    folders = side_folders(path) if path is not None else ()
    return next(filter(None, map(read_folder, folders)), {})


def tokenizer_dir(path: str | Path) -> Path | None:
    """The folder with the tokenizer of a model folder, a checkpoint or a run."""
    for folder in side_folders(path):
        if vocabulary_in(folder):
            return folder
    return None


def tokenizer_of(path: str | Path) -> Path | str | None:
    """What `load_tokenizer` takes for a model folder, a checkpoint or a run."""
    folder = tokenizer_dir(path)
    step = newest_step(Path(path))
    if folder is None and step is not None:
        config = read_record(step)["config"]
        return "byte" if config.get("data", {}).get("tokenizer") == "byte" else None
    return folder


def side_files_of_run(cfg: Config, checkpoints: Path) -> dict[str, bytes]:
    """The side files for the checkpoints of a run, from where its weights or its data come from.

    Weights are those of its newest checkpoint, else of `checkpoint.init_from`. Where `data` has
    another tokenizer than they, its files take the place of all of theirs.
    """
    step = newest_step(checkpoints)
    of_weights = read_folder(step / SIDE_FILES) if step else {}
    of_weights = of_weights or read_side_files(cfg.checkpoint.init_from)
    of_data = _tokenizer_of_data(cfg)
    shared = of_data.keys() & of_weights.keys() & set(TOKENIZERS)
    if any(of_data[name] != of_weights[name] for name in shared):
        return of_data
    return of_data | of_weights


def _tokenizer_of_data(cfg: Config) -> dict[str, bytes]:
    """The files of data.tokenizer and those beside it, without the config of a model."""
    name = cfg.data.tokenizer
    if name is None or name == "byte":
        return {}
    file = Path(name)
    if name.startswith("train:"):
        file = Path(cfg.run.dir) / "data" / "tokenizer.json"
    folder = file if file.is_dir() else file.parent
    files = {n: content for n, content in read_folder(folder).items() if n != "config.json"}
    with contextlib.suppress(UserError):
        files |= {name: path.read_bytes() for name, path in tokenizer_files(file).items()}
    return files


def identify_text(cfg: Config) -> dict[str, str]:
    """Digests of the "tokenizer" and the "text" of a run's data, where it has them."""
    found = read_digests(Path(cfg.run.dir) / "data") if cfg.data.text else {}
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
