"""Megatron-LM's saved arguments -> the whole config of a run, but its model (`arguments.py`).

One table, `FLAGS`, has each argument with its key and group; the page docs/start/from-megatron.md
has it, too, and a test compares them. Arguments without a counterpart come back as comments.
Source: megatron/training/arguments.py and megatron/training/config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mjax.errors import UserError
from mjax.interop.megatron.saved_arguments import Args


def as_given(value: object) -> object:
    return value


@dataclass(frozen=True)
class Flag:
    """An argument, the key that it sets, and the value of the key; None: the key stays out."""

    group: str
    name: str
    key: str
    value: Callable[[object], object] = as_given


DECAYS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_FP8 = {
    "tensorwise": "current",
    "delayed": "delayed",
    "blockwise": "block128",
    "mxfp8": "mxfp8",
}


def _above_zero(value: object) -> object:
    return value or None


def _true(value: object) -> object:
    return True if value else None


FLAGS = (
    Flag("mesh", "tensor_model_parallel_size", "mesh.tp"),
    Flag("mesh", "pipeline_model_parallel_size", "mesh.pp"),
    Flag("mesh", "context_parallel_size", "mesh.cp"),
    Flag("mesh", "expert_model_parallel_size", "mesh.ep"),
    Flag("mesh", "use_distributed_optimizer", "mesh.zero", lambda on: 1 if on else 0),
    Flag("schedule", "lr", "schedule.lr", float),
    Flag("schedule", "min_lr", "schedule.min_lr", float),
    Flag("schedule", "lr_decay_style", "schedule.decay", DECAYS.get),
    Flag("schedule", "lr_warmup_iters", "schedule.warmup_steps", _above_zero),
    Flag("schedule", "lr_warmup_init", "schedule.warmup_init_lr", _above_zero),
    Flag("schedule", "lr_decay_iters", "schedule.decay_steps"),
    Flag("schedule", "lr_wsd_decay_iters", "schedule.wsd_decay_steps"),
    Flag("schedule", "lr_wsd_decay_style", "schedule.wsd_style"),
    Flag("optimizer", "adam_beta1", "optimizer.b1", float),
    Flag("optimizer", "adam_beta2", "optimizer.b2", float),
    Flag("optimizer", "adam_eps", "optimizer.eps", float),
    Flag("optimizer", "weight_decay", "optimizer.weight_decay", float),
    Flag("optimizer", "end_weight_decay", "optimizer.weight_decay_end"),
    Flag("optimizer", "clip_grad", "optimizer.clip_grad_norm", float),
    Flag("training", "train_iters", "train.steps"),
    Flag("training", "global_batch_size", "train.global_batch_size"),
    Flag("training", "micro_batch_size", "train.micro_batch_size"),
    Flag("training", "eval_interval", "train.eval_interval"),
    Flag("training", "eval_iters", "train.eval_steps", _above_zero),
    Flag("training", "mtp_loss_scaling_factor", "train.mtp_loss_scaling_factor", float),
    Flag("training", "save_interval", "checkpoint.interval"),
    Flag("training", "seed", "run.seed"),
    Flag("precision", "bf16", "precision.compute", lambda on: "bfloat16" if on else None),
    Flag("precision", "fp16", "precision.compute", lambda on: "float16" if on else None),
    Flag("precision", "initial_loss_scale", "precision.initial_loss_scale", float),
    Flag("precision", "loss_scale_window", "precision.loss_scale_window", int),
    Flag("precision", "hysteresis", "precision.hysteresis"),
    Flag("precision", "fp8_recipe", "precision.fp8", _FP8.get),
    Flag("precision", "fp8_amax_history_len", "precision.fp8_amax_history"),
    Flag("data", "seq_length", "data.seq_length"),
    Flag("data", "reset_position_ids", "data.reset_position_ids", _true),
    Flag("data", "eod_mask_loss", "data.eod_mask_loss", _true),
    Flag("data", "reset_attention_mask", "data.document_mask", bool),
    Flag("data", "data_cache_path", "data.cache_dir"),
    Flag("data", "mock_data", "data.mock", _true),
)

# Said in the config where they are on, as comments: their effect has no key of its own here.
WITHOUT_KEY = {
    "optimizer_cpu_offload": "moments move by themselves: optimizer.offload=auto",
    "decoupled_lr": "optimizer.lr_multipliers={embedding: .., head: ..}",
    "log_num_zeros_in_grad": "not logged",
    "moe_expert_capacity_factor": "model.moe.capacity_factor counts a sequence's tokens",
    "recompute_granularity": "train.remat=auto takes what fits (docs/train/memory.md)",
    "virtual_pipeline_model_parallel_size": "mesh.virtual_stages",
    "num_layers_per_virtual_pipeline_stage": "mesh.virtual_stages",
    "loss_scale": "a fixed one; here it is found",
    "start_weight_decay": "optimizer.weight_decay is where the ramp starts",
    "lr_warmup_fraction": "schedule.warmup_steps counts steps",
    "train_samples": "train.steps counts steps",
}


def run_config(values: Mapping[str, object], where: str) -> tuple[dict, list[str]]:
    """(groups of a config without its model, lines on what has no key)."""
    args = Args(values, where)
    found: dict[str, dict] = {}
    for flag in FLAGS:
        given = args(flag.name)
        value = None if given is None else flag.value(given)
        if value is not None:
            group, name = flag.key.split(".")
            found.setdefault(group, {})[name] = value
    lines = [
        f"args.{name}={args(name)!r}: {why}" for name, why in WITHOUT_KEY.items() if args(name)
    ]
    _fill_precision(args, found.setdefault("precision", {}))
    _fill_schedule(found.setdefault("schedule", {}), lines)
    _fill_batch(args, found.setdefault("train", {}))
    lines += _fill_data(args, found.setdefault("data", {}))
    if args("optimizer", "adam") != "adam":
        lines.append(f"args.optimizer={args('optimizer')!r}: docs/train/optimizers.md")
    return found, lines


def schedule_of_state(state: Mapping[str, object], args: Args, found: dict) -> list[str]:
    """Let the state of Megatron's scheduler go before the arguments in a config; its lengths count
    samples. Returns lines on what the config cannot say."""
    size, lines = args.need("global_batch_size"), []
    schedule, optimizer = found.setdefault("schedule", {}), found.setdefault("optimizer", {})
    schedule |= {"lr": float(state["max_lr"]), "min_lr": float(state["min_lr"])}
    schedule["decay"] = DECAYS[state["lr_decay_style"]]
    for key in ("warmup_steps", "decay_steps"):
        schedule[key], rest = divmod(state[f"lr_{key}"], size)
        if rest:
            lines.append(f"opt_param_scheduler.lr_{key} samples are no whole steps of {size}")
    optimizer |= {"weight_decay": float(state["start_wd"]), "weight_decay_end": None}
    if state["end_wd"] != state["start_wd"]:
        optimizer["weight_decay_end"] = float(state["end_wd"])
        optimizer["weight_decay_style"] = state["wd_incr_style"]
        if state["wd_incr_steps"] != size * args("train_iters", 0):
            lines.append("opt_param_scheduler.wd_incr_steps is not the time of args.train_iters")
    _fill_schedule(schedule, lines)
    return lines


def _fill_precision(args: Args, precision: dict) -> None:
    if not args("bf16") and not args("fp16"):
        precision["compute"] = "float32"
    if not args("fp16"):
        for name in ("initial_loss_scale", "loss_scale_window", "hysteresis"):
            precision.pop(name, None)
    if not args("fp8"):
        for name in ("fp8", "fp8_amax_history"):
            precision.pop(name, None)


def _fill_schedule(schedule: dict, lines: list[str]) -> None:
    if schedule.get("decay") != "wsd":
        for name in ("wsd_decay_steps", "wsd_style"):
            schedule.pop(name, None)


def _fill_batch(args: Args, train: dict) -> None:
    ramp = args("rampup_batch_size")
    if ramp:
        train["rampup_batch_size"] = [int(number) for number in ramp]
    size = args("global_batch_size")
    if size is not None and args("train_samples") and "steps" not in train:
        train["steps"] = max(1, args("train_samples") // size)


def _fill_data(args: Args, data: dict) -> list[str]:
    """Paths with their weights, the split and the tokenizer."""
    given = args("data_path") or args("train_data_path") or []
    given = given if isinstance(given, list | tuple) else [given]
    weights, paths = [str(w) for w in given[::2]], [str(p) for p in given[1::2]]
    if len(given) % 2 == 0 and all(_reads_as_number(w) for w in weights) and paths:
        data |= {"paths": paths, "weights": [float(w) for w in weights]}
    elif given:
        data["paths"] = [str(path) for path in given]
    split = [part for part in str(args("split", "")).split(",") if _reads_as_number(part)]
    if len(split) == 3:
        total = sum(map(float, split)) or 1.0
        data["split"] = [float(part) / total for part in split]
    data.setdefault("seq_length", args.need("max_position_embeddings"))
    lines = []
    if args("tokenizer_model"):
        lines.append(
            f"args.tokenizer_type={args('tokenizer_type')!r}, tokenizer_model="
            f"{args('tokenizer_model')!r}: give its tokenizer.json as data.tokenizer"
        )
    if not data.get("paths") and not data.get("mock"):
        data["mock"] = True
        lines.append("no args.data_path was saved: set data.paths in the place of data.mock")
    return lines


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def skipped_by(
    args: Mapping[str, object], state: Mapping[str, object], consumed: int, where: str
) -> int:
    """The samples that the scheduler left out; `UserError` unless the run has consumed as many as
    its config says at that step."""
    saved = args.get("consumed_train_samples", consumed)
    counted = state.get("num_steps", consumed)
    if saved != consumed or counted > consumed or (counted < consumed and not args.get("fp16")):
        raise UserError(
            f"{where}: args.consumed_train_samples={saved} and opt_param_scheduler.num_steps="
            f"{counted}, but with its batch size that iteration is sample {consumed}: the run "
            "changed its batch or schedule; import weights alone, without --with-optimizer"
        )
    return consumed - counted
