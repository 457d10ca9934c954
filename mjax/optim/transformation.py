"""A transformation of optax as mjax runs it: on the shard of one parameter, its state by name.

optax's own learning rate is 1 and its weight decay 0; mjax scales and decays what comes out. Leaves
of the state that are shaped like the parameter are moments: each is a tree like the parameters and
is sharded like them. The others are numbers, the same for all parameters. Invariant: the
transformation is elementwise. `examine` tries that on numbers, because the name does not tell it,
and refuses all else: whatever reads norms, rows or shapes would see a shard's instead of the
parameter's.
"""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mjax.config.languages.optax_arguments import optax_function
from mjax.config.schema.run import OptimizerConfig
from mjax.errors import UserError, first_line

# Names in optax of the moments whose dtypes are `optimizer.mu_dtype` and `nu_dtype`.
FIRST_MOMENTS = frozenset({"mu", "trace"})
SECOND_MOMENTS = frozenset({"nu"})

# Of the trial.
SCALES = 1.0, 1e-3, 1e4  # of the gradients of the trial's steps: norms pass most thresholds
SHAPE = 4, 6
SMALL_RATE = 1e-8  # a learning rate below the bounds that some set on their steps
TOLERANCE = 1e-4  # relative to the largest update: shapes may change the last bits
REMEDY = "name an elementwise one, such as optax.lion, optax.sgd or optax.adabelief, or adamw, muon"

# Ways to cut or reshape an array; an elementwise function does not care.
VIEWS: tuple[Callable[[jax.Array], jax.Array], ...] = (
    lambda x: x[:2],
    lambda x: x[:, 3:],
    lambda x: x[1:2, 2:3],
    lambda x: x.reshape(-1),
    lambda x: x.reshape(2, 2, 6),
)


class StateLeaf(NamedTuple):
    """One leaf of the state.

    is_moment: whether it is shaped like the parameter; else it is a number. first: its value before
    the first step, that of every entry of a moment.
    """

    name: str
    is_moment: bool
    dtype: np.dtype
    first: float


