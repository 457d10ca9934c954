"""The command line of a training run: `mjax train`, and commands that train with other defaults."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mjax.checkpoint.base.hub import with_hub_tokenizer
from mjax.config.load import Defaults, add_config_arguments, config_from_args
from mjax.config.schema.run import Config
from mjax.errors import INTERRUPTED, LostProcess
from mjax.run.faults.supervisor import RESTART_NOTE, add_restart_arguments, supervise

if TYPE_CHECKING:  # they import jax
    import jax

    from mjax.run.batches import BatchSource

# Returns those of the devices of a run that its trainer has.
DevicesOf = Callable[[Config, "Sequence[jax.Device]"], "Sequence[jax.Device]"]


def all_devices(cfg: Config, devices: "Sequence[jax.Device]") -> "Sequence[jax.Device]":
    """All devices of a run, which train."""
    return devices


def train_command(
    parser: argparse.ArgumentParser,
    defaults: Defaults | None = None,
    first: Callable[[Config, argparse.Namespace], int | None] = lambda cfg, args: None,
    batch_source: "BatchSource | None" = None,
    devices_of: DevicesOf = all_devices,
) -> int:
    """Parse `sys.argv`, then train, plan or supervise; returns the exit code.

    defaults: returns values for keys that are not given, as a tree.
    first: what the command does before; an exit code ends it there.
    batch_source: makes the batches; None: those of the datasets that the config names.
    devices_of: leaves devices out that a part of the run has for itself.
    """
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, run no step")
    parser.add_argument("--on", metavar="NAME:COUNT", help="--dry-run for other GPUs: h200:8 say")
    parser.add_argument("--no-compile", action="store_true", help="--on without a compiler")
    group = parser.add_argument_group("several processes (default: as the launcher says)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=int, metavar="N")
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
    return _plan_or_train(cfg, args, batch_source, devices_of)


def _plan_or_train(
    cfg: Config,
    args: argparse.Namespace,
    batch_source: "BatchSource | None",
    devices_of: DevicesOf,
) -> int:
    """Plan or train in this process."""
    # After the config: its mistakes should show at once.
    from mjax.sharding.mesh import start_processes
    from mjax.sharding.processes.compiled_programs import keep_compiled_programs

    if args.on is not None or args.no_compile:
        from mjax.run.dry_run import plan_elsewhere

        return plan_elsewhere(cfg, args, devices_of)
    start_processes(args.coordinator, args.num_processes, args.process_id)
    keep_compiled_programs()
    import jax

    from mjax.doctor.clashes import unused_gpus
    from mjax.errors import NonFiniteLoss, ReplicasDiffer
    from mjax.run.dry_run import dry_run
    from mjax.run.faults.health import require_healthy_machines
    from mjax.run.faults.watchdog import lost_process
    from mjax.run.loop import train
    from mjax.run.monitor.log_writer import warn

    if line := unused_gpus(jax.default_backend()):
        warn(line)
    try:
        if cfg.run.doctor and not args.dry_run:
            require_healthy_machines(cfg)
        more = {} if batch_source is None else {"batch_source": batch_source}
        if args.dry_run:
            dry_run(cfg, devices_of=devices_of)
        else:
            train(cfg, devices=devices_of(cfg, jax.devices()), **more)
    except (NonFiniteLoss, ReplicasDiffer) as e:
        print(f"mjax: stopped: {e}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as e:
        if line := lost_process(e):
            raise LostProcess(line) from e
        raise
    return 0
