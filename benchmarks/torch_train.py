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
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from mjax.bench.decode import config_of_transformers, require_transformers
from mjax.bench.report import parse_with_config, report
from mjax.config import Config, load
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import ModelConfig
from mjax.errors import UserError, run_cli
from mjax.models import definition_of
from mjax.models.flops import flops_of_run
from mjax.plan.auto import resolve_auto
from mjax.run.monitor.metrics import peak_tflops

OBJECTIVES = "next_token", "masked_lm", "span_corruption", "classify_images", "contrastive"


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
    if cfg.train.objective not in OBJECTIVES:
        raise UserError(
            f"torch_train: train.objective={cfg.train.objective} is not compared; "
            f"{', '.join(OBJECTIVES)} are"
        )
    if args.documents < 1 or cfg.data.seq_length % args.documents:
        raise UserError(f"--documents {args.documents}: give a divisor of {cfg.data.seq_length}")
    if args.documents > 1 and (cfg.train.objective != "next_token" or cfg.model.modalities):
        raise UserError("--documents: only rows of texts for next_token are packed")
    if cfg.train.freeze:
        raise UserError("torch_train: it trains all parameters; give train.freeze=[]")
    return report(args, [measure(cfg, args)])


def measure(cfg: Config, args: argparse.Namespace) -> dict:
    """Run 1 + `warmup` + `steps` training steps; the record."""
    import torch

    cfg, _ = resolve_auto(cfg, jax.devices()[:1], definition_of(cfg.model).specs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = made_model(cfg, args.dtype, args.compile, device)
    step = training_step(
        cfg, model, random_inputs(cfg, device, args.documents), args.dtype == "mixed", device
    )
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
        "case": case(cfg, args),
        "ms": round(1e3 * seconds, 3),
        "ms_range": [round(1e3 * f(times), 3) for f in (min, max)],
        "steps": args.steps,
        **rates(cfg, seconds, torch.cuda.get_device_name() if device == "cuda" else device),
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


def case(cfg: Config, args: argparse.Namespace) -> dict:
    """What two runs must share to be compared."""
    return {
        "model": cfg.model.model_type,
        "layers": cfg.model.num_hidden_layers,
        "hidden": cfg.model.hidden_size,
        "seq": cfg.data.seq_length,
        "global_batch": cfg.train.global_batch_size,
        "micro_batch": cfg.train.micro_batch_size,
        "documents": args.documents,
        "dtype": args.dtype,
        "lora_rank": cfg.lora.rank,
        "compile": args.compile,
    }


def rates(cfg: Config, seconds: float, kind: str) -> dict:
    """tok/s, TFLOP/s and MFU of a step, by what mjax counts."""
    tokens = cfg.train.global_batch_size * cfg.data.seq_length / seconds
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


def training_step(
    cfg: Config, model, inputs: dict, mixed: bool, device: str
) -> Callable[[], object]:
    """A function that trains on a global batch of equal micro-batches and returns the loss."""
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
                loss = model(**inputs).loss / micro_batches
            loss.backward()
        if cfg.optimizer.clip_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return micro_batches * loss.detach()

    return step


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
