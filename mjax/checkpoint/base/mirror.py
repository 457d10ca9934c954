"""A run's steps in an object store: copies of the complete ones in its folder, and back.

A folder there, checkpoints/STEP or hf/STEP, is complete once it has `complete.json`, which lists
its files and is sent last and removed first. So invariant: whatever breaks off a copy, what counts
as a step is whole. The digests of a step travel with it and are checked when it is read.
"""

import functools
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mjax.checkpoint.base.steps import HELD_OUT_LOSS, steps_in
from mjax.data.base.object_store import (
    StoredObject,
    address_of,
    fetch,
    list_objects,
    local_copy,
    remove_objects,
    send_file,
    store_cache,
)
from mjax.errors import UserError, or_user_error
from mjax.files import replace_text
from mjax.json_file import parse_json

COMPLETE = "complete.json"
STEPS, WEIGHTS_BESIDE = "checkpoints", "hf"  # folders of a run
OWNER = "mirror_owner"  # file of a run and of its mirror
FILES_AT_ONCE = 4  # files
_CHOSEN = re.compile(r"(.+)@(best|\d+)")


@dataclass(frozen=True)
class Mirror:
    """The steps of the run in `folder` at an address."""

    folder: Path
    address: str

    def steps(self, kind: str = STEPS) -> list[int]:
        """The complete steps there, oldest first."""
        return complete_steps(list_objects(self.address), f"{self.address}/{kind}")

    def pull(self) -> int | None:
        """Copy the newest step to the folder where that has none as new; returns it."""
        there, here = self.steps(), [int(step.name) for step in self._here(STEPS)]
        if not there or there[-1] <= max(here, default=-1):
            return None
        with local_copy(f"{self.address}/{OWNER}") as owner:
            replace_text(self.folder / OWNER, Path(owner).read_text())
        address = f"{self.address}/{STEPS}/{there[-1]}"
        fetch_folder(list_objects(address), address, self.folder / STEPS / str(there[-1]))
        return there[-1]

    def require_empty(self) -> None:
        """Raise `UserError` if steps are there, for a run that starts over."""
        if self.steps():
            raise UserError(
                f"checkpoint.mirror={self.address} holds steps, and checkpoint.resume=never starts "
                "over: give another address, or remove what is there"
            )

    def push(self) -> None:
        """Make the steps there those of the folder. Raises `UserError`, also for another's."""
        found = list_objects(self.address)
        self._claim([stored.address for stored in found])
        for kind in (STEPS, WEIGHTS_BESIDE):
            root, here = f"{self.address}/{kind}", self._here(kind)
            there = set(complete_steps(found, root))
            for step in here:
                if int(step.name) not in there:
                    send_folder(step, f"{root}/{step.name}")
            kept = {step.name for step in here}
            below = [s.address for s in found if s.address.startswith(f"{root}/")]
            outdated = [a for a in below if a.removeprefix(f"{root}/").split("/")[0] not in kept]
            remove_objects(sorted(outdated, key=lambda address: not address.endswith(COMPLETE)))

    def _here(self, kind: str) -> list[Path]:
        folder = self.folder / kind
        if kind == STEPS:
            return steps_in(folder) if folder.is_dir() else []
        return sorted(path for path in folder.glob("*") if path.name.isdecimal())

    def _claim(self, found: list[str]) -> None:
        """Mark the address as this run's, or raise `UserError` if it is another's."""
        mine, there = self.folder / OWNER, f"{self.address}/{OWNER}"
        if not mine.is_file():
            replace_text(mine, uuid.uuid4().hex)
        if there not in found:
            send_file(mine, there)
            return
        with local_copy(there) as owner:
            if Path(owner).read_text() != mine.read_text():
                raise UserError(
                    f"checkpoint.mirror={self.address} has the steps of another run than "
                    f"{self.folder}; give another address"
                )


def complete_steps(found: list[StoredObject], root: str) -> list[int]:
    """The numbers of the complete steps below an address, oldest first."""
    pattern = re.compile(rf"{re.escape(root)}/(\d+)/{re.escape(COMPLETE)}")
    return sorted(int(match[1]) for s in found if (match := pattern.fullmatch(s.address)))


