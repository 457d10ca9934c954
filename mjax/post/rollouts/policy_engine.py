"""An engine with the weights of a trainer, on its mesh: handed over, put to sleep, woken.

A hand-over is one compiled program that casts, shards and takes apart. It moves what training
changes: all parameters, or adapters alone. Invariant: the engine's arrays are its own, so a step
may take over the trainer's. While the trainer updates, the engine's caches are freed, and its
weights unless only a part of them changes.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.caches.paged import PAGE
from mjax.infer.checks import longest_window
from mjax.infer.engine import Engine
from mjax.infer.records import powers_of_two
from mjax.infer.scheduling.scheduler import Limits
from mjax.infer.weights import converted_apart, form_of, partitions_apart
from mjax.objectives.objective import OWN_WEIGHTS
from mjax.post.base.roles import require_no_pipeline
from mjax.sharding.collectives import DATA_AXES
from mjax.sharding.spec import trained_only
from mjax.train.trainer import Trainer

OPTIONS = "rows", "chunk", "pages", "weight_dtype", "cache_dtype", "batch_invariant"
_ROWS, _CHUNK = 256, 2048


class PolicyEngine:
    """The engine of a trainer's policy; `engine` is there after the first `take_weights`.

    length: tokens of the longest text. most_rows: texts that may run at a time.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer,
        ends: Sequence[int],
        length: int,
        most_rows: int,
    ):
        require_no_pipeline(trainer, "the engine of rollouts")
        options = dict(trainer.cfg.reinforce.engine)
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise UserError(
                f"reinforce.engine: there is no option {unknown[0]}; known: {', '.join(OPTIONS)}"
            )
        self.trainer, self.tokenizer, self.ends = trainer, tokenizer, ends
        self.engine: Engine | None = None
        self._dtype = jnp.dtype(trainer.cfg.precision.compute)
        self._form = form_of(options.get("weight_dtype"), trainer.definition.specs)
        lanes = trainer.parallel.size(*DATA_AXES)
        rows = min(options.pop("rows", _ROWS), -(-most_rows // lanes))
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
        self._programs: dict[int, jax.stages.Wrapped] = {}  # by the number of parameters
        self._of_step = -1  # the step whose weights the engine has

    @functools.cached_property
    def _is_partial(self) -> bool:
        """Whether training leaves some parameters as they are."""
        trained = trained_only(self.trainer.specs, self.trainer.specs)
        return len(jax.tree.leaves(trained)) < len(jax.tree.leaves(self.trainer.specs))

    def take_weights(self) -> Engine:
        """The engine, awake and with the weights of the trainer as they are now."""
        trainer, engine = self.trainer, self.engine
        if engine is None:
            self.engine = engine = Engine(
                trainer.definition,
                self._handed_over(trainer.params()),
                trainer.cfg.model,
                dtype=trainer.cfg.precision.compute,
                tokenizer=self.tokenizer,
                eos=self.ends,
                **self._options,
            )
        elif self._of_step != trainer.step_number or not engine.runner.has_weights:
            params = trainer.params()
            if self._is_partial and engine.runner.has_weights:
                params = trained_only(params, trainer.specs)
            engine.exchange_weights(self._handed_over(params))
        engine.wake()
        self._of_step = self._steps[engine.version] = trainer.step_number
        return engine

    def expire(self) -> None:
        """Take the weights anew when next asked, though the trainer's step may be the same."""
        self._of_step = -1

    def rest(self) -> None:
        """Free the caches, and the weights if all of them change; not while requests run."""
        if self.engine is not None and not self.engine.requests:
            self.engine.pause()  # reads what is in flight
            self.engine.resume()
            self.engine.sleep(weights=not self._is_partial)

    def step_of(self, version: int) -> int:
        """The trainer's step that a version of the engine's weights comes from."""
        return self._steps[version]

    def _handed_over(self, params: dict) -> dict:
        """Parameters in the form of the engine, by a program for all of them or for some."""
        params = {name: tree for name, tree in params.items() if name != OWN_WEIGHTS}
        flat = flatten_dict(params)
        program = self._programs.get(len(flat))
        if program is None:
            specs, mesh = self.trainer.definition.specs, self.trainer.mesh
            parallel = replace(self.trainer.parallel, pp=1, cp=1, cuts_sequence=False)
            cuts = flatten_dict(partitions_apart(specs, parallel, self._form))
            wanted = unflatten_dict({path: cuts[path] for path in flat})
            program = jax.jit(
                partial(converted_apart, specs, dtype=self._dtype, form=self._form),
                out_shardings=jax.tree.map(partial(NamedSharding, mesh), wanted),
            )
            self._programs[len(flat)] = program
        return program(params)
