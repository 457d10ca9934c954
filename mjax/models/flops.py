"""Model FLOPs of a token: what the speed of a run is measured by.

The convention is that of PaLM (Chowdhery et al. 2022, appendix B) with the causal half counted.
Recomputation is not counted.
"""

from mjax.config.pattern import STACK_OF, expand
from mjax.config.schema import ModelConfig


def matmul_weights(model: ModelConfig) -> int:
    """Weights that a token is multiplied with: projections, MLP, LM head; no embedding lookup.

    Per layer D*N*H (q) + 2*D*K*H (k, v) + N*H*D (o) + (3 if gated else 2)*D*F, and D*V once. An E
    block has its active experts, num_experts_per_tok wide, and the router D*E instead of F.
    """
    d, h = model.hidden_size, model.head_dim
    attention = 2 * d * model.num_attention_heads * h + 2 * d * model.num_key_value_heads * h
    mlp = (3 if model.mlp_gated else 2) * d
    active = mlp * model.num_experts_per_tok * model.moe_intermediate_size + d * model.num_experts
    ffn = {"dense": mlp * model.intermediate_size, "moe": active}
    kinds = expand(model.layer_pattern, model.num_hidden_layers)
    return sum(attention + ffn[STACK_OF[kind]] for kind in kinds) + d * model.vocab_size


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one token, forward and backward, nothing recomputed.

    6 * matmul_weights + 12 * N*H * sum over layers of the mean number of keys a query sees:
    s/2 under a causal mask, w - w^2/(2s) in a sliding window of w < s keys. Without windows the
    second term is 6*L*s*N*H. Document masks are not discounted. The convention of PaLM
    (Chowdhery et al. 2022, appendix B) with the causal half counted.
    """
    s, keys = seq_length, 0.0
    for kind in expand(model.layer_pattern, model.num_hidden_layers):
        w = min(model.sliding_window or s, s) if kind == "L" else s
        keys += w - w * w / (2 * s)
    width = model.num_attention_heads * model.head_dim
    return 6.0 * matmul_weights(model) + 12.0 * width * keys
