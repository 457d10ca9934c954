"""`python -m mjax.checkpoint ls|show|diff|verify PATH`: what checkpoints hold, and whether intact.

    python -m mjax.checkpoint ls runs/a              # a line for each step
    python -m mjax.checkpoint show runs/a            # the newest step: record, side files, arrays
    python -m mjax.checkpoint diff runs/a/checkpoints/500 runs/b    # exits 1 if they differ
    python -m mjax.checkpoint verify runs/a          # reads all files; exits 1 if one is damaged

PATH is a run, a checkpoint folder, one of its steps, or the address of one of these (of the first
two, `show` and `diff` take the newest step). Nothing is changed and no device is used.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from mjax.checkpoint.base.companion_files import SIDE_FILES
from mjax.checkpoint.base.digest import read_digests, require_never_made
from mjax.checkpoint.base.hub import model_folder
from mjax.checkpoint.base.mirror import list_mirrored
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.source import block_shape, blocks
from mjax.checkpoint.base.steps import checkpoint_folder, is_step, newest_step, steps_in
from mjax.checkpoint.base.stored import StoredArrays, read_record
from mjax.config.languages.paths import as_path, is_address
from mjax.errors import CommandParser, UserError, run_cli

NOTHING = object()  # a value of a key that is not there


def main(argv: list[str] | None = None) -> int:
    args = _checkpoint_arguments(argv)
    if args.command == "ls" and is_address(args.path):
        return list_mirrored(str(args.path))
    for name in ("path", "other"):
        if is_address(getattr(args, name, None)):
            setattr(args, name, model_folder(getattr(args, name)))
    if args.command == "diff":
        return diff(_newest(args.path), _newest(args.other), values=not args.no_values)
    if args.command == "show":
        return show_step(_newest(args.path), config=args.config)
    return {"ls": ls, "verify": verify_steps}[args.command](_steps_of_run(args.path))


def _checkpoint_arguments(argv: list[str] | None) -> argparse.Namespace:
    about = "See what checkpoints hold, and whether they are intact."
    parser = CommandParser("checkpoint", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    path = "a run, a checkpoint folder or one step"
    for name, text in (
        ("ls", "a line for each step"),
        ("show", "the record, side files and arrays of a step"),
        ("diff", "what differs between two steps; exits 1 if anything does"),
        ("verify", "compare all files with their digests; exits 1 if one is damaged"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=as_path, help=path)
        if name == "show":
            command.add_argument("--config", action="store_true", help="print the whole config")
        if name == "diff":
            command.add_argument("other", type=as_path, help=path)
            text = "leave the numbers in the arrays alone"
            command.add_argument("--no-values", action="store_true", help=text)
    return parser.parse_args(argv)


def _steps_of_run(path: Path) -> list[Path]:
    """The steps in a run or checkpoint folder, oldest first; a step is the only one in itself."""
    if is_step(path):
        return [path]
    folder = checkpoint_folder(path)
    if folder is None:
        raise UserError(f"{path}: no checkpoint here; give a run, a checkpoint folder or a step")
    return steps_in(folder)


def _newest(path: Path) -> Path:
    return newest_step(path) or _steps_of_run(path)[-1]


# ---- ls ----------------------------------------------------------------------------------------


def ls(steps: list[Path]) -> int:
    """Print a line for each step."""
    print(steps[0].parent)
    row = "{:>10}  {:>9}  {:16}  {:>13}  {}"
    print(row.format("step", "size", "saved", "held-out loss", "holds"))
    for step in steps:
        try:
            record = read_record(step)
            loss = record.get("held_out_loss")
            holds = ", ".join(dict.fromkeys(path[0] for path in StoredArrays(step).paths()))
            holds += ", side files" if (step / SIDE_FILES).is_dir() else ""
            holds += "" if record.get("digests") else "; no digests"
        except UserError as e:
            loss, holds = None, str(e)
        size = decimal(sum(p.stat().st_size for p in step.rglob("*") if p.is_file()))
        shown = "" if loss is None else f"{loss:.4f}"
        print(row.format(step.name, size, _saved(step), shown, holds))
    for other in sorted(steps[0].parent.glob("damaged-*")):
        print(
            f"{other.name}: set aside because it could not be read; remove it when it is not needed"
        )
    return 0


def _saved(step: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(step.stat().st_mtime))


# ---- show --------------------------------------------------------------------------------------


def show_step(step: Path, config: bool) -> int:
    """Print what a step holds; `config`: with the whole config as YAML."""
    record, stored = read_record(step), StoredArrays(step)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    print(f"{step}: step {record['step']}, {record['consumed_samples']:,} samples consumed")
    print(f"saved {_saved(step)} with {versions}; digests: {record.get('digests') or 'none'}")
    if record.get("held_out_loss") is not None:
        print(f"held-out loss: {record['held_out_loss']:.6f}")
    for corpus in record.get("data", ()):
        sizes = f"{decimal(corpus['bin_bytes'])} of tokens, {decimal(corpus['idx_bytes'])} of index"
        digest = " ".join(f"{crc:08x}" for crc in corpus["idx_crc32"])
        print(f"data: {corpus['path']} ({sizes}, CRC-32 {digest})")
    for name, digest in record.get("text_digests", {}).items():
        print(f"{name}: digest {digest}")
    files = [path for path in sorted((step / SIDE_FILES).rglob("*")) if path.is_file()]
    side = {path.relative_to(step / SIDE_FILES): path.stat().st_size for path in files}
    named = [f"{name} ({decimal(size)})" for name, size in side.items()]
    print("side files: " + (", ".join(named) or "none"))
    opened = {path: stored.open(path) for path in stored.paths()}
    total = sum(_text_of_bytes(array) for array in opened.values())
    numbers = sum(array.size for path, array in opened.items() if path[0] == "params")
    print(f"arrays: {len(opened)}, {decimal(total)}; {numbers:,} parameters")
    width = max(len(".".join(path)) for path in opened)
    for path, array in opened.items():
        shape = " x ".join(map(str, array.shape)) or "scalar"
        kind = array.dtype.numpy_dtype.name
        print(f"  {'.'.join(path):{width}}  {kind:8}  {decimal(_text_of_bytes(array)):>8}  {shape}")
    if config:
        import yaml

        print(yaml.safe_dump(record["config"], sort_keys=False), end="")
    return 0


def _text_of_bytes(array) -> int:
    return array.size * array.dtype.numpy_dtype.itemsize


# ---- diff --------------------------------------------------------------------------------------


def diff(a: Path, b: Path, values: bool) -> int:
    """Print what differs between two steps, `values` too; returns 1 if anything does."""
    print(f"{a} -> {b}")
    lines = list(differing_keys(read_record(a), read_record(b)))
    arrays_a, arrays_b = StoredArrays(a), StoredArrays(b)
    paths_a, paths_b = arrays_a.paths(), arrays_b.paths()
    lines += [f"only in {a}: {'.'.join(path)}" for path in paths_a if path not in paths_b]
    lines += [f"only in {b}: {'.'.join(path)}" for path in paths_b if path not in paths_a]
    for line in lines:
        print(f"  {line}")
    shared, equal = [path for path in paths_a if path in paths_b], 0
    for path in shared:
        found = differing_array(arrays_a, arrays_b, path, values)
        equal += found is None
        if found:
            print(f"  {'.'.join(path)}: {found}")
    what = "equal" if values else "of equal shape and dtype"
    print(f"{len(shared)} arrays in both, {equal} of them {what}; {len(lines)} other differences")
    return int(bool(lines) or equal < len(shared))


def differing_keys(a: object, b: object, name: str = "") -> Iterator[str]:
    """A line for each key of two records whose values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{name}.{key}" if name else key
            yield from differing_keys(a.get(key, NOTHING), b.get(key, NOTHING), inner)
    elif a != b:
        texts = ("nothing" if value is NOTHING else repr(value) for value in (a, b))
        yield f"{name.removeprefix('config.')}: {' -> '.join(texts)}"


