"""Twenty steps of a decoder on the mesh that its config names, with new random tokens in each.

    python docs/lab/mesh_losses.py CONFIG [a.b=c ...]

prints each loss, the median time of a step, tokens a second and a device, and its memory. Tokens,
parameters and order are the same on every mesh, so losses of two meshes should agree. Learning one
batch by heart is no test: on four H200s losses of four meshes agreed to 2e-4 for 17 steps and
differed by 3e-3 after 20.
"""

import argparse
import statistics
import time

import jax

from mjax.bench.train import peak_memory_gb, random_batch
from mjax.config import load
from mjax.train import Trainer

STEPS = 20


def main(config: str, overrides: list[str]) -> None:
    cfg = load(config, overrides)
    trainer = Trainer(cfg)
    trainer.init()
    losses, seconds = [], []
    for step in range(STEPS):
        batch = random_batch(cfg, seed=step)
        start = time.perf_counter()
        losses.append(float(trainer.step(batch)["loss"]))
        seconds.append(time.perf_counter() - start)
    usual = statistics.median(seconds[2:])
    rate = batch["tokens"].size / usual / jax.device_count()
    memory = peak_memory_gb()
    print(
        f"first step {seconds[0]:.1f} s, then {1e3 * usual:.1f} ms, {rate:,.0f} tokens/s a device"
    )
    print(f"memory {memory:.1f} GB" if memory else "memory unknown")
    print("losses", " ".join(f"{loss:.5f}" for loss in losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    main(**vars(parser.parse_args()))
