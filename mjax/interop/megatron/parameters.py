"""Megatron-LM `torch_dist` GPT checkpoints as a `Source`: names and layouts of every parameter.

Layers are stacked on a leading axis or named by number, experts likewise; names are those of
Transformer Engine's modules or of Megatron's own. A converter takes `fetch`, which reads a box of
one layer's (or expert's) Megatron tensor, and gives a box of ours; it asks for no more than the
rows it needs. Optimizer state, random state and `_extra_state` are left out; any other tensor
without a place is refused. Source: megatron/core (transformer/attention.py, mlp.py, moe/experts.py,
transformer_block.py, dist_checkpointing).
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx

from mjax.checkpoint.base.source import Index, Source
from mjax.checkpoint.base.source import Path as Leaf
from mjax.config.languages.layer_pattern import stack_of
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.megatron.arguments import model_config
from mjax.interop.megatron.torch_dist import TorchDist, open_torch_dist
from mjax.models import definition_of
from mjax.sharding.spec import ParamSpec

_SKIPPED = re.compile(r"(chained_\d+\.)?optimizer\.|.*_extra_state|rng_state|rerun_state_machine")

Fetch = Callable[..., np.ndarray]  # fetch(*slices, part=0): of one layer's or expert's, raw bits


def megatron_source(folder: str | Path) -> Source:
    """The model in a run folder (latest iteration) or iteration folder; reads no weights yet."""
    store = open_torch_dist(folder)
    cfg = _config_of_store(store)
    specs = nnx.traversals.flatten_mapping(definition_of(cfg).specs)
    places = {path: _find(store, cfg, path, spec) for path, spec in specs.items()}

    def read(path: Leaf, index: Index) -> np.ndarray:
        spec = specs[path]
        _, layout = _layout_of(path, cfg)
        ends = [s.indices(n) for s, n in zip(index, spec.shape, strict=True)]
        box = [slice(first, last) for first, last, _ in ends]
        lead = _lead(spec)
        ranges = [range(s.start, s.stop) for s in box[:lead]]
        pieces = list(itertools.product(*ranges))
        first_part, *_ = places[path][pieces[0]]
        kind = store.dtype(first_part.name)
        out = np.empty([s.stop - s.start for s in box], f"u{kind.itemsize}")
        for at in pieces:
            here = tuple(i - s.start for i, s in zip(at, box[:lead], strict=True))
            _copy_by_columns(
                out[here], layout.convert(_fetcher(store, places[path][at]), cfg, box[lead:])
            )
        return out.view(kind)

    return Source(cfg, read, lambda: _check_tensors(store, cfg, places))


def _copy_by_columns(out: np.ndarray, x: np.ndarray) -> None:
    """out[...] = x, by columns where x is a transposed view: four times as fast as at once."""
    step = max(1, x.shape[-1]) if x.flags.c_contiguous else 64
    for i in range(0, x.shape[-1], step):
        out[..., i : i + step] = x[..., i : i + step]


def _config_of_store(store: TorchDist) -> ModelConfig:
    where = str(store.folder / "common.pt")
    args = store.common.get("args") if isinstance(store.common, dict) else None
    if args is None:
        raise UserError(
            f"{where} holds no `args`: Megatron-LM's training script did not write it; load and "
            "save it once with pretrain_gpt.py"
        )
    return model_config(vars(args), where)


# ---- layouts: Megatron's tensor of one layer or expert -> ours -----------------------------------


@dataclass(frozen=True)
class MegatronLayout:
    """`shape(cfg, ours)` is Megatron's; `convert(fetch, cfg, box)` a box of ours, all of it given
    by slices with start and stop. `parts`: the tensor is two halves on its first axis."""

    shape: Callable[[ModelConfig, tuple[int, ...]], tuple[int, ...]]
    convert: Callable[[Fetch, ModelConfig, list[slice]], np.ndarray]
    parts: int = 1


def _rows_of_group(cfg: ModelConfig) -> tuple[int, int]:
    """Query heads of a group; rows of a group in the fused projection: its q, then k, then v."""
    group = cfg.attention.num_attention_heads // cfg.attention.num_key_value_heads
    return group, (group + 2) * cfg.attention.head_dim


def _query_groups(fetch: Fetch, cfg: ModelConfig, k: slice, rest: list[slice]) -> np.ndarray:
    """Groups k of the fused projection, [k, G + 2, H, ...]."""
    group, rows = _rows_of_group(cfg)
    x = fetch(slice(k.start * rows, k.stop * rows), *rest)
    return x.reshape(-1, group + 2, cfg.attention.head_dim, *x.shape[1:])


def _fused_layout(convert: Callable, *rest: str) -> MegatronLayout:
    def shape(cfg: ModelConfig, ours: tuple[int, ...]) -> tuple[int, ...]:
        heads = cfg.attention.num_key_value_heads
        return (heads * _rows_of_group(cfg)[1], *(getattr(cfg, name) for name in rest))

    return MegatronLayout(shape, convert)


def _q(fetch: Fetch, cfg: ModelConfig, box: list[slice]) -> np.ndarray:
    *embed, n, h = box
    group, _ = _rows_of_group(cfg)
    k = slice(n.start // group, -(-n.stop // group))
    queries = _query_groups(fetch, cfg, k, embed)[:, :group]
    first = k.start * group
    heads = queries.reshape(-1, *queries.shape[2:])
    x = heads[n.start - first : n.stop - first, h]
    return np.moveaxis(x, -1, 0) if embed else x


def _kv(fetch: Fetch, cfg: ModelConfig, box: list[slice]) -> np.ndarray:
    *embed, pair, k, h = box
    x = _query_groups(fetch, cfg, k, embed)[:, _rows_of_group(cfg)[0] :][:, pair, h].swapaxes(0, 1)
    return np.moveaxis(x, -1, 0) if embed else x


def _out(fetch: Fetch, cfg: ModelConfig, box: list[slice]) -> np.ndarray:
    n, h, d = box
    x = fetch(d, slice(n.start * cfg.attention.head_dim, n.stop * cfg.attention.head_dim))
    return x.reshape(len(x), -1, cfg.attention.head_dim)[:, :, h].transpose(1, 2, 0)


def _gate_and_up(fetch: Fetch, cfg: ModelConfig, box: list[slice]) -> np.ndarray:
    *embed, pair, f = box
    x = np.stack([fetch(f, *embed, part=part) for part in range(pair.start, pair.stop)])
    return np.moveaxis(x, -1, 0) if embed else x


def _vocab(fetch: Fetch, cfg: ModelConfig, box: list[slice]) -> np.ndarray:
    rows, d = box
    stop = max(min(rows.stop, cfg.vocab_size), rows.start)
    x = fetch(slice(rows.start, stop), d)
    return np.concatenate([x, np.zeros((rows.stop - stop, x.shape[1]), x.dtype)])


PLAIN = MegatronLayout(lambda cfg, ours: ours, lambda fetch, cfg, box: fetch(*box))
TRANSPOSED = MegatronLayout(
    lambda cfg, ours: ours[::-1], lambda fetch, cfg, box: fetch(*box[::-1]).T
)
Q, Q_BIAS = _fused_layout(_q, "hidden_size"), _fused_layout(_q)
KV, KV_BIAS = _fused_layout(_kv, "hidden_size"), _fused_layout(_kv)
OUT = MegatronLayout(lambda cfg, ours: (ours[2], ours[0] * ours[1]), _out)
GATED = MegatronLayout(lambda cfg, ours: (2 * ours[-1], *ours[:-2]), _gate_and_up, parts=2)
VOCABULARY_LAYOUT = MegatronLayout(lambda cfg, ours: ours, _vocab)

WHOLE = {
    ("embedding",): (("embedding.word_embeddings.weight",), VOCABULARY_LAYOUT),
    ("position_embedding",): (("embedding.position_embeddings.weight",), PLAIN),
    ("final_norm", "gain"): (("decoder.final_layernorm.weight",), PLAIN),
    ("final_norm", "bias"): (("decoder.final_layernorm.bias",), PLAIN),
    ("head",): (("output_layer.weight",), VOCABULARY_LAYOUT),
}
_QKV, _FC1 = "self_attention.linear_qkv.", "mlp.linear_fc1."
LAYER = {  # within a layer; of several names the first that is there
    ("attention_norm", "gain"): ((_QKV + "layer_norm_weight", "input_layernorm.weight"), PLAIN),
    ("attention_norm", "bias"): ((_QKV + "layer_norm_bias", "input_layernorm.bias"), PLAIN),
    ("attention", "q"): ((_QKV + "weight",), Q),
    ("attention", "kv"): ((_QKV + "weight",), KV),
    ("attention", "q_bias"): ((_QKV + "bias",), Q_BIAS),
    ("attention", "kv_bias"): ((_QKV + "bias",), KV_BIAS),
    ("attention", "q_norm", "gain"): (("self_attention.q_layernorm.weight",), PLAIN),
    ("attention", "q_norm", "bias"): (("self_attention.q_layernorm.bias",), PLAIN),
    ("attention", "k_norm", "gain"): (("self_attention.k_layernorm.weight",), PLAIN),
    ("attention", "k_norm", "bias"): (("self_attention.k_layernorm.bias",), PLAIN),
    ("attention", "sinks"): (("self_attention.core_attention.softmax_offset",), PLAIN),
    ("attention", "out"): (("self_attention.linear_proj.weight",), OUT),
    ("attention", "out_bias"): (("self_attention.linear_proj.bias",), PLAIN),
    ("mlp_norm", "gain"): ((_FC1 + "layer_norm_weight", "pre_mlp_layernorm.weight"), PLAIN),
    ("mlp_norm", "bias"): ((_FC1 + "layer_norm_bias", "pre_mlp_layernorm.bias"), PLAIN),
    ("mlp", "up"): ((_FC1 + "weight",), TRANSPOSED),
    ("mlp", "up_bias"): ((_FC1 + "bias",), PLAIN),
    ("mlp", "down"): (("mlp.linear_fc2.weight",), TRANSPOSED),
    ("mlp", "down_bias"): (("mlp.linear_fc2.bias",), PLAIN),
    ("mlp", "router"): (("mlp.router.weight",), TRANSPOSED),
}  # fmt: skip


def _layout_of(path: Leaf, cfg: ModelConfig) -> tuple[tuple[str, ...], MegatronLayout]:
    """Megatron's names (within the layer, for a layer's parameter) and layout of one of ours."""
    if path in WHOLE:
        return WHOLE[path]
    names, layout = LAYER[path[1:]]
    if path[0] == "moe" and path[-1] in ("up", "down"):
        names = tuple(name.replace("mlp.", "mlp.experts.experts.") for name in names)
    return names, GATED if path[-1] in ("up", "up_bias") and cfg.mlp_gated else layout


# ---- places: where each layer's and expert's tensor is -------------------------------------------


@dataclass(frozen=True)
class Place:
    """Entry `at` of the leading axes of a Megatron tensor whose shape should be `shape`, from row
    `first` of what is left."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    first: int = 0


