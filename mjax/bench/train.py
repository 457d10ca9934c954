"""`python -m mjax.bench train --config X [a.b=c ...]`: the speed of the training step, as JSON.

Real training steps of the trainer on random tokens (one document per sequence unless `--documents`
says otherwise), after warm-up; the median step counts. The line holds what a reader needs to
compare: shape, mesh, tok/s and TFLOP/s per device, MFU, memory, compile seconds, versions.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

from mjax.config import Config, load
from mjax.train import Trainer
from mjax.train.metrics import peak_memory_gb, speed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mjax.bench train", description=__doc__)
    parser.add_argument("--config", metavar="YAML")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--documents", type=int, default=1, help="documents per sequence")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_intermixed_args(argv)
    cfg = load(args.config, args.overrides)
    print(json.dumps(measure(cfg, args.steps, args.warmup, args.documents)), flush=True)
    return 0


def measure(cfg: Config, steps: int, warmup: int, documents: int = 1) -> dict:
    """Run `warmup` + `steps` training steps; the record of the median one."""
    trainer = Trainer(cfg)
    trainer.init()
    batch = random_batch(cfg, documents)
    start = time.perf_counter()
    jax.block_until_ready(trainer.step(batch))
    compile_s = time.perf_counter() - start
    for _ in range(warmup):
        metrics = trainer.step(batch)
    jax.block_until_ready(metrics)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        metrics = jax.block_until_ready(trainer.step(batch))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    tokens = batch["tokens"].size
    mesh = {axis: size for axis, size in trainer.mesh.shape.items() if size > 1}
    return {
        "bench": "train",
        "layers": cfg.model.num_hidden_layers,
        "hidden": cfg.model.hidden_size,
        "seq": cfg.data.seq_length,
        "global_batch": cfg.train.global_batch_size,
        "micro_batch": cfg.train.micro_batch_size,
        "documents": documents,
        "remat": cfg.train.remat,
        "mesh": mesh,
        "devices": trainer.mesh.size,
        "ms": round(1e3 * seconds, 2),
        **{k: v if v is None else round(v, 4) for k, v in speed(cfg, tokens, seconds).items()},
        "memory_gb": peak_memory_gb(),
        "first_step_s": round(compile_s, 1),
        "loss": float(metrics["loss"]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def random_batch(cfg: Config, documents: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Uniform random tokens [B, S] in `documents` equal documents per sequence."""
    shape = cfg.train.global_batch_size, cfg.data.seq_length
    ids = np.random.default_rng(seed).integers(0, cfg.model.vocab_size, (shape[0], shape[1] + 1))
    place = np.arange(shape[1], dtype=np.int32)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "labels": ids[:, 1:].astype(np.int32),
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.broadcast_to(1 + place * documents // shape[1], shape),
        "positions": np.broadcast_to(place, shape),
    }
