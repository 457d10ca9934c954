"""A model as a StableHLO artifact: programs, weights and a manifest that says how to call them.

One pair of programs for each bucket of batch size and cache length; `prefill` takes a block of
tokens a row and `decode` one, by the same convention, so a prompt of any length is a few calls.
Weights are arguments, saved beside in their own file: a program is kilobytes whatever the model's
size, all buckets share one copy, and fine-tuned weights need no new export. Attention is plain XLA:
`jax.export` promises to read a program for months only if it calls nothing but what it lists as
stable, which cuDNN's and our own kernels are not. Invariant: a program computes `cache.extend`.
"""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

import mjax
from mjax.checkpoint.base.companion_files import write_files
from mjax.checkpoint.base.new_folder import new_folder
from mjax.checkpoint.base.safetensors import require_fp16_range, write_file
from mjax.checkpoint.base.source import Source, block_shape, blocks, flat
from mjax.config.schema.keys import nested
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.export import artifact
from mjax.infer.caches.contiguous import KVCache, extend, last_real, real_first
from mjax.infer.checks import require_decoder
from mjax.models import definition_of
from mjax.models.base.branch import cache_specs
from mjax.models.base.params import Definition

PLATFORMS = ("cpu", "cuda")
# Letters in shapes: B rows and T cache slots of a bucket, S tokens of a row in one call.
CACHE_ABOUT = {
    "layers": "of each layer and branch; of attention [B, kv heads, T, head size], keys after "
    "rotary embedding; of latent attention [B, T, normed latent and key part after it]",
    "lengths": "tokens of each row, which is its next slot and position; the caller keeps "
    "lengths + S <= T",
}
CONVENTION = {
    "call": "logits, cache = program(weights, cache, ids, real)",
    "order": "arguments and results flattened, dictionaries by sorted key; weights first",
    "ids": {"shape": ["B", "S"], "dtype": "int32", "about": "rows padded on either side"},
    "real": {"shape": ["B", "S"], "dtype": "int32", "about": "1 for a token, 0 for padding"},
    "logits": {
        "shape": ["B", "V"],
        "dtype": "float32",
        "about": "of each row's last token; a row without one has none",
    },
    "sampling": "left to the caller",
    "start": "a cache of zeros",
}


