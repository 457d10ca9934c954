"""The command line of a training run: `mjax train`, and commands that train with other defaults."""

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable

from mjax.checkpoint.base.hub import with_hub_tokenizer
from mjax.config.load import Defaults, add_config_arguments, config_from_args
from mjax.config.schema.run import Config
from mjax.run.faults.supervisor import RESTART_NOTE, add_restart_arguments, supervise


def train_command(
    parser: argparse.ArgumentParser,
    defaults: Defaults | None = None,
    first: Callable[[Config, argparse.Namespace], int | None] = lambda cfg, args: None,
    batch_source: str = "mjax.run.batches:from_config",
) -> int:
    """Parse `sys.argv`, then train, plan or supervise; returns the exit code.

    defaults: returns values for keys that are not given, as a tree.
    first: what the command does before; an exit code ends it there.
    batch_source: the module and name of a `BatchSource`, which imports jax; the default reads the
        datasets that the config names.
    """
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, run no step")
    parser.add_argument("--on", metavar="NAME:COUNT", help="--dry-run for other GPUs: h200:8 say")
    parser.add_argument("--no-compile", action="store_true", help="--on without a compiler")
    group = parser.add_argument_group("several processes (default: as the launcher says)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=int, metavar="N", help="of the run")
    group.add_argument("--process-id", type=int, metavar="I", help="0 to N-1")
    add_restart_arguments(parser)
    args, cfg = config_from_args(parser, defaults=defaults)
    cfg = with_hub_tokenizer(cfg)
    code = first(cfg, args)
    if code is not None:
        return code
    plans = args.dry_run or args.on is not None or args.no_compile
    if args.restarts is not None and not plans and RESTART_NOTE not in os.environ:
        return supervise(cfg, args)
    return _plan_or_train(cfg, args, batch_source)


def _plan_or_train(cfg: Config, args: argparse.Namespace, batch_source: str) -> int:
    """Plan or train in this process."""
    # After the config: its mistakes should show at once.
    from mjax.sharding.mesh import start_processes
    from mjax.sharding.processes.compiled_programs import keep_compiled_programs

    if args.on is not None or args.no_compile:
        from mjax.run.dry_run import plan_elsewhere

        return plan_elsewhere(cfg, args)
    start_processes(args.coordinator, args.num_processes, args.process_id)
    keep_compiled_programs()
    import jax

    backend = jax.default_backend()
    from mjax.doctor.clashes import unused_gpus
    from mjax.errors import NonFiniteLoss, ReplicasDiffer
    from mjax.run.dry_run import dry_run
    from mjax.run.faults.health import require_healthy_machines
    from mjax.run.faults.watchdog import naming_lost_processes
    from mjax.run.loop import train
    from mjax.run.monitor.log_writer import warn
    from mjax.sharding.processes.agreement import ends_with_others

    if line := unused_gpus(backend):
        warn(line)
    try:
        with naming_lost_processes(), ends_with_others():
            if cfg.run.doctor and not args.dry_run:
                require_healthy_machines(cfg)
            if args.dry_run:
                dry_run(cfg)
            else:
                train(cfg, batch_source=pkgutil.resolve_name(batch_source))
    except (NonFiniteLoss, ReplicasDiffer) as e:
        print(f"mjax: stopped: {e}", file=sys.stderr, flush=True)
        return 1
    return 0
