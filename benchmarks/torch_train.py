"""`python -m benchmarks.torch_train --config X [a.b=c ...]`: the same step by torch, as JSON.

What `python -m mjax.bench train` is compared with: the model of transformers that our weights
export to, at the same sizes, batch and micro-batches, without recomputation. torch compiles it with
its default settings; attention is its scaled dot product. Masters and moments are in fp32 and
products in bf16 by autocast, or all in `--dtype`; AdamW is torch's fused one, and gradients are
clipped as the config says. Inputs are random, and nothing drops out. With `--documents` a row packs
so many texts: positions start anew, and a mask keeps them apart, as a plain loop of torch has it.
It runs on one GPU, in a process of its own, so that JAX holds none of its memory. tok/s, TFLOP/s
and MFU count what mjax counts for this config, as if a row were one text. With lora.rank the layers
have PEFT's adapters on all of their matmuls; the base is then in bf16 and does not train.
train.objective=preference is DPO, whose reference each step computes: a copy in bf16, or the base
with its adapters off. A row has so many `--documents`, in pairs: torch has each as a row. Or pairs
are those of data.conversations.path: as many as have the tokens of a step, each padded to the
longest, as a loop without packing has them. Then tok/s count their tokens, and no padding.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from mjax.bench.decode import config_of_transformers, require_transformers
from mjax.bench.report import parse_with_config, report
from mjax.bench.train import random_batch
from mjax.config import Config, load
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import ModelConfig
from mjax.config.schema.preference import PreferenceConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.data.conversations.answer_records import PAIRS
from mjax.data.conversations.answer_rows import read_answers
from mjax.errors import UserError, run_cli
from mjax.models import definition_of
from mjax.models.flops import flops_of_run
from mjax.plan.auto import resolve_auto
from mjax.post.preferences.mock_answers import equal_answers
from mjax.run.monitor.metrics import peak_tflops

OBJECTIVES = (
    "next_token",
    "masked_lm",
    "span_corruption",
    "classify_images",
    "contrastive",
    "preference",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_train", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them")
    parser.add_argument(
        "--dtype",
        choices=("mixed", "float32", "bfloat16"),
        default="mixed",
        help="of weights, gradients and moments; mixed: fp32 with autocast to bf16 (default)",
    )
    about = "texts in a row, of equal length (default: 1)"
    parser.add_argument("--documents", type=int, default=1, help=about)
    parser.add_argument(
        "--compile",
        choices=("model", "layers", "no"),
        default="model",
        help="compile the whole model, or each layer and the loss (BERT's with head), sooner",
    )
    args = parse_with_config(parser, sys.argv[1:] if argv is None else argv)
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least one step must be measured")
    require_transformers("torch_train")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX only says what the device is
    cfg = load(args.config, args.overrides)
    require_comparable(cfg, args)
    return report(args, [measure(cfg, args)])


def require_comparable(cfg: Config, args: argparse.Namespace) -> None:
    """Raise `UserError` for what mjax and torch would not compute alike."""
    if cfg.train.objective not in OBJECTIVES:
        raise UserError(
            f"torch_train: train.objective={cfg.train.objective} is not compared; "
            f"{', '.join(OBJECTIVES)} are"
        )
    if args.documents < 1 or cfg.data.seq_length % args.documents:
        raise UserError(f"--documents {args.documents}: give a divisor of {cfg.data.seq_length}")
    if cfg.train.objective == "preference":
        if (args.documents % 2 and not has_file(cfg)) or cfg.model.modalities:
            raise UserError(f"--documents {args.documents}: give an even number, of texts alone")
        if has_file(cfg) and (args.documents != 1 or cfg.data.shared_prefixes):
            raise UserError(
                "torch_train: each text of data.conversations.path is padded by itself; leave out "
                "--documents and data.shared_prefixes"
            )
        if cfg.preference != PreferenceConfig(beta=cfg.preference.beta):
            raise UserError("torch_train: of preference it reads beta; leave out the other keys")
    elif args.documents > 1 and (cfg.train.objective != "next_token" or cfg.model.modalities):
        raise UserError("--documents: only rows of texts for next_token are packed")
    if cfg.train.freeze:
        raise UserError("torch_train: it trains all parameters; give train.freeze=[]")


def measure(cfg: Config, args: argparse.Namespace) -> dict:
    """Run 1 + `warmup` + `steps` training steps; the record."""
    import torch

    cfg, _ = resolve_auto(cfg, jax.devices()[:1], definition_of(cfg.model).specs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = made_model(cfg, args.dtype, args.compile, device)
    if cfg.train.objective == "preference":
        reference = None if cfg.lora.rank else copy_in_bf16(cfg, model, args, device)
        loss_of = preference_loss(model, reference, cfg.preference.beta, args.compile)
    else:
        loss_of = partial(loss_within, model)
    batches, count = step_inputs(cfg, device, args.documents)
    ahead = itertools.cycle(batches)
    step = training_step(cfg, model, lambda: loss_of(**next(ahead)), args.dtype == "mixed", device)
    start = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - start
    for _ in range(args.warmup):
        step()
    times = step_seconds(step, args.steps, device)
    seconds, memory = statistics.median(times), None
    if device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 1e9
    return {
        "bench": "torch",
        "case": case(cfg, args, count),
        "ms": round(1e3 * seconds, 3),
        "ms_range": [round(1e3 * f(times), 3) for f in (min, max)],
        "steps": args.steps,
        **rates(cfg, count / seconds, torch.cuda.get_device_name() if device == "cuda" else device),
        "memory_gb": memory,
        "first_step_s": round(first, 1),
        "first_loss": loss,
        "torch": torch.__version__,
    }


def step_seconds(step: Callable[[], object], steps: int, device: str) -> list[float]:
    """Seconds from the end of each step to that of the next; the host does not wait for a GPU."""
    import torch

    ends = []
    for _ in range(1 + steps):
        step()
        if device == "cuda":
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        else:
            ends.append(time.perf_counter())
    if device == "cpu":
        return np.diff(ends).tolist()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(ends)]


def case(cfg: Config, args: argparse.Namespace, tokens: int) -> dict:
    """What two runs must share to be compared; `tokens` of a step."""
    is_pairs = cfg.train.objective == "preference"
    return ({"preference": "sigmoid"} if is_pairs else {}) | {
        "model": cfg.model.model_type,
        "layers": cfg.model.num_hidden_layers,
        "hidden": cfg.model.hidden_size,
        "seq": cfg.data.seq_length,
        "global_batch": cfg.train.global_batch_size,
        "micro_batch": cfg.train.micro_batch_size,
        "documents": args.documents,
        "tokens": tokens,
        "dtype": args.dtype,
        "lora_rank": cfg.lora.rank,
        "compile": args.compile,
    }


def rates(cfg: Config, tokens: float, kind: str) -> dict:
    """tok/s, TFLOP/s and MFU at so many tokens a second, by what mjax counts."""
    tflops = tokens * flops_of_run(cfg) / 1e12
    peak = peak_tflops(cfg.log, kind)
    return {
        "tokens_per_second": round(tokens, 4),
        "tflops": round(tflops, 4),
        "mfu": round(tflops / peak, 4) if peak else None,
    }


def made_model(cfg: Config, dtype: str, compiled: str, device: str):
    """The model of transformers on `device`, in mode `eval`, so that nothing drops out."""
    import torch
    import transformers
    from transformers.modeling_layers import GradientCheckpointingLayer

    lora, cfg = cfg.lora, cfg.model
    config = config_of_transformers(cfg)
    kind = getattr(transformers, config.architectures[0])
    with torch.device(device):
        model = kind(config)
    if dtype == "bfloat16" or lora.rank:
        model.to(torch.bfloat16)
    if lora.rank:
        model = with_adapters(model, lora)
    model.eval()
    if compiled == "model":
        model.compile()
    elif compiled == "layers":
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile()
        if cfg.bert.mlm_head:  # its loss is part of its forward: one graph behind the trunk,
            trunk = model.base_model  # within which the layers alone are compiled
            trunk.forward = torch.compiler.disable(trunk.forward)
            model.compile()
        elif hasattr(model, "loss_function"):
            model.loss_function = torch.compile(model.loss_function)
    return model


def with_adapters(model, lora: LoraConfig):
    """The model with PEFT's adapters in fp32 on all matmuls of its layers, which alone train."""
    import peft

    if lora != LoraConfig(rank=lora.rank, alpha=lora.alpha):
        raise UserError("torch_train: of lora it reads rank and alpha; leave out the other keys")
    adapters = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
    return peft.get_peft_model(model, adapters)


