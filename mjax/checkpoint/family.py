"""`Family`: a row of the table of Hugging Face's model families (`families.py`)."""

from dataclasses import dataclass

from mjax.checkpoint.hf_config import Part


@dataclass(frozen=True)
class Family:
    """`fixed`: values all its models share, by key. `rename`: replacements on declared names, in
    order. `fused`: tensor -> the declared projections side by side in it. `conv1d`: matrices are
    [in, out], as in GPT-2. `stacked`: all experts of a layer are one tensor.
    `interleaved`: it is [E, in, out], and gate and up take turns along its last axis."""

    architecture: str
    parts: tuple[Part, ...]
    fixed: dict[str, object]
    rename: tuple[tuple[str, str], ...] = ()
    fused: dict[str, tuple[str, ...]] | None = None
    conv1d: bool = False
    stacked: bool = False
    interleaved: bool = False
