"""Gate: latent attention runs in cuDNN's kernels, with heads of 192 and 128 as they are."""

import re

import pytest

from tests.aot.common import Compiled, compile_step, missing
from tests.marks import exhaustive

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYERS = 2
DEEPSEEK_V2_LITE = (  # with an MLP in every layer
    "model.layer_pattern=A",
    f"model.num_hidden_layers={LAYERS}",
    "model.hidden_size=2048",
    "model.intermediate_size=10944",
    "model.vocab_size=102400",
    "model.attention.num_attention_heads=16",
    "model.attention.num_key_value_heads=0",
    "model.mla.kv_lora_rank=512",
    "model.mla.qk_nope_head_dim=128",
    "model.mla.qk_rope_head_dim=64",
    "model.mla.v_head_dim=128",
    "data.seq_length=4096",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
)
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
MESHES = {
    "one": ["mesh.dp=1"],
    "tp2": ["mesh.dp=1", "mesh.tp=2"],
    "cp2": ["mesh.dp=1", "mesh.cp=2", "train.micro_batch_size=1"],
    "fp8": ["mesh.dp=1", "precision.fp8=delayed"],
}


@exhaustive
@pytest.mark.parametrize("name", MESHES)
def test_cudnn_computes_unlike_heads(name):
    made = compile_step("configs/models/llama3_8b.yaml", *DEEPSEEK_V2_LITE, *MESHES[name])
    assert made.calls(FORWARD) == LAYERS, "remat must not run attention again"
    assert made.calls(BACKWARD) == LAYERS
    assert head_sizes(made) == ["192", "192", "128"], "queries and keys are wider than values"
    if name == "fp8":
        matmuls = 6 * LAYERS  # four of attention, two of the MLP
        assert made.calls("__cublas$lt$matmul$f8") == 3 * matmuls


@exhaustive
def test_packed_documents_pad_values():
    """jax gives cuDNN the same offsets for keys and values, so that they must be of one size."""
    path = "configs/models/llama3_8b.yaml"
    made = compile_step(path, *DEEPSEEK_V2_LITE, "mesh.dp=1", documents=8)
    assert made.calls(FORWARD) == made.calls(BACKWARD) == LAYERS
    assert head_sizes(made) == ["192"] * 3


def head_sizes(made: Compiled) -> list[str]:
    """Of queries, keys and values of a call of attention."""
    call = next(line for line in made.text.splitlines() if f'"{FORWARD}"' in line)
    read = re.search(r"operand_layout_constraints={(.*?)}, api", call)[1]
    return [dims.split(",")[-1] for dims in re.findall(r"bf16\[([\d,]+)\]", read)]
