"""The adapter of one module of PEFT, or of one part of it, between both layouts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.engine import slots
from mjax.interop.huggingface.files import tensor_shapes
from mjax.interop.peft.modules import in_memory
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


def names_in_memory(cfg: ModelConfig, specs: dict) -> dict[str, str]:
    """The names in transformers' model of all tensors of a file, and those in the file."""
    return {in_memory(cfg, name): name for name in tensor_shapes(cfg, specs, slots(cfg, specs))}
