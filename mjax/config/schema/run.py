"""Every key a user may set, as one frozen pydantic tree; a YAML file mirrors it one to one.

The keys of some groups are in files of their own, those of `model` in `model.py`. Invariant:
unknown keys are forbidden and values are never coerced across types (a string is not a number).
Names are Megatron-LM's words for parallelism. Rules across groups live in `validate.py`.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from mjax.config.languages.paths import PathText
from mjax.config.schema.base import Group
from mjax.config.schema.checkpoint import CheckpointConfig
from mjax.config.schema.log import LogConfig
from mjax.config.schema.lora import LoraConfig
from mjax.config.schema.model import Dtype, ModelConfig
from mjax.config.schema.preference import DistillConfig, PreferenceConfig, RewardConfig
from mjax.config.schema.reinforce import ReinforceConfig
from mjax.config.schema.sizes import StepKey, UpTo20, UpTo24, UpTo28


class RunConfig(Group):
    """Place of a run on disk, and the keys that make it repeatable."""

    dir: PathText = "runs/default"
    """Run folder: config, logs, checkpoints, data."""
    seed: int = Field(1234, ge=0)
    """Seed of parameters, dropout and data order."""
    imports: list[str] = []
    """Modules that are imported first, with a mixer say (docs/develop/adding-a-model.md)."""
    deterministic: bool = False
    """Equal runs give equal bits on GPUs too, at a cost (docs/train/debugging.md)."""
    rehearse: list[str] = []
    """Faults put into this run, as FAULT@STEP or FAULT@STEP:PROCESS: nan, nan_once, bit_flip, hang
    or die, e.g. [nan@10, die@20:1] (docs/train/failures.md).
    """
    doctor: bool = False
    """Measure first: a slow GPU or a full disk stops the run (docs/start/install.md)."""


class MeshConfig(Group):
    """Devices per axis; their product is the device count. `mesh: auto` stands for `auto: true`."""

    auto: bool = False
    """Propose sizes from the memory estimate, and say why."""

    dp: UpTo20 | Literal["auto"] = "auto"
    """Data; auto: what the others leave."""
    tp: UpTo20 = Field(1, ge=1)
    """Tensor (with sequence parallelism)."""
    tp_overlap: Literal["auto", "always", "never"] = "auto"
    """Exchange over tp in pieces, under the matmuls; auto: where GPUs can copy to each other and
    shards are long enough to pay (models/base/tensor_parallel_overlap.py).
    """
    pp: UpTo20 = Field(1, ge=1)
    """Pipeline."""
    cp: UpTo20 = Field(1, ge=1)
    """Context."""
    cp_type: Literal["auto", "all_gather", "ring", "a2a", "a2a_ring"] = "auto"
    """How attention meets keys of other devices (docs/train/context.md)."""
    cp_a2a: int = Field(1, ge=1)
    """Size of the inner groups of a2a_ring."""
    ep: UpTo20 = Field(1, ge=1)
    """Expert; also splits the batch."""
    expert_tp: UpTo20 | Literal["auto"] = "auto"
    """Devices that cut an expert: tp, or 1 for whole experts over ep x tp (docs/models/moe.md);
    auto: 1 where tp would leave them narrow and divides them.
    """
    towers: dict[Literal["vision", "audio"], dict[Literal["tp", "cp"], UpTo20]] = {}
    """Sizes of towers' own, 1 or the mesh's, e.g. {vision: {tp: 1, cp: 1}}: weights and items are
    whole, and the axes divide the items instead (docs/models/multimodal.md).
    """
    virtual_stages: int = Field(1, ge=1, le=10_000)
    """Chunks of layers a pipeline device holds."""
    pipeline_layout: str | None = None
    """Layers of every stage in Megatron's notation: 'E|(tt|)*2,(t|)*4,L'. It sets virtual_stages
    too; None: as equal as can be.
    """
    pipeline_account_for: list[Literal["embedding", "loss"]] = []
    """Count as one layer when layers are split over stages."""
    zero: Literal[0, 1, 2, 3, "auto"] = "auto"
    """ZeRO stage: what is sharded over dp, ep and cp (sharding/rules.py); auto: by memory and time
    (plan/auto.py).
    """
    zero_group: int | None = Field(None, ge=1)
    """Shard within groups of this many devices; None: all of them."""

    @property
    def zero_stage(self) -> int:
        """`zero`; 1 as long as it is auto."""
        return 1 if self.zero == "auto" else self.zero

    def of_tower(self, modality: str) -> dict[str, int]:
        """The sizes of tp and cp in the layers of a modality."""
        own: dict[Any, dict[str, int]] = self.towers
        return {"tp": self.tp, "cp": self.cp} | own.get(modality, {})


class MaskedDataConfig(Group):
    """Hidden tokens, for masked_lm, and spans, for span_corruption (docs/models/encoders.md)."""

    mask_token_id: int | None = Field(None, ge=0)
    """In place of hidden tokens: [MASK]."""
    cls_token_id: int | None = Field(None, ge=0)
    """Before a sample: [CLS]."""
    sep_token_id: int | None = Field(None, ge=0)
    """Behind each text: [SEP]."""
    pad_token_id: int | None = Field(None, ge=0)
    """Fills a sample up: [PAD]."""
    probability: float = Field(0.15, gt=0, lt=1)
    """Part of the tokens to be hidden."""
    sentences: bool = False
    """Samples of whole sentences by Megatron's rules, from data with sentence bounds (preprocess
    --split-sentences); false: a stream of tokens.
    """
    short_probability: float = Field(0.1, ge=0, le=1)
    """Samples aimed at a random shorter length."""
    max_ngram: int | None = Field(None, ge=1)
    """Words hidden at once, at most; None: 3, or 10 in spans."""
    whole_words: bool = True
    """All tokens of a word are hidden or none."""
    mean_span: float = Field(3.0, ge=1)
    """Tokens of a hidden span in streams; a mean."""
    sentinel_ids: list[int] = Field([], max_length=2)
    """First and last id in place of spans, in the order of use: [32099, 32000]."""


class ImageDataConfig(Group):
    """Images with classes, for classify_images, or images and sounds beside texts."""

    path: PathText | list[PathText] | None = None
    """A folder (for classes: of folders), a webdataset .tar, a .parquet, a .jsonl, a glob of one
    kind, or 'digits' (scikit-learn's); several are blended by data.weights.
    """
    valid_path: PathText | None = None
    """Held-out images; None: use data.split."""
    image_size: int | None = Field(None, ge=1)
    """Pixels of a side, resized and cut; None: model.vision.image_size."""
    mean: list[float] = Field([0.5], min_length=1)
    """Mean of pixels from 0 to 1, subtracted from them: one for all, or one a channel."""
    std: list[float] = Field([0.5], min_length=1)
    """Divisor of pixels after `mean` is subtracted: one for all, or one a channel."""
    packed: bool = False
    """Whether a row holds several texts, as many as fit."""
    workers: int | None = Field(None, ge=0, le=1024)
    """Processes that decode; 0: loader threads do; None: one a core, up to 16."""

    @property
    def paths(self) -> list[str]:
        """The sources, whether there is one, several or none."""
        one_or_more = self.path or []
        return [one_or_more] if isinstance(one_or_more, str) else one_or_more


class ConversationDataConfig(Group):
    """Conversations to fine-tune on (docs/train/fine-tuning.md)."""

    path: PathText | list[PathText] | None = None
    """A .jsonl(.gz|.zst), .json or .parquet file, a folder or a glob of them, or a folder of
    `save_to_disk`; several are blended by data.weights.
    """
    answers: Literal["all", "last"] = "all"
    """Answers of a conversation that the loss is on."""
    rows: Literal["packed", "padded", "longest"] = "packed"
    """A row is many conversations, or one, padded to data.seq_length or to the batch's longest."""
    too_long: Literal["cut", "skip", "refuse"] = "cut"
    """For conversations of more than data.seq_length tokens."""
    broken: Literal["refuse", "skip"] = "refuse"
    """For records that cannot be trained on; skipped ones are counted and named."""

    @property
    def paths(self) -> list[str]:
        """The sources, whether there is one, several or none."""
        one_or_more = self.path or []
        return [one_or_more] if isinstance(one_or_more, str) else one_or_more


class DataConfig(Group):
    """The training data. Exactly one source is used.

    Sources are `paths`, `text`, `conversations.path`, `images.path` and `mock`.
    """

    paths: list[PathText] = []
    """Prefixes of Megatron .bin/.idx pairs."""
    weights: list[float] | dict[StepKey, list[float]] | None = None
    """Blend weights of the source's paths; None: by their counts. By the step that each list
    begins after, as {0: [1, 1], 5000: [1, 3]}, they may change (docs/start/data.md).
    """
    valid_paths: list[PathText] = []
    """Held-out prefixes, or files of conversations; empty: use `split`."""
    eval_sets: dict[str, PathText | list[PathText]] = {}
    """Further held-out sets by name, each as `valid_paths`, whose losses are logged apart:
    {code: data/code, law: [data/a, data/b]}.
    """
    split: list[float] = Field([0.969, 0.03, 0.001], min_length=3, max_length=3)
    """Shares of documents for training, evaluations and the test at the end (train.test_steps)."""
    text: PathText | None = None
    """Train on raw text: a folder, a glob, a .jsonl(.gz|.zst) or parquet file, a Hugging Face data
    set, an address (s3://, gs://, hf://datasets/ORG/NAME), or 'stdlib' (Python's own sources).
    Tokenized once into run.dir/data.
    """
    text_key: str | None = None
    """Key of the text in JSON lines, column in tables; None: text, or the only one of strings."""
    stream: bool = False
    """Tokenize `text` while the run trains, from files that are fetched one at a time."""
    mock: bool = False
    """Random tokens, for speed tests."""
    tokenizer: PathText | None = None
    """'byte', a tokenizer's file or folder (docs/start/data.md lists them), or 'train:VOCAB'."""
    seq_length: UpTo28 = Field(1024, ge=1)
    target_length: int | None = Field(None, ge=8)
    """Tokens of a row of the decoder, for span_corruption."""
    document_mask: bool = True
    """Attention stays within documents."""
    reset_position_ids: bool = False
    """Positions restart at each document."""
    shared_prefixes: bool = False
    """Answers of a prompt lie behind one copy of it in a row, and compute it once
    (docs/train/preferences.md).
    """
    eod_token_id: int | None = Field(None, ge=0)
    eod_mask_loss: bool = False
    """No loss on predicting from an EOD token."""
    cache_dir: PathText | None = None
    """Index cache; None: beside the data."""
    fim_rate: float = Field(0.0, ge=0, le=1)
    """Share of documents made fill-in-the-middle (data/corpus/fim.py)."""
    fim_spm_rate: float = Field(0.5, ge=0, le=1)
    """Share of those whose suffix comes first."""
    fim_prefix_token: str | int | None = None
    """A token's text, or its id."""
    fim_middle_token: str | int | None = None
    fim_suffix_token: str | int | None = None
    fim_pad_token: str | int | None = None
    """None: the end of a document."""
    fim_split_sample: str | int | None = None
    """Token between the files of a document; each is then permuted by itself."""
    fim_fragment_rate: float | None = Field(None, ge=0, le=1)
    """Share of those files, in a document that fim_rate draws."""
    fim_no_prefix: str | None = None
    """A document that begins with this text stays as it is."""
    masked: MaskedDataConfig = MaskedDataConfig()
    images: ImageDataConfig = ImageDataConfig()
    conversations: ConversationDataConfig = ConversationDataConfig()
    prefetch: int = Field(4, ge=1, le=10_000)
    """Batches prepared ahead."""
    workers: int = Field(2, ge=1, le=1024)
    """Loader threads."""


class OptimizerConfig(Group):
    """Optimizer, decay and clipping; groups go by a parameter's role, never by its rank."""

    name: str = "adamw"
    """adamw, muon, or an elementwise transformation of optax: optax.lion, optax.sgd
    (docs/train/optimizers.md).
    """
    args: dict[str, bool | int | float | str | None] = {}
    """Arguments of that function of optax, e.g. {momentum: 0.9}."""
    b1: float = Field(0.9, ge=0, lt=1)
    b2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    weight_decay_end: float | None = Field(None, ge=0)
    """Ramp target; None: constant."""
    weight_decay_style: Literal["linear", "cosine"] = "linear"
    weight_decay_roles: list[str] = Field(["matrix", "embedding", "head", "router", "conv"])
    lr_multipliers: dict[str, float] = {}
    """Per role or name, e.g. {embedding: 0.5, "vision_mlp.*": 0.1}; experts: of all parameters of
    experts. The first name that matches goes before experts, and that before roles.
    """
    clip_grad_norm: float = Field(1.0, ge=0)
    """Global L2 norm; 0: off."""
    mu_dtype: Dtype = "float32"
    nu_dtype: Dtype = "float32"
    stochastic_rounding: bool = False
    """Round what is stored in bf16 (moments, weights) up or down at random."""
    offload: bool | Literal["auto"] = "auto"
    """Moments wait in pinned host memory; auto: where they do not fit."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_nesterov: bool = True
    muon_steps: int = Field(5, ge=1)
    """Newton-Schulz iterations."""
    muon_roles: list[str] = ["matrix"]
    """The rest is trained by AdamW."""
    muon_scale: Literal["match_adamw", "spectral", "original"] = "match_adamw"


class ScheduleConfig(Group):
    """Learning rate over samples (Megatron's clock); lengths are given in steps."""

    lr: float = Field(3e-4, ge=0)
    min_lr: float = Field(0.0, ge=0)
    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    warmup_init_lr: float = Field(0.0, ge=0)
    decay_steps: int | None = Field(None, ge=1)
    """None: train.steps."""
    wsd_decay_steps: int = Field(0, ge=0)
    """Length of the final decay of wsd."""
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"


class TrainConfig(Group):
    """Batch, length of the run, memory policy, evaluation."""

    objective: str = "next_token"
    """Task to train for: next_token, masked_lm (docs/models/encoders.md), classify,
    span_corruption, classify_images, contrastive (docs/models/multimodal.md), preference, reward
    (docs/train/preferences.md), distill (docs/train/distillation.md), policy
    (docs/train/reinforcement.md), or module.path:Name of a class like those of `objectives/`.
    """
    steps: int = Field(1000, ge=1, le=10**12)
    max_tokens: int | None = Field(None, ge=1)
    """Stop after this many tokens."""
    max_minutes: float | None = Field(None, gt=0)
    """Save and stop after this long."""
    step_timeout_minutes: float | None = Field(30.0, gt=0)
    """Exit, not hang, when no step ends in this long (with compiling)."""
    global_batch_size: UpTo28 = Field(8, ge=1)
    """Sequences per step."""
    micro_batch_size: Annotated[UpTo28, Field(ge=1)] | Literal["auto"] = "auto"
    """Sequences per device and micro-batch; auto: the most that divide a device's share of the
    batch and fit (docs/train/memory.md).
    """
    rampup_batch_size: list[int] | None = Field(None, min_length=3, max_length=3)
    """[start, increment, samples], as Megatron."""
    on_suspect: Literal["stop", "skip", "roll_back"] = "stop"
    """After a loss that is not finite, or a spike, and is so again when the step is repeated: end
    the run, leave the batch out, or also go back to the newest checkpoint's weights
    (docs/train/failures.md).
    """
    spike_factor: float | None = Field(None, gt=1)
    """A loss above this many times the median of the last is a spike."""
    max_suspects: int = Field(10, ge=1)
    """Suspect steps within 100 after which the run ends in any case."""
    check_replicas_interval: int | None = Field(None, ge=1)
    """Steps between comparisons of devices that must hold the same bits; also done before each save
    (docs/train/failures.md).
    """
    eval_interval: int | None = Field(None, ge=1)
    """Steps between evaluations."""
    eval_steps: UpTo28 = Field(10, ge=1)
    eval_tasks: dict[str, Annotated[int, Field(ge=1)] | None] = {}
    """Tasks of lm-evaluation-harness and how many documents of each to score (null: all), e.g.
    {arc_easy: 200, my/folder/task: null}; needs mjax[lm-eval].
    """
    eval_tasks_interval: int | None = Field(None, ge=1)
    """Steps between scores of those tasks; None: only at the end."""
    test_steps: UpTo28 = Field(0, ge=0)
    """Batches of the third share of data.split, for a loss that is measured at the end."""
    early_stop: int | None = Field(None, ge=1)
    """Stop after so many evaluations in a row without a lower held-out loss."""
    remat: str = "auto"
    """Values a layer keeps for its backward: none (all), dots (matmul outputs and attention),
    attention, full (nothing); counts go in layer order: 'full*8,dots'. auto: the fastest that fits
    by the memory estimate (docs/train/memory.md)."""
    offload: Literal["all"] | list[str] = []
    """Kept tensors that wait in pinned host memory, e.g. [up, attn_out]; or all."""
    attention: Literal["auto", "xla", "cudnn", "mosaic", "triton"] = "auto"
    experts: Literal["auto", "loop", "xla", "mosaic", "batched"] = "auto"
    """loop: every expert runs on all tokens; xla, mosaic: a grouped matmul runs each on its own;
    batched: with model.moe.capacity_factor, each on as many rows as it has capacity."""
    expert_exchange: Literal["auto", "all_gather", "all_to_all"] = "auto"
    """How tokens reach experts over ep: all tokens to all devices, or each to those of its experts;
    auto: by ep, experts of a token and bytes (docs/models/moe.md)."""
    unroll: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Layers in an iteration of the layer loop; 0: all; auto: docs/train/tuning.md."""
    mtp_loss_scaling_factor: float = Field(0.1, ge=0)
    """Weight of the mean loss of model.num_nextn_predict_layers."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the logged loss."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of log(sum exp logits)^2; part of the logged loss."""
    loss_divisor: Literal["tokens", "sequences"] | Annotated[float, Field(gt=0)] = "tokens"
    """Divisor of the training loss: tokens that count in the global batch; sequences (each is the
    mean over its tokens); or a number. The held-out loss is always by token.
    """
    loss_chunk: int | None = Field(None, ge=1)
    """Tokens per chunk of the loss."""
    freeze: list[str] = []
    """Parameters that stay as they are: roles, or names with * such as dense.mlp.*."""
    neftune_alpha: float = Field(0.0, ge=0)
    """Noise on the embeddings of training, uniform within alpha / sqrt(tokens * width); tokens are
    those of a token's document (NEFTune).
    """
    sample_prompt: str | list[str] | None = None
    """Texts continued at the end of the run; with data.conversations, messages to answer."""
    sample_interval: int | None = Field(None, ge=1)
    """Steps between samples; None: only at the end."""
    sample_tokens: UpTo24 = Field(64, ge=1)


# Recipes of 8 bits and 4: `kernels/fp8/recipe.py` has a class for each.
Fp8 = Literal["none", "current", "delayed", "block128", "mxfp8", "nvfp4"]
FP8_RECIPES = get_args(Fp8)[1:]
FP8_OF_BLOCKS = FP8_RECIPES[2:]
# A pattern of weights' names, and the recipe of those.
RecipeRule = Annotated[tuple[str, Fp8], Field(strict=False)]
_Count = Annotated[int, Field(ge=0)]
FirstAndLast = _Count | Annotated[tuple[_Count, _Count], Field(strict=False)]


class PrecisionConfig(Group):
    """Masters are kept in `params`; the forward and backward pass run in `compute`."""

    compute: Dtype | Literal["float16"] = "bfloat16"
    """float16: with a loss scale (docs/train/precision.md)."""
    params: Dtype = "float32"
    """Dtype of the weights between steps; bfloat16: no fp32 master."""
    grad_accum: Dtype = "float32"
    """Dtype gradients accumulate and reduce in."""
    initial_loss_scale: float = Field(2.0**32, gt=0)
    """Factor on the loss before the backward, in float16."""
    min_loss_scale: float = Field(1.0, gt=0)
    loss_scale_window: int = Field(1000, ge=1)
    """Steps in a row without overflow that double the scale."""
    hysteresis: int = Field(2, ge=1)
    """Overflows until the scale is halved; then each one halves it."""
    weights: Literal["plain", "mxfp4", "int4_group128"] = "plain"
    """Numbers that matmuls of layers read: weights in 4 bits, as `mjax quantize` writes them."""
    fp8: Fp8 = "none"
    """Layers multiply in 8 bits, scaled by the tensor's maximum or by that of the last steps; or by
    those of blocks (block128 on Hopper; mxfp8, and nvfp4 of 4 bits, on Blackwell)."""
    fp8_rules: list[RecipeRule] = []
    """Other recipes for some weights: [[pattern, recipe], ..]; the first that fits counts."""
    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    """Format of gradients in block128 and mxfp8; hybrid: E5M2. Others have their own."""
    fp8_scales: Literal["power_of_two", "free", "floor"] = "power_of_two"
    """Scales of blocks. free: of block128, any fp32; floor: of mxfp8, rounded as OCP says."""
    fp8_block: int | None = Field(None, ge=1)
    """Side of the blocks of block128, if not 128."""
    fp8_emulate: bool = False
    """Let GPUs multiply rounded blocks in plain JAX, which is slow, also where they have better."""
    fp8_evaluation: bool = True
    """Evaluate with the recipe, fp8_dispatch and fp8_attention; false: in `compute`."""
    fp8_backend: Literal["xla", "te"] = "xla"
    """Code that rounds and multiplies; te: Transformer Engine's kernels (mjax[te])."""
    fp8_amax_history: int = Field(1024, ge=1)
    """Steps that delayed scaling looks back."""
    fp8_skip_layers: FirstAndLast = 0
    """First and last layers left in `compute`: so many each, or [first, last]."""
    fp8_experts: bool = False
    """Round experts, too; else they are left in `compute`."""
    fp8_dispatch: bool = False
    """Experts read tokens in E4M3, scaled by 1 x 128, which so travel to them as bytes."""
    fp8_attention: bool = False
    """Attention multiplies in E4M3 in the forward pass: causal, without masks of documents."""

    @property
    def fp8_left_out(self) -> tuple[int, int]:
        """The numbers of first and of last layers that `fp8_skip_layers` leaves in `compute`."""
        left = self.fp8_skip_layers
        return left if isinstance(left, tuple) else (left, left)

    @property
    def fp8_recipes(self) -> tuple[str, ...]:
        """The recipes that some weight may have, that of the run first."""
        if self.fp8 == "none":
            return ()
        others = [recipe for _, recipe in self.fp8_rules if recipe != "none"]
        return tuple(dict.fromkeys([self.fp8, *others]))


class Config(Group):
    """The whole of a run."""

    @model_validator(mode="before")
    @classmethod
    def _short_mesh(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("mesh") == "auto":
            return {**data, "mesh": {"auto": True}}
        return data

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    preference: PreferenceConfig = PreferenceConfig()
    reward: RewardConfig = RewardConfig()
    distill: DistillConfig = DistillConfig()
    reinforce: ReinforceConfig = ReinforceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: PrecisionConfig = PrecisionConfig()
    log: LogConfig = LogConfig()

    @property
    def image_size(self) -> int:
        """The pixels of a side of the images of a run."""
        return self.data.images.image_size or self.model.vision.image_size

    def item_size(self, modality: str) -> int | None:
        """The size of the items of a modality in a run (`TowerConfig.num_tokens`)."""
        return self.image_size if modality == "vision" else None
