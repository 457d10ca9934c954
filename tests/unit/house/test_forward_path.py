"""What a reader of a Llama's forward pass has to read: the functions that it enters, counted."""

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config import load
from mjax.models import build

PACKAGE = Path(__file__).parents[3] / "mjax"
KEYS = """data.mock=true model.vocab_size=64 model.hidden_size=32 model.num_hidden_layers=2
    model.intermediate_size=64 model.attention.num_attention_heads=4"""


def test_the_functions_of_a_llamas_forward_pass_are_at_most_1700_lines():
    model = build(load(None, KEYS.split()).model, nnx.Rngs(params=0))
    entered = defaultdict(set)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code.co_filename].add(frame.f_code.co_firstlineno)

    tokens = jnp.zeros((1, 4), jnp.int32)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        jax.eval_shape(model, tokens)
    finally:
        sys.setprofile(before)
    files = {Path(name) for name in entered if Path(name).is_relative_to(PACKAGE)}
    lines = sum(len(lines_of(path, entered[str(path)])) for path in files)
    assert PACKAGE / "models" / "decoder.py" in files and 1_000 < lines <= 1_700


def lines_of(path: Path, entered: set[int]) -> set[int]:
    """The lines of the functions that begin at these lines, with docstrings and comments."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if entered & set(range(first, node.lineno + 1)):
                found |= set(range(first, node.end_lineno + 1))
    return found
