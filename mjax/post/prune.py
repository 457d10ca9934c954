"""`mjax prune CKPT OUT --text FILE --hidden-size N ...`: a smaller model out of a larger one.

Depth and width by the criteria of Minitron (arXiv 2407.14679), all from forward passes on text:

- an entry of the residual stream: the size of what matmuls read there, summed over layers;
- a neuron of an MLP, and the heads of a group of attention: the size of what the output projection
  reads there, in each layer by itself;
- a layer: 1 - the cosine of its input and output, the block influence of arXiv 2403.03853.

A size is the L2 norm over a row's tokens, a mean over rows. The result is a checkpoint to distill
into; it is worse than its origin until then.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.companion_files import is_of_tokenizer, read_side_files, tokenizer_of
from mjax.checkpoint.base.source import flat
from mjax.checkpoint.weights import write_weights
from mjax.config.languages.layer_pattern import stack_of
from mjax.config.languages.paths import as_path, path_text
from mjax.config.schema.model import ModelConfig
from mjax.data.base.documents import read_text
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import CommandParser, UserError, run_cli
from mjax.infer.trace import trace
from mjax.infer.weights import usual_dtype
from mjax.interop.pretrained import Pretrained, from_pretrained
from mjax.interop.pruned import CUT, KeptParts, pruned
from mjax.interop.sources import source_of
from mjax.models import definition_of


class Importance(NamedTuple):
    """Larger is more important.

    layers [L]; embed [D]; within: of the axes "mlp" and "kv_heads" of a layer, by layer and axis.
    """

    layers: np.ndarray
    embed: np.ndarray
    within: dict[tuple[int, str], np.ndarray]


def main() -> int:
    """The command line."""
    parser = CommandParser("post.prune", description="Prune a model.")
    about = "a run, a checkpoint, RUN@best, a Hugging Face folder, org/name of the hub"
    parser.add_argument("ckpt", type=path_text, metavar="CKPT", help=about)
    parser.add_argument("out", type=as_path, metavar="OUT", help="folder to make: a checkpoint")
    parser.add_argument("--text", type=as_path, required=True, help="UTF-8 text to look at")
    about = "default: the model's own; see data.tokenizer"
    parser.add_argument("--tokenizer", type=path_text, help=about)
    for name, about in SIZES.items():
        parser.add_argument(name, type=int, metavar="N", help=f"{about} to keep; default: all")
    parser.add_argument("--rows", type=int, default=32, help="rows of text (default: 32)")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows at once")
    args = parser.parse_args()
    source = source_of(args.ckpt)
    wanted = _wanted(args, source.cfg)
    tokenizer = args.tokenizer or tokenizer_of(args.ckpt)
    if tokenizer is None:
        raise UserError(f"{args.ckpt}: holds no tokenizer; give --tokenizer")
    ids = load_tokenizer(tokenizer).encode(read_text(args.text))
    rows = rows_of_text(ids, args, source.cfg, f"--text {args.text}", args.rows)
    model = from_pretrained(args.ckpt, dtype=usual_dtype())
    kept = choose_parts(importance(model, rows, args.batch_size), model.cfg, wanted)
    found = pruned(source, kept)
    files = read_side_files(args.ckpt)
    extras = {name: content for name, content in files.items() if is_of_tokenizer(name)}
    write_weights(args.out, found, definition_of(found.cfg).specs, "float32", extras)
    layers = ", ".join(map(str, kept.layers))
    print(f"{args.out}: {sizes_in_words(found.cfg)}, of {sizes_in_words(source.cfg)}")
    print(f"layers kept: {layers}")
    return 0


SIZES = {
    "--num-hidden-layers": "layers",
    "--hidden-size": "entries of the residual stream",
    "--intermediate-size": "neurons of each MLP",
    "--num-key-value-heads": "groups of attention heads of each layer",
}


def sizes_in_words(cfg: ModelConfig) -> str:
    """The sizes that pruning changes."""
    heads = f"{cfg.attention.num_attention_heads}/{cfg.attention.num_key_value_heads} heads"
    width = f"width {cfg.hidden_size}, MLPs {cfg.intermediate_size}"
    return f"{cfg.num_hidden_layers} layers, {width}, {heads}"


def importance(model: Pretrained, rows: np.ndarray, batch: int) -> Importance:
    """The importance of a decoder's parts on rows of tokens int32 [B, S], `batch` rows at a time.

    Raises `UserError` for models that `trace` does not look into.
    """
    cfg, names = model.cfg, _axes_of_inputs(model)

    @jax.jit
    def look(params: dict, tokens: jax.Array) -> tuple[jax.Array, dict]:
        keep = ["embedding", "layers.*", "inputs.*"]
        _, seen = trace(model.definition.bind(params), tokens, keep=keep)
        streams = [seen["embedding"], *(seen[f"layers.{i}"] for i in range(len(cfg.layer_kinds)))]
        change = [1 - _cosine(*pair) for pair in zip(streams, streams[1:], strict=False)]
        found = defaultdict(float)
        for number, kind in enumerate(cfg.layer_kinds):
            for matmul, axes in names[stack_of(kind)].items():
                x = seen.get(f"inputs.{number}.{matmul}")
                if x is not None:
                    key = (0, "embed") if axes == ("embed",) else (number, axes[0])
                    found[key] += _size_of_entries(x)
        return jnp.stack(change), dict(found)

    sums = None
    for first in range(0, len(rows), batch):
        seen = look(model.params, jnp.asarray(rows[first : first + batch]))
        sums = seen if sums is None else jax.tree.map(jnp.add, sums, seen)
    layers, within = jax.tree.map(lambda a: np.asarray(a, np.float64) / len(rows), sums)
    embed = within.pop((0, "embed"))
    groups = cfg.attention.num_key_value_heads
    named = {}
    for (number, axis), size in within.items():
        is_heads = axis == "heads"
        size = size.reshape(groups, -1).sum(1) if is_heads else size
        named[number, "kv_heads" if is_heads else axis] = size
    return Importance(layers, embed, named)


def _size_of_entries(x: jax.Array) -> jax.Array:
    """fp32 [N] of activations [B, S, N, ...]: the L2 norm over tokens and what follows N."""
    squares = jnp.square(x.astype(jnp.float32)).sum((1, *range(3, x.ndim)))
    return jnp.sqrt(squares).sum(0)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over tokens of the cosine of x and y [B, S, D], summed over rows."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return ((x * y).sum(-1) / jnp.maximum(norms, 1e-12)).mean(1).sum()


def _axes_of_inputs(model: Pretrained) -> dict[str, dict[str, tuple[str, ...]]]:
    """The axes of what matmuls read, by stack and matmul, of those that importance is read from."""
    found = defaultdict(dict)
    for path, spec in flat(model.definition.specs).items():
        if spec.matmul is None:
            continue
        inputs = [axis for axis in spec.axes if axis != "layers"][: spec.inputs]
        if inputs[0] in ("embed", *CUT.get(path[1], ())):
            found[path[0]][spec.matmul] = tuple(inputs)
    return found


def choose_parts(found: Importance, cfg: ModelConfig, wanted: dict[str, int]) -> KeptParts:
    """The most important parts of the wanted sizes, by the names of config keys."""
    layers = _most_important(found.layers, wanted["num_hidden_layers"])
    within = {}
    for (number, axis), sizes in found.within.items():
        key = "intermediate_size" if axis == "mlp" else "num_key_value_heads"
        if wanted[key] < len(sizes):
            within[number, axis] = _most_important(sizes, wanted[key])
        if axis == "kv_heads" and wanted[key] < len(sizes):
            group = cfg.attention.num_attention_heads // cfg.attention.num_key_value_heads
            heads = within[number, axis][:, None] * group + np.arange(group)
            within[number, "heads"] = heads.reshape(-1)
    within = {key: entries for key, entries in within.items() if key[0] in layers}
    return KeptParts(layers, _most_important(found.embed, wanted["hidden_size"]), within)


def _most_important(sizes: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest, in rising order; of equal ones the first."""
    return np.sort(np.argsort(-sizes, kind="stable")[:count])


