"""`python -m mjax.prove`: does every feature give the same numbers on every mesh? A table.

For each feature and mesh a small model in fp32 is trained for 20 steps (AdamW, clipping, a short
schedule) and compared with one device and one micro-batch: loss, gradient norm and every gradient
of the first step, the loss of all of them, and whether devices that hold the same shard hold the
same bits at the end. Packed documents, an uneven loss mask and sequences without a single valid
token included. One compiled step gives all of it: AdamW's first moment after one step is
(1 - b1) times the clipped gradient, Muon's likewise. The law tests run a part of the same table.
Exit code 1 if any cell is above the bounds.
"""

import argparse
import functools
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
from typing import NamedTuple

import jax
import numpy as np

from mjax.config import load
from mjax.config.mesh_rules import AXES
from mjax.errors import UserError, run_cli
from mjax.pipeline.storage import canonical
from mjax.sharding.fake_devices import fake_devices
from mjax.sharding.mesh import make_mesh
from mjax.train import Trainer

BOUND, CURVE_BOUND, STEPS = 1e-5, 1e-4, 20
VOCAB = 251
ROWS = (24, 40, 56)  # sequences of a batch: between them 1 to 8 micro-batches fit any mesh
SMALL = [
    f"model.vocab_size={VOCAB}",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=8",
    "model.attention.num_key_value_heads=2",
    "model.attention.head_dim=4",
    "model.intermediate_size=48",
    "model.num_hidden_layers=4",
    "model.initializer_range=0.1",
    "data.mock=true",
    "data.seq_length=16",
    "precision.compute=float32",
    "train.attention=xla",
    f"train.steps={STEPS}",
    "schedule.lr=3e-3",
    "schedule.warmup_steps=4",
]
# Sizes that 6 devices divide.
SIX = ["model.attention.num_attention_heads=12", "model.vocab_multiple=96", "data.seq_length=24"]
# The parameters of seed 1 keep experts' scores apart for 20 steps. Where two meet, as with those of
# seed 1234, rounding decides where a token goes, and the curve leaves the reference by 1e-4
# (docs/lab/2026-11-23-router.md). Rows whose scores are closer have fewer and weaker experts.
EXPERTS = [
    "run.seed=1",
    "model.layer_pattern=E",
    "model.moe.num_experts_per_tok=2",
    "model.moe.moe_intermediate_size=24",
    "model.moe.router_aux_loss_coef=0.1",
]
STATES = [
    "model.mamba.mamba_num_heads=24",
    "model.mamba.mamba_head_dim=4",
    "model.mamba.state_size=6",
    "model.mamba.chunk_size=4",
]
# Each is a feature whose sharding could go wrong on its own.
FEATURES = {
    "dense": [],
    "experts": ["model.moe.num_experts=8", *EXPERTS],
    "tied": ["model.tie_word_embeddings=true", "model.attention.num_key_value_heads=1"],
    "biases": [
        "model.attention.attention_bias=true",
        "model.attention.attention_out_bias=true",
        "model.mlp_bias=true",
        "model.norm=layernorm",
        "model.mlp_gated=false",
        "model.hidden_act=gelu_tanh",
    ],
    "windows": [
        "model.layer_pattern=LG",
        "model.attention.sliding_window=5",
        "model.rope.rope_local_theta=100.0",
        "model.attention.qk_norm=true",
        "model.norm_placement=sandwich",
        "model.norm_zero_centered=true",
        # unit q and k else make fp32 itself differ by 1e-5
        "model.attention.attention_multiplier=0.1",
    ],
    "learned positions": ["model.position_embedding=learned"],
    "sinks": [
        "model.attention.attention_sinks=true",
        "model.attention.attn_logit_softcapping=2.0",
        "model.final_logit_softcapping=3.0",
        "model.embedding_multiplier=4.0",
        "model.attention.num_key_value_heads=4",
        "train.loss_chunk=48",
    ],
    "dropout": ["model.hidden_dropout=0.2", "model.attention.attention_dropout=0.1"],
    "muon": [
        "optimizer.name=muon",
        "model.attention.num_attention_heads=24",
        "model.attention.num_key_value_heads=6",
    ],
    "uneven layers": ["model.num_hidden_layers=5"],  # 11 where there are more stages: primes
    "odd widths": [  # which no ZeRO group divides
        "model.vocab_multiple=254",
        "model.hidden_size=35",
        "model.attention.num_attention_heads=2",
        "model.attention.head_dim=10",
        "model.intermediate_size=50",
    ],
    "gpt-oss": [
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern='window, full, full, window+experts'",
        "model.moe.routed_scaling_factor=0.5",
        "model.attention.sliding_window=5",
        "model.attention.attention_sinks=true",
        "model.attention.attention_bias=true",
        "model.moe.router_bias=true",
        "model.mlp_bias=true",
        "model.swiglu_limit=0.5",
    ],
    "routing": [  # DeepSeek-V3's, with all that a router may have
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern=GGGE",
        "model.moe.scoring_func=sigmoid",
        "model.moe.n_group=2",
        "model.moe.routed_scaling_factor=0.5",
        "model.moe.router_bias=true",
        "model.moe.router_z_loss_coef=0.01",
        "model.moe.shared_expert_intermediate_size=24",
        "model.moe.shared_expert_gate=true",
    ],
    "expert bias": [
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern=GGGE",
        "model.moe.scoring_func=sigmoid",
        "model.moe.expert_bias=true",
        "model.moe.routed_scaling_factor=0.5",
    ],
    "multi-token prediction": [  # by two depths of experts
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern=GE",
        "model.moe.expert_bias=true",
        "model.moe.scoring_func=sigmoid",
        "model.num_nextn_predict_layers=2",
        "model.hidden_dropout=0.1",
        "train.mtp_loss_scaling_factor=0.5",
    ],
    "capacity": [  # a third of all pairs is dropped
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern=GGGE",
        "model.moe.capacity_factor=0.75",
        "model.moe.routed_scaling_factor=0.5",
    ],
    "all-to-all": [  # of tokens over ep; some exchanges have more tokens than room, and gather
        "model.moe.num_experts=8",
        *EXPERTS,
        "train.expert_exchange=all_to_all",
    ],
    "sinkhorn": [  # and jitter
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern=GGGE",
        "model.moe.router_aux_loss_coef=0.0",
        "model.moe.sinkhorn=true",
        "model.moe.router_jitter_noise=0.05",
        "model.moe.routed_scaling_factor=0.5",
    ],
    "unlike layers": [  # a branch a layer, two at once, and a wider MLP
        "model.layer_pattern='[G][D][G|D]G@1'",
        "model.layer_sizes=[{intermediate_size: 96}]",
    ],
    "frozen": ["train.freeze=[embedding, '*.mlp.*']"],
    "latent attention": [  # DeepSeek's
        "model.layer_pattern=A",
        "model.attention.num_key_value_heads=0",
        "model.mla.q_lora_rank=20",
        "model.mla.kv_lora_rank=12",
        "model.mla.qk_nope_head_dim=6",
        "model.mla.qk_rope_head_dim=4",
        "model.mla.v_head_dim=8",
        "model.rope.rope_scaling={rope_type: yarn, factor: 4.0, mscale: 0.7, "
        "mscale_all_dim: 1.0, original_max_position_embeddings: 8}",
    ],
    "mamba": ["model.layer_pattern=M", "model.mamba.n_groups=2", *STATES],
    "hybrid": [  # one group for all heads, attention beside a mixer, experts
        "model.moe.num_experts=8",
        *EXPERTS,
        "model.layer_pattern='mamba+mlp, mamba|full, mamba, experts'",
        *STATES,
    ],
}
NO_RING = ("sinks", "dropout", "gpt-oss", "latent attention", "multi-token prediction")
MOST_TP = {"odd widths": 2}
# Layers that differ, in turn.
PERIOD = {
    "windows": 2,
    "multi-token prediction": 2,
    "gpt-oss": 4,
    "routing": 4,
    "expert bias": 4,
    "capacity": 4,
    "sinkhorn": 4,
    "unlike layers": 4,
    "hybrid": 4,
}


