"""One layer of experts alone on the GPUs of a host, one sequence each, all of them in mesh.ep.

    python docs/lab/expert_layer.py mixtral|h7168 [a.b=c ...]

times router, exchange, experts and combination, without norm and attention: the forward, and the
forward with all gradients as one program; the backward is the difference. Parameters are in bf16
as matmuls read them, gradients stay where the weights are, and the router's are summed over ep.
The router is force-balanced.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.bench.report import launch_ms
from mjax.config import load
from mjax.models.base.branch import BranchInputs
from mjax.models.base.context import tokens_of
from mjax.models.base.params import split
from mjax.models.moe.layer import MoE
from mjax.plan.execution import decide_execution, tp_overlap_rows, training_context
from mjax.plan.xla_options import compiler_options, device_facts
from mjax.sharding.collectives import reduce_gradients
from mjax.sharding.mesh import make_mesh, on_shards, parallel_of
from mjax.sharding.rules import partition, place
from mjax.sharding.spec import is_spec

CONFIG = Path(__file__).resolve().parents[2] / "configs/models/mixtral_8x7b.yaml"
WIDE = {"hidden_size": 7168, "moe.num_experts_per_tok": 8, "moe.moe_intermediate_size": 2048}


def keys_of(shape: str, count: int) -> list[str]:
    """The config's keys for `count` devices; `h7168` has 32 experts a device."""
    keys = [f"mesh.ep={count}", f"train.global_batch_size={count}", "train.micro_batch_size=1"]
    keys += ["data.mock=true", "data.seq_length=4096", "model.num_hidden_layers=1"]
    keys += ["model.moe.force_balanced=true"]
    if shape == "mixtral":
        return keys
    keys += [f"model.moe.num_experts={32 * count}"]
    return keys + [f"model.{key}={value}" for key, value in WIDE.items()]


def main(shape: str, overrides: list[str]) -> None:
    count = jax.device_count()
    cfg = load(CONFIG, [*keys_of(shape, count), *overrides])
    mesh = make_mesh(cfg.mesh)
    devices, parallel = list(mesh.devices.flat), parallel_of(mesh)
    facts = device_facts(devices)
    execution = decide_execution(cfg, dict(mesh.shape), facts, count)
    rows = tp_overlap_rows(cfg.mesh, facts)
    ctx = training_context(cfg, parallel, max_documents=1, overlap_rows=rows)
    length, width = cfg.data.seq_length, cfg.model.hidden_size

    def make() -> MoE:
        return MoE(cfg.model, cfg.model.initializer_range, nnx.Rngs(0))

    definition, _ = split(nnx.eval_shape(make))
    cuts = place(definition.specs, parallel, 0).weights
    of_rows = partition(("batch",), parallel)
    of_x = P(*of_rows, None, None)

    def draw():
        def cast(spec, value):
            return value.astype(spec.dtype(jnp.dtype(execution.compute)))

        params = jax.tree.map(cast, definition.specs, split(make())[1], is_leaf=is_spec)
        keys = jax.random.split(jax.random.key(1))
        x, dy = (jax.random.normal(k, (count, length, width), execution.compute) for k in keys)
        return params, x, dy, jnp.arange(count), jnp.arange(length)

    def forward(params, x, dy, rows, columns):
        tokens = tokens_of(x.shape[:2], rows=rows, columns=columns)
        return definition.bind(params)(x, BranchInputs(tokens, ctx, "E")).y

    def both(params, x, *rest):
        y, pull = jax.vjp(lambda params, x: forward(params, x, *rest), params, x)
        d_params, dx = pull(rest[0])
        return y, dx, reduce_gradients(d_params, cuts, parallel)  # y, or its matmuls were left out

    given = cuts, of_x, of_x, of_rows, P(None)
    stored = jax.tree.map(lambda c: NamedSharding(mesh, c), given, is_leaf=lambda c: type(c) is P)
    arguments = jax.block_until_ready(jax.jit(draw, out_shardings=stored)())
    options = compiler_options(execution, rows is not None, devices) or None

    def timed(f, outputs) -> float:
        f = jax.jit(on_shards(f, mesh, given, outputs), compiler_options=options)
        return launch_ms(lambda: f(*arguments))

    one, all_ = timed(forward, of_x), timed(both, (of_x, of_x, cuts))
    moe = cfg.model.moe
    flops = 6 * moe.num_experts_per_tok * width * moe.moe_intermediate_size * length
    print(f"{shape}, {count} x {devices[0].device_kind}, {cfg.train.expert_exchange}:", end=" ")
    print(f"forward {one:.2f} ms, backward {all_ - one:.2f} ms,", end=" ")
    print(f"{flops / one / 1e9:.0f} and {2 * flops / (all_ - one) / 1e9:.0f} TFLOP/s a device")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["mixtral", "h7168"])
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    main(**vars(parser.parse_args()))
