"""What a reader of a Llama's forward pass has to read: functions it enters, files around it."""

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
from tests.marks import slow
from tests.unit.house.test_budget import count
from tests.unit.house.test_imports import all_imports

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


@slow
def test_a_decoder_reaches_at_most_20_files_of_its_room():
    """What other features add to a forward pass is given to it by callers, not imported."""
    reached, left = set(), {Path("models", "decoder")}
    while left:
        file = left.pop()
        reached.add(file)
        found = {each.imported for each in all_imports() if each.importer == file}
        left |= {path for path in found if path.parts[0] == "models"} - reached
    texts = [(PACKAGE / path).with_suffix(".py").read_text() for path in reached]
    assert 10 < len(reached) <= 20 and sum(count(text)[0] for text in texts) <= 2_200


def lines_of(path: Path, entered: set[int]) -> set[int]:
    """The lines of the functions that begin at these lines, with docstrings and comments."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if entered & set(range(first, node.lineno + 1)):
                found |= set(range(first, node.end_lineno + 1))
    return found
