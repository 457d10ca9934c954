"""How Megatron-LM lays out the tensors of one layer or expert, and the same in mjax's order.

A layout's `convert` takes `fetch`, which reads a box of Megatron's tensor, and gives a box of ours.
It asks for no more than the rows it needs. Run on the places of entries instead of their values, it
says where each entry of ours belongs, so the writer needs no inverse of its own. Source:
megatron/core (transformer/attention.py, mlp.py, multi_latent_attention.py, ssm/mamba_mixer.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mjax.config.schema.model import ModelConfig

TensorShape = tuple[int, ...]
Fetch = Callable[..., np.ndarray]  # fetch(*slices, part=0): of one layer's or expert's, raw bits


@dataclass(frozen=True)
class MegatronLayout:
    """`shape(cfg, ours)` is Megatron's; `convert(fetch, cfg, ours, box)` a box of ours, all of it
    given by slices with start and stop. `parts`: the tensor has that many on its first axis.
    `endings`: names of tensors that hold a part each may end so."""

    shape: Callable[[ModelConfig, TensorShape], TensorShape]
    convert: Callable[[Fetch, ModelConfig, TensorShape, list[slice]], np.ndarray]
    parts: int = 1
    endings: tuple[str, ...] = ()

    def ending(self, *endings: str) -> "MegatronLayout":
        """The layout whose parts are always tensors of their own, or one tensor with an ending."""
        return replace(self, endings=endings)


@dataclass(frozen=True)
class _RowsOfTensor:
    """Ours: [embed, pair, *rows, taps], of which rows are always there; Megatron's: [rows, embed],
    the two of a pair one after the other; [rows, 1, taps] of a convolution."""

    pair: bool
    embed: bool
    taps: bool

    def cut(self, axes: Sequence) -> tuple:
        """The axes of ours before a pair, those of rows, and the taps."""
        end = len(axes) - self.taps
        return axes[: self.embed], axes[self.embed + self.pair : end], axes[end:]

    def shape(self, cfg: ModelConfig, ours: TensorShape) -> TensorShape:
        embed, rows, taps = self.cut(ours)
        total = math.prod(rows) * (2 if self.pair else 1)
        middle = (1,) if self.taps else ()
        return (total, *embed, *middle, *taps)

    def convert(
        self, fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]
    ) -> np.ndarray:
        embed, rows, taps = self.cut(box)
        _, sizes, _ = self.cut(ours)
        one = slice(0, 1)
        middle = [one] if self.taps else []
        inner = math.prod(sizes[1:])
        span = slice(rows[0].start * inner, rows[0].stop * inner)
        of_pair = box[self.embed] if self.pair else one
        pieces = []
        for part in range(of_pair.start, of_pair.stop):
            x = fetch(span, *embed, *middle, *taps, part=part)
            columns = x.shape[1 + len(middle) :]
            x = x.reshape(-1, *sizes[1:], *columns)
            inside = slice(None), *rows[1:]
            pieces.append(x[inside])
        x = np.stack(pieces) if self.pair else pieces[0]
        return np.moveaxis(x, -1, 0) if self.embed else x


def _rows_layout(pair: bool = False, embed: bool = True, taps: bool = False) -> MegatronLayout:
    rows = _RowsOfTensor(pair, embed, taps)
    return MegatronLayout(rows.shape, rows.convert, 2 if pair else 1)


def _rows_of_group(cfg: ModelConfig) -> tuple[int, int]:
    """Query heads of a group; rows of a group in the fused projection: its q, then k, then v."""
    group = cfg.attention.num_attention_heads // cfg.attention.num_key_value_heads
    return group, (group + 2) * cfg.attention.head_dim


def _query_groups(
    fetch: Fetch, cfg: ModelConfig, group: int, k: slice, rest: list[slice]
) -> np.ndarray:
    """Groups k of the fused projection, [k, G + 2, H, ...]."""
    rows = (group + 2) * cfg.attention.head_dim
    x = fetch(slice(k.start * rows, k.stop * rows), *rest)
    return x.reshape(-1, group + 2, cfg.attention.head_dim, *x.shape[1:])


def _fused_shape(cfg: ModelConfig, ours: TensorShape, embed: int) -> TensorShape:
    return (cfg.attention.num_key_value_heads * _rows_of_group(cfg)[1], *ours[:embed])


def _q(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    *embed, n, h = box
    group, _ = _rows_of_group(cfg)
    k = slice(n.start // group, -(-n.stop // group))
    queries = _query_groups(fetch, cfg, group, k, embed)[:, :group]
    first = k.start * group
    heads = queries.reshape(-1, *queries.shape[2:])
    x = heads[n.start - first : n.stop - first, h]
    return np.moveaxis(x, -1, 0) if embed else x


def _kv(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    return _keys_and_values(fetch, cfg, box, _rows_of_group(cfg)[0])


def _cross_kv(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    return _keys_and_values(fetch, cfg, box, 0)


def _keys_and_values(fetch: Fetch, cfg: ModelConfig, box: list[slice], group: int) -> np.ndarray:
    """Keys and values of heads, behind the queries of a group; cross-attention has none there."""
    *embed, pair, k, h = box
    x = _query_groups(fetch, cfg, group, k, embed)[:, group:][:, pair, h].swapaxes(0, 1)
    return np.moveaxis(x, -1, 0) if embed else x


def _out(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    n, h, d = box
    size = ours[1]
    x = fetch(d, slice(n.start * size, n.stop * size))
    return x.reshape(len(x), -1, size)[:, :, h].transpose(1, 2, 0)


def _vocab(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    rows, *rest = box
    stop = max(min(rows.stop, cfg.vocab_size), rows.start)
    x = fetch(slice(rows.start, stop), *rest)
    return np.concatenate([x, np.zeros((rows.stop - stop, *x.shape[1:]), x.dtype)])


def _patches(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    return np.moveaxis(fetch(box[-1], *box[:-1]), 0, -1)


def _single(fetch: Fetch, cfg: ModelConfig, ours: TensorShape, box: list[slice]) -> np.ndarray:
    one = slice(0, 1)
    return fetch(one, one, *box)[0, 0]


OF_PATCHES = MegatronLayout(lambda cfg, ours: (ours[-1], *ours[:-1]), _patches)
SINGLE = MegatronLayout(lambda cfg, ours: (1, 1, *ours), _single)
PLAIN = MegatronLayout(lambda cfg, ours: ours, lambda fetch, cfg, ours, box: fetch(*box))
TRANSPOSED = MegatronLayout(
    lambda cfg, ours: ours[::-1], lambda fetch, cfg, ours, box: fetch(*box[::-1]).T
)
OF_ROWS, PAIR = _rows_layout(), _rows_layout(pair=True)
FLAT, FLAT_PAIR = _rows_layout(embed=False), _rows_layout(pair=True, embed=False)
TAPS = _rows_layout(embed=False, taps=True)
TAPS_PAIR = _rows_layout(pair=True, embed=False, taps=True)
GATED = PAIR.ending("_w", "_v")
Q = MegatronLayout(lambda cfg, ours: _fused_shape(cfg, ours, 1), _q)
Q_BIAS = MegatronLayout(lambda cfg, ours: _fused_shape(cfg, ours, 0), _q)
KV = MegatronLayout(lambda cfg, ours: _fused_shape(cfg, ours, 1), _kv)
KV_BIAS = MegatronLayout(lambda cfg, ours: _fused_shape(cfg, ours, 0), _kv)
CROSS_KV = MegatronLayout(PAIR.shape, _cross_kv)
CROSS_KV_BIAS = MegatronLayout(FLAT_PAIR.shape, _cross_kv)
OUT = MegatronLayout(lambda cfg, ours: (ours[2], ours[0] * ours[1]), _out)
VOCABULARY = MegatronLayout(lambda cfg, ours: ours, _vocab)
