"""One order for the collectives of a program, which XLA's CPU runtime needs.

GPUs start collectives in the order of the compiled program. The CPU runtime starts each as soon as
its operands are there. Two collectives that do not depend on each other may then start in another
order on each device, and each device waits for the others forever. `in_program_order` rewrites the
traced program: every collective reads one number that depends on the collective before it.
Invariant: every two collectives of the program depend on each other. No bit of a result changes.
"""

from collections.abc import Callable, Sequence

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
        traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
        start = jnp.float32(-0.0)
        results, _ = _evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(args), start)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return ordered


def _evaluate(jaxpr, consts: Sequence, args: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    """The results of `jaxpr`, and the token of its last collective. A token is fp32 -0.0."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

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
    return [read(atom) for atom in jaxpr.outvars], token


def _bind(equation, operands: Sequence) -> list:
    params = equation.primitive.get_bind_params(equation.params)
    result = equation.primitive.bind(*operands, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def _collective(equation, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    """The results of a collective of each operand, one after the other, and the next token."""
    results = []
    for operand in operands:
        results += _bind(equation, [_after(operand, token)])
        token = _token_of(results[-1])
    return results, token


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
    found = jax.tree.leaves(list(params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    return [getattr(p, "jaxpr", p) for p in found if hasattr(p, "eqns")]


def _has_collectives(equation) -> bool:
    return any(
        inner.primitive.name in _COLLECTIVES or _has_collectives(inner)
        for jaxpr in _jaxprs(equation.params)
        for inner in jaxpr.eqns
    )


def _call(params: dict, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    """A function that the program calls: its equations take the place of the call."""
    called = params.get("jaxpr", params.get("call_jaxpr"))
    if not isinstance(called, ClosedJaxpr):
        called = ClosedJaxpr(called, ())
    return _evaluate(called.jaxpr, called.consts, operands, token)


def _checkpoint(params: dict, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    """A function that is recomputed: a barrier hides that, as JAX's own rule does."""
    if params["prevent_cse"] and params["differentiated"]:
        operands = lax.optimization_barrier(tuple(operands))
    return _call(params, operands, token)


def _cond(params: dict, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    def branch(traced):
        return lambda token, *args: _evaluate(traced.jaxpr, traced.consts, args, token)

    return lax.switch(operands[0], [*map(branch, params["branches"])], token, *operands[1:])


def _scan(params: dict, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    body, (consts, carry, xs) = params["jaxpr"], _scan_operands(params, operands)

    def step(carried, x):
        token, carry = carried
        results, token = _evaluate(body.jaxpr, body.consts, (*consts, *carry, *x), token)
        return (token, results[: len(carry)]), results[len(carry) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (token, carry), ys = lax.scan(step, (token, list(carry)), list(xs), **options)
    return [*carry, *ys], token


def _scan_operands(params: dict, operands: Sequence) -> tuple[Sequence, Sequence, Sequence]:
    """Constants, carry and slices: jax 0.10 counts them, jax 0.11 keeps their tree."""
    if "ft_in" in params:
        return tuple(list(part) for part in params["ft_in"].update(operands).unpack())
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return operands[:first], operands[first:last], operands[last:]


def _while(params: dict, operands: Sequence, token: jax.Array) -> tuple[list, jax.Array]:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def go_on(carried):
        return jax.core.eval_jaxpr(
            condition.jaxpr, condition.consts, *operands[:first], *carried[0]
        )[0]

    def step(carried):
        carry, token = carried
        return _evaluate(body.jaxpr, body.consts, (*operands[first:last], *carry), token)

    return lax.while_loop(go_on, step, (list(operands[last:]), token))


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
