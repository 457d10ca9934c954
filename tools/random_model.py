"""`python -m tools.random_model --config X --out DIR [a.b=c ...]`: a Hugging Face folder to time.

Weights are random, in bfloat16. `mjax serve --load-format dummy` needs no such folder; a teacher or
a base of adapters does.
"""

import argparse
import json

from mjax.checkpoint.base.source import array_source
from mjax.config.languages.paths import as_path
from mjax.config.load import add_config_arguments, config_from_args
from mjax.errors import run_cli
from mjax.interop.huggingface.families.engine import config_to_hf, slots
from mjax.interop.huggingface.files import export
from mjax.interop.random_weights import random_params
from mjax.models import definition_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.random_model", description=__doc__)
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR")
    add_config_arguments(parser)
    args, cfg = config_from_args(parser, argv)
    model, specs = cfg.model, definition_of(cfg.model).specs
    params = random_params(model, "bfloat16")
    config = {"config.json": json.dumps(config_to_hf(model)).encode()}
    read = array_source(model, params).read
    export(read, model, specs, slots(model, specs), args.out, "bfloat16", extras=config)
    return 0


if __name__ == "__main__":
    run_cli(main)
