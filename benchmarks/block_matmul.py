"""`python -m benchmarks.block_matmul [--shape M,K,N | --experts M,E,K,N]`: 128-blocks on Hopper.

TFLOP/s of several tiles with operands ready, each checked against the product in plain JAX, forward
also with a factor for each column of the weight; the rates of the kernels that round; and the three
products of a matmul with all roundings, beside those of bf16. What does not compile or run says so
in its row. `--experts` has the same of grouped products: M rows that are random experts' of E, as
those of Mixtral (16384,8,4096,14336) and of Qwen3-30B-A3B (65536,128,2048,768).
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp

from mjax.bench.report import launch_ms
from mjax.bench.work import draw
from mjax.errors import UserError, read_numbers, run_cli
from mjax.kernels.base import chooser
from mjax.kernels.fp8 import block_rounding
from mjax.kernels.fp8.block_recipes import Block128
from mjax.kernels.fp8.block_rounding import round_both_ways, round_square
from mjax.kernels.fp8.blocks import FORMATS, Blocks, multiply_blocks
from mjax.kernels.matmul.grouped import grouped_matmul, grouped_weight_gradient
from mjax.models.base.weight import Weight, matmul
from mjax.models.moe.grouped_linear import product_of_rows, rounded_rows, weight_cotangent

# lines, columns, slots, tiles of a band, blocks of a cluster, stages
SQUARE = [
    (128, 192, 4, 16, 1, 2),
    (128, 192, 4, 8, 2, 2),
    (128, 192, 4, 16, 2, 2),
    (128, 192, 4, 4, 2, 2),
    (128, 192, 3, 8, 2, 2),
    (128, 128, 5, 8, 2, 2),
]
LINES = [
    (128, 192, 4, 8, 2, 2),
    (128, 192, 4, 8, 1, 2),
    (128, 192, 4, 16, 2, 2),
    (128, 192, 3, 8, 2, 2),
    (128, 128, 5, 8, 2, 2),
]
E4M3 = FORMATS["e4m3"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_matmul", description=__doc__)
    parser.add_argument("--shape", default="8192,4096,14336", help="M, K, N (default %(default)s)")
    parser.add_argument("--samples", type=int, default=7, help="the median counts (default 7)")
    parser.add_argument("--experts", help="M, E, K, N: the products of experts instead")
    args = parser.parse_args(argv)
    shape = read_numbers("--shape", args.shape)
    if len(shape) != 3 or any(n < 128 or n % 128 for n in shape):
        raise UserError("--shape: give M,K,N, multiples of 128")
    of_experts = read_numbers("--experts", args.experts) if args.experts else None
    if of_experts and (len(of_experts) != 4 or any(n % 128 for n in of_experts[2:])):
        raise UserError("--experts: give M,E,K,N; K and N are multiples of 128")
    if not chooser.on_hopper():
        raise UserError("benchmarks.block_matmul: needs a Hopper GPU and jax >= 0.11")
    if of_experts:
        measure_experts(*of_experts, args)
        return 0
    m, k, n = shape
    x, w, g = draw((m, k)), draw((k, n), 1), draw((m, n), 2)
    both_ways = partial(round_both_ways, to=E4M3)
    both = jax.jit(partial(both_ways, free=False))
    square = partial(round_square, to=E4M3, free=False)
    (x8, x8_turned), (_, g8_turned) = both(x), both(g)
    w8 = jax.jit(partial(square, turned=True))(w)
    flops = 2.0 * m * k * n
    print(f"{m} x {k} x {n}, {jax.devices()[0].device_kind}: TFLOP/s (error of the norm)")
    measure_tiles("forward", SQUARE, (x8, w8), jnp.bfloat16, flops, args.samples)
    by_column = Blocks(w8.values, jnp.repeat(w8.factors, 128, 0), block=(1, 128))
    measure_tiles("by column", LINES[:1], (x8, by_column), jnp.bfloat16, flops, args.samples)
    measure_tiles("d_weight", LINES, (x8_turned, g8_turned), jnp.float32, flops, args.samples)
    for warps in (4, 8, 16):
        block_rounding._WARPS_OF_TILE = warps
        measure_rounding(f"both ways, {warps} warps", partial(both_ways, free=False), x, 4, args)
        turned = partial(square, turned=True)
        measure_rounding(f"square, turned, {warps} warps", turned, w, 3, args)
    block_rounding._WARPS_OF_TILE = 8
    measure_layer(x, w, g, 3 * flops, args.samples)
    return 0


def measure_rounding(name, rounding, value, bytes_of_element, args) -> None:
    """Print the rate of a kernel that rounds."""
    try:
        program = jax.jit(lambda value: rounding(value)).lower(value).compile()
        ms = launch_ms(partial(program, value), args.samples)
        rate = bytes_of_element * value.size / ms / 1e6
        print(f"round {name:26} {rate:7.0f} GB/s  {ms:.3f} ms", flush=True)
    except Exception as error:
        print(f"round {name:26} {type(error).__name__}: {str(error)[:100]}", flush=True)


def measure_tiles(name, tiles, operands, dtype, flops, samples) -> None:
    """Print a row for each tile."""
    from mjax.kernels.fp8.block_mosaic import multiply_on_hopper

    want = jax.jit(partial(multiply_blocks, dtype=jnp.float32, promoted=128))(*operands)
    product = partial(multiply_on_hopper, dtype=dtype)
    measure_product(name, tiles, product, operands, want, flops, samples)


def measure_product(name, tiles, product, operands, want, flops, samples) -> None:
    """Print a row for each tile of a product, whose result should be `want`."""
    from mjax.kernels.fp8.block_mosaic import BlockTile

    norm = float(jnp.linalg.norm(want.astype(jnp.float32)))
    for numbers in tiles:
        label = f"{name:9} {' x '.join(map(str, numbers[:2])):10} {numbers[2:]!s:14}"
        try:
            run = partial(product, tile=BlockTile(*numbers))
            program = jax.jit(run).lower(*operands).compile()
            got = program(*operands)
            error = float(jnp.linalg.norm(got.astype(jnp.float32) - want)) / norm
            ms = launch_ms(partial(program, *operands), samples)
            print(f"{label} {flops / ms / 1e9:7.0f} ({error:.1e})", flush=True)
        except Exception as error:
            print(f"{label} {type(error).__name__}: {str(error)[:100]}", flush=True)


def measure_experts(m, experts, k, n, args) -> None:
    """Print the rows of grouped products of `experts` weights [K, N]."""
    from mjax.kernels.fp8.block_mosaic import multiply_rows_of_groups, weight_gradient_of_groups

    chosen = jax.random.randint(jax.random.key(3), (m,), 0, experts)
    sizes = jnp.zeros(experts, jnp.int32).at[chosen].add(1)
    x, w, g = draw((m, k)), draw((experts, k, n), 1), draw((m, n), 2)
    flops, bf16 = 2.0 * m * k * n, jnp.bfloat16
    print(f"{m} rows of {experts} x {k} x {n}, {jax.devices()[0].device_kind}: TFLOP/s (error)")
    rounded = jax.jit(lambda x: round_both_ways(x, E4M3, False, sizes))
    (x8, x_turned), (_, g_turned) = rounded(x), rounded(g)
    w8 = jax.jit(partial(round_square, to=E4M3, free=False, turned=True))(w)
    emulated = Block128(emulates=True)
    want = jax.jit(
        lambda x8, w: grouped_matmul(x8.numbers(), emulated.weights_of_experts(w, 0), sizes)
    )
    forward = partial(multiply_rows_of_groups, sizes=sizes, dtype=bf16)
    measure_product("forward", SQUARE, forward, (x8, w8), want(x8, w), flops, args.samples)
    want = jax.jit(
        lambda x, g: grouped_weight_gradient(
            *(emulated.round_experts(a, sizes, "input", (k, n))[1] for a in (x, g)),
            sizes,
        )
    )
    gradient = partial(weight_gradient_of_groups, sizes=sizes, dtype=bf16)
    turned = x_turned, g_turned
    measure_product("d_weight", LINES, gradient, turned, want(x, g), flops, args.samples)
    measure_rounding(
        "experts, both ways", lambda x: round_both_ways(x, E4M3, False, sizes), x, 4, args
    )
    measure_rounding(
        "stack, turned", partial(round_square, to=E4M3, free=False, turned=True), w, 3, args
    )
    measure_layer(x, w, g, 3 * flops, args.samples, partial(products_of_experts, sizes=sizes))


def products_of_experts(recipe, x, w, g, sizes):
    """y, and the gradients of x and of w, of a grouped matmul of the model."""
    weight = Weight(w, scales=None if recipe is None else jnp.zeros(3), recipe=recipe)
    facts = weight, sizes, "mosaic"
    y = product_of_rows(rounded_rows(x, weight, sizes, "input", turned=False)[0], *facts, 0)
    by_rows, by_columns = rounded_rows(g, weight, sizes, "gradient")
    dx = product_of_rows(by_rows, *facts, 1)
    return y, dx, weight_cotangent(weight, x, by_columns, sizes, "mosaic").value


def products_of_matmul(recipe, x, w, g):
    """y, and the gradients of x and of w, of a matmul of the model."""
    scales = None if recipe is None else jnp.zeros(3)
    y, pull = jax.vjp(lambda x, w: matmul(x, Weight(w, scales=scales, recipe=recipe)), x, w)
    return y, *pull(g)


def measure_layer(x, w, g, flops, samples, run=products_of_matmul) -> None:
    """Print the rate of y and both gradients, with roundings, in blocks and in bf16."""
    for name, recipe in (("blocks", Block128()), ("bf16", None)):
        products = jax.jit(partial(run, recipe))
        try:
            ms = launch_ms(partial(products, x, w, g), samples)
            print(f"three products and roundings, {name:6} {flops / ms / 1e9:7.0f}  {ms:.3f} ms")
        except Exception as error:
            print(f"three products, {name}: {type(error).__name__}: {str(error)[:100]}")


if __name__ == "__main__":
    run_cli(main)