def send_folder(folder: Path, address: str) -> None:
    """Copy a complete folder to an address, the list of its files last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(send_file, files, [f"{address}/{name}" for name in names]))
    sizes = {name: path.stat().st_size for name, path in zip(names, files, strict=True)}
    listed = folder.parent / f".{folder.name}.{COMPLETE}"
    try:
        replace_text(listed, json.dumps(sizes))
        send_file(listed, f"{address}/{COMPLETE}")
    finally:
        listed.unlink(missing_ok=True)


def fetch_folder(found: list[StoredObject], address: str, folder: Path) -> Path:
    """Copy what is `found` below an address to a folder, which gets its name when it is whole.

    Raises `UserError` where files lack that `complete.json` lists.
    """
    below = {stored.address.removeprefix(f"{address}/"): stored for stored in found}
    if f"{COMPLETE}" in below:
        with local_copy(f"{address}/{COMPLETE}") as listed:
            sizes = parse_json(Path(listed).read_bytes())
        lost = [name for name, n in sizes.items() if name not in below or below[name].size != n]
        if lost:
            raise UserError(f"{address} is damaged: {lost[0]} is not as it was sent")
        below = {name: below[name] for name in sizes}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with or_user_error(f"{folder}: cannot be written: {{reason}}; free space"):
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                list(pool.map(lambda name: fetch(below[name], temporary / name), below))
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@functools.cache
def fetched_weights(address: str) -> Path:
    """The folder in the cache of what an address holds: a step of a run, or a model's folder.

    A run gives its newest step, RUN@best the best one and RUN@160 step 160.
    """
    address = address_of(address).rstrip("/")
    run, chosen = match.groups() if (match := _CHOSEN.fullmatch(address)) else (address, "")
    found = list_objects(run)
    names = {stored.address for stored in found}
    if chosen or f"{run}/config.json" not in names:
        run = _chosen_step(run, found, chosen)
        found = [stored for stored in found if stored.address.startswith(f"{run}/")]
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()
    folder = store_cache() / "weights" / digest / run.rpartition("/")[2]
    return folder if folder.is_dir() else fetch_folder(found, run, folder)


def _chosen_step(run: str, found: list[StoredObject], chosen: str) -> str:
    """The address of a step of a run, of its folder of steps, or of a step itself."""
    if f"{run}/{COMPLETE}" in {stored.address for stored in found}:
        return run
    roots = [root for root in (f"{run}/{STEPS}", run) if complete_steps(found, root)]
    if not roots:
        raise UserError(
            f"{run}: no weights there: neither config.json (Hugging Face), nor steps that "
            "checkpoint.mirror has written"
        )
    steps = complete_steps(found, roots[0])
    if chosen == "best":
        losses = {step: held_out_loss_at(f"{roots[0]}/{step}") for step in steps}
        steps = sorted((s for s in steps if math.isfinite(losses[s])), key=losses.get)[:1]
    elif chosen:
        steps = [step for step in steps if step == int(chosen)]
    if not steps:
        raise UserError(f"{run}@{chosen}: {roots[0]} has no such step")
    return f"{roots[0]}/{steps[-1]}"


def held_out_loss_at(address: str) -> float:
    """The held-out loss in the record of a step; not finite where it has none."""
    with local_copy(f"{address}/meta/metadata") as record:
        loss = parse_json(Path(record).read_bytes()).get(HELD_OUT_LOSS)
    return math.inf if loss is None else loss


def list_mirrored(address: str) -> int:
    """Print a line for each complete step of the run at an address."""
    address = address_of(address).rstrip("/")
    found, sizes = list_objects(address), defaultdict(int)
    root = next((r for r in (f"{address}/{STEPS}", address) if complete_steps(found, r)), None)
    if root is None:
        raise UserError(f"{address}: no step of a run there")
    for stored in found:
        sizes[stored.address.removeprefix(f"{root}/").split("/")[0]] += stored.size
    print(f"{root}\n{'step':>10}  {'bytes':>15}  held-out loss")
    for step in complete_steps(found, root):
        loss = held_out_loss_at(f"{root}/{step}")
        shown = f"{loss:.4f}" if math.isfinite(loss) else ""
        print(f"{step:>10}  {sizes[str(step)]:>15,}  {shown}")
    return 0
