"""Every key of a model, group `model` of the config, as one frozen pydantic tree.

Names follow Hugging Face's `config.json` where it has one. Invariant: unknown keys are forbidden
and values are never coerced across types (a string is not a number). Defaults that depend on other
keys of the group are filled in here, so that the printed config shows what will run.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from mjax.config.languages.layer_pattern import (
    BRANCHES,
    branches_of_model,
    expand,
    modalities_of,
    modality_of,
    of_tower,
    roles_of,
    sizes_of,
)
from mjax.config.schema.architecture import Architecture, Companions, architecture_of
from mjax.config.schema.audio import AudioConfig
from mjax.config.schema.base import Group
from mjax.config.schema.mixers import DeltaNetConfig, MambaConfig, MlaConfig, RetroConfig
from mjax.config.schema.sizes import UpTo16, UpTo20, UpTo24
from mjax.config.schema.towers import TowerConfig
from mjax.config.schema.vision import ContrastiveConfig, VisionConfig

Dtype = Literal["float32", "bfloat16"]

# What a parameter is for; weight decay, learning rates and Muon go by it.
ROLES = ("matrix", "embedding", "head", "router", "norm", "bias", "scalar", "conv")

# All parameters of experts, in `optimizer.lr_multipliers`; it goes before their roles.
EXPERTS_GROUP = "experts"


def _with_defaults(group: type[Group], given: Any) -> dict[str, Any]:
    """The values of a group, with defaults for what is left out; {} for what is no group."""
    if isinstance(given, group):
        given = dict(given)
    if not isinstance(given, dict):
        return {}
    return {name: field.default for name, field in group.model_fields.items()} | given


class RopeScaling(Group):
    """Hugging Face's `rope_scaling` dictionary."""

    rope_type: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float = Field(1.0, ge=1.0)
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3"""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3"""
    original_max_position_embeddings: int = Field(8192, ge=1)
    """all but linear"""
    beta_fast: float = Field(32.0, gt=0)
    """yarn"""
    beta_slow: float = Field(1.0, gt=0)
    """yarn"""
    mscale: float | None = None
    """yarn: attention temperature numerator"""
    mscale_all_dim: float | None = None
    """yarn: its denominator"""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: overrides both mscales; longrope: its own"""
    truncate: bool = True
    """yarn: round the correction range to whole dims"""
    llama_4_scaling_beta: float | None = Field(None, gt=0)
    """yarn: queries at position p times 1 + beta log(1 + floor(p / original length))"""
    short_factor: list[float] | None = None
    """longrope: one per channel pair"""
    long_factor: list[float] | None = None
    """longrope: beyond the original length"""


ROPE_KEYS = {  # of RopeScaling, that each type uses
    "linear": ["factor"],
    "llama3": """factor low_freq_factor high_freq_factor
        original_max_position_embeddings""".split(),
    "yarn": """factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
        attention_factor truncate llama_4_scaling_beta""".split(),
    "longrope": """short_factor long_factor original_max_position_embeddings
        attention_factor""".split(),
}


class AttentionConfig(Group):
    """Self-attention: heads, window, and what is done to queries, keys and logits."""

    num_attention_heads: UpTo16 = Field(4, ge=1)
    num_key_value_heads: UpTo16 = Field(0, ge=0)
    """GQA/MQA; 0: num_attention_heads."""
    head_dim: UpTo20 = Field(0, ge=0)
    """0: hidden_size / num_attention_heads."""
    sliding_window: int | None = Field(None, ge=1)
    """Keys an L block sees, itself in; a W block sees as many to either side."""
    attention_bias: bool = False
    """Bias on the q, k and v projections."""
    attention_key_bias: bool = True
    """Whether attention_bias gives keys one, too; false: Whisper's."""
    attention_out_bias: bool = False
    """Bias on the attention output projection."""
    qk_norm: bool = False
    """Norm over head_dim on q and k before RoPE."""
    qk_norm_after_rope: bool = False
    """qk_norm after it instead (Hunyuan)."""
    qk_norm_all_heads: bool = False
    """qk_norm over all heads together (OLMo-2)."""
    attention_sinks: bool = False
    """One learned extra softmax logit per head."""
    attention_output_gate: bool = False
    """Output times a sigmoid of the token, projected beside q (Qwen3-Next)."""
    attn_logit_softcapping: float | None = Field(None, gt=0)
    attention_multiplier: float | None = Field(None, gt=0)
    """None: head_dim ** -0.5."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    key_multiplier: float | None = Field(None, gt=0)
    """Falcon-H1: scales keys."""
    attention_in_multiplier: float | None = Field(None, gt=0)
    """Scales the input."""
    attention_out_multiplier: float | None = Field(None, gt=0)
    """Scales the output."""


class RelativeConfig(Group):
    """T5's biases on scores by distance, where `model.position_embedding` is relative."""

    num_buckets: int = Field(32, ge=4)
    """Biases of a head, half of them behind a token."""
    max_distance: int = Field(128, ge=1)
    """Tokens from which on all share a bias."""