@dataclass(frozen=True)
class Transformation:
    """An elementwise transformation.

    name: as `optimizer.name` has it. sign: of a step against the gradient in what `inner` returns.
    tree: the structure of the state of one array. leaves: of that state, in its order.
    """

    name: str
    inner: optax.GradientTransformation
    sign: float
    tree: jax.tree_util.PyTreeDef
    leaves: tuple[StateLeaf, ...]

    @property
    def moments(self) -> tuple[StateLeaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_moment)

    @property
    def numbers(self) -> tuple[StateLeaf, ...]:
        return tuple(leaf for leaf in self.leaves if not leaf.is_moment)

    def step(
        self, grad: jax.Array, param: jax.Array, moments: tuple, numbers: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """(what to subtract per unit of learning rate, the new moments), all fp32."""
        state = self._state(moments, numbers)
        update, state = self.inner.update(grad, state, param)
        moments, _ = self._parts(state)
        return self.sign * update, moments

    def next_numbers(self, numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The numbers after a step; they do not depend on gradients."""
        nothing = jnp.zeros(1)
        moments = tuple(jnp.zeros(1, leaf.dtype) for leaf in self.moments)
        old = self._state(moments, numbers)
        _, new = self.inner.update(nothing, old, nothing)
        _, numbers = self._parts(new)
        return numbers

    def require_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `UserError` unless moments of a parameter of this shape are shaped like it."""
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        state = jax.eval_shape(self.inner.init, like)
        wanted = [shape if leaf.is_moment else () for leaf in self.leaves]
        found = [leaf.shape for leaf in jax.tree.leaves(state)]
        is_alike = jax.tree.structure(state) == self.tree
        if is_alike and found == wanted:
            return
        odd = [other for other in found if other not in ((), shape)]
        kept = odd[0] if odd else found
        raise refused(self.name, f"of a parameter of shape {shape} it keeps a state of {kept}")

    def _parts(self, state: optax.OptState) -> tuple[tuple, dict[str, jax.Array]]:
        """(the moments in a state, its numbers by name)."""
        moments, numbers = [], {}
        for leaf, value in zip(self.leaves, jax.tree.leaves(state), strict=True):
            if leaf.is_moment:
                moments.append(value)
            else:
                numbers[leaf.name] = value
        return tuple(moments), numbers

    def _state(self, moments: tuple, numbers: dict[str, jax.Array]) -> optax.OptState:
        """The state of one array as optax has it."""
        next_moment = iter(moments)
        leaves = [next(next_moment) if e.is_moment else numbers[e.name] for e in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


def transformation_of(cfg: OptimizerConfig) -> Transformation | None:
    """The transformation that `optimizer.name` names; None for those built here.

    Raises `UserError` for one that is not elementwise.
    """
    if optax_function(cfg.name) is None:
        return None
    found = _examined(cfg.name, tuple(sorted(cfg.args.items())))
    names = [leaf.name for leaf in found.moments]
    for key, wanted in (("mu_dtype", FIRST_MOMENTS), ("nu_dtype", SECOND_MOMENTS)):
        dtype = getattr(cfg, key)
        if dtype != "float32" and not wanted & set(names):
            kept = ", ".join(names) or "no moment"
            raise UserError(
                f"optimizer.{key}={dtype!r} has no effect: optimizer.name={cfg.name!r} keeps {kept}"
                f"; set optimizer.{key}=float32"
            )
    return found


def refused(name: str, why: str) -> UserError:
    return UserError(f"optimizer.name={name!r} is not elementwise: {why}; {REMEDY}")


@cache  # the trial cannot run within a trace
def _examined(name: str, args: tuple[tuple[str, object], ...]) -> Transformation:
    """The transformation `name` with these arguments, after its trial."""
    function = optax_function(name)
    assert function is not None, name
    known = inspect.signature(function).parameters
    own = {"weight_decay": 0.0} if "weight_decay" in known else {}
    has_rate = "learning_rate" in known

    def build(rate: float) -> optax.GradientTransformation:
        own_rate = {"learning_rate": rate} if has_rate else {}
        return function(**own_rate, **own, **dict(args))

    try:
        inner = build(1.0)
        slow = build(SMALL_RATE) if has_rate else None
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args) or "none"
        raise UserError(
            f"optimizer.args: {name} refuses {given} ({type(error).__name__}: "
            f"{first_line(error)}); correct the values"
        ) from error
    return examine(name, inner, slow, -1.0 if has_rate else 1.0)


def examine(
    name: str,
    inner: optax.GradientTransformation,
    slow: optax.GradientTransformation | None,
    sign: float,
) -> Transformation:
    """A transformation after a trial; `slow` is the same with the learning rate `SMALL_RATE`.

    Raises `UserError` where it is not elementwise, where the learning rate is not a factor of its
    updates, or where it moves a parameter that is zero and has no gradient, as padding is.
    """
    rng = np.random.default_rng(0)
    param = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)
    drawn = rng.standard_normal((len(SCALES), *SHAPE))
    grads = jnp.asarray(drawn * np.reshape(SCALES, (-1, 1, 1)), jnp.float32)
    try:
        start = jax.jit(inner.init)(param)
        trial = jax.jit(_try, static_argnums=(0, 1))(inner, slow or inner, grads, param)
        trial = jax.tree.map(np.asarray, trial)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        why = f"it cannot run on gradients and parameters alone ({said})"
        raise refused(name, why) from error
    factor = SMALL_RATE if slow is not None else 1.0
    for view, updates in zip(VIEWS, trial["of_views"], strict=True):
        if not all(map(_close, map(view, trial["updates"]), updates)):
            raise refused(
                name, "the update of a part of a parameter is not that part of its update"
            )
    if not all(map(_close, factor * trial["updates"], trial["at_small_rate"])):
        raise UserError(
            f"optimizer.name={name!r}: its learning rate is not a factor of its updates; {REMEDY}"
        )
    leaves = _state_leaves(name, start)
    values = zip(leaves, trial["states"], strict=True)
    if not all(leaf.is_moment or (pair[0] == pair[1]).all() for leaf, pair in values):
        raise refused(name, "a number in its state depends on the gradients of a whole parameter")
    if trial["of_zeros"].any() or not np.isfinite(trial["of_zeros"]).all():
        raise refused(name, "it moves a parameter that is zero and has no gradient")
    return Transformation(name, inner, sign, jax.tree.structure(start), leaves)


def _try(
    inner: optax.GradientTransformation,
    slow: optax.GradientTransformation,
    grads: jax.Array,
    param: jax.Array,
) -> dict:
    """Updates by `grads` [steps, ...] of a parameter, of views of it, at the small rate, of zeros.

    `states` holds each leaf of the last state, of the parameter and of a view of its negative.
    """
    updates, state = _run(inner, grads, param)
    of_views = []
    for view in VIEWS:
        of_view = jax.vmap(view)(grads)
        of_views.append(_run(inner, of_view, view(param))[0])
    other = _run(inner, -2 * grads.reshape(len(SCALES), -1), param.reshape(-1))[1]
    zeros = jnp.zeros_like(grads)
    return {
        "updates": updates,
        "of_views": of_views,
        "at_small_rate": _run(slow, grads, param)[0],
        "of_zeros": _run(inner, zeros, zeros[0])[0],
        "states": list(zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True)),
    }


def _run(
    inner: optax.GradientTransformation, grads: jax.Array, param: jax.Array
) -> tuple[jax.Array, optax.OptState]:
    """(the updates of all steps, the last state); the parameter stays."""
    state = inner.init(param)
    updates = []
    for grad in grads:
        update, state = inner.update(grad, state, param)
        updates.append(update)
    return jnp.stack(updates), state


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two updates of one step agree; what is no number agrees with nothing."""
    return bool(np.abs(a - b).max() <= TOLERANCE * np.abs(a).max())


def _state_leaves(name: str, start: optax.OptState) -> tuple[StateLeaf, ...]:
    """The leaves of a state by name; it is of an array of `SHAPE`, before the first step."""
    moments = {"count", "numbers"}  # the names of the optimizer's own parts are taken
    numbers: set[str] = set()
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(start)[0]:
        if leaf.shape not in ((), SHAPE):
            raise refused(name, f"of a parameter of shape {SHAPE} it keeps a state of {leaf.shape}")
        value = np.asarray(leaf)
        is_moment = leaf.shape == SHAPE
        if is_moment and (value != value.flat[0]).any():
            raise refused(name, "its state begins with the parameters themselves")
        taken = moments if is_moment else numbers
        leaf_name = _free_name(path, taken)
        taken.add(leaf_name)
        leaves.append(StateLeaf(leaf_name, is_moment, value.dtype, value.flat[0].item()))
    return tuple(leaves)


def _free_name(path: tuple, taken: set[str]) -> str:
    """The last field that a key path names, with a number where that is taken."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    field = fields[-1] if fields else "state"
    numbered = (f"{field}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([field], numbered) if name not in taken)