def differing_array(a: StoredArrays, b: StoredArrays, path: Leaf, values: bool) -> str | None:
    """Words on how the arrays at `path` differ, read block by block; None if they are equal."""
    ours, theirs = a.open(path), b.open(path)
    texts = [f"{x.dtype.numpy_dtype.name} {list(x.shape)}" for x in (ours, theirs)]
    if texts[0] != texts[1]:
        return " -> ".join(texts)
    if not values:
        return None
    largest, scale, count = 0.0, 0.0, 0
    for index in blocks(ours.shape, block_shape(ours.shape, ours.dtype.numpy_dtype.itemsize)):
        with a.readable(path), b.readable(path):
            x, y = (array[index].read().result() for array in (ours, theirs))
        count += int(np.sum(x.view(f"V{x.itemsize}") != y.view(f"V{y.itemsize}")))
        x, y = x.astype(np.float64), y.astype(np.float64)
        largest = max(largest, float(np.abs(x - y).max(initial=0)))
        scale = max(scale, float(np.abs(x).max(initial=0)))
    if not count:
        return None
    return (
        f"{count:,} of {ours.size:,} numbers differ, by at most {largest:.3g} (largest {scale:.3g})"
    )


# ---- verify ------------------------------------------------------------------------------------


def verify_steps(steps: list[Path]) -> int:
    """Compare the files of each step with their digests; returns 1 if one is damaged."""
    damaged = 0
    for step in steps:
        began = time.monotonic()
        try:
            digests = read_digests(step)
            if digests is None:
                require_never_made(step, read_record(step))
                print(f"{step}: has no digests, so damage in it cannot be found")
                continue
            digests.verify()
        except UserError as e:
            damaged += 1
            print(e)
            continue
        size = sum(one.bytes for one in digests.files.values())
        speed = decimal(int(size / max(time.monotonic() - began, 1e-9)))
        print(f"{step}: intact, {len(digests.files)} files, {decimal(size)}, {speed}/s")
    return int(damaged > 0)


if __name__ == "__main__":
    run_cli(main)