def _wanted(args: argparse.Namespace, cfg: ModelConfig) -> dict[str, int]:
    """The sizes to keep. Raises `UserError` for those that the model does not have."""
    sizes = {
        "num_hidden_layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_key_value_heads": cfg.attention.num_key_value_heads,
    }
    found = {}
    for name, size in sizes.items():
        given = getattr(args, name)
        if given is not None and not 1 <= given <= size:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {given}: the model has {size}; give 1 to {size}")
        found[name] = size if given is None else given
    if found == sizes:
        raise UserError(f"nothing to prune: give {', '.join(SIZES)}")
    return found


def rows_of_text(
    ids: Sequence[int], args: argparse.Namespace, cfg: ModelConfig, option: str, count: int
) -> np.ndarray:
    """The first rows of tokens of the text of an option, int32 [rows, seq_length]."""
    length = min(args.seq_length, cfg.max_position_embeddings)
    rows = min(count, len(ids) // max(length, 1))
    if rows < 1 or length < 1 or args.batch_size < 1:
        raise UserError(
            f"{option}: its {len(ids)} tokens make no row of {length}; give more text, or "
            "--seq-length, --batch-size and the number of rows from 1"
        )
    return np.asarray(ids[: rows * length], np.int32).reshape(rows, length)


if __name__ == "__main__":
    run_cli(main)
