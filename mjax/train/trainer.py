"""`Trainer`: a model, its optimiser and their state on a mesh; what the CLI and notebooks drive.

It owns no loop and no data. State is initialised under jit with output shardings, so no device
ever holds more than its part. `step` is asynchronous: it returns device scalars.
"""

import functools
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.source import Source, arrays
from mjax.checkpoint.store import Store, require_same_model
from mjax.config.schema import Config
from mjax.config.validate import validate
from mjax.errors import UserError
from mjax.kernels.quantize import empty_history, require_fp8
from mjax.models import build, definition_of, split
from mjax.models.context_attention import zigzag
from mjax.models.linear import weights_of
from mjax.optim.build import build_optimizer
from mjax.optim.schedule import consumed_samples, learning_rate, weight_decay
from mjax.pipeline.layout import layout_of
from mjax.pipeline.storage import (
    Storage,
    canonical,
    canonical_abstract,
    coordinates,
    from_canonical,
    of_parameter,
    storage_specs,
    to_storage,
)
from mjax.plan.auto import resolve
from mjax.plan.memory import unrolls
from mjax.plan.xla_options import compiler_options, hides, overlap_rows
from mjax.sharding.collectives import Parallel, gather_weights, shard_weights
from mjax.sharding.mesh import global_array, local_part, make_mesh, parallel_of
from mjax.sharding.ordered import in_program_order
from mjax.sharding.rules import (
    Padding,
    batch_partition,
    padding,
    param_partitions,
    partition,
    stored_partitions,
)
from mjax.sharding.spec import ENUMERATING_AXES, ParamSpec, count_parameters
from mjax.train import step as steps

FIELDS = {
    "tokens": np.int32,
    "labels": np.int32,
    "loss_mask": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
}


