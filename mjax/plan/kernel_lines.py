"""The kernels that a run's ops get, in words: what the chooser answers for a config's shapes."""

from dataclasses import replace

from mjax.config.languages.layer_pattern import BRANCHES, DECODER, branches_of, stream_of
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.kernels import Choice, choose
from mjax.kernels.fp8.recipe import recipe_of
from mjax.models.attention.calls import attention_call
from mjax.models.attention.packed_products import adds_biases_only
from mjax.models.base.branch import BranchInputs, KernelChoices, Workload, branch_class
from mjax.models.base.context import PADDED_ROWS, Documents, tokens_of
from mjax.models.base.stream_of_layer import documents_of_items
from mjax.objectives.objective import PaddedRows, objective_of
from mjax.plan.activations import stream_shapes
from mjax.plan.execution import decide_execution, micro_batch_shape, training_context
from mjax.sharding.mesh import parallel_of_run


def kernel_lines(cfg: Config, sizes: dict[str, int]) -> list[str]:
    """A line for each op, as a device of this kind computes it; `sizes` are those of the mesh."""
    lines = []
    for op, choice in kernel_choices(cfg, sizes).items():
        heading = "" if lines else "kernels"
        lines.append(f"{heading:<11} {op}: {choice.name}, because {choice.why}")
    return lines + document_lines(cfg, sizes)


def document_lines(cfg: Config, sizes: dict[str, int]) -> list[str]:
    """A line for each attention that gets another kernel where rows have many documents, or images.

    The plan does not look at the data. A run compiles for powers of two (`bound_of_documents`).
    """
    found = []
    for word, few in attention_by_word(cfg, sizes, 2).items():
        bound, other = 2, few
        while other.name == few.name and bound < cfg.data.seq_length:
            bound *= 2
            other = attention_by_word(cfg, sizes, bound)[word]
        if other.name != few.name:
            items = "images" if BRANCHES[word].modality else "documents"
            rows = f"attention ({word}) of rows with more than {bound // 2} {items}"
            why = f"{other.why}; no estimate counts what fewer take"
            found.append(f"            {rows}: {other.name}, because {why}")
    return found


def workload(cfg: Config, sizes: dict[str, int]) -> Workload:
    """A micro-batch of the run on one device, as the branches' kernels see it."""
    rows, length = micro_batch_shape(cfg, sizes)
    recipe = recipe_of(cfg.precision)
    in_8_bits = recipe is not None
    return Workload(
        dtype=cfg.precision.compute,
        rows=rows,
        length=length,
        parallel=parallel_of_run(cfg, sizes),
        fp8=in_8_bits,
        fp8_experts=in_8_bits and recipe.scales_tensors and cfg.precision.fp8_experts,
        experts=cfg.train.experts,
        expert_exchange=cfg.train.expert_exchange,
        shared_prefixes=cfg.data.shared_prefixes,
        rounds_dispatch=cfg.precision.fp8_dispatch,
    )


def branch_kernels(cfg: Config, sizes: dict[str, int]) -> KernelChoices:
    """The kernels that the model's branches call (`BranchModule.kernels`), for its usual sizes."""
    work = workload(cfg, sizes)
    kernels: KernelChoices = {}
    for word in BRANCHES:
        if word in cfg.model.branches:
            kernels |= branch_class(word).kernels(cfg.model, work)
    return kernels


def attention_choices(cfg: Config, sizes: dict[str, int]) -> dict[str, Choice]:
    """The choice for attention, and for its other kinds by their words, where they get another."""
    choices: dict[str, Choice] = {}
    for word, choice in attention_by_word(cfg, sizes).items():
        if choice not in choices.values():
            choices[f"attention ({word})" if choices else "attention"] = choice
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


def attention_by_word(cfg: Config, sizes: dict[str, int], documents: int = 0) -> dict[str, Choice]:
    """The choice for each branch that is attention, by a bound on documents; 0: it is unknown."""
    model = cfg.model
    streams = {}
    for kind in model.layer_kinds:
        for word in branches_of(kind):
            streams[word] = stream_of(kind)
    most = documents if cfg.data.document_mask else 1
    whole = training_context(cfg, parallel_of_run(cfg, sizes), Documents(most, images=most))
    shapes = stream_shapes(cfg, sizes, whole)
    texts_hold_one = bool(model.modalities) and not cfg.data.images.packed
    rows_hold_one = isinstance(objective_of(cfg), PaddedRows) or texts_hold_one  # and then padding
    choices: dict[str, Choice] = {}
    for word in sorted(model.branches):
        branch, stream = BRANCHES[word], streams[word]
        own = _sizes_of(model, word)
        heads = branch_class(word).heads(own)
        if heads is None:
            continue
        ctx = whole.of(stream)
        if stream != DECODER:
            ctx = replace(ctx, documents=documents_of_items(stream, ctx, model))
        elif rows_hold_one:
            ctx = replace(ctx, documents=PADDED_ROWS)
        tokens = tokens_of((1, 1))
        if cfg.data.shared_prefixes:
            tokens = replace(tokens, prefixes=tokens.positions)
        call = attention_call(own, BranchInputs(tokens, ctx, word), scale=1.0)
        facts = {
            "call": call,
            "sinks": own.attention.attention_sinks,
            "value_size": heads.value_size,
            "relative": own.position_embedding == "relative" and branch.mask != "cross",
            "by_blocks": ctx.parallel.cp > 1,
        }
        shape = *shapes.get(stream, shapes[DECODER]), heads.heads // ctx.parallel.tp, heads.size
        choices[word] = choose(call.op, cfg.precision.compute, shape, **facts)
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
    }
    choices |= branch_kernels(cfg, sizes)
    choices["loss rows"] = choose("loss_rows", "float32", logits, tp=tp, chunk=cfg.train.loss_chunk)
    if execution.gradients_apart:
        choices["adam row"] = choose("adam_row", cfg.precision.grad_accum, ())
    recipe = execution.recipe
    if recipe is not None:
        op = "quantize" if recipe.scales_tensors else "scaled blocks"
        choices[op] = recipe.gradient_kernel(dtype, (tokens, up[-1]))
    return choices
