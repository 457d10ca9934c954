"""Starting from weights of a model that differs: vocabulary or context resized, layers added or
left out, MLPs made into experts (`upcycle.py`).

Only the parts that `checkpoint.init_changes` names may differ. Parameters of both models are
loaded; the rest of the run's model is as drawn from run.seed. Invariant: nothing is left out or
drawn unsaid: `summary` names every parameter that was not loaded as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.base.continuation import CHANGES, require_same_model
from mjax.checkpoint.base.source import Index, Path, Source
from mjax.config.languages.layer_pattern import modality_of
from mjax.config.schema.keys import leaf_keys
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError
from mjax.interop.huggingface.files import real_specs
from mjax.interop.upcycle import upcycled
from mjax.models import definition_of

_TOWERS = ("vision.", "audio.")
_POSITION_KEYS = {"audio.max_source_positions"}  # the first ones are those of shorter sounds

# The parameters of heads that may be drawn anew, or left out.
HEAD_STACKS = ("masked_head", "classifier", "score")
VOCABULARY_HEADS = ("head", "vocabulary_bias")  # which a model of scores lacks


@dataclass(frozen=True)
class Fit:
    """The part of some weights that fits a model.

    source: the weights in the shapes of the model, zero where they have nothing.
    shared: the shape of the leading part of each parameter that both have.
    given: shapes in the weights, without padding.
    wanted: shapes in the model.
    made: in words, how a parameter is computed from others.
    left_out: heads and prediction layers that the model lacks.
    """

    source: Source
    shared: dict[Path, tuple[int, ...]]
    given: dict[Path, tuple[int, ...]]
    wanted: dict[Path, tuple[int, ...]]
    made: dict[Path, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def summary(self) -> str:
        """Lines on what was loaded: one in all, and one for each parameter not loaded whole."""
        fitting = {
            p for p, shape in self.shared.items() if shape == self.wanted[p] == self.given[p]
        }
        whole = fitting - self.made.keys()
        lines = [
            f"loaded: {len(whole)} of {len(self.wanted)} parameters as they are; not loaded: "
            "moments, step and place in the data"
        ]
        for path, shared in self.shared.items():
            texts = [self.made[path]] if path in self.made else []
            texts += [] if path in fitting else [self._part(path, shared)]
            if texts:
                lines.append(f"  {'.'.join(path)}: {'; '.join(texts)}")
        lines += [f"  {name}: left out" for name in self.left_out]
        return "\n".join(lines)

    def _part(self, path: Path, shared: tuple[int, ...]) -> str:
        text = f"{list(shared)} loaded of {list(self.given[path])}"
        if shared != self.wanted[path]:
            text += f", the rest of {list(self.wanted[path])} drawn from run.seed"
        return text

    def complete(self, loaded: dict, drawn: dict) -> dict:
        """`loaded` where the weights have something, else `drawn`; trees of global arrays."""

        def one(path: tuple, a: jax.Array, b: jax.Array) -> jax.Array:
            names = tuple(key.key for key in path)
            if self.shared[names] == self.wanted[names]:
                return a
            return jax.device_put(_leading(a, b, self.shared[names]), a.sharding)

        return jax.tree_util.tree_map_with_path(one, loaded, drawn)


@jax.jit
def _leading(a: jax.Array, b: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The leading part of `a` of these sizes, the rest of `b`."""
    inside = True
    for axis, size in enumerate(sizes):
        inside &= jax.lax.broadcasted_iota(jnp.int32, a.shape, axis) < size
    return jnp.where(inside, a, b)


