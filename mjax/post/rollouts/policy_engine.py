"""An engine with the weights of a trainer: handed over, put to sleep, woken.

A hand-over is one compiled program that casts, shards and takes apart, then one transfer if the
engine has devices of its own (`engine_place.py`). It moves what training changes: all parameters,
or adapters alone. Invariant: the engine's arrays are its own, so a step may take over the
trainer's. On the trainer's devices the engine's caches are freed while it updates, and its weights
unless only a part of them changes. On devices of its own the engine may draw beside an update.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding

from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE
from mjax.infer.caches.specs import PoolSizes
from mjax.infer.checks import longest_window, snapshots_of
from mjax.infer.engine import Engine
from mjax.infer.programs import EnginePrograms
from mjax.infer.records import powers_of_two
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.stages.layers_in_stages import stages_for
from mjax.infer.weights import converted_apart, form_of, partitions_apart
from mjax.objectives.objective import OWN_WEIGHTS
from mjax.pipeline.storage import canonical, sharded_by_stages
from mjax.post.base.device_copies import copied_shards
from mjax.post.rollouts.engine_place import PLACE_OPTIONS, engine_place_of
from mjax.run.out_of_memory import owned_by
from mjax.sharding.collectives import DATA_AXES
from mjax.sharding.spec import is_spec, trained_only
from mjax.train.trainer import Trainer

OPTIONS = "rows", "chunk", "pages", "weight_dtype", "cache_dtype", "batch_invariant", *PLACE_OPTIONS
_ROWS, _CHUNK = 256, 2048


class PolicyEngine:
    """The engine of a trainer's policy; `engine` is there after the first `take_weights`.

    length: tokens of the longest text. most_rows: texts that may run at a time.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer | None,
        ends: Sequence[int],
        length: int,
        most_rows: int,
    ):
        options = dict(trainer.cfg.reinforce.engine)
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise UserError(
                f"reinforce.engine: there is no option {unknown[0]}; known: {', '.join(OPTIONS)}"
            )
        self.trainer, self.tokenizer, self.ends = trainer, tokenizer, ends
        self.engine: Engine | None = None
        self.place = engine_place_of(trainer, options)
        options = {name: options[name] for name in options if name not in PLACE_OPTIONS}
        self._dtype = jnp.dtype(trainer.cfg.precision.compute)
        self._form = form_of(options.get("weight_dtype"), trainer.definition.specs)
        lanes = self.place.parallel.size(*DATA_AXES)
        rows = options.pop("rows", _ROWS)
        if type(rows) is not int or rows < 1 or rows & (rows - 1):
            raise UserError(f"reinforce.engine: rows={rows!r}: give a power of two, such as 64")
        rows = min(rows, -(-most_rows // lanes))
        rows = powers_of_two(1, rows)[-1]
        chunk = options.pop("chunk", _CHUNK)
        options.setdefault("pages", 1 + rows * -(-length // PAGE))
        limits = Limits(rows, rows + chunk, chunk, length)
        self._options = options | {"limits": limits, "fixed_rows": True}
        if trainer.cfg.reinforce.router_replay:
            self._options["keeps_experts"] = True
            if longest_window(trainer.cfg.model) is not None:
                raise UserError(
                    "reinforce.router_replay: the engine forgets tokens that have left the windows "
                    "of all layers; set it to false"
                )
        self._steps: dict[int, int] = {}  # of the trainer, by the engine's version of weights
        self._programs: dict[int, tuple] = {}  # with shardings, by the number of parameters
        self._of_step = -1  # the step whose weights the engine has
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._drawing: Future | None = None

    def bytes_per_device(self) -> tuple[int, int]:
        """(weights, caches) of the engine on one of its devices; nothing is allocated."""
        trainer, model, options = self.trainer, self.trainer.cfg.model, self._options
        stored = trainer.abstract_state()["params"]
        params = jax.eval_shape(partial(canonical, trainer.storage), stored)
        params.pop(OWN_WEIGHTS, None)
        program, there = self._program(tuple(flatten_dict(params)))
        found = jax.eval_shape(program, params)
        sizes = jax.tree.map(
            lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, found, there
        )
        limits = options["limits"]
        pools = PoolSizes(
            options["pages"],
            limits.rows,
            -(-limits.length // PAGE),
            eight_bits=options.get("cache_dtype") == "fp8",
            snapshots=snapshots_of(model, limits),
            keeps_experts=options.get("keeps_experts", False),
        )
        of_model = trainer.definition, model, self.place.mesh, self._dtype
        layout = stages_for(model, self.place.parallel.pp)
        programs = EnginePrograms(*of_model, pools, self._form, layout)
        return sum(jax.tree.leaves(sizes)), programs.bytes_of_caches()

    @functools.cached_property
    def _is_partial(self) -> bool:
        """Whether training leaves some parameters as they are, and others can be exchanged."""
        if self._in_stages:
            return False
        trained = trained_only(self.trainer.specs, self.trainer.specs)
        return len(jax.tree.leaves(trained)) < len(jax.tree.leaves(self.trainer.specs))

    def take_weights(self) -> Engine:
        """The engine, awake and with the weights of the trainer as they are now.

        It waits for what `draw_beside` has begun; who began it is told of errors.
        """
        if self._drawing is not None:
            wait([self._drawing])
            self._drawing = None
        trainer, engine = self.trainer, self.engine
        if engine is None:
            handed = self._handed_over(trainer.params())
            with self.memory_named():
                self.engine = engine = Engine(
                    trainer.definition,
                    handed,
                    trainer.cfg.model,
                    dtype=trainer.cfg.precision.compute,
                    tokenizer=self.tokenizer,
                    eos=self.ends,
                    donate=self._in_stages,
                    **self._options,
                )
        elif self._of_step != trainer.step_number or not engine.runner.has_weights:
            params = trainer.params()
            if not self._is_partial:
                self._free()  # so that old weights and new ones need no memory at a time
            elif engine.runner.has_weights:
                params = trained_only(params, trainer.specs)
            handed = self._handed_over(params)
            if self._in_stages:
                engine.update_weights(handed, donate=True)
            else:
                engine.exchange_weights(handed)
        with self.memory_named():
            engine.wake()
        self._of_step = self._steps[engine.version] = trainer.step_number
        return engine

    def expire(self) -> None:
        """Take the weights anew when next asked, though the trainer's step may be the same."""
        self._of_step = -1

    def draw_beside(self, draw: Callable[[], Any]) -> Future:
        """Begin to draw in a thread of its own, beside an update of the trainer.

        XLA's CPU runtime starts collectives of all devices in the order of launches by one thread,
        which must be that of all processes. So several draw in this thread, before the update.
        """
        if jax.process_count() > 1 and jax.default_backend() == "cpu":
            drawn: Future = Future()
            drawn.set_result(draw())
            return drawn
        self._drawing = self._thread.submit(draw)
        return self._drawing

    def rest(self) -> None:
        """Leave the memory of caches and of weights that change to the trainer, if it shares it."""
        if not self.place.is_apart:
            self._free()

    def _free(self) -> None:
        """Free the caches, and the weights if all of them change; not while requests run."""
        if self.engine is not None and not self.engine.requests:
            self.engine.pause()  # reads what is in flight
            self.engine.resume()
            self.engine.sleep(weights=not self._is_partial)

    def step_of(self, version: int) -> int:
        """The trainer's step that a version of the engine's weights comes from."""
        return self._steps[version]

    @property
    def _in_stages(self) -> bool:
        """Whether the engine has layers in stages, which it makes of stacks itself."""
        return self.place.parallel.pp > 1

    def _handed_over(self, params: dict) -> dict:
        """Parameters in the form and place of the engine; stacks of layers for stages."""
        params = {name: tree for name, tree in params.items() if name != OWN_WEIGHTS}
        flat = flatten_dict(params)
        if len(flat) not in self._programs:
            self._programs[len(flat)] = self._program(tuple(flat))
        program, there = self._programs[len(flat)]
        found = program(params)
        with self.memory_named():
            return jax.tree.map(copied_shards, found, there) if self.place.is_apart else found

    def memory_named(self) -> AbstractContextManager[None]:
        """Name the engine's devices, if it has its own, in errors for want of memory."""
        if not self.place.is_apart:
            return nullcontext()
        ways = "to mend it, lower rows, chunk or pages in reinforce.engine, or give it more devices"
        return owned_by(" of the engine", ways)

    def _program(self, paths: Sequence[tuple]) -> tuple[jax.stages.Wrapped, dict]:
        """(what casts and cuts parameters where the trainer has them, shardings of the engine)."""
        specs, place = self.trainer.definition.specs, self.place
        convert = partial(converted_apart, specs, dtype=self._dtype, form=self._form)
        if self._in_stages:
            convert = partial(_cast, specs, dtype=self._dtype)

        def wanted(mesh: Mesh) -> dict:
            if self._in_stages:
                cuts = jax.tree.map(partial(sharded_by_stages, mesh=mesh), specs, is_leaf=is_spec)
            else:
                cuts = partitions_apart(specs, place.parallel, self._form)
                cuts = jax.tree.map(partial(NamedSharding, mesh), cuts)
            cuts = flatten_dict(cuts)
            return unflatten_dict({path: cuts[path] for path in paths})

        return jax.jit(convert, out_shardings=wanted(place.source)), wanted(place.mesh)


def _cast(specs: dict, params: dict, dtype: jnp.dtype) -> dict:
    """Copies of all parameters in the dtype of the engine."""
    return jax.tree.map(
        lambda spec, x: jnp.copy(x).astype(spec.dtype(dtype)), specs, params, is_leaf=is_spec
    )
