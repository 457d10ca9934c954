"""The rules across config keys, as one table: predicate, message, remedy.

`schema.py` has checked each key alone. Rules are tried in order and the first that fails is raised.
They see `mesh.dp` as a number once the device count is known. While it is "auto", the batch rules
demand what every dp would. The batch and schedule rules are Megatron-LM's
(`num_microbatches_calculator.py`, `optimizer_param_scheduler.py`).
"""

from mjax.config.data_rules import DATA_RULES
from mjax.config.encoder_rules import ENCODER_RULES
from mjax.config.mesh_rules import MESH_RULES, Rule, count_slots, mesh_sizes, not_for_cudnn
from mjax.config.model_rules import MODEL_RULES
from mjax.config.optimizer_rules import OPTIMIZER_RULES
from mjax.config.paths import MOUNT_IT, NEEDS_FILES, is_address
from mjax.config.remat import not_kept, remat_policies
from mjax.config.schema import Config, PrecisionConfig
from mjax.errors import UserError


def validate(cfg: Config, device_count: int | None = None) -> None:
    """Raise the first broken rule as `UserError`.

    Without a `device_count`, rules that need it are left out.
    """
    for rule in RULES:
        error = rule.error(cfg)
        if error:
            raise UserError(error)
    if device_count is None:
        return
    sizes = mesh_sizes(cfg.mesh, device_count)
    if cfg.mesh.dp == "auto":
        mesh = cfg.mesh.model_copy(update={"dp": sizes["dp"]})
        validate(cfg.model_copy(update={"mesh": mesh}))


def _sequences_per_micro_batch(c: Config) -> int:
    """Sequences in one micro-batch of all devices; while dp is "auto", as if it were 1."""
    dp = 1 if c.mesh.dp == "auto" else c.mesh.dp
    return c.train.micro_batch_size * dp * c.mesh.ep


def _micro_batch_factors(c: Config) -> str:
    """The keys whose product is `_sequences_per_micro_batch`, for a message."""
    factors = "`train.micro_batch_size`"
    if c.mesh.dp != "auto":
        factors += " x `mesh.dp`"
    if c.mesh.ep != 1:
        factors += " x `mesh.ep`"
    return factors


def _sources(c: Config) -> list[str]:
    """The data sources that are set."""
    given = {"paths": c.data.paths, "text": c.data.text, "mock": c.data.mock}
    return [f"data.{name}" for name, value in given.items() if value]


def _decay_steps(c: Config) -> int:
    return c.schedule.decay_steps or c.train.steps


def _trained_vocab(c: Config) -> str | None:
    """The VOCAB of tokenizer 'train:VOCAB'."""
    name = c.data.tokenizer or ""
    return name.removeprefix("train:") if name.startswith("train:") else None


def _ramp_ok(c: Config) -> bool:
    if c.train.rampup_batch_size is None:
        return True
    start, increment, samples = c.train.rampup_batch_size
    rise = c.train.global_batch_size - start
    return min(start, increment, samples) >= 1 and rise > 0 and rise % increment == 0


def _undivided_ramp_sizes(c: Config) -> list[int]:
    if c.train.rampup_batch_size is None:
        return []
    start, increment, _ = c.train.rampup_batch_size
    sizes = range(start, c.train.global_batch_size, increment)
    return [size for size in sizes if size % _sequences_per_micro_batch(c)]


def _balances_global_batch(c: Config) -> bool:
    """While dp is "auto", the number of micro-batches is not known."""
    moe = c.model.moe
    over_batch = moe.router_aux_loss_over == "global_batch" and moe.router_aux_loss_coef > 0
    return over_batch and c.mesh.dp != "auto"


def _profile_ok(c: Config) -> bool:
    steps = c.log.profile_steps
    return steps is None or (len(steps) == 2 and 1 <= steps[0] <= steps[1])


def _scale_keys(c: Config) -> list[str]:
    """The keys of the loss scale that are set."""
    names = "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    default = PrecisionConfig()
    return [name for name in names if getattr(c.precision, name) != getattr(default, name)]