def copy_in_bf16(cfg: Config, model, args: argparse.Namespace, device: str):
    """A model of the same weights that does not train; in fp32 with `--dtype float32`."""
    dtype = "bfloat16" if args.dtype == "mixed" else args.dtype
    copy = made_model(cfg, dtype, args.compile, device).requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    return copy


def loss_within(model, **inputs):
    """The loss that a model of transformers computes itself."""
    return model(**inputs).loss


def preference_loss(model, reference, beta: float, compiled: str) -> Callable[..., object]:
    """A function of answers, chosen and rejected in turn: the loss of DPO, a mean over pairs.

    reference: a model that does not train; None: `model` with its adapters off.
    compiled: as `--compile`; the log-probabilities are compiled with the model, or alone.
    """
    import torch
    from torch.nn.functional import cross_entropy, logsigmoid

    def of_logits(logits, labels):
        losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return -losses.view(labels.shape).sum(1)

    if compiled == "layers":
        of_logits = torch.compile(of_logits)

    def of_answers(model, input_ids, labels):
        return of_logits(model(input_ids=input_ids, use_cache=False).logits, labels)

    if compiled == "model":
        of_answers = torch.compile(of_answers)

    def loss(input_ids, labels):
        off = model.disable_adapter() if reference is None else contextlib.nullcontext()
        with torch.no_grad(), off:
            start = of_answers(model if reference is None else reference, input_ids, labels)
        chosen, rejected = (of_answers(model, input_ids, labels) - start).view(-1, 2).unbind(1)
        return -logsigmoid(beta * (chosen - rejected)).mean()

    return loss


