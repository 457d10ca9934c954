"""`mjax doctor [--dir FOLDER] [--json]`: what this machine can do, and what is wrong with it.

Started as the processes of a job (`srun mjax doctor`), it measures all of their machines. Exit
codes: 0 all is well, 1 there is a problem.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mjax.config.languages.paths import as_path
from mjax.doctor import clashes, host
from mjax.errors import CommandParser, UserError, first_line, run_cli

LEAST_DISK_GB = 2.0  # that the command asks for; a run asks for what its checkpoint takes
MOST_ROWS = 16  # devices shown, the slowest first


def main() -> int:
    about = "Measure this machine for some seconds, and name what is wrong with it."
    parser = CommandParser("doctor", description=about)
    folder = "whose free disk counts (default: this one)"
    parser.add_argument("--dir", type=as_path, default=Path("."), metavar="FOLDER", help=folder)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found, is_shown = _examination(args.dir)
    found["healthy"] = not found["problems"]
    if is_shown and args.json:
        print(json.dumps(found, indent=2))
    elif is_shown:
        show_examination(found)
    return int(not found["healthy"])


def _examination(folder: Path) -> tuple[dict, bool]:
    """(what was found, whether this process shows it); without speeds if JAX does not start."""
    try:
        import jax  # it may not start

        from mjax.doctor.examination import examine_machine
        from mjax.sharding.mesh import start_processes
        from mjax.sharding.processes.agreement import ends_with_others

        start_processes()
        with ends_with_others():
            return asdict(examine_machine(folder, LEAST_DISK_GB)), jax.process_index() == 0
    except UserError:
        raise
    except (ImportError, RuntimeError) as e:
        found = clashes.installed()
        problems = [*clashes.clashes_of(found), f"JAX does not start: {first_line(e)}"]
        notes, versions = [*clashes.notes_of(found)], host.shown_versions(found)
        return {"versions": versions, "problems": problems, "notes": notes}, True


def show_examination(found: Mapping) -> None:
    """Print an examination on one screen."""
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if "devices" in found:  # else JAX did not start
        _show_speeds(console, found)
    for kind, style in (("note", "yellow"), ("problem", "red")):
        for line in found[f"{kind}s"]:
            console.print(f"{kind}: {line}", style=style, soft_wrap=True, markup=False)
    count = len(found["problems"])
    console.print(f"problems: {count}" if count else "all is well", style="bold")


def _show_speeds(console: Console, found: Mapping) -> None:
    table = Table("device", "kind", "bf16 TFLOP/s", box=None, pad_edge=False)
    for device in sorted(found["devices"], key=lambda device: device["tflops"])[:MOST_ROWS]:
        table.add_row(device["name"], device["kind"], f"{device['tflops']:g}")
    console.print(table)
    link, disk = found["all_reduce_gb_per_s"], found["free_disk_gb"]
    console.print("all-reduce: " + ("one device" if link is None else f"{link:g} GB/s (bus)"))
    console.print(f"free: {disk:,} GB of disk, {found['free_memory_gb']:,} GB of host memory")


if __name__ == "__main__":
    run_cli(main)
