"""The kernels that a run's ops get, in words: what the chooser answers for a config's shapes."""

from dataclasses import replace

import jax.numpy as jnp

from mjax.config.languages.layer_pattern import BRANCHES, DECODER, branches_of, stream_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.kernels import Choice, choose
from mjax.models.attention.calls import attention_call
from mjax.models.attention.packed_products import adds_biases_only
from mjax.models.base.branch import BranchInputs, branch_class
from mjax.models.base.context import PADDED_ROWS, Documents, tokens_of
from mjax.models.moe.exchange import choose_expert_exchange
from mjax.objectives.objective import CONFIGURED
from mjax.plan.activations import stream_shapes
from mjax.plan.execution import decide_execution, micro_batch_shape, training_context
from mjax.sharding.collectives import Parallel


def kernel_lines(cfg: Config, sizes: dict[str, int]) -> list[str]:
    """A line for each op, as a device of this kind computes it; `sizes` are those of the mesh."""
    lines = []
    for op, choice in kernel_choices(cfg, sizes).items():
        heading = "" if lines else "kernels"
        lines.append(f"{heading:<11} {op}: {choice.name}, because {choice.why}")
    return lines


def expert_choice(cfg: Config, sizes: dict[str, int]) -> Choice:
    """What multiplies tokens by the weights of a device's experts."""
    moe = cfg.model.moe
    held = moe.num_experts // sizes["ep"]
    rows, columns = micro_batch_shape(cfg, sizes)
    pairs = rows * columns * sizes["ep"] * min(moe.num_experts_per_tok, held)
    width = cfg.model.expert_width
    shape = pairs, held, width, moe.moe_intermediate_size // sizes["tp"]
    facts = {
        "asked": cfg.train.experts,
        "has_capacity": moe.capacity_factor is not None,
        "eight_bits": cfg.precision.fp8 != "none" and cfg.precision.fp8_experts,
    }
    return choose("experts", cfg.precision.compute, shape, **facts)


def activation_choice(cfg: Config, sizes: dict[str, int]) -> Choice:
    """Whether the matmuls of a dense feed-forward block compute its activation function."""
    model = cfg.model
    rows, width = micro_batch_shape(cfg, sizes)
    product = rows * width, model.hidden_size, model.intermediate_size // sizes["tp"]
    is_plain = model.mlp_bias and not model.mlp_gated and cfg.precision.fp8 == "none"
    facts = {"act": model.hidden_act, "plain": is_plain}
    return choose("activated_matmul", cfg.precision.compute, product, **facts)


def exchange_choice(cfg: Config, sizes: dict[str, int]) -> Choice:
    """How the tokens of a micro-batch reach their experts over ep."""
    rows, width = micro_batch_shape(cfg, sizes)
    tokens = rows * width // sizes["tp"]
    size = cfg.model.expert_width * jnp.dtype(cfg.precision.compute).itemsize
    asked = cfg.train.expert_exchange
    return choose_expert_exchange(asked, tokens, size, sizes["ep"], cfg.model.moe)


def attention_choices(cfg: Config, sizes: dict[str, int]) -> dict[str, Choice]:
    """The choice for attention, and for its other kinds by their words, where they get another."""
    choices: dict[str, Choice] = {}
    for word, choice in attention_by_word(cfg, sizes).items():
        if choice not in choices.values():
            choices[f"attention ({BRANCHES[word].word})" if choices else "attention"] = choice
    return choices


def reads_pairs(cfg: Config, sizes: dict[str, int]) -> bool:
    """Whether some attention reads keys and values as one array, where their matmul put them."""
    for word, choice in attention_by_word(cfg, sizes).items():
        is_short = choice.name == "triton" and BRANCHES[word].mask != "cross"
        if is_short and adds_biases_only(_sizes_of(cfg.model, word), word):
            return True
    return False


def _sizes_of(model: ModelConfig, word: str) -> ModelConfig:
    """The sizes of a branch: the model's, or those of a tower."""
    modality = BRANCHES[word].modality
    return model.of_modality(modality) if modality else model


