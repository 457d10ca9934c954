"""The keys of mixers other than plain attention: groups of `model` (`model.py`)."""

from pydantic import Field

from mjax.config.schema.architecture import NEIGHBORS, Companions
from mjax.config.schema.base import Group
from mjax.config.schema.sizes import UpTo20, UpTo24


class MlaConfig(Group):
    """Multi-head latent attention (mla): queries and keys come from low-rank latents."""

    q_lora_rank: UpTo24 | None = Field(None, ge=1)
    """Width of the latent of queries; None: they come from the input."""
    kv_lora_rank: UpTo24 = Field(0, ge=0)
    """Width of the latent of keys and values."""
    qk_nope_head_dim: UpTo20 = Field(0, ge=0)
    """Part of a query or key without RoPE."""
    qk_rope_head_dim: UpTo20 = Field(0, ge=0)
    """Part of them with RoPE; that of keys is one for all heads."""
    v_head_dim: UpTo20 = Field(0, ge=0)
    """Size of a head of values."""
    latent_norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of the norms of latents: 1e-6 in DeepSeek's models, norm_eps in Megatron-LM."""

    @property
    def qk_head_dim(self) -> int:
        """The size of a head of queries or keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MambaConfig(Group):
    """Mamba-2 (mamba): a scan over states, a convolution before it, a gated norm after it."""

    mamba_num_heads: int = Field(0, ge=0)
    """Heads of an M block."""
    mamba_head_dim: int = Field(64, ge=1)
    """Channels of a head."""
    state_size: int = Field(128, ge=1)
    """Numbers of the state of a channel."""
    n_groups: int = Field(1, ge=1)
    """Groups of heads that share B, C and a norm."""
    conv_kernel: int = Field(4, ge=2)
    """Tokens that the convolution sees, itself in."""
    use_conv_bias: bool = True
    chunk_size: int = Field(256, ge=1)
    """Tokens of a chunk of the scan: speed only."""
    time_step_min: float = Field(1e-3, gt=0)
    """Smallest initial step."""
    time_step_max: float = Field(0.1, gt=0)
    """Largest initial step."""
    time_step_floor: float = Field(1e-4, gt=0)
    """Bound below initial steps."""
    time_step_limit: list[float] | None = None
    """[smallest, largest] step; null: any."""
    mamba_rms_norm: bool = True
    """Norm behind the gate; Falcon-H1 has none."""
    ssm_in_multiplier: float | None = Field(None, gt=0)
    """Scales the input."""
    ssm_out_multiplier: float | None = Field(None, gt=0)
    """Scales the output."""
    ssm_multipliers: list[float] | None = None
    """Scale z, x, B, C and dt."""

    @property
    def channels(self) -> int:
        """The channels of all heads."""
        return self.mamba_num_heads * self.mamba_head_dim


class DeltaNetConfig(Group):
    """Gated DeltaNet (deltanet): linear attention by the gated delta rule, behind a convolution;
    a gated norm behind it."""

    linear_num_key_heads: int = Field(0, ge=0)
    """Heads of queries and keys of a T block."""
    linear_num_value_heads: int = Field(0, ge=0)
    """Heads of values: as many for each head of keys."""
    linear_key_head_dim: int = Field(128, ge=1)
    """Channels of a head of queries or keys."""
    linear_value_head_dim: int = Field(128, ge=1)
    """Channels of a head of values."""
    linear_conv_kernel_dim: int = Field(4, ge=2)
    """Tokens that the convolution sees, itself in."""
    linear_chunk_size: int = Field(64, ge=1)
    """Tokens of a chunk of the rule: speed only."""

    @property
    def heads_a_key(self) -> int:
        """The heads of values that a head of keys serves."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def widths(self) -> tuple[int, int]:
        """The channels of a head of keys, and those of all values that it serves."""
        return self.linear_key_head_dim, self.heads_a_key * self.linear_value_head_dim

    @property
    def channels(self) -> int:
        """The channels of all heads of values."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class RetroConfig(Group):
    """Retrieved neighbors, where `model.layer_pattern` has retrieval (docs/models/encoders.md)."""

    chunk_length: UpTo20 = Field(64, ge=1)
    """Tokens that neighbors are looked up for."""
    num_neighbors: int = Field(2, ge=1)
    """Neighbors of a chunk."""
    num_retrieved_chunks: int = Field(2, ge=1)
    """Chunks that are read of each: itself and what follows it."""

    @property
    def retrieved_length(self) -> int:
        """Tokens of a neighbor."""
        return self.chunk_length * self.num_retrieved_chunks

    def companions(self, seq_length: int) -> Companions:
        """The neighbors of all chunks of a text."""
        return Companions(
            field=NEIGHBORS,
            axes=("neighbors", "retrieved"),
            count=seq_length // self.chunk_length * self.num_neighbors,
            length=self.retrieved_length,
        )
