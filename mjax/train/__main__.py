"""`python -m mjax.train --config X [a.b=c ...] [--restarts N] [--dry-run [--on NAME:COUNT]]`.

Several processes: see docs/start/multi-host.md. Exit codes: 0 done, or stopped in good order by a
signal or the wall time; 1 training diverged, a weight is not finite or a device errs; 2 something
to mend, in one line; 3 no step ended within train.step_timeout_minutes or another process was lost;
130 interrupted before the first step or twice (docs/train/failures.md).
"""

from mjax.errors import CommandParser, run_cli
from mjax.run.command import train_command


def main() -> int:
    parser = CommandParser("train", description="Train a model.")
    return train_command(parser)


if __name__ == "__main__":
    run_cli(main)