def _not_kept(c: Config) -> list[str]:
    """The tensors in train.offload that no layer keeps. Raises `UserError` for train.remat."""
    text = "dots" if c.train.remat == "auto" else c.train.remat
    if c.mesh.pp > 1:
        policies = remat_policies(text, count_slots(c), "layers in a pipeline stage")
    else:
        policies = remat_policies(text, c.model.num_hidden_layers)
    return not_kept(policies, c.train.offload)


RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    *MODEL_RULES,
    *ENCODER_RULES,
    # data
    Rule(
        "one_data_source",
        lambda c: len(_sources(c)) == 1,
        lambda c: (
            " and ".join(_sources(c)) + " exclude each other"
            if _sources(c)
            else "data: nothing to train on"
        ),
        "set exactly one of data.paths, data.text, data.mock",
    ),
    Rule(
        "weights_match_paths",
        lambda c: c.data.weights is None or len(c.data.weights) == len(c.data.paths),
        "`data.weights` does not have one entry for each of `data.paths`",
        "give one weight a path, or null to weigh by tokens",
    ),
    Rule(
        "weights_legal",
        lambda c: c.data.weights is None or min(c.data.weights) >= 0 < sum(c.data.weights),
        "`data.weights` are not shares",
        "use numbers of at least 0 that are not all 0",
    ),
    Rule(
        "split_legal",
        lambda c: min(c.data.split) >= 0 < sum(c.data.split),
        "`data.split` are not shares of train, valid, test",
        "use numbers of at least 0 that are not all 0",
    ),
    Rule(
        "held_out_data",
        lambda c: (
            c.train.eval_interval is None
            or c.data.mock
            or bool(c.data.valid_paths)
            or c.data.split[1] > 0
        ),
        "`train.eval_interval` but no data is held out: `data.split`",
        "give it a second share, set data.valid_paths, or set train.eval_interval=null",
    ),
    Rule(
        "text_needs_tokenizer",
        lambda c: c.data.text is None or c.data.tokenizer is not None,
        "`data.text` has no tokenizer",
        "set data.tokenizer, for example byte or train:4096",
    ),
    Rule(
        "trained_tokenizer_needs_text",
        lambda c: _trained_vocab(c) is None or c.data.text is not None,
        "`data.tokenizer` has no text to train on",
        "set data.text or name a tokenizer file",
    ),
    Rule(
        "trained_vocab_legal",
        lambda c: (
            (n := _trained_vocab(c)) is None
            or (n.isdecimal() and 257 <= int(n) <= c.model.vocab_size)
        ),
        "`data.tokenizer` does not fit `model.vocab_size`",
        "write train:N with N from 257 (the bytes and an end mark) to model.vocab_size",
    ),
    Rule(
        "eod_known",
        lambda c: (
            not c.data.eod_mask_loss
            or c.data.eod_token_id is not None
            or c.data.tokenizer is not None
        ),
        "`data.eod_mask_loss` but the EOD token is unknown",
        "set data.eod_token_id or data.tokenizer",
    ),
    Rule(
        "eod_in_vocab",
        lambda c: c.data.eod_token_id is None or c.data.eod_token_id < c.model.vocab_size,
        "`data.eod_token_id` is outside `model.vocab_size`",
        "change either",
    ),
    Rule(
        "sample_prompt_needs_tokenizer",
        lambda c: c.train.sample_prompt is None or c.data.tokenizer is not None,
        "`train.sample_prompt` cannot be read without a tokenizer",
        "set data.tokenizer or train.sample_prompt=null",
    ),
    Rule(
        "run_dir_is_files",
        lambda c: not is_address(c.run.dir),
        f"`run.dir` {NEEDS_FILES}",
        MOUNT_IT,
    ),
    Rule(
        "init_from_is_files",
        lambda c: not is_address(c.checkpoint.init_from),
        f"`checkpoint.init_from` {NEEDS_FILES}",
        MOUNT_IT,
    ),
    Rule(
        "local_dir_is_files",
        lambda c: not is_address(c.checkpoint.local_dir),
        f"`checkpoint.local_dir` {NEEDS_FILES}",
        "give a folder of this machine's disk or memory",
    ),
    Rule(
        "local_tier_is_whole",
        lambda c: (c.checkpoint.local_dir is None) == (c.checkpoint.local_interval is None),
        "`checkpoint.local_dir` and `checkpoint.local_interval` go together",
        "set both or neither",
    ),
    Rule(
        "local_is_more_frequent",
        lambda c: (c.checkpoint.local_interval or 0) < (c.checkpoint.interval or 10**18),
        "`checkpoint.local_interval` is not below `checkpoint.interval`, so no save would be local",
        "lower the first, or set checkpoint.local_dir=null and checkpoint.local_interval=null",
    ),
    Rule(
        "best_is_measured",
        lambda c: (
            not c.checkpoint.keep_best
            or c.train.eval_interval is not None
            and (c.checkpoint.interval or 0) % c.train.eval_interval == 0
        ),
        "`checkpoint.keep_best` needs the held-out loss of every step that is saved, but "
        "`checkpoint.interval` is no multiple of `train.eval_interval`",
        "set both, the first as a multiple of the second",
    ),
    *OPTIMIZER_RULES,
    *DATA_RULES,
    # schedule
    Rule(
        "min_lr_below_lr",
        lambda c: c.schedule.min_lr <= c.schedule.lr,
        "`schedule.min_lr` exceeds `schedule.lr`",
        "lower min_lr",
    ),
    Rule(
        "warmup_init_below_lr",
        lambda c: c.schedule.warmup_init_lr <= c.schedule.lr,
        "`schedule.warmup_init_lr` exceeds `schedule.lr`",
        "lower warmup_init_lr",
    ),
    Rule(
        "warmup_before_decay_ends",
        lambda c: c.schedule.warmup_steps < _decay_steps(c),
        lambda c: f"`schedule.warmup_steps` fills all {_decay_steps(c)} steps",
        "shorten it, or raise schedule.decay_steps or train.steps",
    ),
    Rule(
        "wsd_has_decay",
        lambda c: c.schedule.decay != "wsd" or c.schedule.wsd_decay_steps > 0,
        "`schedule.decay` has no length of the final decay",
        "set schedule.wsd_decay_steps",
    ),
    Rule(
        "wsd_fits",
        lambda c: (
            c.schedule.decay != "wsd"
            or c.schedule.warmup_steps + c.schedule.wsd_decay_steps <= _decay_steps(c)
        ),
        lambda c: (
            f"`schedule.warmup_steps` and `schedule.wsd_decay_steps` exceed {_decay_steps(c)} steps"
        ),
        "shorten one of them",
    ),
    # batch
    Rule(
        "ramp_legal",
        _ramp_ok,
        "`train.rampup_batch_size` does not lead to `train.global_batch_size`",
        "[start, increment, samples]: positive, start below it, whole increments up to it",
    ),
    Rule(
        "ramp_divisible",
        lambda c: not _undivided_ramp_sizes(c),
        lambda c: (
            f"`train.rampup_batch_size` passes {_undivided_ramp_sizes(c)[0]}, which is not "
            f"divisible by {_micro_batch_factors(c)}"
        ),
        "choose start and increment that are",
    ),
    Rule(
        "batch_divisible",
        lambda c: c.train.global_batch_size % _sequences_per_micro_batch(c) == 0,
        lambda c: f"`train.global_batch_size` is not divisible by {_micro_batch_factors(c)}",
        "change either: a step is a whole number of micro-batches on every device",
    ),
    Rule(
        "global_balance_needs_one_micro_batch",
        lambda c: (
            not _balances_global_batch(c)
            or c.train.global_batch_size == _sequences_per_micro_batch(c)
        ),
        lambda c: (
            "`model.moe.router_aux_loss_over` needs all choices before the first gradient, but "
            f"`train.global_batch_size` is several times {_micro_batch_factors(c)}"
        ),
        "make a step one micro-batch, or balance each sequence: "
        "model.moe.router_aux_loss_over=sequence",
    ),
    # precision
    Rule(
        "fp8_of_blackwell",
        lambda c: c.precision.fp8 not in ("mxfp8", "nvfp4"),
        "`precision.fp8`: block-scaled recipes need Blackwell (compute capability 10) and are not "
        "built",
        "set precision.fp8=current or delayed, which Hopper and Blackwell both run",
    ),
    Rule(
        "fp8_keys_used",
        lambda c: c.precision.fp8 != "none" or c.precision.fp8_skip_layers == 0,
        "`precision.fp8_skip_layers` has no effect with `precision.fp8`",
        "remove it or set precision.fp8=current",
    ),
    Rule(
        "fp8_backend_used",
        lambda c: c.precision.fp8 != "none" or c.precision.fp8_backend == "xla",
        "`precision.fp8_backend` has no effect with `precision.fp8`",
        "remove it or set precision.fp8=delayed",
    ),
    Rule(
        "fp8_layers_left",
        lambda c: 2 * c.precision.fp8_skip_layers < c.model.num_hidden_layers,
        "`precision.fp8_skip_layers` at both ends of `model.num_hidden_layers` leaves none",
        "lower it or set precision.fp8=none",
    ),
    Rule(  # slots of a chunk hold layers from all over
        "fp8_skip_pipeline",
        lambda c: c.precision.fp8_skip_layers == 0 or c.mesh.pp == 1,
        "`precision.fp8_skip_layers` is not built for the chunks of `mesh.pp`",
        "set precision.fp8_skip_layers=0",
    ),
    Rule(
        "fp16_without_fp8",
        lambda c: c.precision.compute != "float16" or c.precision.fp8 == "none",
        "`precision.fp8`: its scales are not built for gradients with the loss scale of "
        "`precision.compute`",
        "set precision.compute=bfloat16 or precision.fp8=none",
    ),
    Rule(
        "fp16_masters",
        lambda c: c.precision.compute != "float16" or c.precision.params == "float32",
        "`precision.params`: `precision.compute` needs fp32 masters",
        "set precision.params=float32 or precision.compute=bfloat16",
    ),
    Rule(
        "loss_scale_used",
        lambda c: c.precision.compute == "float16" or not _scale_keys(c),
        lambda c: f"`precision.{_scale_keys(c)[0]}` has no effect with `precision.compute`",
        "remove it or set precision.compute=float16",
    ),
    Rule(
        "loss_scale_range",
        lambda c: c.precision.min_loss_scale <= c.precision.initial_loss_scale < 2.0**127,
        "`precision.initial_loss_scale` is below `precision.min_loss_scale` or beyond fp32",
        "set them to Megatron's, which are 4294967296 and 1",
    ),
    # memory
    Rule(
        "offload_kept",
        lambda c: not _not_kept(c),
        lambda c: f"`train.offload`: no layer keeps {_not_kept(c)[0]!r} under `train.remat`",
        "dots keeps q, kv, attn_proj, up, down, attn_out, attn_lse, attention the last two",
    ),
    Rule(
        "offload_pipeline",
        lambda c: not c.train.offload or c.mesh.pp == 1,
        "`train.offload` is not built for what waits in the stages of `mesh.pp`",
        "set train.offload=[] and, to save memory, train.remat=attention or full",
    ),
    Rule(  # the compiler copies as late as it can: outside a loop, right before it copies back
        "offload_loops",
        lambda c: not c.train.offload or c.train.unroll in ("auto", 1),
        "`train.offload` saves nothing where layers are unrolled: `train.unroll`",
        "set train.unroll=auto, which is then 1",
    ),
    # the rest
    Rule(
        "keep_every_is_saved",
        lambda c: (
            c.checkpoint.keep_every is None
            or (
                c.checkpoint.interval is not None
                and c.checkpoint.keep_every % c.checkpoint.interval == 0
            )
        ),
        "`checkpoint.keep_every` is not a multiple of `checkpoint.interval`",
        "only saved steps can be kept: change either",
    ),
    Rule(
        "profile_steps_follow",
        _profile_ok,
        "`log.profile_steps` is not a first and a last step",
        "give [first, last], as in [10, 12], counted from 1",
    ),
    Rule(
        "diagnostics_offload",
        lambda c: c.log.diagnostics_interval is None or c.optimizer.offload is not True,
        "`log.diagnostics_interval` is not built for moments on the host (`optimizer.offload`)",
        "set log.diagnostics_interval=null or optimizer.offload=false",
    ),
    Rule(
        "cudnn_supports",
        lambda c: c.train.attention != "cudnn" or not not_for_cudnn(c),
        lambda c: f"`train.attention` cannot run with {not_for_cudnn(c)[0]}",
        "set train.attention=auto",
    ),
)
