"""Adapters of a run or of a folder of PEFT, and the weights that they make with their base.

Invariant: adapters of a run are merged only with weights of the digest that the run recorded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mjax.checkpoint.base.hub import hub_name, model_folder
from mjax.checkpoint.base.source import Path as Leaf
from mjax.checkpoint.base.source import Source, flat
from mjax.checkpoint.base.steps import newest_step, run_of
from mjax.checkpoint.base.stored import read_record
from mjax.checkpoint.merged import Adapters, adapter_alpha, merged
from mjax.checkpoint.weights import read_config, stored_source
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, or_user_error
from mjax.interop.held_base import HeldBase
from mjax.interop.partial_load import fit
from mjax.interop.peft.adapter_config import ADAPTER_CONFIG
from mjax.interop.peft.adapter_reader import read_adapter
from mjax.models import definition_of
from mjax.models.base.adapted import base_of, is_of_adapter, part_path, specs_of_run
from mjax.sharding.spec import ParamSpec


@dataclass(frozen=True)
class AdapterRun:
    """The step of a run with adapters: its model, its declarations by path, and what it records.

    digest: that of the base, None if it is not known.
    """

    step: Path
    cfg: ModelConfig
    lora: LoraConfig
    specs: Mapping[Leaf, ParamSpec]
    digest: str | None
    config: dict

    def adapters(self) -> Adapters:
        """The adapters of the step; reads them whole. Raises `UserError` for damaged files."""
        trained = {path: spec for path, spec in self.specs.items() if spec.is_trained}
        source = stored_source(self.step, self.cfg, trained)
        source.check()
        arrays, scales = {}, {}
        for path, spec in trained.items():
            arrays[path] = source.read(path, tuple(slice(0, n) for n in spec.shape))
            if is_of_adapter(path) and path[-1] == "b":
                scales[base_of(path)] = spec.scale
        return Adapters(arrays, scales, rslora=self.lora.rslora, base=base_of_run(self.step))

    def base(self, source: Source) -> HeldBase:
        """The base as the run stores it, of the weights that the run began with."""
        checkpoint = self.config["checkpoint"]
        found = fit(source, self.cfg, checkpoint["init_changes"], self.config["run"]["seed"])
        if found.shared != found.wanted or checkpoint.get("init_audio"):
            raise UserError(
                f"{self.step}: the run drew some weights of its base, or had them from "
                "checkpoint.init_audio; its adapters cannot be merged without them"
            )
        compute = self.config["precision"]["compute"]
        return HeldBase(found.source, self.specs, compute, self.lora.init == "pissa")

    def require_same_base(self, base: HeldBase) -> None:
        """Raise `UserError` unless the base has the digest that the run recorded; reads it all."""
        digest = base.digest()
        if digest != self.digest is not None:
            raise UserError(
                f"{self.step}: its adapters were trained on other weights than these (digest "
                f"{self.digest}, these have {digest}); give the folder that checkpoint.init_from "
                "named, as it was"
            )

    def merged(self, source: Source) -> Source:
        """The weights of the run, of the weights that it began with."""
        base = self.base(source)

        def check() -> None:
            source.check()
            self.require_same_base(base)

        of_model = replace(base.source, cfg=self.cfg, read=base.read, check=check)
        return merged(of_model, self.adapters(), flat(definition_of(self.cfg).specs))


def has_adapters(step: Path) -> bool:
    """Whether a step is one of a run with adapters."""
    return bool(_lora_of(read_record(step)).get("rank"))


def _lora_of(record: dict) -> dict:
    return record.get("config", {}).get("lora") or {}


def base_of_run(step: Path) -> str | None:
    """The folder of the weights that a run with adapters began with, if it began with some."""
    return read_record(step).get("base", {}).get("from")


def named_base(folder: Path, base: str | None) -> str | Path:
    """The base that adapters in `folder` name, a folder or a model of the hub.

    base: its name there. Raises `UserError` if there is none.
    """
    if hub_name(base) is not None:
        return base
    if base is None or not run_of(Path(base).expanduser()).exists():
        what = "no base" if base is None else f"the base {base}, which is not here"
        raise UserError(
            f"{folder}: holds adapters alone and names {what}; merge them with their base (mjax "
            "convert merge BASE ADAPTER OUT)"
        )
    return Path(base).expanduser()


def read_adapter_run(step: Path) -> AdapterRun:
    """The step of a run with adapters."""
    record, cfg = read_record(step), read_config(step)
    wrong = f"{step}: its config has lora: {{reason}}; read it with the mjax that wrote it"
    with or_user_error(wrong, (ValueError, TypeError)):
        lora = LoraConfig(**_lora_of(record))
    compute = record["config"]["precision"]["compute"]
    specs = specs_of_run(definition_of(cfg).specs, lora, compute)
    digest = record.get("base", {}).get("digest")
    return AdapterRun(step, cfg, lora, flat(specs), digest, record["config"])


def adapters_for_others(run: AdapterRun, source: Callable[[], Source]) -> Adapters:
    """The adapters of a run for the weights that it began with, which `source()` gives.

    A run that took principal parts out of its base has other adapters on that: theirs beside the
    first ones, of twice the rank.
    """
    adapters = run.adapters()
    if run.lora.init != "pissa":
        return adapters
    base = run.base(source())
    run.require_same_base(base)
    arrays = dict(adapters.arrays)
    for path in base.principal:
        first = base.first_adapter(path)
        a, b = (part_path(path, name) for name in "ab")
        arrays[a] = np.concatenate([arrays[a], first["a"]], axis=-1)
        arrays[b] = np.concatenate([arrays[b], -first["b"]], axis=run.specs[path].lead)
    return replace(adapters, arrays=arrays)


def adapted_source(folder: Path, base: Source) -> Source:
    """The weights of `base` with the adapters in a folder of PEFT or a step of a run merged."""
    if (folder / ADAPTER_CONFIG).is_file():
        specs = definition_of(base.cfg).specs
        return merged(base, read_adapter(folder, base.cfg, specs), flat(specs))
    return read_adapter_run(folder).merged(base)


def adapter_step(run: Path) -> Path:
    """The newest step of a run with adapters, or the one that RUN@best or RUN@160 names."""
    step = newest_step(run)
    if step is None or not has_adapters(step):
        raise UserError(
            f"{run}: holds no adapters; give the folder of a run with lora.rank above 0, a step of "
            f"one, or a folder of PEFT with {ADAPTER_CONFIG}"
        )
    return step


def read_starting_arrays(
    given: str | Path, cfg: ModelConfig, specs: Mapping[Leaf, ParamSpec]
) -> dict[Leaf, np.ndarray]:
    """The arrays that a run on the model `cfg` begins with, from a folder of PEFT or a run.

    given: that folder, or the name of a model on the hub. specs: the run's declarations by path.
    Raises `UserError` where they differ.
    """
    folder = model_folder(given, weights=True)
    if (folder / ADAPTER_CONFIG).is_file():
        adapters = read_adapter(folder, cfg, definition_of(cfg).specs)
        return starting_arrays(adapters, specs)
    found = read_adapter_run(adapter_step(folder))
    if found.lora.init == "pissa":
        raise UserError(
            f"lora.init={folder}: that run took principal parts out of its base; extract its "
            "adapters (mjax convert extract), and start from those"
        )
    return starting_arrays(found.adapters(), specs)


def starting_arrays(adapters: Adapters, specs: Mapping[Leaf, ParamSpec]) -> dict[Leaf, np.ndarray]:
    """The arrays that a run with adapters begins with, of given adapters.

    specs: the run's declarations by path, those of its adapters among them. Raises `UserError`
    naming the key of the config that is otherwise.
    """
    trained = {path: spec for path, spec in specs.items() if spec.is_trained}
    for path in sorted(adapters.arrays.keys() ^ trained.keys()):
        where = "the run" if path in trained else "the adapters to start from"
        raise UserError(
            f"lora.targets, lora.trained, lora.dora: only {where} has {'.'.join(path)}; make them "
            "agree"
        )
    for path, array in adapters.arrays.items():
        if path[-1] == "magnitude" and not array.all():
            raise UserError(
                f"lora.init: the adapters to start from are not on all layers of "
                f"{'.'.join(base_of(path))}, and lora.dora=true needs their lengths"
            )
        if array.shape != trained[path].shape:
            raise UserError(
                f"lora.rank, lora.rank_pattern: {'.'.join(path)} of the adapters to start from has "
                f"shape {array.shape}, this run's has {trained[path].shape}; set the rank of the "
                "former"
            )
        scale = adapters.scales.get(base_of(path)) if path[-1] == "b" else None
        if scale is not None and not np.isclose(scale, trained[path].scale, rtol=1e-6):
            rank = array.shape[trained[path].axes.index(None)]
            alpha = adapter_alpha(scale, rank, adapters.rslora)
            raise UserError(
                f"lora.alpha, lora.alpha_pattern, lora.rslora: {'.'.join(base_of(path))} of the "
                f"adapters to start from has alpha={alpha:g}, rslora={adapters.rslora}; set them so"
            )
    return {path: array.astype(np.float32) for path, array in adapters.arrays.items()}