class Cell(NamedTuple):
    """Where and how a feature is run; the default is the reference."""

    mesh: dict[str, int] = {}  # axes that are left out have size 1
    zero: int = 0
    micro_batches: int = 1
    rows: int = ROWS[0]
    cp_type: str = "auto"

    def __str__(self) -> str:
        mesh = "·".join(f"{axis}{n}" for axis, n in self.mesh.items() if n > 1) or "one device"
        keys = f", {self.cp_type}" if self.mesh.get("cp", 1) > 1 else ""
        return f"{mesh} (ZeRO {self.zero}, {self.micro_batches} mb{keys})"


def meshes(devices: int) -> list[dict[str, int]]:
    """Every factorization of `devices` into the five axes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = itertools.product(divisors, repeat=len(AXES))
    return [dict(zip(AXES, s, strict=True)) for s in shapes if math.prod(s) == devices]


def cells(devices: int, feature: str) -> Iterator[Cell]:
    """A feature's row: every mesh. ZeRO stage, micro-batches and the exchange of keys take turns
    along it, beginning elsewhere for each feature."""
    ways = ("all_gather", "a2a") if feature in NO_RING else ("all_gather", "a2a", "ring")
    for i, mesh in enumerate(meshes(devices), list(FEATURES).index(feature)):
        if mesh["tp"] > MOST_TP.get(feature, devices):
            continue
        stages = (0, 1, 3) if mesh["pp"] > 1 else (0, 1, 2, 3)
        parts = mesh["dp"] * mesh["ep"]
        fits = [(m, r) for m in range(1, 9) for r in ROWS if r % (m * parts) == 0]
        heads = 2 if feature == "odd widths" else 8
        way = ways[i % len(ways)]
        layers = layers_for(mesh, feature)
        odd = mesh["pp"] > 1 and layers // mesh["pp"] % PERIOD.get(feature, 1)
        uneven = layers % mesh["pp"] or odd  # where a ring is refused
        if (way == "a2a" and heads // mesh["tp"] % mesh["cp"]) or (way == "ring" and uneven):
            way = ways[0]
        yield Cell(mesh, stages[i % len(stages)], *fits[5 * i % len(fits)], way)


def make_batch(rows: int, seed: int = 0, width: int = 16, vocab: int = VOCAB) -> dict:
    """Packed documents, an uneven loss mask, an eighth of the rows without a valid token."""
    rng = np.random.default_rng(seed)
    shape = rows, width
    segments = np.cumsum(rng.random(shape) < 0.15, axis=1).astype(np.int32) + 1
    mask = (rng.random(shape) < rng.random((rows, 1))).astype(np.float32)
    mask[: rows // 8] = 0
    new = np.diff(segments, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(new, np.arange(width), 0), axis=1)
    return {
        "tokens": rng.integers(0, vocab, shape).astype(np.int32),
        "labels": rng.integers(0, vocab, shape).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": segments,
        "positions": (np.arange(width) - starts).astype(np.int32),
    }


def make_trainer(feature: str, cell: Cell, *overrides: str) -> Trainer:
    """A trainer of `feature` at step 0 on the first devices."""
    mesh = dict.fromkeys(AXES, 1) | cell.mesh
    size = cell.rows // (mesh["dp"] * mesh["ep"]) // cell.micro_batches
    keys = {f"mesh.{axis}": n for axis, n in mesh.items()}
    keys |= {"mesh.zero": cell.zero, "mesh.cp_type": cell.cp_type}
    keys |= {"train.global_batch_size": cell.rows, "train.micro_batch_size": size}
    given = [f"{key}={value}" for key, value in keys.items()]
    cfg = load(None, [*SMALL, *FEATURES[feature], *given, *overrides])
    trainer = Trainer(cfg, make_mesh(cfg.mesh, jax.devices()[: math.prod(mesh.values())]))
    trainer.init()
    return trainer


class Numbers(NamedTuple):
    """What a run gave: loss, norm and gradients of the first step; losses; replicas identical."""

    first: dict
    curve: np.ndarray
    replicas: bool


def measure(trainer: Trainer, steps: int = STEPS) -> Numbers:
    """Train from step 0 on one batch, whose loss falls the faster and shows the more."""
    rows, width = trainer.cfg.train.global_batch_size, trainer.cfg.data.seq_length
    batch = make_batch(rows, width=width)
    first = trainer.step(batch)
    moment = canonical(trainer.storage, trainer.state["opt"]["mu"])
    first = {
        name: value for name, value in first.items() if name not in ("tokens", "finite", "accepted")
    }
    first = jax.tree.map(np.asarray, {**first, "gradients": moment})
    losses = [first["loss"], *(trainer.step(batch)["loss"] for _ in range(1, steps))]
    return Numbers(first, np.array(losses, np.float64), replicas_identical(trainer.state))


def replicas_identical(state: dict) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits."""
    for leaf in jax.tree.leaves(state):
        seen: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if seen.setdefault(str(shard.index), bits) != bits:
                return False
    return True