def export_model(
    source: Source,
    folder: str | Path,
    *,
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] = (1024,),
    platforms: Sequence[str] = PLATFORMS,
    dtype: str = "bfloat16",
    block: int = 128,
    eos: Sequence[int] = (),
    extras: Mapping[str, bytes] | None = None,
) -> dict:
    """Write the artifact of `source` to the new `folder`, `extras` (tokenizer files) with it, and
    give its manifest back. `lengths`: slots of the caches; `block`: tokens a row of a prefill call,
    at most half a cache. One device. Raises `UserError` for sizes that the model does not take,
    with nothing written.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("jax.export writes programs with flatbuffers; pip install mjax[export]")
    source.check()
    cfg, definition = source.cfg, definition_of(source.cfg)
    _check(cfg, batches, lengths, platforms, block)
    shapes = {".".join(p): (s.shape, jnp.dtype(dtype)) for p, s in flat(definition.specs).items()}
    cache = _cache(cfg, dtype)
    with new_folder(folder) as temporary:
        entries, version = [], 0
        for batch, length in sorted((b, t) for b in set(batches) for t in set(lengths)):
            entry = {"batch": batch, "length": length}
            for kind, tokens in (("prefill", min(block, length // 2)), ("decode", 1)):
                sizes = {"B": batch, "T": length, "S": tokens}
                made = _program(definition, shapes, cache, sizes, platforms)
                name, data = f"{kind}_b{batch}_t{length}.stablehlo", bytes(made.serialize())
                (temporary / name).write_bytes(data)
                digest = hashlib.sha256(data).hexdigest()
                entry[kind] = {"file": name, "tokens": tokens, "sha256": digest}
                version = made.calling_convention_version
            entries.append(entry)
        manifest = {
            "format": artifact.FORMAT,
            "format_version": artifact.FORMAT_VERSION,
            "mjax": mjax.__version__,
            "jax": jax.__version__,
            "calling_convention_version": version,
            "platforms": list(platforms),
            "vocab_size": cfg.vocab_size,
            "eos_token_ids": [int(i) for i in eos],
            "max_position_embeddings": cfg.max_position_embeddings,
            "convention": CONVENTION,
            "cache": {k: {**v, "about": CACHE_ABOUT[k.split(".")[0]]} for k, v in cache.items()},
            "buckets": entries,
            "weights": {n: {"shape": s, "dtype": str(d)} for n, (s, d) in shapes.items()},
        }
        text = json.dumps(manifest, indent=1) + "\n"
        (temporary / artifact.MANIFEST).write_text(text, encoding="utf-8")
        write_file(temporary / artifact.WEIGHTS, shapes, partial(_runs_of_rows, source, shapes))
        shutil.copyfile(artifact.__file__, temporary / "run.py")
        write_files(temporary, extras or {})
    return manifest


def _check(cfg: ModelConfig, batches, lengths, platforms, block: int) -> None:
    require_decoder(cfg)
    limit = cfg.max_position_embeddings
    if not batches or min(batches) < 1 or not lengths or min(lengths) < 2 or block < 1:
        raise UserError(
            f"--batch {list(batches)} --length {list(lengths)} --block {block}: give batches and a "
            "block of 1 or more, and lengths of 2 or more"
        )
    if max(lengths) > limit:
        raise UserError(
            f"--length {max(lengths)}: the model takes model.max_position_embeddings={limit}; "
            "give shorter caches"
        )
    unknown = sorted(set(platforms) - set(PLATFORMS))
    if unknown or not platforms:
        what = unknown[0] if unknown else "nothing"
        raise UserError(f"--platforms: {what!r} is not one of {', '.join(PLATFORMS)}")


def _cache(cfg: ModelConfig, dtype: str) -> dict[str, dict]:
    """Name -> shape, with letters, and dtype of the leaves of a `KVCache`."""
    paths = tree_flatten_with_path(cache_specs(cfg, "B", "T"))[0]
    layers = {
        f"layers.{keystr(path, simple=True, separator='.')}": {
            "shape": list(spec.shape),
            "dtype": spec.dtype or dtype,
        }
        for path, spec in paths
    }
    return layers | {"lengths": {"shape": ["B"], "dtype": "int32"}}


def _program(
    definition: Definition, shapes: Mapping, cache: dict, sizes: dict, platforms: Sequence[str]
) -> jax.export.Exported:
    """The program of one bucket; `jax.export` refuses calls that it does not hold stable."""

    names = [name for name in cache if name.startswith("layers.")]

    def run(weights, cache, ids, real):
        model = definition.bind(nested(weights))
        tree = jax.tree.structure(cache_specs(model.cfg, "B", "T"))
        layers = jax.tree.unflatten(tree, [cache[name] for name in names])
        ids, count = real_first(ids, real)
        x, new = extend(model, KVCache(layers, cache["lengths"]), ids, count)
        leaves = jax.tree.leaves(new.layers)
        out = dict(zip(names, leaves, strict=True))
        out["lengths"] = new.lengths
        return model.logits(last_real(x, count)), out

    def abstract(shape, dtype="int32"):
        return jax.ShapeDtypeStruct([sizes.get(n, n) for n in shape], jnp.dtype(dtype))

    return jax.export.export(jax.jit(run), platforms=tuple(platforms))(
        {name: abstract(*entry) for name, entry in shapes.items()},
        {name: abstract(entry["shape"], entry["dtype"]) for name, entry in cache.items()},
        abstract(["B", "S"]),
        abstract(["B", "S"]),
    )


def _runs_of_rows(source: Source, shapes: Mapping, name: str) -> Iterator[np.ndarray]:
    """A parameter in runs of whole rows of its leading axes, each at most a block of memory."""
    shape, dtype = shapes[name]
    for index in blocks(shape, block_shape(shape, dtype.itemsize, tuple(range(len(shape))))):
        part = source.read(tuple(name.split(".")), index).astype(dtype, copy=False)
        require_fp16_range(part, name)
        yield part