class Trainer:
    """Trains the model of `cfg` on `mesh` (default: all devices, sizes from cfg.mesh).

    A batch is a dict of numpy [B, S] arrays: tokens, labels, loss_mask, segment_ids, positions; of
    several processes each passes its `local_rows` of the global batch.
    """

    def __init__(self, cfg: Config, mesh: Mesh | None = None):
        validate(cfg)
        self.definition = definition_of(cfg.model)
        self.specs = self.definition.specs
        devices = jax.devices() if mesh is None else mesh.devices.flatten()
        cfg, self.why = resolve(cfg, devices, count_parameters(self.specs))
        validate(cfg, device_count=len(devices))
        if cfg.precision.fp8 != "none":
            require_fp8(devices[0], cfg.precision.fp8_backend)
        self.cfg = cfg
        self.mesh = make_mesh(cfg.mesh) if mesh is None else mesh
        self.parallel: Parallel = parallel_of(self.mesh)
        self.layout = layout_of(cfg) if self.parallel.pp > 1 else None
        zero = cfg.mesh.zero, cfg.mesh.zero_group
        placed = storage_specs(self.layout, self.specs)
        self.partitions = param_partitions(placed, self.parallel)
        self.stored = stored_partitions(placed, self.parallel, *zero)
        self.storage = Storage(self.layout, self._paddings(placed))
        gather, shard = self._whole_leaf(placed)
        of_rounding = {"seed": cfg.run.seed, "coordinates": self._places(placed)}
        self.optimizer = build_optimizer(cfg.optimizer, placed, gather, shard, **of_rounding)
        self.state: steps.State | None = None
        self.step_number = 0
        self.max_documents = 1 if not cfg.data.document_mask else 0
        self._store: Store | None = None
        self._jits: dict = {}
        self._xla_options: dict = {}

    # ---- state -------------------------------------------------------------------------------

    def init(self) -> None:
        """Draw parameters from run.seed and start at step 0. Equal on every mesh."""
        shardings = self._shardings(self.stored)
        self._start(jax.jit(self._initial_params, out_shardings=shardings)())

    def load_params(self, source: Source) -> None:
        """Start at step 0 from the weights of `source`; raises `UserError` for another model."""
        require_same_model(self.cfg.model, source.cfg)
        source.check()
        stored = self.abstract_state()["params"]
        params = arrays(source, canonical_abstract(self.storage, stored))
        self._start(from_canonical(self.storage, params, stored))

    def _start(self, params: dict) -> None:
        """Step 0 with these parameters: all else is zero. Moments of the host are made there."""
        rest = {name: part for name, part in self.abstract_state().items() if name != "params"}
        leaves, tree = jax.tree.flatten(rest)
        shapes = [a for a in leaves if not _on_host(a)]
        make = lambda: [jax.numpy.zeros(a.shape, a.dtype) for a in shapes]  # noqa: E731
        on_device = iter(jax.jit(make, out_shardings=[a.sharding for a in shapes])())
        made = [_host_zeros(a) if _on_host(a) else next(on_device) for a in leaves]
        self.state = {"params": params} | jax.tree.unflatten(tree, made)
        self.step_number = 0

    def abstract_state(self) -> steps.State:
        """The state as `ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self._initial_state)
        shardings = self._shardings(self._state_partitions())
        if self.cfg.optimizer.offload is True:
            to_host = lambda s: s.with_memory_kind("pinned_host")  # noqa: E731
            moments = {name: shardings["opt"][name] for name in ("mu", "nu")}
            shardings["opt"] |= jax.tree.map(to_host, moments)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
        )

    def params(self) -> dict:
        """Parameters in `precision.params`, a nested dict of global arrays."""
        return canonical(self.storage, self._live()["params"])

    def save(self) -> None:
        """Start an asynchronous checkpoint of the current step under run.dir/checkpoints."""
        self.store.save(self.step_number, canonical(self.storage, self._live()))

    def restore(self, step: int | None = None) -> int:
        """Load checkpoint `step` (default: the newest), onto any mesh; returns its step."""
        abstract = self.abstract_state()
        state = self.store.restore(canonical_abstract(self.storage, abstract), step)
        self.state = from_canonical(self.storage, state, abstract)
        self.step_number = int(self.state["step"])
        return self.step_number

    @property
    def store(self) -> Store:
        if self._store is None:
            cfg = self.cfg.checkpoint
            self._store = Store(
                Path(self.cfg.run.dir) / "checkpoints",
                self.cfg,
                keep=cfg.keep,
                keep_every=cfg.keep_every,
                async_save=cfg.async_save,
            )
        return self._store

    # ---- computation -------------------------------------------------------------------------

    def step(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """One optimiser step on a global batch; device scalars, as `train_step` says."""
        placed = self._place(batch)
        state, self.state = self._live(), None  # donated: gone if the step fails
        samples = consumed_samples(self.cfg.train, self.step_number)
        lr = np.float32(learning_rate(self.cfg.schedule, self.cfg.train, samples))
        decay = np.float32(weight_decay(self.cfg.optimizer, self.cfg.train, samples))
        self.state, metrics = self._jit("train")(state, placed, lr, decay)
        self.step_number += 1
        return metrics

    def grads(self, batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array, dict]:
        """(loss, gradient norm, gradients as nested dict of global arrays) of a global batch."""
        state = self._live()
        placed = self._place(batch)
        losses, norm, _, grads, _ = self._jit("grads")(_without_moments(state), placed)
        return losses["loss"], norm, canonical(self.storage, grads)

    def evaluate(self, batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
        """(sum of nll, number of unmasked tokens) of a global batch, without dropout."""
        placed = self._place(batch)
        return self._jit("eval")(_without_moments(self._live()), placed)

    def lower(self, batch_size: int | None = None) -> jax.stages.Lowered:
        """The train step lowered for this mesh and an abstract batch, nothing allocated."""
        shape = (batch_size or self.cfg.train.global_batch_size, self.cfg.data.seq_length)
        fields = {name: np.broadcast_to(dtype(0), shape) for name, dtype in FIELDS.items()}
        fields |= _places(*shape)
        shardings = self._shardings(self._batch_partitions())
        abstract = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shardings[name])
            for name, a in fields.items()
        }
        scalar = jax.ShapeDtypeStruct((), np.float32)
        return self._jit("train").lower(self.abstract_state(), abstract, scalar, scalar)

    def recompile(self, xla_options: dict) -> None:
        """Compile programs anew when next needed, with these XLA options besides the usual."""
        self._xla_options = xla_options
        self._jits.clear()

    # ---- placement ---------------------------------------------------------------------------

    def _jit(self, kind: str):
        """The jitted program `kind` for the present bound on documents."""
        if (kind, self.max_documents) not in self._jits:
            devices = list(self.mesh.devices.flat)
            uniform = self.layout is None or self.layout.uniform
            rows = overlap_rows(self.cfg.mesh, devices, uniform)
            unroll = self._unroll()
            under = hides(self.cfg, devices, unroll)
            options = compiler_options(self.cfg, devices, rows is not None, under)
            options |= self._xla_options
            program = steps.Program(
                cfg=self.cfg,
                definition=self.definition,
                partitions=self.partitions,
                stored=self.stored,
                optimizer=self.optimizer,
                parallel=self.parallel,
                max_documents=self.max_documents,
                overlap_rows=rows,
                unroll=unroll,
                hides=under,
                layout=self.layout,
            )
            batch, state = self._batch_partitions(), self._state_partitions()
            inputs = _without_moments(state), batch
            gradients = P(), P(), P(), self.stored, state.get("fp8", {})
            body, inputs, outputs = {
                "train": (steps.train_step, (state, batch, P(), P()), (state, P())),
                "grads": (steps.gradients, inputs, gradients),
                "eval": (steps.evaluate, inputs, P()),
            }[kind]
            body = functools.partial(body, program)
            if devices[0].platform == "cpu" and len(devices) > 1:
                body = in_program_order(body)
            mapped = jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=inputs,
                out_specs=outputs,
                check_vma=False,
            )
            donate = 0 if kind == "train" else None
            self._jits[kind, self.max_documents] = jax.jit(
                mapped, donate_argnums=donate, compiler_options=options or None
            )
        return self._jits[kind, self.max_documents]

    def _initial_params(self) -> dict:
        params = split(build(self.cfg.model, nnx.Rngs(self.cfg.run.seed)))[1]
        params = to_storage(self.storage, params)
        return steps.cast(params, self.cfg.precision.params)

    def _initial_state(self) -> steps.State:
        params = self._initial_params()
        state = {"params": params, "opt": self.optimizer.init(params), "step": jax.numpy.int32(0)}
        if self.cfg.precision.fp8 == "delayed":
            dense = weights_of(params, self.specs)
            state["fp8"] = empty_history(dense, self.cfg.precision.fp8_amax_history)
        return state

    def _state_partitions(self) -> steps.State:
        """Optimiser leaves follow the parameter whose path ends theirs; FP8's maxima are cut like
        layers, the rest is replicated."""
        paths = jax.tree_util.tree_flatten_with_path(self.stored)[0]
        by_path = {jax.tree_util.keystr(path): p for path, p in paths}
        of = lambda path, _leaf: of_parameter(by_path, path) or P()  # noqa: E731
        shapes = jax.eval_shape(self._initial_state)
        layers = partition(("layers",), self.parallel)
        fp8 = {"fp8": jax.tree.map(lambda _: layers, shapes.pop("fp8"))} if "fp8" in shapes else {}
        return jax.tree_util.tree_map_with_path(of, shapes) | fp8

    def _paddings(self, specs: dict) -> dict[str, Padding | None]:
        partitions = jax.tree.leaves(self.partitions), jax.tree.leaves(self.stored)
        paths = jax.tree_util.tree_flatten_with_path(specs)[0]
        return {
            jax.tree_util.keystr(path): padding(spec, *both, self.parallel)
            for (path, spec), *both in zip(paths, *partitions, strict=True)
        }

    def _batch_partitions(self) -> dict[str, P]:
        whole = {name: batch_partition(self.parallel) for name in FIELDS}
        rows = partition(("batch",), self.parallel)
        return whole | {"rows": rows, "columns": partition(("seq",), self.parallel)}

    def _shardings(self, partitions):
        return jax.tree.map(lambda p: NamedSharding(self.mesh, p), partitions)

    def _place(self, batch: dict[str, np.ndarray]) -> steps.Batch:
        """This process's rows, numpy [B, S] fields -> sharded global arrays, with the place of
        every token added."""
        for name in FIELDS:
            if name not in batch:
                raise UserError(f"batch: field {name!r} is missing; it needs {', '.join(FIELDS)}")
        local, width = batch["tokens"].shape
        devices = self.parallel.size("dp", "ep")
        here = self.local_rows(devices)  # this process's parts of a batch
        rows = local * devices // (here.stop - here.start)
        size = min(self.cfg.train.micro_batch_size, rows // devices)
        cuts = self.parallel.tp if self.parallel.cp == 1 else 2 * self.parallel.size("cp", "tp")
        if rows % devices or rows // devices % max(size, 1) or width % cuts:
            raise UserError(
                f"batch: {rows} sequences of {width} tokens do not divide over dp*ep={devices}, "
                f"train.micro_batch_size={size} and tp={self.parallel.tp}, cp={self.parallel.cp} "
                "(zigzag: 2*cp*tp); change one of them"
            )
        changes = np.diff(batch["segment_ids"], axis=1) != 0
        self.bound_documents(1 + int(changes.sum(1).max(initial=0)))
        fields = {name: np.asarray(batch[name], dtype) for name, dtype in FIELDS.items()}
        mine = self.local_rows(rows)
        places = _places(rows, width)
        fields |= places | {"rows": places["rows"][mine]}
        if self.parallel.cp > 1:
            order = zigzag(width, self.parallel.cp)
            fields |= {name: a[..., order] for name, a in fields.items() if name != "rows"}
        shardings = self._shardings(self._batch_partitions())
        whole = {name: (rows, mine.start) for name in fields} | {"columns": (width, 0)}
        return {name: global_array(a, shardings[name], *whole[name]) for name, a in fields.items()}

    def local_rows(self, count: int) -> slice:
        """Of `count` rows of a global batch, those that this process's devices work on."""
        return local_part(NamedSharding(self.mesh, partition(("batch",), self.parallel)), count)

    def bound_documents(self, most: int) -> None:
        """Promise that no sequence holds more than `most` documents; rounded up to a power of two.

        Only cuDNN's packed attention needs a static bound. The loop gives the dataset's, so that
        nothing compiles twice and all processes agree.
        """
        cpu = self.cfg.train.attention == "auto" and jax.default_backend() == "cpu"
        if self.cfg.data.document_mask and self.cfg.train.attention != "xla" and not cpu:
            self.max_documents = max(self.max_documents, 1 << (most - 1).bit_length())

    def _whole_leaf(self, specs: dict):
        """(gather, shard): make a stored shard of a Muon matrix whole, and cut it again."""
        stored = dict(zip(jax.tree.leaves(specs), jax.tree.leaves(self.stored), strict=True))

        def levels(spec: ParamSpec) -> list[P]:
            """As stored, as a weight, whole; axes that enumerate matrices stay as stored."""
            fine = stored[spec]
            all_three = fine, partition(spec.axes, self.parallel, spec.shape), [None] * len(fine)
            rows = zip(spec.axes, fine, *all_three, strict=True)
            cut = [[own] * 3 if axis in ENUMERATING_AXES else of for axis, own, *of in rows]
            return [P(*entries) for entries in zip(*cut, strict=True)]

        def gather(x: jax.Array, spec: ParamSpec) -> jax.Array:
            fine, weight, whole = levels(spec)
            x = gather_weights(x, fine, weight, spec, self.parallel)
            return gather_weights(x, weight, whole, spec, self.parallel)

        def shard(x: jax.Array, spec: ParamSpec) -> jax.Array:
            fine, weight, whole = levels(spec)
            x = shard_weights(x, whole, weight, self.parallel)
            return shard_weights(x, weight, fine, self.parallel)

        return gather, shard

    def _places(self, specs: dict):
        """name of a parameter -> canonical indices of its local entries (for `build_optimizer`)."""
        flat_specs, stored = flatten_dict(specs), flatten_dict(self.stored)

        def of(name: tuple[str, ...]) -> tuple[jax.Array, ...]:
            path = tuple(map(jax.tree_util.DictKey, name))
            return coordinates(self.storage, path, flat_specs[name], stored[name], self.parallel)

        return of

    def _unroll(self) -> int:
        """A loop over layers copies what each leaves for the backward into stacks and zero-fills
        those first: without it GPUs are 5 to 18 % faster (docs/performance.md). It compiles in
        proportion to the layers, so CPUs, which run small models, keep the loop."""
        if self.cfg.train.unroll != "auto":
            return self.cfg.train.unroll
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return 1 if on_cpu or not unrolls(self.cfg) else 0

    def _live(self) -> steps.State:
        if self.state is None:
            raise RuntimeError("Trainer holds no state: call init() or restore() first")
        return self.state


def _without_moments(state: steps.State) -> steps.State:
    return {name: part for name, part in state.items() if name != "opt"}


def _on_host(a: jax.ShapeDtypeStruct) -> bool:
    return a.sharding.memory_kind == "pinned_host"


def _host_zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
    part = a.sharding.shard_shape(a.shape)
    return jax.make_array_from_callback(a.shape, a.sharding, lambda _: np.zeros(part, a.dtype))


def _places(rows: int, width: int) -> dict[str, np.ndarray]:
    """Global row and column numbers of a batch."""
    return {"rows": np.arange(rows, dtype=np.int32), "columns": np.arange(width, dtype=np.int32)}
