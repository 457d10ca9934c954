"""What the H200 programs of encoders contain: cuDNN's attention, once a layer, padded or not."""

import re

import pytest

from mjax.kernels.base.chooser import Device, believed
from tests.aot.common import compile_step, missing
from tests.marks import exhaustive, slow

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

BERT = "configs/models/bert_base.yaml"
TWO_LAYERS = ("model.num_hidden_layers=2", "mesh.dp=1", "model.bert.num_labels=2")
BATCH = ("train.global_batch_size=32", "train.micro_batch_size=32")


@exhaustive
@pytest.mark.parametrize("documents", [1, 2], ids=["whole rows", "padding"])
def test_attention_runs_once_a_layer_without_whole_scores(documents):
    made = compile_step(BERT, *TWO_LAYERS, *BATCH, "train.remat=none", documents=documents)
    assert made.calls("__cudnn$fmhaSoftmax") == 2
    assert made.calls("__cudnn$fmhaSoftmaxBackward") == 2
    assert "32,12,512,512]" not in made.text, "whole scores exist"
    assert made.temp < 5e9


@exhaustive
def test_a_backward_adds_no_bias_of_queries_and_keys_again():
    made = compile_step(BERT, *TWO_LAYERS, *BATCH, "train.remat=dots")
    added = [line for line in made.text.splitlines() if "/attention/add" in line]
    to_heads = [line for line in added if "32,512,12,64]" in line]
    assert to_heads, "in the forward"
    assert not [line for line in to_heads if "rematted_computation" in line]


@exhaustive
def test_context_parallel_encoders_trade_heads():
    made = compile_step(BERT, *TWO_LAYERS, *BATCH, "mesh.cp=2", "train.remat=none", documents=2)
    assert made.calls("__cudnn$fmhaSoftmax") == 2
    assert "all-to-all" in made.text


@exhaustive
def test_attention_with_biases_by_distance_runs_once_a_layer_without_whole_scores():
    layers = "model.num_hidden_layers=2", "model.layer_pattern='B, [GXD]'", "mesh.dp=1"
    batch = "train.global_batch_size=8", "train.micro_batch_size=8", "train.attention=auto"
    with believed(Device("gpu", triton=False)):
        made = compile_step("configs/models/t5_base.yaml", *layers, *batch)
    assert made.calls("__cudnn$fmhaScaleBiasSoftmax") == 2
    assert made.calls("__cudnn$fmhaScaleBiasSoftmaxBackward") == 2
    assert made.calls("__cudnn$fmhaSoftmaxBackward") == 1, "of cross-attention"
    assert "8,12,512,512]" not in made.text, "whole scores exist"


@exhaustive
def test_windows_to_both_sides_hold_scores_of_the_keys_near_by():
    layers = "model.num_hidden_layers=4", "model.layer_pattern=FWWB", "mesh.dp=1"
    batch = "train.global_batch_size=8", "train.micro_batch_size=8", "train.attention=auto"
    keys = *layers, *batch, "train.remat=none"
    with believed(Device("gpu", triton=False)):
        made = compile_step("configs/models/modernbert_base.yaml", *keys, documents=2)
    assert made.calls("__cudnn$fmhaSoftmax") == 2, "of full attention"
    assert made.calls("__cudnn$fmhaSoftmaxBackward") == 2
    assert "1024,1024]" not in made.text, "whole scores exist"


@exhaustive
@pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))
def test_queries_keys_and_values_are_one_product_that_no_kernel_cuts_copies_or_adds_to():
    """Where each head has keys of its own, the attention of short rows reads them as they lie."""
    batch = *BATCH, "train.attention=auto", "train.remat=none"
    with believed(Device("gpu", triton=True)):
        made = compile_step(BERT, *TWO_LAYERS, *batch)
    # What gives an array of all, alone or first in a tuple.
    givers = re.findall(r" = \(?bf16\[32,512,3,12,64\][^=]*? ([\w-]+)\(", made.text)
    assert set(givers) <= {"custom-call", "get-tuple-element", "parameter", "bitcast", "fusion"}
    fused = re.findall(r"%(\S+) = \(?bf16\[32,512,3,12,64\][^=]*? fusion\(", made.text)
    assert all(name.startswith("dynamic_slice_fusion") for name in fused), "a kernel of ours"
    assert not re.search(r" = bf16\[32,512,(2,)?12,64\]\S* fusion\(", made.text)


@exhaustive
@pytest.mark.skipif(missing(triton=True) is not None, reason=str(missing(triton=True)))
@pytest.mark.parametrize("remat", ["none", pytest.param("dots", marks=slow)])
def test_an_activation_function_needs_no_kernel_where_layers_keep_all(remat):
    batch = "train.global_batch_size=128", "train.micro_batch_size=128", f"train.remat={remat}"
    keys = "model.num_hidden_layers=2", "mesh.dp=1", "train.attention=auto", *batch
    with believed(Device("gpu", hopper=True, triton=True)):
        made = compile_step("configs/models/vit_l16.yaml", *keys)
    apart = "act_forward", "act_backward"
    assert all((f"/{name}/" in made.text) == (remat != "none") for name in apart)
    calls = re.findall(r'custom_call_target="mosaic_gpu', made.text)
    assert len(calls) == (4 if remat == "none" else 0)
    # Nothing else writes arrays of the width of F: the slices of weights are of [1024, 4096].
    writers = re.findall(r" = bf16\[25216,4096\]\S* ([\w-]+)\(", made.text)
    assert remat != "none" or set(writers) <= {"get-tuple-element", "parameter", "bitcast"}