def fit(source: Source, cfg: ModelConfig, changes: Sequence[str], seed: int = 0) -> Fit:
    """Fit `source` to the model of `cfg`; routers of new experts are drawn from `seed`.

    Raises `UserError` if more than `changes` differs.
    """
    made: dict[Path, str] = {}
    if "experts" in changes:
        source, made = upcycled(source, cfg, seed)
    keys = {key for change in changes for key in CHANGES[change]}
    if "towers" in changes:
        keys |= {key for key in leaf_keys(ModelConfig) if key.startswith(_TOWERS)}
    if cfg.num_nextn_predict_layers < source.cfg.num_nextn_predict_layers:
        keys |= {"num_nextn_predict_layers"}
    require_same_model(cfg, source, may_differ=keys | (_POSITION_KEYS if source.has else set()))
    _require_same_kinds(cfg, source, changes)
    given = _shapes(definition_of(source.cfg).specs, source.cfg)
    wanted = _shapes(definition_of(cfg).specs, cfg)
    left_out = {path[0] for path in given if path not in wanted and path[0].startswith("mtp_")}
    given = {path: shape for path, shape in given.items() if path[0] not in left_out}
    if source.has is not None or "towers" in changes:  # the rest is drawn, whole
        has = given.keys() if source.has is None else source.has
        left_out |= {path[0] for path in has if path not in wanted}
        given = {p: given[p] if p in has else (0,) * len(shape) for p, shape in wanted.items()}
    if "heads" in changes:
        heads = (*HEAD_STACKS, *VOCABULARY_HEADS)
        left_out |= {p[0] for p in given if p[0] in heads and p not in wanted}
        given = {path: shape for path, shape in given.items() if path[0] not in left_out}
        for path, shape in wanted.items():
            if path[0] in HEAD_STACKS and given.get(path) != shape:  # drawn, whole
                given[path] = (0,) * len(shape)
    shared = {
        path: tuple(min(a, b) for a, b in zip(given[path], shape, strict=True))
        for path, shape in wanted.items()
        if path in given
    }
    missing = [path for path in wanted if path not in given]
    if missing:
        raise UserError(
            f"{source.name} have no parameter {'.'.join(missing[0])}, which this run's model has; "
            "choose layers of kinds that they have"
        )

    if given == wanted and cfg.vocab_multiple == source.cfg.vocab_multiple:
        return Fit(source, shared, given, wanted, made, tuple(sorted(left_out)))

    def read(path: Path, index: Index) -> np.ndarray:
        wanted_sizes = [s.stop - s.start for s in index]
        if 0 in shared[path]:
            return np.zeros(wanted_sizes, np.float32)
        inside = []
        for s, n in zip(index, shared[path], strict=True):
            inside.append(slice(min(s.start, n), min(s.stop, n)))
        part = source.read(path, tuple(inside))
        widths = [(0, n - there) for n, there in zip(wanted_sizes, part.shape, strict=True)]
        return np.pad(part, widths) if part.shape != tuple(wanted_sizes) else part

    fitting = replace(source, cfg=cfg, read=read)
    return Fit(fitting, shared, given, wanted, made, tuple(sorted(left_out)))


def _require_same_kinds(cfg: ModelConfig, source: Source, changes: Sequence[str]) -> None:
    """Raise `UserError` unless the layers that both models have are of the same kinds.

    If towers may differ, only layers of the text are compared.
    """
    kinds = [cfg.layer_kinds, source.cfg.layer_kinds]
    if "towers" in changes:
        kinds = [[kind for kind in each if not modality_of(kind)] for each in kinds]
        ours, theirs = map(len, kinds)
        if ours != theirs and "num_hidden_layers" not in changes:
            raise UserError(
                f"{source.name} have {theirs} layers of a text, but this run's "
                f"model.layer_pattern has {ours}; make them agree"
            )
    pairs = zip(*kinds, strict=False)
    for number, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            raise UserError(
                f"layer {number} of {source.name} is {theirs!r}, but that of this run's "
                f"model.layer_pattern is {ours!r}; layers may only be added after the last"
            )


def _shapes(specs: dict, cfg: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """Shapes by path; a vocabulary counts without its padding."""
    return {path: spec.shape for path, spec in real_specs(cfg, specs).items()}