def training_step(
    cfg: Config, model, loss_of: Callable[[], object], mixed: bool, device: str
) -> Callable[[], object]:
    """A function that trains on a global batch of equal micro-batches and returns the loss.

    loss_of: returns that of a micro-batch.
    """
    import torch

    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=cfg.schedule.lr,
        betas=(cfg.optimizer.b1, cfg.optimizer.b2),
        eps=cfg.optimizer.eps,
        weight_decay=cfg.optimizer.weight_decay,
        fused=True,
    )
    micro_batches = cfg.train.global_batch_size // cfg.train.micro_batch_size

    def step():
        for _ in range(micro_batches):
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                loss = loss_of() / micro_batches
            loss.backward()
        if cfg.optimizer.clip_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return micro_batches * loss.detach()

    return step


def has_file(cfg: Config) -> bool:
    """Whether pairs are read from a file."""
    return cfg.train.objective == "preference" and cfg.data.conversations.path is not None


def step_inputs(cfg: Config, device: str, documents: int) -> tuple[list[dict], int]:
    """(what the micro-batches of a step read in turn, tokens of the step); one serves for all."""
    tokens = cfg.train.global_batch_size * cfg.data.seq_length
    if has_file(cfg):
        return padded_answers(cfg, device)
    if cfg.train.objective == "preference":
        return [random_answers(cfg, device, documents)], tokens
    return [random_inputs(cfg, device, documents)], tokens


def random_inputs(cfg: Config, device: str, documents: int = 1) -> dict:
    """A micro-batch for the model of `made_model`, with what makes it return a loss.

    Rows are of so many `documents`, if the objective is next_token.
    """
    import torch

    rng = np.random.default_rng(0)
    model, objective = cfg.model, cfg.train.objective
    tokens = rng.integers(0, model.vocab_size, (cfg.train.micro_batch_size, cfg.data.seq_length))
    arrays, rest = {"input_ids": tokens}, {}
    if model.vision.patch_size:
        side = model.vision.image_size
        shape = len(tokens), model.vision.num_channels, side, side
        arrays["pixel_values"] = rng.standard_normal(shape, np.float32)
    if objective == "classify_images":
        del arrays["input_ids"]
        arrays["labels"] = rng.integers(0, model.vision.num_labels, len(tokens))
    elif objective == "contrastive":
        rest["return_loss"] = True
    elif objective == "masked_lm":
        arrays["labels"] = np.where(rng.random(tokens.shape) < 0.15, tokens, -100)
    elif objective == "span_corruption":
        shape = len(tokens), cfg.data.target_length
        arrays["labels"] = rng.integers(0, model.vocab_size, shape)
    else:
        arrays["labels"] = labels_of(tokens, model)
        if documents > 1:
            arrays |= packing_of(arrays["labels"], documents)
    return {name: torch.as_tensor(array, device=device) for name, array in arrays.items()} | rest


