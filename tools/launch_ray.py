"""`python -m tools.launch_ray --nodes N --gpus G -- ARGUMENTS`: `mjax train` on a Ray cluster.

Ray finds N nodes with G free GPUs each; on every one it starts one process of `mjax train`, which
finds the others by JAX's variables. Invariant: all processes start together or none does, and the
exit code is the largest of theirs. Run it on the cluster, as `ray job submit` does.
"""

import argparse
import os
import socket
import subprocess
import sys

PATIENCE = 600.0  # seconds to wait for nodes that are free


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.launch_ray", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="processes, one a node")
    parser.add_argument("--gpus", type=int, default=8, help="of each process; 0: CPUs only")
    parser.add_argument("--cpus", type=int, default=1, help="of each process")
    parser.add_argument("--same-node", action="store_true", help="let processes share a node")
    parser.add_argument("arguments", nargs="*", help="of mjax train, after --")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_job(parser().parse_args(argv))


def run_job(args: argparse.Namespace) -> int:
    """Start the processes and wait for them."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(ignore_reinit_error=True, log_to_driver=True)
    each = {"CPU": args.cpus} | ({"GPU": args.gpus} if args.gpus else {})
    group = placement_group([each] * args.nodes, "PACK" if args.same_node else "STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=PATIENCE)
    except ray.exceptions.GetTimeoutError:
        print(f"no {args.nodes} nodes with {each} were free in {PATIENCE:g} s", file=sys.stderr)
        return 3

    def place(task, number: int):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        sizes = {"num_cpus": args.cpus, "num_gpus": args.gpus, "max_retries": 0}
        return ray.remote(task).options(scheduling_strategy=strategy, **sizes)

    coordinator = ray.get(place(free_address, 0).remote())
    command = [sys.executable, "-m", "mjax.train", *args.arguments]
    processes = [
        place(train_one, number).remote(command, coordinator, args.nodes, number)
        for number in range(args.nodes)
    ]
    codes = ray.get(processes)
    return max(codes, key=abs)


def free_address() -> str:
    """HOST:PORT of this node that process 0 can listen on."""
    import ray

    with socket.socket() as s:
        s.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"


def train_one(command: list[str], coordinator: str, count: int, number: int) -> int:
    """Run one process of the job; returns its exit code."""
    found = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.run(command, env=os.environ | found).returncode


if __name__ == "__main__":
    sys.exit(main())
