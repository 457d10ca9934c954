"""The adapter of one module of PEFT, or of one part of it, between both layouts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.files import tensor_shapes
from mjax.interop.peft.modules import Rows, in_memory
from mjax.sharding.spec import ParamSpec

ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LowRank:
    """The adapter of a module, or of one part of it: of each expert, or once.

    a: [experts, r, inputs]. b: [experts, outputs, r]. magnitude: [outputs] or None.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def trimmed(self) -> "LowRank":
        """The adapter without the last ranks that are zero at both ends."""
        used = np.any(self.a, (0, 2)) | np.any(self.b, (0, 1))
        rank = int(np.max(np.nonzero(used)[0], initial=-1)) + 1
        return replace(self, a=self.a[:, :rank], b=self.b[:, :, :rank])


def common_dtype(pairs: Iterable[LowRank]) -> np.dtype:
    """The dtype that holds the numbers of all, fp32 where their scales differ."""
    pairs = list(pairs)
    if len({pair.scale for pair in pairs}) > 1:
        return np.dtype(np.float32)
    return np.result_type(*(array.dtype for pair in pairs for array in (pair.a, pair.b)))


def place_of_batch(spec: ParamSpec, batch: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
    """(index along layers and experts, which half or None) of one matrix of a weight."""
    enumerating = [spec.axes[axis] for axis in spec.matrix_view()[0]]
    at = dict(zip(enumerating, batch, strict=True))
    half = at.pop("pair", None)
    return tuple(at.values()), half


def axis_of_half(spec: ParamSpec) -> int:
    """The axis that enumerates the halves, of b [r, *outputs] of one layer."""
    return 1 + spec.output_axes.index("pair")


def scaled_b(b: np.ndarray, factor: float) -> np.ndarray:
    """b times a factor, in fp32 unless that is one."""
    return b if factor == 1 else b.astype(np.float32) * np.float32(factor)


def side_by_side(outputs: int, found: Sequence[tuple[Rows, LowRank]]) -> LowRank:
    """One adapter of a matrix of those of its rows, which stack their ranks or share an A.

    outputs: the rows of the matrix; those that none has get zeros.
    """
    pairs = [pair for _, pair in found]
    first, each = pairs[0], max(pair.rank for pair in pairs)
    shares_a = all(_has_same_a(pair, first) for pair in pairs)
    rank = each if shares_a else each * len(pairs)
    dtype, (experts, _, inputs) = common_dtype(pairs), first.a.shape
    a = np.zeros((experts, rank, inputs), dtype)
    b = np.zeros((experts, outputs, rank), dtype)
    length = None if first.magnitude is None else np.zeros(outputs, first.magnitude.dtype)
    for i, (rows, pair) in enumerate(found):
        at = 0 if shares_a else i * each
        ranks = slice(at, at + pair.rank)
        a[:, ranks] = pair.a
        b[:, rows, ranks] = scaled_b(pair.b, pair.scale / first.scale)
        if length is not None:
            length[rows] = pair.magnitude
    return LowRank(a, b, first.scale, length)


def _has_same_a(pair: LowRank, other: LowRank) -> bool:
    return pair.scale == other.scale and np.array_equal(pair.a, other.a)


def names_in_memory(cfg: ModelConfig, specs: dict) -> dict[str, str]:
    """The names in transformers' model of all tensors of a file, and those in the file."""
    return {in_memory(cfg, name): name for name in tensor_shapes(cfg, specs, slots(cfg, specs))}
