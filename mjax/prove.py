"""`python -m mjax.prove`: does every feature give the same numbers on every mesh? A table.

For each feature and mesh: loss, gradient norm and every gradient of a small model in fp32 against
one device and one micro-batch, as the largest relative deviation; packed documents, an uneven loss
mask and sequences without a single valid token included. The law tests run parts of the same table.
Exit code 1 if any cell is above the bound.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BOUND = 1e-5
SEQ, VOCAB = 32, 251
AXES = ("dp", "tp", "pp", "cp", "ep")
SMALL = [
    f"model.vocab_size={VOCAB}",
    "model.hidden_size=32",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "model.head_dim=4",
    "model.intermediate_size=48",
    "model.num_hidden_layers=8",
    "model.num_experts=8",
    "model.moe_intermediate_size=24",
    "model.initializer_range=0.1",
    "data.mock=true",
    f"data.seq_length={SEQ}",
    "precision.compute=float32",
    "train.attention=xla",
]
DENSE = ["model.num_experts=0", "model.moe_intermediate_size=0"]
FEATURES = {
    "dense, GQA": DENSE,
    "MoE, top-2 of 8, balance loss": [
        "model.layer_pattern=E",
        "model.router_aux_loss_coef=0.1",
    ],
    "tied embeddings": [*DENSE, "model.tie_word_embeddings=true", "model.num_key_value_heads=1"],
    "biases, LayerNorm, GELU": [
        *DENSE,
        "model.attention_bias=true",
        "model.attention_out_bias=true",
        "model.mlp_bias=true",
        "model.norm=layernorm",
        "model.mlp_gated=false",
        "model.hidden_act=gelu",
    ],
    "sliding windows, QK norm, sandwich norms": [
        *DENSE,
        "model.layer_pattern=L",
        "model.sliding_window=9",
        "model.qk_norm=true",
        "model.norm_placement=sandwich",
        "model.attention_multiplier=0.1",  # unit q and k else make fp32 itself differ by 1e-5
    ],
    "learned positions, soft-caps, sinks": [
        *DENSE,
        "model.position_embedding=learned",
        "model.attention_sinks=true",
        "model.attn_logit_softcapping=2.0",
        "model.final_logit_softcapping=3.0",
        "mesh.cp_type=all_gather",
    ],
    "dropout": [
        *DENSE,
        "model.hidden_dropout=0.2",
        "model.attention_dropout=0.1",
        "mesh.cp_type=all_gather",
    ],
}


def meshes(devices: int) -> list[dict[str, int]]:
    """Every factorisation of `devices` into dp, tp, pp, cp, ep."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = itertools.product(divisors, repeat=len(AXES))
    return [dict(zip(AXES, s, strict=True)) for s in shapes if math.prod(s) == devices]


def cells(devices: int) -> Iterator[tuple[dict[str, int], int, int]]:
    """(mesh, ZeRO stage, micro-batches) of every column; the latter two vary along the list."""
    for i, mesh in enumerate(meshes(devices)):
        zero = 1 if mesh["pp"] > 1 else i % 4
        yield mesh, zero, (1, 2, 4)[i % 3] if mesh["pp"] == 1 else (4, 2, 3)[i % 3]


def make_batch(rows: int, seed: int = 0) -> dict:
    """Packed documents, an uneven loss mask, an eighth of the rows without a valid token."""
    import numpy as np

    rng = np.random.default_rng(seed)
    shape = rows, SEQ
    mask = (rng.random(shape) < rng.random((rows, 1))).astype(np.float32)
    mask[: rows // 8] = 0
    return {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "labels": rng.integers(0, VOCAB, shape).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": np.cumsum(rng.random(shape) < 0.1, axis=1).astype(np.int32) + 1,
        "positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), shape),
    }


def measure(feature: str, mesh: dict[str, int], zero: int, micro_batches: int, rows: int) -> tuple:
    """(loss, gradient norm, gradients as numpy) of `feature` on `mesh`."""
    import jax
    import numpy as np

    from mjax.config import load
    from mjax.sharding.mesh import make_mesh
    from mjax.train import Trainer

    sizes = [f"mesh.{axis}={n}" for axis, n in mesh.items()]
    size = rows // (mesh["dp"] * mesh["ep"]) // micro_batches
    batch = [f"train.global_batch_size={rows}", f"train.micro_batch_size={size}"]
    cfg = load(None, [*SMALL, *FEATURES[feature], *sizes, f"mesh.zero={zero}", *batch])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: math.prod(mesh.values())]))
    trainer.init()
    loss, norm, grads = trainer.grads(make_batch(rows))
    return float(loss), float(norm), jax.tree.map(np.asarray, grads)


