"""One order for the collectives of a program, which XLA's CPU runtime needs.

GPUs start collectives in the order of the compiled program. The CPU runtime starts each as soon as
its operands are there. Two collectives that do not depend on each other may then start in another
order on each device, and each device waits for the others forever. `in_program_order` rewrites the
traced program: every collective reads one number that depends on the collective before it.
Invariant: every two collectives of the program depend on each other. No bit of a result changes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

_COLLECTIVES = frozenset(
    "psum pmax pmin all_gather reduce_scatter ppermute all_to_all psum_invariant".split()
)


def in_program_order(function: Callable) -> Callable:
    """`function` of pytrees of arrays, with its collectives in the order in which it calls them.

    Call the result inside `jax.shard_map`. It cannot be differentiated: differentiate `function`.
    """

    def ordered(*args):
        trace = jax.make_jaxpr(function, return_shape=True)
        program, shapes = trace(*args)
        start = jnp.float32(-0.0)
        results = _evaluate(program, jax.tree.leaves(args), start)
        return jax.tree.unflatten(jax.tree.structure(shapes), results.values)

    return ordered


class Results(NamedTuple):
    """The results of a program, and the token of its last collective: fp32 [], always -0.0."""

    values: list
    token: jax.Array


def _evaluate(program: ClosedJaxpr, args: Sequence, token: jax.Array) -> Results:
    """The results of a traced program whose first collective waits for `token`."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _COLLECTIVES:
            results, token = _collective(equation, operands, token)
        elif _has_collectives(equation):
            rewrite = _CONTROL_FLOW[equation.primitive.name]
            results, token = rewrite(equation.params, operands, token)
        else:
            results = _bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return Results([read(atom) for atom in jaxpr.outvars], token)


def _bind(equation, operands: Sequence) -> list:
    """The results of one equation."""
    params = equation.primitive.get_bind_params(equation.params)
    result = equation.primitive.bind(*operands, **params)
    if equation.primitive.multiple_results:
        return list(result)
    return [result]


def _collective(equation, operands: Sequence, token: jax.Array) -> Results:
    """The results of a collective of each operand, one after the other."""
    results = []
    for operand in operands:
        (result,) = _bind(equation, [_after(operand, token)])
        token = _token_of(result)
        results.append(result)
    return Results(results, token)


def _after(operand: jax.Array, token: jax.Array) -> jax.Array:
    """`operand`, equal bit for bit, which is there once `token` is: x + -0.0 is x."""
    return operand + token.astype(operand.dtype)


def _token_of(result: jax.Array) -> jax.Array:
    """-0.0, which XLA cannot know: 0 times a number that is not finite would be none."""
    number = result.ravel()[0].astype(jnp.float32)
    finite = jnp.where(jnp.abs(number) < 1.0, number, 0.5)
    return -jnp.abs(finite * 0.0)


def _jaxprs(params: dict) -> list:
    """The jaxprs among the parameters of an equation."""
    params = jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr)
    return [getattr(param, "jaxpr", param) for param in params if _is_jaxpr(param)]


def _is_jaxpr(param: object) -> bool:
    return hasattr(param, "eqns")


def _has_collectives(equation) -> bool:
    for jaxpr in _jaxprs(equation.params):
        for inner in jaxpr.eqns:
            if inner.primitive.name in _COLLECTIVES or _has_collectives(inner):
                return True
    return False


# ---- equations that run other programs -----------------------------------------------------------


def _call(params: dict, operands: Sequence, token: jax.Array) -> Results:
    """A function that the program calls: its equations take the place of the call."""
    called = params.get("jaxpr", params.get("call_jaxpr"))
    if not isinstance(called, ClosedJaxpr):
        called = ClosedJaxpr(called, ())
    return _evaluate(called, operands, token)


def _checkpoint(params: dict, operands: Sequence, token: jax.Array) -> Results:
    """A function that is recomputed: a barrier hides that, as JAX's own rule does."""
    if params["prevent_cse"] and params["differentiated"]:
        operands = lax.optimization_barrier(tuple(operands))
    return _call(params, operands, token)


def _cond(params: dict, operands: Sequence, token: jax.Array) -> Results:
    def branch(program: ClosedJaxpr) -> Callable:
        return lambda token, *args: _evaluate(program, args, token)

    choice, *args = operands
    branches = [branch(program) for program in params["branches"]]
    return lax.switch(choice, branches, token, *args)


def _scan(params: dict, operands: Sequence, token: jax.Array) -> Results:
    body = params["jaxpr"]
    consts, carry, xs = _scan_operands(params, operands)

    def step(state, x):
        carry, token = state
        results, token = _evaluate(body, (*consts, *carry, *x), token)
        carry, y = results[: len(carry)], results[len(carry) :]
        return (carry, token), y

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (carry, token), ys = lax.scan(step, (list(carry), token), list(xs), **options)
    return Results([*carry, *ys], token)


def _scan_operands(params: dict, operands: Sequence) -> tuple[Sequence, Sequence, Sequence]:
    """(constants, carry, slices): jax 0.10 counts them, jax 0.11 keeps their tree."""
    if "ft_in" in params:
        parts = params["ft_in"].update(operands).unpack()
        return tuple(map(list, parts))
    first = params["num_consts"]
    last = first + params["num_carry"]
    return operands[:first], operands[first:last], operands[last:]


def _while(params: dict, operands: Sequence, token: jax.Array) -> Results:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    condition_consts, body_consts = operands[:first], operands[first:last]

    def holds(state):
        carry, _ = state
        args = *condition_consts, *carry
        (result,) = jax.core.eval_jaxpr(condition.jaxpr, condition.consts, *args)
        return result

    def step(state):
        carry, token = state
        return tuple(_evaluate(body, (*body_consts, *carry), token))

    carry, token = lax.while_loop(holds, step, (list(operands[last:]), token))
    return Results(carry, token)


_CONTROL_FLOW = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "remat2": _checkpoint,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