def deviation(mine: object, one: object) -> float:
    """Largest |a - b| over the largest |b| of any leaf of two trees."""

    def leaf(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(leaf, mine, one)))


@functools.cache
def one_device(feature: str, rows: int, steps: int, *overrides: str) -> Numbers:
    """The reference: one device, one micro-batch."""
    return measure(make_trainer(feature, Cell(rows=rows), *overrides), steps)


def layers_for(mesh: dict[str, int], feature: str) -> int:
    """Enough for every stage to have one."""
    long = mesh.get("pp", 1) > 4
    return (5, 11)[long] if feature == "uneven layers" else (4, 8)[long]


def sizes_for(mesh: dict[str, int], feature: str) -> list[str]:
    """Overrides that make every axis of 6 devices divide what it cuts, and fill long pipelines."""
    layers = layers_for(mesh, feature)
    deep = [f"model.num_hidden_layers={layers}"] if mesh.get("pp", 1) > 4 else []
    if math.prod(mesh.values()) % 3:
        return deep
    six = SIX[{"muon": 1, "odd widths": 2}.get(feature, 0) :]  # those two have sizes of their own
    experts = ["model.moe.num_experts=6"] if "model.moe.num_experts=8" in FEATURES[feature] else []
    return [*deep, *six, *experts]