PlacesOfPieces = dict[
    tuple[int, ...], tuple[Place, ...]
]  # (layer of the stack, expert) -> its parts
Option = tuple[str, tuple[tuple[int, int], ...]]  # a name; of each leading axis the entry and size


def _lead(spec: ParamSpec) -> int:
    """Leading axes of ours that enumerate Megatron's tensors: layers, experts."""
    return sum(axis in ("layers", "experts") for axis in spec.axes[:2])


def _find(store: TorchDist, cfg: ModelConfig, path: Leaf, spec: ParamSpec) -> PlacesOfPieces:
    names, layout = _layout_of(path, cfg)
    kinds = cfg.layer_kinds
    layers = [layer for layer, kind in enumerate(kinds) if stack_of(kind) == path[0]]
    shape = layout.shape(cfg, spec.shape[_lead(spec) :])
    found = {}
    for at in np.ndindex(spec.shape[: _lead(spec)]):
        options: list[Option] = [(name, ()) for name in names]
        if at:
            layer, n = layers[at[0]], len(kinds)
            options = [(f"decoder.layers.{layer}.{name}", ()) for name in names]
            options += [(f"decoder.layers.{name}", ((layer, n),)) for name in names]
        if len(at) == 2:
            stacked = [(name, (*lead, (at[1], cfg.moe.num_experts))) for name, lead in options]
            own = f".experts.{at[1]}.linear_"
            options = stacked + [(n.replace(".experts.linear_", own), a) for n, a in options]
        found[at] = _parts_of_tensor(store, options, shape, layout.parts)
    return found


