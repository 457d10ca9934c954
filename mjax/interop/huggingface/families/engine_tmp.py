"""`Family`: a row of the table of Hugging Face's model families (`families.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mjax.config.schema.model import ModelConfig
from mjax.interop.huggingface.families.parts import Part


@dataclass(frozen=True)
class Family:
    """`fixed`: values all its models share, by key. `rename`: replacements on declared names, in
    order. `fused`: tensor -> the declared projections side by side in it. `conv1d`: matrices are
    [in, out], as in GPT-2. `stacked`: all experts of a layer are one tensor.
    `interleaved`: it is [E, in, out], and gate and up take turns along its last axis. `name_of`:
    makes a tensor's name of a declared one, where replacements do not reach. `ones`: tensor -> how
    many dimensions of size 1 it begins with. `numbers`: tensors without a dimension. `left_out`:
    transformers' values of keys that a config.json lacks, where parts would take others."""

    architecture: str
    parts: tuple[Part, ...]
    fixed: dict[str, object] = field(default_factory=dict)
    rename: tuple[tuple[str, str], ...] = ()
    fused: dict[str, tuple[str, ...]] | None = None
    conv1d: bool = False
    stacked: bool = False
    interleaved: bool = False
    name_of: Callable[[ModelConfig, str], str] | None = None
    ones: dict[str, int] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    left_out: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, architecture: str, *parts: Part, **others: Any) -> "Family":
        """A row of the table, its parts in the order in which they read."""
        return cls(architecture, parts, **others)
