"""`python -m mjax.data.neighbors --config X [a.b=c ...]`: neighbors of a run's samples, for RETRO.

Looks up the neighbors of all samples of a run among its training documents, held-out samples too,
and keeps them beside the data, where the run finds them.
"""

import json
import os
import time

import numpy as np

from mjax.config.load import add_config_arguments, config_from_args
from mjax.data.corpus.gpt import GPTDataset
from mjax.data.corpus.neighbor_index import ChunkIndex, database_of, search
from mjax.data.corpus.retro import NeighborDataset
from mjax.data.loader import run_datasets
from mjax.errors import CommandParser, UserError, run_cli


def main(argv: list[str] | None = None) -> int:
    """The command line; prints one JSON line on success."""
    about = "Look up the neighbors of the chunks of a run's samples."
    parser = CommandParser("data.neighbors", description=about)
    add_config_arguments(parser)
    _, cfg = config_from_args(parser, argv)
    if not cfg.model.architecture.reads_neighbors or cfg.data.mock:
        raise UserError(
            f"model.layer_pattern={cfg.model.layer_pattern}, data.mock={cfg.data.mock}: neighbors "
            "are for RETRO (R blocks) on text; give its config"
        )
    began = time.perf_counter()
    size = cfg.model.retro.chunk_length
    counts, (training, held_out) = run_datasets(cfg)
    corpus = training.dataset
    database = database_of(corpus, training.sequences, size)
    index = ChunkIndex(corpus, database, size)

    def build(dataset: GPTDataset, count: int) -> np.ndarray:
        same = os.path.abspath(dataset.prefix) == os.path.abspath(training.prefix)
        return search(dataset, count, index, database, same, cfg)

    made = {"database_chunks": len(database.starts)}
    named = ("train", training), ("held_out", held_out)
    for (name, dataset), count in zip(named, counts, strict=True):
        if dataset is not None:
            starts = NeighborDataset(dataset, count, training, cfg, build).starts
            made[f"{name}_chunks"] = int(starts[..., 0].size)
            made[f"{name}_missing"] = round(float((starts < 0).mean()), 4)
    made["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    run_cli(main)
