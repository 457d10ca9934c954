"""Gate: what run.deterministic asks for reaches the program for an H200."""

import re

import pytest

from tests.aot.common import compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LLAMA = "configs/models/llama3_8b.yaml"
DETERMINISTIC = "run.deterministic=true"
SMALL = (
    "model.attention.num_attention_heads=4",
    "model.attention.num_key_value_heads=2",
    "model.attention.head_dim=64",
    "data.seq_length=512",
)
KEYS = ("mesh.dp=1", "train.global_batch_size=1", "train.micro_batch_size=1")


def scatters(text: str) -> list[str]:
    """The scatters that may write one place several times: by atomic sums, in any order."""
    found = re.findall(r" scatter\(.*", text)
    assert found, "the gradient of the embedding is a scatter"
    return [line for line in found if "unique_indices=true" not in line]


def backward_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if '"__cudnn$fmhaSoftmaxBackward"' in line]


def are_marked(calls: list[str]) -> bool:
    """XLA would mark the first of equal calls alone, and not find programs of the others."""
    return all(re.search(r"force_deterministic\": *true", call) for call in calls)


@exhaustive
def test_a_deterministic_program_has_no_atomic_sums_and_each_attention_says_so():
    usual = compile_step(LLAMA, "model.num_hidden_layers=1", *KEYS)
    assert scatters(usual.text), "the law can fail"
    made = compile_step(LLAMA, "model.num_hidden_layers=2", *KEYS, DETERMINISTIC)
    assert not scatters(made.text)
    assert made.calls("__cublas$lt$matmul") > 0 and "__triton_gemm" not in made.text
    calls = backward_calls(made.text)
    assert len(calls) == 2 and are_marked(calls)


@exhaustive
def test_the_batch_invariant_mode_says_so_of_each_attention():
    keys = "model.vocab_size=512", "model.hidden_size=256", "model.intermediate_size=512"
    invariant = "train.objective=policy", "reinforce.engine.batch_invariant=true"
    made = compile_step(LLAMA, "model.num_hidden_layers=2", *keys, *SMALL, *KEYS, *invariant)
    calls = backward_calls(made.text)
    assert len(calls) == 2 and are_marked(calls)