def compare(feature: str, cell: Cell, *overrides: str, steps: int = STEPS) -> dict:
    """One cell of the table: its largest deviations from one device, and the replicas. The
    reference takes those `overrides` that are not about the mesh."""
    sizes = sizes_for(cell.mesh, feature)
    mine = measure(make_trainer(feature, cell, *sizes, *overrides), steps)
    common = (o for o in overrides if not o.startswith("mesh."))
    one = one_device(feature, cell.rows, steps, *sizes, *common)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(one.first["gradients"])), feature
    return {
        "gradient": deviation(mine.first, one.first),
        "curve": float(np.abs(mine.curve / one.curve - 1).max()),
        "replicas": mine.replicas,
    }


def holds(record: dict) -> bool:
    """False for NaN, too."""
    return record["gradient"] <= BOUND and record["curve"] <= CURVE_BOUND and record["replicas"]


def print_cells(devices: int, feature: str, rows: int) -> None:
    """A JSON line for every cell of a feature's row that has batches of `rows` sequences."""
    for cell in cells(devices, feature):
        if cell.rows == rows:
            start = time.time()
            record = {"feature": feature, "devices": devices, "cell": str(cell)}
            record |= compare(feature, cell)
            print(json.dumps(record | {"s": round(time.time() - start, 1)}), flush=True)


def prove(devices: list[int], features: list[str], jobs: int) -> list[dict]:
    """Measure each (device count, feature, batch size) in a process of its own, `jobs` at a time;
    all records, in order."""

    def one(task: tuple[int, str, int]) -> list[dict]:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {fake_devices(task[0])}"
        env = os.environ | {"XLA_FLAGS": flags.strip()}
        env |= {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "mjax.prove", "--cells", *map(str, task)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        print(done.stdout, end="", flush=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    tasks = itertools.product(devices, features, ROWS)
    with ThreadPoolExecutor(jobs) as pool:
        return [record for records in pool.map(one, tasks) for record in records]


def page(records: list[dict]) -> str:
    """The published table."""
    lines, devices = [], sorted({r["devices"] for r in records})
    for feature in dict.fromkeys(r["feature"] for r in records):
        row = [r for r in records if r["feature"] == feature]
        worst = {key: max(row, key=lambda r: r[key]) for key in ("gradient", "curve")}  # noqa: B023
        shown = [f"{r[key]:.1e} at {r['cell']}" for key, r in worst.items()]
        same = sum(r["replicas"] for r in row)
        keys = ", ".join(o.removeprefix("model.") for o in FEATURES[feature]) or "Llama-like, GQA"
        lines.append(f"| {feature}: {keys} | {len(row)} | {' | '.join(shown)} | {same} |")
    return PAGE.format(
        devices=" or ".join(map(str, devices)),
        command=f"python -m mjax.prove --devices {' '.join(map(str, devices))}",
        jax=jax.__version__,
        cells=len(records),
        held=sum(map(holds, records)),
        lines="\n".join(lines),
    )


PAGE = f"""# Every mesh, same answer

Every way to split {{devices}} devices into pp, dp, ep, cp and tp, for every feature, fp32 on fake
CPU devices, against one device and one micro-batch. ZeRO stages 0 to 3, 1 to 8 micro-batches and
the exchange of keys over cp take turns from mesh to mesh. Written by `{{command}}` (jax {{jax}}).

- gradient: largest relative deviation of loss, gradient norm or any gradient (over its largest
  entry) of the first step; bound {BOUND:.0e}.
- curve: largest relative deviation of the loss in {STEPS} steps; bound {CURVE_BOUND:.0e}.
- replicas: in how many runs all devices that hold the same part of parameters and moments hold the
  same bits at the end.

{{held}} of {{cells}} runs hold all three.

| feature | runs | gradient | curve | replicas |
|---|---|---|---|---|
{{lines}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mjax.prove", description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8], help="fake CPU devices")
    parser.add_argument("--out", type=Path, default=Path("docs/invariance.md"))
    parser.add_argument("--features", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--records", type=Path, nargs="+", help="table of what runs have printed")
    parser.add_argument("--cells", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cells:
        devices, feature, rows = args.cells
        print_cells(int(devices), feature, int(rows))
        return 0
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: no such folder; create it or name another file")
    if args.records:
        lines = [line for file in args.records for line in file.read_text().splitlines()]
        records = map(json.loads, lines)
        records = list({(r["feature"], r["devices"], r["cell"]): r for r in records}.values())
    else:
        records = prove(args.devices, args.features, args.jobs)
    args.out.write_text(page(records), encoding="utf-8")
    return 0 if all(map(holds, records)) else 1


if __name__ == "__main__":
    run_cli(main)
