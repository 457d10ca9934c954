"""The keys of adapters, group `lora` of the config."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group
from mjax.config.schema.sizes import UpTo20

Start = Literal["zero", "gaussian", "pissa"]


class LoraConfig(Group):
    """Low-rank adapters (LoRA) beside weights that stay as they are (docs/train/fine-tuning.md)."""

    rank: UpTo20 = Field(0, ge=0)
    """Rank of each adapter; 0: no adapters, all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """Adapters are multiplied by alpha / rank."""
    targets: list[str] = ["*"]
    """Weights that get one: names of matmuls (q, kv, attn_proj, up, down, ..), names with * such as
    dense.mlp.*, or the roles embedding and head; *: all matmuls of layers.
    """
    rank_pattern: dict[str, Annotated[UpTo20, Field(ge=1)]] = {}
    """Other ranks, by the same patterns; the first that matches counts."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) (arXiv 2312.03732)."""
    dora: bool = False
    """Train the length of each output's weights apart from their direction (arXiv 2402.09353)."""
    init: Start | PathText = "zero"
    """First values: zero: b is 0, a uniform as PEFT's; gaussian: b is 0, a normal, 1 / rank its
    deviation; pissa: the largest singular values of the weight, which the base loses (arXiv
    2404.02948); else a folder of PEFT or a run, whose adapters are trained on.
    """
    base: Literal["compute", "nf4"] = "compute"
    """How weights that are not trained are stored: in precision.compute; nf4: matmul weights of
    layers in 4 bits, as by bitsandbytes with double quantization (QLoRA, arXiv 2305.14314).
    """
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of what adapters read, in training."""
    trained: list[str] = []
    """Parameters that are trained whole beside the adapters: patterns as in train.freeze."""

    @property
    def begins_at_base(self) -> bool:
        """Whether training starts from the base, with adapters that change nothing yet."""
        return bool(self.rank) and self.init in ("zero", "gaussian") and not self.trained

    @property
    def starts_from(self) -> str | None:
        """The folder whose adapters are trained on, or None."""
        return None if self.init in get_args(Start) else self.init
