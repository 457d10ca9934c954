"""Merging adapters into their base, and taking them out: by bringing back the base itself.

A merged folder has a record, merge.json: where the base is, its digest, and that of the merged
weights. Rounding loses bits, so no subtraction gives the base's; invariant: what `unmerge` writes
has the base's files byte for byte, or nothing is written.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from mjax.checkpoint.base.companion_files import is_of_tokenizer, read_side_files
from mjax.checkpoint.base.new_folder import new_folder
from mjax.checkpoint.base.source import Source, flat
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.source_digest import digest_of_source
from mjax.checkpoint.weights import read_config, write_weights
from mjax.errors import UserError, or_user_error
from mjax.interop.adapted_source import (
    adapted_source,
    adapter_step,
    adapters_for_others,
    base_of_run,
    named_base,
    read_adapter_run,
)
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.files import export
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.sources import source_of
from mjax.json_file import read_json
from mjax.models import definition_of

RECORD = "merge.json"


def merged_source(base: Path, adapter: Path) -> Source:
    """The weights in `base` with the adapters of a run, of its step, or of a folder of PEFT."""
    if (adapter / ADAPTER_CONFIG).is_file():
        return adapted_source(adapter, source_of(base))
    adapter = adapter_step(adapter)
    return adapted_source(adapter, source_of(base, read_config(adapter)))


def stored_dtype(source: Source) -> str:
    """The dtype that most weights of matmuls are stored in."""
    specs = flat(definition_of(source.cfg).specs)
    found: dict[str, int] = {}
    for path, spec in specs.items():
        name = source.read(path, (slice(0, 1),) * len(spec.shape)).dtype.name
        found[name] = found.get(name, 0) + spec.size
    return max(found, key=found.get)


def write_merged(
    base: Path,
    adapter: Path,
    out: Path,
    source: Source,
    dtype: str,
    extras: Mapping[str, bytes],
) -> None:
    """Write `source`, merged weights of `base` and `adapter`, in the format of `base`.

    extras: side files, by name. Raises `UserError` where `out` holds something.
    """
    specs = definition_of(source.cfg).specs
    original = source_of(base)
    if (base / "config.json").is_file():
        places = slots(source.cfg, specs)
        export(source.read, source.cfg, specs, places, out, dtype, math.ceil(5e9), extras)
    else:
        write_weights(out, source, specs, dtype, extras)
    record = {
        "base": str(_files_of(base).absolute()),
        "base_digest": digest_of_source(original, flat(definition_of(original.cfg).specs)),
        "adapter": str(adapter.absolute()),
        "digest": _stored_digest(out),
    }
    text = json.dumps(record, indent=2) + "\n"
    with or_user_error(f"cannot write {out / RECORD}: {{reason}}"):
        (out / RECORD).write_text(text, encoding="utf-8")


def _stored_digest(folder: Path) -> str:
    """The digest of the weights in a folder, as they are stored."""
    source = source_of(folder)
    return digest_of_source(source, flat(definition_of(source.cfg).specs))


def _files_of(folder: Path) -> Path:
    """The folder with the weights themselves: of a run its newest step."""
    if (folder / "config.json").is_file():
        return folder
    return newest_step(folder) or folder


def unmerge(folder: Path, out: Path) -> Path:
    """Write the base of merged weights, byte for byte; returns the folder that it came from.

    Raises `UserError` where `folder` or the base have changed, or the base is gone.
    """
    record = read_json(folder / RECORD, missing={})
    if not {"base", "base_digest", "digest"} <= record.keys():
        raise UserError(f"{folder}: has no {RECORD}; only what mjax convert merge wrote has one")
    if _stored_digest(folder) != record["digest"]:
        raise UserError(f"{folder}: its weights have changed since they were merged")
    base = Path(record["base"])
    if not base.is_dir():
        raise UserError(
            f"{base}: the base is not here any more, and subtracting adapters would not give its "
            f"bits; bring it back, or name its place in {folder / RECORD}"
        )
    if _stored_digest(base) != record["base_digest"]:
        raise UserError(
            f"{base}: the base has changed since it was merged; bring it back as it was"
        )
    with new_folder(out) as temporary:
        into = temporary if (base / "config.json").is_file() else temporary / base.name
        with or_user_error(f"cannot copy {base} to {out}: {{reason}}; free or mend it"):
            shutil.copytree(base, into, dirs_exist_ok=True)
    return base


def extract(run: Path, out: Path) -> None:
    """Write the adapters of a run as a folder of PEFT, with the tokenizer of the run."""
    step = adapter_step(run)
    found = read_adapter_run(step)

    def base() -> Source:
        return source_of(named_base(step, base_of_run(step)), found.cfg)

    adapters = adapters_for_others(found, base)
    files = {n: text for n, text in read_side_files(step).items() if is_of_tokenizer(n)}
    write_adapter(out, found.cfg, definition_of(found.cfg).specs, adapters, files)