class RopeConfig(Group):
    """Rotary positions, where `model.position_embedding` is rope."""

    rope_theta: float = Field(10000.0, gt=0)
    rope_local_theta: float | None = Field(None, gt=0)
    """rope_theta of blocks with a window."""
    rope_scaling: RopeScaling | None = None
    """Applies to full attention."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    rope_interleave: bool = False
    """Pairs are channels 2i and 2i + 1 of a head (GLM, Cohere), as in MLA, not i and i + R/2."""
    rope_reversed: bool = False
    """Pairs turn the other way (nanochat)."""
    mrope_section: list[int] = []
    """Channel pairs that turn by the time, the row and the column of a token (Qwen-VL); empty: all
    turn by its place.
    """
    mrope_interleaved: bool = False
    """The sections take turns from pair to pair (Qwen3-VL)."""


class MoeConfig(Group):
    """The experts of a layer and their router."""

    num_experts: UpTo20 = Field(0, ge=0)
    """Experts of an E block."""
    num_experts_per_tok: int = Field(2, ge=1)
    """Experts that a token is sent to."""
    moe_intermediate_size: UpTo24 = Field(0, ge=0)
    """Width of one; 0: intermediate_size."""
    shared_expert_intermediate_size: UpTo24 = Field(0, ge=0)
    """Width of an MLP beside the experts, for all tokens; 0: none."""
    shared_expert_gate: bool = False
    """Weigh it by a sigmoid of the token."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    """Gates: divided by their sum; for softmax the one over the chosen logits."""
    latent_size: int | None = Field(None, ge=1)
    """Width of what experts read and write, between projections from and to hidden_size; None:
    hidden_size itself.
    """
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor on the gates."""
    router_bias: bool = False
    """Bias on the router's logits (gpt-oss)."""
    n_group: int = Field(1, ge=1)
    """Groups of experts; a token goes to topk_group."""
    topk_group: int = Field(1, ge=1)
    """Groups that a token is sent to."""
    group_score_topk: int = Field(2, ge=1)
    """A group's score sums its best ones: DeepSeek-V3: 2, DeepSeek-V2: 1."""
    router_jitter_noise: float = Field(0.0, ge=0, lt=1)
    """Training multiplies the router's input by numbers within this of 1."""
    sinkhorn: bool = False
    """Training balances each sequence's choice of experts by Sinkhorn's method."""
    expert_bias: bool = False
    """Bias on the scores that choose experts; no gradient moves it."""
    expert_bias_update_rate: float = Field(1e-3, ge=0)
    """Step of expert_bias towards equal loads; 0: it stays."""
    capacity_factor: float | None = Field(None, gt=0)
    """An expert takes this many times its share of a sequence's tokens, and drops the others; None:
    it drops none.
    """
    drop_policy: Literal["probs", "position"] = "probs"
    """Whom it keeps: the tokens of the largest gates, or the first."""
    skip_padding: bool = False
    """Padding (segment 0) goes to no expert and counts in no loss of the router."""
    force_balanced: bool = False
    """Benchmarks only: experts take turns, whatever the router says."""

    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the balance loss."""
    router_aux_loss_type: Literal["sum", "mean_over_layers"] = "sum"
    """The loss that it weighs: one of each E block, summed over them (Megatron-LM), or one of all
    blocks' mean shares and probabilities, whose shares sum to num_experts_per_tok (transformers).
    """
    router_aux_loss_over: Literal["sequence", "global_batch"] = "sequence"
    """Tokens over which the balance loss evens out the load of experts."""
    router_z_loss_coef: float = Field(0.0, ge=0)
    """Weight of the mean of logsumexp(logits)^2, summed over layers with experts."""


class BertConfig(Group):
    """Parts of BERT and its kin that a decoder lacks: token types, and heads."""

    type_vocab_size: int = Field(0, ge=0)
    """Types of a token, as first or second text; 0: no embedding of them."""
    embedding_norm: bool = False
    """Norm of the sum of all embeddings."""
    position_offset: int = Field(0, ge=0)
    """Row of the first learned position (RoBERTa: 2)."""
    mlm_head: bool = False
    """Dense layer, hidden_act and norm before the vocabulary, bias behind it."""
    prediction_head: bool = False
    """ModernBERT's heads: the dense layer has no bias, and that of classes hidden_act and a norm,
    where BERT's has a tanh.
    """
    num_labels: int = Field(0, ge=0)
    """Classes told from a row, by pooler and head; 0: none."""
    pooling: Literal["cls", "mean"] = "cls"
    """Input of the classes' head: a row's first token, or the mean of its tokens but padding."""


class AttentionSizes(Group):
    """The part of `AttentionConfig` that may differ from layer to layer; None: as the model."""

    num_attention_heads: UpTo16 | None = Field(None, ge=1)
    num_key_value_heads: UpTo16 | None = Field(None, ge=1)
    sliding_window: int | None = Field(None, ge=1)


class MoeSizes(Group):
    """The part of `MoeConfig` that may differ from layer to layer; None: as the model."""

    moe_intermediate_size: UpTo24 | None = Field(None, ge=1)


class LayerSizes(Group):
    """Sizes of some layers, in the places that `ModelConfig` has for them; None: as the model.

    `layer_pattern` says which layers take them.
    """

    intermediate_size: UpTo24 | None = Field(None, ge=1)
    attention: AttentionSizes = AttentionSizes()
    moe: MoeSizes = MoeSizes()


class ModelConfig(Group):
    """The architecture of a decoder."""

    model_type: str | None = None
    """Hugging Face family to export as; None: the first that can express it."""
    vocab_size: int = Field(256, ge=2, le=2**26)
    """Ids the tokenizer may produce."""
    vocab_multiple: int = Field(128, ge=1)
    """Pad the vocabulary to a multiple of this."""
    hidden_size: UpTo24 = Field(256, ge=1)
    num_hidden_layers: int = Field(4, ge=1, le=10_000)
    intermediate_size: UpTo24 = Field(0, ge=0)
    """FFN width; 0: 4 x hidden_size."""
    max_position_embeddings: int = Field(2048, ge=1)

    layer_pattern: str = "full+mlp"
    """Layers in order, repeated to num_hidden_layers, each by the words of its branches:
    'window+experts, full+experts' (docs/develop/adding-a-model.md lists them). Groups repeat, as in
    '(window+mlp*5, full+mlp)*4'. Letters stand for common layers: '(LLLLLG)*4,LL'
    (docs/models/families.md).

    'bidirectional+mlp*12, full+cross+mlp*12' is an encoder and a decoder that reads it
    (docs/models/encoders.md). 'vision+mlp*23, projector, full+mlp*32' is an image tower, its
    projector and a text. 'vision+mlp*27, text+mlp*27' are towers of images and of texts
    (docs/models/multimodal.md).
    """
    layer_sizes: list[LayerSizes] = []
    """Sizes of the layers marked '@1', ..."""
    decoder_start_token_id: int | None = Field(None, ge=0)
    """First token that the decoder of an encoder-decoder reads."""
    num_labels: int = Field(0, ge=0)
    """Numbers that a decoder gives a token in place of the vocabulary's logits, such as a reward;
    0: logits (docs/train/preferences.md).
    """
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Layers that predict tokens further ahead, in training (docs/models/families.md)."""

    attention: AttentionConfig = AttentionConfig()
    mla: MlaConfig = MlaConfig()
    mamba: MambaConfig = MambaConfig()
    deltanet: DeltaNetConfig = DeltaNetConfig()
    position_embedding: Literal["rope", "learned", "relative", "none"] = "rope"
    rope: RopeConfig = RopeConfig()
    relative: RelativeConfig = RelativeConfig()
    retro: RetroConfig = RetroConfig()
    moe: MoeConfig = MoeConfig()
    bert: BertConfig = BertConfig()
    vision: VisionConfig = VisionConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    audio: AudioConfig = AudioConfig()

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0)
    norm_bias: bool = True
    """Whether layernorm has a bias."""
    norm_gain: bool = True
    """Whether norms have gains; false: OLMo's."""
    parallel_norms: bool = False
    """Branches side by side each have a norm of their own (GPT-NeoX)."""
    norm_zero_centered: bool = False
    """Gain is stored as offset from one."""
    norm_placement: Literal["pre", "post", "sandwich", "post_residual"] = "pre"
    """Norms before attention and MLP, after them, both, or of the residual stream after each
    (BERT), without a last norm.
    """

    hidden_act: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"] = "silu"
    mlp_gated: bool = True
    """SwiGLU/GEGLU: act(gate) * up."""
    mlp_bias: bool = False
    mlp_multipliers: list[float] | None = None
    """Falcon-H1: scale the gate, and the output, of an MLP."""
    swiglu_limit: float | None = Field(None, gt=0)
    """gpt-oss: experts clamp gate and up at it, and add 1 to up."""

    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    """Bias on the logits (Phi)."""
    embedding_multiplier: float | None = Field(None, gt=0)
    """Scales embeddings."""
    residual_multiplier: float | None = Field(None, gt=0)
    """Scales what a block adds."""
    logits_scaling: float | None = Field(None, gt=0)
    """Logits are divided by it."""
    final_logit_softcapping: float | None = Field(None, gt=0)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    """Embedding and residual branches."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of weights."""
    scaled_output_init: bool = True
    """Megatron: output projections use std / sqrt(2 * num_hidden_layers)."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        """Replace the zeros that mean 'derive' so that the resolved config is explicit.

        Values of a wrong type are left for the checks of their fields.
        """
        if not isinstance(data, dict):
            return data
        given = _with_defaults(cls, data)
        attention = _with_defaults(AttentionConfig, given["attention"])
        moe = _with_defaults(MoeConfig, given["moe"])
        hidden, heads = given["hidden_size"], attention.get("num_attention_heads")
        if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0):
            return data
        derived = {}
        if given["intermediate_size"] == 0:
            given["intermediate_size"] = derived["intermediate_size"] = 4 * hidden
        if moe.get("moe_intermediate_size") == 0 and moe["num_experts"]:
            derived["moe"] = {**moe, "moe_intermediate_size": given["intermediate_size"]}
        if attention["num_key_value_heads"] == 0:
            attention["num_key_value_heads"] = heads
        if attention["head_dim"] == 0 and hidden % heads == 0:
            attention["head_dim"] = hidden // heads
        return {**data, **derived, "attention": attention}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer. Raises `UserError` for a malformed layer_pattern."""
        return expand(self.layer_pattern, self.num_hidden_layers)

    @property
    def prediction_kinds(self) -> tuple[str, ...]:
        """The kind of each layer that predicts tokens further ahead.

        It is that of the last layer without a recurrence, if there is one, as in Qwen3-Next.
        """
        kinds = [k for k in self.layer_kinds if "recurrent" not in roles_of(k)]
        return (kinds or self.layer_kinds)[-1:] * self.num_nextn_predict_layers

    @property
    def architecture(self) -> Architecture:
        """The model's inputs, the sequences that its layers work on, and its predictions."""
        return architecture_of(self)

    def companions(self, seq_length: int) -> Companions | None:
        """The texts that an encoder reads beside each text of `seq_length` tokens, if any."""
        group = self.architecture.companions
        return None if group is None else getattr(self, group).companions(seq_length)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The groups of the towers beside a text: "audio", "vision"."""
        return modalities_of(self.layer_kinds)

    @property
    def embedded(self) -> tuple[str, ...]:
        """The modalities that enter the model, in a text or in the place of one."""
        return self.modalities if self.architecture.reads_tokens else ("vision",)

    def tower(self, modality: str) -> TowerConfig:
        """The group of a modality."""
        return getattr(self, modality)

    def of_modality(self, modality: str) -> "ModelConfig":
        """The config with the sizes of what embeds and encodes a modality."""
        if not self.architecture.reads_tokens:
            return self
        tower = self.tower(modality)
        heads = tower.num_attention_heads
        attention = AttentionConfig(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=tower.hidden_size // heads,
            attention_bias=True,
            attention_key_bias=tower.key_bias,
            attention_out_bias=True,
            attention_dropout=self.attention.attention_dropout,
        )
        sizes = {
            "hidden_size": tower.hidden_size,
            "intermediate_size": tower.intermediate_size,
            "hidden_act": tower.hidden_act,
            "attention": attention,
            "norm": tower.kind_of_norm,
            "norm_eps": tower.layer_norm_eps,
            "norm_bias": True,
            "norm_placement": "pre",
            "norm_gain": True,
            "norm_zero_centered": False,
            "mlp_gated": tower.hidden_act == "silu",
            "mlp_bias": True,
            "mlp_multipliers": None,
            "residual_multiplier": None,
        }
        return self.model_copy(update=sizes)

    @property
    def branches(self) -> set[str]:
        """The words of all branches that some layer has (`config/languages/layer_pattern.py`)."""
        return branches_of_model(self.layer_kinds)

    def has_role(self, *roles: str) -> bool:
        """Whether some layer has a branch of one of these roles (`Branch.role`)."""
        return any(BRANCHES[word].role in roles for word in self.branches)

    def reads_group(self, group: str) -> bool:
        """Whether some layer has a branch whose own keys are those of `group` (`Branch.group`)."""
        return any(BRANCHES[word].group == group for word in self.branches)

    def rotary_dim(self, word: str) -> int:
        """The number of channels of each head that RoPE turns in a branch."""
        group, _, name = BRANCHES[word].rotary.partition(".")
        head = getattr(getattr(self, group), name)
        if BRANCHES[word].modality:
            return head
        return int(head * self.rope.partial_rotary_factor)

    @property
    def sizes(self) -> list["ModelConfig"]:
        """This config, and with each of layer_sizes."""
        return [self, *map(self._with, self.layer_sizes)]

    def of_layer(self, kind: str) -> "ModelConfig":
        """The config with the sizes of layers of this kind."""
        if of_tower(kind):
            return self.of_modality(modality_of(kind))
        return self.sizes[sizes_of(kind)]

    def _with(self, sizes: LayerSizes) -> "ModelConfig":
        """This config with all of `sizes` that are given."""
        given = sizes.model_dump(exclude_none=True)
        for name, value in given.items():
            if isinstance(value, dict):
                given[name] = getattr(self, name).model_copy(update=value)
        return self.model_copy(update=given)

    @property
    def expert_width(self) -> int:
        """The width of what experts read and write."""
        return self.moe.latent_size or self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: never a function of the mesh."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