def random_answers(cfg: Config, device: str, documents: int) -> dict:
    """Answers of a micro-batch of `mjax bench train`, chosen and rejected in turn.

    "input_ids" and "labels", which are -100 before an answer: [rows * documents, tokens of each].
    """
    import torch

    batch = random_batch(cfg, documents)
    batch |= equal_answers(batch, documents)
    labels = np.where(batch["loss_mask"] > 0, batch["labels"], -100)
    arrays = {"input_ids": batch["tokens"], "labels": labels}
    rows, width = cfg.train.micro_batch_size, cfg.data.seq_length // documents
    cut = {name: array[:rows].reshape(-1, width) for name, array in arrays.items()}
    return {name: torch.as_tensor(a, dtype=torch.long, device=device) for name, a in cut.items()}


def padded_answers(cfg: Config, device: str) -> tuple[list[dict], int]:
    """The first pairs of `data.conversations.path`, as many as have about the tokens of a step.

    Micro-batches have equally many, chosen and rejected in turn, padded to the longest of all, so
    that one program serves: "input_ids" and "labels", -100 but in answers. And their tokens.
    """
    import torch

    path, tokenizer = cfg.data.conversations.path, load_tokenizer(cfg.data.tokenizer)
    source = read_answers(path, cfg, tokenizer, PAIRS)
    lengths = np.diff(source.ends, prepend=0) - 1  # places that predict a token
    micro_batches = cfg.train.global_batch_size // cfg.train.micro_batch_size
    of_micro_batch = cfg.train.micro_batch_size * cfg.data.seq_length
    rows = 2 * max(1, round(of_micro_batch / lengths.mean() / 2))
    if len(lengths) < micro_batches * rows:
        raise UserError(f"{path}: a step needs {micro_batches * rows // 2} pairs")
    lengths = lengths[: micro_batches * rows]
    if (lengths[0::2] + lengths[1::2]).max() > cfg.data.seq_length:  # mjax would cut or drop it
        raise UserError(f"{path}: a pair is longer than data.seq_length={cfg.data.seq_length}")
    ids = np.zeros((micro_batches * rows, lengths.max()), np.int64)
    labels = np.full_like(ids, -100)
    for row, length in enumerate(lengths):
        tokens, is_answer, _ = source.document(row)
        ids[row, :length] = tokens[:-1]
        labels[row, :length] = np.where(is_answer[1:], tokens[1:], -100)
    arrays = {"input_ids": ids, "labels": labels}
    on_device = {name: torch.as_tensor(a, device=device) for name, a in arrays.items()}
    split = {name: a.split(rows) for name, a in on_device.items()}
    made = [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]
    return made, int(lengths.sum())


def packing_of(labels: np.ndarray, documents: int) -> dict[str, np.ndarray]:
    """Labels [B, S] without the first of each document, positions, and a mask [B, 1, S, S]."""
    place, length = np.arange(labels.shape[1]), labels.shape[1] // documents
    reads = place[:, None] >= place
    reads &= place[:, None] // length == place // length
    return {
        "labels": np.where(place % length == 0, -100, labels),
        "position_ids": np.broadcast_to(place % length, labels.shape).copy(),
        "attention_mask": np.broadcast_to(reads, (len(labels), 1, *reads.shape)).copy(),
    }


def labels_of(tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
    """The labels of texts [B, S]; where the model reads images, each text gets one, in place."""
    labels = tokens.copy()
    if model.vision.patch_size:
        patches, image = model.vision.grid() ** 2, model.vision.image_token_id
        tokens[tokens == image] = image - 1
        tokens[:, 1 : 1 + patches] = image
        labels[:, : 1 + patches] = -100
    return labels


if __name__ == "__main__":
    run_cli(main)