def attention_by_word(cfg: Config, sizes: dict[str, int]) -> dict[str, Choice]:
    """The choice for each branch that is attention."""
    model = cfg.model
    streams = {}
    for kind in model.layer_kinds:
        for word in branches_of(kind):
            streams[word] = stream_of(kind)
    most = 0 if cfg.data.document_mask else 1
    whole = training_context(cfg, Parallel(**sizes), Documents(most))
    shapes = stream_shapes(cfg, sizes, whole)
    texts_hold_one = bool(model.modalities) and not cfg.data.images.packed
    rows_hold_one = cfg.train.objective in CONFIGURED or texts_hold_one  # and then padding
    choices: dict[str, Choice] = {}
    for word in sorted(model.branches):
        branch, stream = BRANCHES[word], streams[word]
        own = _sizes_of(model, word)
        heads = branch_class(word).heads(own)
        if heads is None:
            continue
        ctx = whole.of(stream)
        if rows_hold_one or stream != DECODER:
            ctx = replace(ctx, documents=PADDED_ROWS)
        call = attention_call(own, BranchInputs(tokens_of((1, 1)), ctx, word), scale=1.0)
        facts = {
            "call": call,
            "sinks": own.attention.attention_sinks,
            "value_size": heads.value_size,
            "relative": own.position_embedding == "relative" and branch.mask != "cross",
            "by_blocks": ctx.parallel.cp > 1,
        }
        shape = *shapes.get(stream, shapes[DECODER]), heads.heads // ctx.parallel.tp, heads.size
        choices[word] = choose("attention", cfg.precision.compute, shape, **facts)
    return choices


def kernel_choices(cfg: Config, sizes: dict[str, int]) -> dict[str, Choice]:
    """The choice for each op, for one micro-batch of a layer of the usual sizes."""
    model, dtype, tp = cfg.model, cfg.precision.compute, sizes["tp"]
    rows, width = micro_batch_shape(cfg, sizes)
    tokens = rows * width
    hidden = rows, width // tp, model.hidden_size
    halves = 2 if model.mlp_gated else 1
    up = rows, width, halves, model.intermediate_size // tp
    execution = decide_execution(cfg, sizes)
    logits = tokens, model.padded_vocab_size // tp
    choices = attention_choices(cfg, sizes)
    choices |= {
        "norm": choose("norm", dtype, hidden, layernorm=model.norm == "layernorm"),
        "gate": choose("gate", dtype, up, act=model.hidden_act),
        "activated matmul": activation_choice(cfg, sizes),
        "loss rows": choose("loss_rows", "float32", logits, tp=tp, chunk=cfg.train.loss_chunk),
    }
    if "E" in model.branches:
        choices["experts"] = expert_choice(cfg, sizes)
        if sizes["ep"] > 1:
            choices["tokens over ep"] = exchange_choice(cfg, sizes)
    if "M" in model.branches:
        mamba = model.mamba
        scanned = rows, width, mamba.mamba_num_heads // tp, mamba.mamba_head_dim
        choices["causal conv"] = choose("causal_conv", dtype, scanned, taps=mamba.conv_kernel)
        choices["ssd"] = choose("ssd", dtype, scanned, state=mamba.state_size)
    if "T" in model.branches:
        delta = model.deltanet
        taps = delta.linear_conv_kernel_dim
        read = rows, width, delta.linear_num_value_heads // tp, delta.linear_value_head_dim
        choices["causal conv"] = choose("causal_conv", dtype, read, taps=taps)
        chunk = min(width, delta.linear_chunk_size)
        of_chunk = {"width": delta.linear_key_head_dim, "chunk": chunk}
        choices["gated delta"] = choose("gated_delta", dtype, read, **of_chunk)
    if execution.gradients_apart:
        choices["adam row"] = choose("adam_row", cfg.precision.grad_accum, ())
    recipe = execution.recipe
    if recipe is not None:
        gradient = tokens, up[-1]
        choices["quantize"] = choose(
            "quantize", dtype, gradient, delayed=recipe.delayed, backend=recipe.backend
        )
    return choices
