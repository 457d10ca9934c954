"""`mjax quantize CKPT OUT --scheme S`: a trained model in 8 or 4 bits, as vLLM reads it.

A text (`--calibrate`) says how large the inputs of matmuls are, for scales of least error and for
activation-aware ones. Another (`--evaluate`) is scored twice: with the model, and with the numbers
that were written.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.companion_files import tokenizer_of
from mjax.checkpoint.base.new_folder import require_new
from mjax.config.languages.paths import as_path, path_text
from mjax.data.base.documents import read_text
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import CommandParser, UserError, run_cli
from mjax.evaluate.__main__ import perplexity
from mjax.infer.checks import require_decoder
from mjax.infer.trace import trace
from mjax.infer.weights import usual_dtype
from mjax.interop.pretrained import Pretrained, from_pretrained
from mjax.interop.quantized.activation_aware import (
    choose_factors,
    folded,
    of_all_readers,
    require_norms,
)
from mjax.interop.quantized.folder import Options, plan_of, write_quantized
from mjax.interop.quantized.scale_choice import WAYS_TO_SCALE, Matrix, round_matrix
from mjax.interop.quantized.schemes import SCHEMES
from mjax.interop.sources import source_of
from mjax.post.prune import rows_of_text


def main() -> int:
    """The command line."""
    args = _arguments()
    require_new(args.out)
    texts = {file: read_text(file) for file in (args.calibrate, args.evaluate) if file is not None}
    source, scheme = source_of(args.ckpt), SCHEMES[args.scheme]
    source.check()
    require_decoder(source.cfg)
    plan_of(source, scheme, args.ignore)
    if args.activation_aware:
        require_norms(source.cfg)
    found = tokenizer_of(args.ckpt) if args.tokenizer is None else args.tokenizer
    if texts and found is None:
        raise UserError(f"{args.ckpt}: holds no tokenizer; give --tokenizer")
    tokenizer = load_tokenizer(found) if texts else None

    def figure(ckpt: str) -> float:
        model, text = from_pretrained(ckpt, dtype=usual_dtype()), texts[args.evaluate]
        length = min(args.seq_length, model.cfg.max_position_embeddings)
        return perplexity(model, tokenizer, text, length, None, args.batch_size)["perplexity"]

    before = figure(args.ckpt) if args.evaluate else 0.0
    moments = {}
    if args.calibrate:
        ids, option = tokenizer.encode(texts[args.calibrate]), f"--calibrate {args.calibrate}"
        rows = rows_of_text(ids, args, source.cfg, option, args.samples)
        model = from_pretrained(args.ckpt, dtype=usual_dtype())
        moments = input_moments(model, rows, args.batch_size)
        del model
    if args.activation_aware:
        factors = choose_factors(
            source, moments, lambda w: round_matrix(Matrix("", w), scheme, "max", 0.0).numbers
        )
        source, moments = folded(source, factors), of_all_readers(source.cfg, moments, factors)
    size = math.ceil(args.max_shard_gb * 1e9)
    options = Options(tuple(args.ignore), args.scales, moments, size, args.license)
    told = write_quantized(source, args.ckpt, args.out, scheme, options)
    print(f"{args.out}: {source.cfg.model_type} as {args.scheme}, {told}")
    if args.evaluate:
        after = figure(str(args.out))
        change = f"{after / before - 1:+.2%}"
        print(f"perplexity of {args.evaluate}: {before:.4f} before, {after:.4f} after ({change})")
    return 0


def _arguments() -> argparse.Namespace:
    """The options. Raises `UserError` for those that do not go together."""
    parser = CommandParser("post.quantize", description="Quantize a model.")
    about = "a run, a checkpoint, RUN@best, a Hugging Face folder, org/name of the hub"
    parser.add_argument("ckpt", type=path_text, metavar="CKPT", help=about)
    parser.add_argument("out", type=as_path, metavar="OUT", help="Hugging Face folder to make")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="what shares a scale")
    about = "modules left in bfloat16, such as '*.down_proj'; the head and routers always are"
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=about)
    about = "what a block keeps: its maximum, its 99.9th percentile, or what errs least"
    parser.add_argument("--scales", choices=WAYS_TO_SCALE, default="max", help=about)
    about = "UTF-8 text that says how large the inputs of matmuls are"
    parser.add_argument("--calibrate", type=as_path, metavar="FILE", help=about)
    parser.add_argument("--samples", type=int, default=128, help="rows of it (default: 128)")
    about = "int4_group128: scale inputs by their size (AWQ); needs --calibrate"
    parser.add_argument("--activation-aware", action="store_true", help=about)
    about = "UTF-8 text whose perplexity is printed, before and after"
    parser.add_argument("--evaluate", type=as_path, metavar="FILE", help=about)
    parser.add_argument("--tokenizer", type=path_text, help="default: the model's own")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows at once")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of one file")
    parser.add_argument("--license", metavar="WORD", help="for the model card: the hub's word")
    args = parser.parse_args()
    if not 0 < args.max_shard_gb < math.inf:
        raise UserError(f"--max-shard-gb {args.max_shard_gb}: give a number above 0")
    if args.activation_aware and (args.scheme != "int4_group128" or args.calibrate is None):
        raise UserError("--activation-aware goes with --scheme int4_group128 and --calibrate FILE")
    if args.calibrate and not args.activation_aware and args.scales != "mse":
        raise UserError("--calibrate is read by --scales mse and --activation-aware alone")
    return args


def input_moments(
    model: Pretrained, rows: np.ndarray, batch: int
) -> dict[tuple[int, str], np.ndarray]:
    """The mean squares fp32 [in] of what matmuls read on rows of tokens int32 [B, S], by layer and
    matmul. The second matmul of experts is not among them."""

    @jax.jit
    def look(params: dict, tokens: jax.Array) -> dict[str, jax.Array]:
        _, seen = trace(model.definition.bind(params), tokens, keep=["inputs.*"])
        sums = {name: jnp.square(x.astype(jnp.float32)).mean(1) for name, x in seen.items()}
        return {name: x.sum(0).reshape(-1) for name, x in sums.items()}

    sums: dict[str, jax.Array] = {}
    for first in range(0, len(rows), batch):
        seen = look(model.params, jnp.asarray(rows[first : first + batch]))
        sums = jax.tree.map(jnp.add, sums, seen) if sums else seen
    found = {}
    for name, squares in sums.items():
        _, layer, matmul = name.split(".", 2)
        found[int(layer), matmul] = np.asarray(squares) / len(rows)
    return of_all_readers(model.cfg, found)


if __name__ == "__main__":
    run_cli(main)