def deviation(mine: tuple, one: tuple) -> float:
    """Largest relative deviation of loss, norm, or any gradient (over its largest entry)."""
    import jax
    import numpy as np

    def leaf(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(leaf, mine, one)))


def measure_feature(devices: int, feature: str) -> None:
    """Print a JSON line for every cell of a feature's row."""
    references: dict[int, tuple] = {}
    for mesh, zero, micro_batches in cells(devices):
        start, rows = time.time(), 8 * micro_batches
        if rows not in references:
            references[rows] = measure(feature, dict.fromkeys(AXES, 1), 0, 1, rows)
        mine = measure(feature, mesh, zero, micro_batches, rows)
        record = {"feature": feature, "mesh": _name(mesh), "zero": zero}
        record |= {"micro_batches": micro_batches, "deviation": deviation(mine, references[rows])}
        print(json.dumps(record | {"s": round(time.time() - start, 1)}), flush=True)


def prove(devices: int, features: list[str], jobs: int) -> list[dict]:
    """Measure each feature in a process of its own, `jobs` at a time; all records."""

    def one(feature: str) -> list[dict]:
        command = [sys.executable, "-m", "mjax.prove", "--devices", str(devices), "--row", feature]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="", flush=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(jobs) as pool:
        return [record for records in pool.map(one, features) for record in records]


def page(devices: int, records: list[dict]) -> str:
    """The published table."""
    import jax

    lines = []
    for feature in dict.fromkeys(r["feature"] for r in records):
        row = [r for r in records if r["feature"] == feature]
        worst = max(row, key=lambda r: r["deviation"])
        lines.append(f"| {feature} | {len(row)} | {worst['deviation']:.1e} | {worst['mesh']} |")
    first = [r for r in records if r["feature"] == records[0]["feature"]]
    meshes = "; ".join(f"{r['mesh']} (ZeRO {r['zero']}, {r['micro_batches']} mb)" for r in first)
    return "\n".join(
        [
            "# Every mesh, same answer",
            "",
            "Largest relative deviation of loss, gradient norm or any gradient from one device and",
            f"one micro-batch, fp32, {devices} fake CPU devices, jax {jax.__version__}. Written by",
            f"`python -m mjax.prove --devices {devices}`; the bound is {BOUND:.0e}.",
            "",
            "| feature | meshes | largest deviation | where |",
            "|---|---|---|---|",
            *lines,
            "",
            f"Meshes (with ZeRO stage and micro-batches): {meshes}.",
            "",
        ]
    )


def _name(mesh: dict[str, int]) -> str:
    return "·".join(f"{axis}{n}" for axis, n in mesh.items() if n > 1) or "one device"


def main() -> int:
    from mjax.errors import UserError

    parser = argparse.ArgumentParser(prog="python -m mjax.prove", description=__doc__)
    parser.add_argument("--devices", type=int, default=8, help="fake CPU devices")
    parser.add_argument("--out", type=Path, default=Path("docs/invariance.md"))
    parser.add_argument("--feature", action="append", choices=list(FEATURES), help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="features side by side")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        flags = f"--xla_force_host_platform_device_count={args.devices}"
        flags += " --xla_backend_optimization_level=0"  # tiny shapes: compiling is most of the time
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["NPROC"] = "1"  # XLA's CPU threads: with many, pipelines abort in a rendezvous
        measure_feature(args.devices, args.row)
        return 0
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: no such folder; create it or name another file")
    records = prove(args.devices, args.feature or list(FEATURES), args.jobs)
    args.out.write_text(page(args.devices, records), encoding="utf-8")
    return 0 if all(r["deviation"] <= BOUND for r in records) else 1


if __name__ == "__main__":
    from mjax.errors import run_cli

    run_cli(main)