def _parts_of_tensor(
    store: TorchDist, options: list[Option], shape: tuple[int, ...], parts: int
) -> tuple[Place, ...]:
    """The first option that is there: whole, or as halves named _w and _v."""
    half = shape[0] // parts
    for name, lead in options:
        at, sizes = tuple(i for i, _ in lead), tuple(n for _, n in lead)
        if name in store.tensors:
            return tuple(Place(name, (*sizes, *shape), at, part * half) for part in range(parts))
        if parts == 2 and {name + "_w", name + "_v"} <= store.tensors.keys():
            return tuple(Place(name + end, (*sizes, half, *shape[1:]), at) for end in ("_w", "_v"))
    names = " or ".join(repr(name) for name, _ in options)
    raise UserError(
        f"{store.folder}: tensor {names} is missing, which the arguments in common.pt ask for; "
        "the model was built in another way than they say and cannot be imported"
    )


def _fetcher(store: TorchDist, parts: tuple[Place, ...]) -> Fetch:
    def fetch(rows: slice, *rest: slice, part: int = 0) -> np.ndarray:
        place = parts[part]
        lead = [slice(i, i + 1) for i in place.at]
        first, last = rows.start + place.first, rows.stop + place.first
        x = store.read(place.name, (*lead, slice(first, last), *rest))
        inner = x.shape[len(lead) :]
        return x.reshape(inner)

    return fetch


def _check_tensors(store: TorchDist, cfg: ModelConfig, places: dict[Leaf, PlacesOfPieces]) -> None:
    """Shapes of all tensors, tensors without a place, files that are not whole."""
    vocab = {
        name for names, layout in WHOLE.values() if layout is VOCABULARY_LAYOUT for name in names
    }
    used = {p.name: p for own in places.values() for parts in own.values() for p in parts}
    for name, place in used.items():
        found, want = store.tensors[name].shape, place.shape
        if name in vocab:  # Megatron's padding follows its tp, ours does not
            want = (max(cfg.vocab_size, found[0]), want[1])
        if found != want:
            raise UserError(
                f"{store.folder}: tensor {name!r} is {list(found)}, but by the arguments in "
                f"common.pt it should be {list(want)}; such a model cannot be imported"
            )
    for name in store.tensors:
        if name not in used and not _SKIPPED.match(name):
            raise UserError(
                f"{store.folder}: tensor {name!r} has no counterpart in the model that the "
                "arguments in common.pt describe; such a model cannot be imported"
            )
    store.check_files(set(used))
