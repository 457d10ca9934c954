"""Arithmetic that a model wrote, computed exactly and without `eval`.

Invariant: time and memory are bounded by the length of the text: no powers, no names, no calls.
"""

import ast
import operator
import re
from fractions import Fraction

LONGEST_EXPRESSION = 200  # characters
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[Fraction]]:
    """(the value of an expression of + - * / and parentheses, the numbers in it, in order).

    Raises `ValueError` for anything else, and for a division by zero.
    """
    if len(text) > LONGEST_EXPRESSION or not re.fullmatch(r"[\d\s.+\-*/()]+", text, re.ASCII):
        raise ValueError("not an expression of numbers and + - * / ( )")
    numbers = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                numbers.append(Fraction(str(node.value)))
                return numbers[-1]
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)} is not + - * /")

    try:
        return value(ast.parse(text.strip(), mode="eval").body), numbers
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as e:
        raise ValueError(type(e).__name__) from None


def number_text(value: Fraction) -> str:
    """A number as a person writes it: whole, or with at most ten digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
