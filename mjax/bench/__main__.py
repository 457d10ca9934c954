"""`python -m mjax.bench NAME [options]`: runs one benchmark; each prints JSON lines."""

import importlib
import sys

from mjax.errors import UserError, program, run_cli

BENCHMARKS = {
    "train": "speed of the training step on random tokens, and where its time goes",
    "kernel": "our kernels one at a time, against what the device reaches and their references",
    "decode": "milliseconds a token of generation, beside what memory allows",
    "engine": "the engine under load: tokens a second, time to the first token and between tokens",
    "serve": "a server of OpenAI's form under load: the same, requests and goodput a second",
    "checkpoint": "how long a save blocks training, and the rates of saves and restores",
    "collective": "bandwidth of the collectives over all devices",
    "data": "index build and loader throughput on a synthetic corpus",
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(f"usage: {program('bench')} {{{','.join(BENCHMARKS)}}} [options]\n")
        print("\n".join(f"  {n:12} {about}" for n, about in BENCHMARKS.items()))
        return 0
    if name not in BENCHMARKS:
        raise UserError(f"no benchmark {name!r}: one of {', '.join(BENCHMARKS)}")
    if sys.argv[0].startswith("mjax "):
        sys.argv[0] = f"mjax bench {name}"  # what `errors.program` names in usage lines
    return importlib.import_module(f"mjax.bench.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    run_cli(main)
