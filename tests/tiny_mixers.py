"""Sizes of tiny mixers that laws of several rooms train, continue and serve."""

LATENT = {
    "layer_pattern": "A",
    "attention.num_key_value_heads": 4,
    "mla.q_lora_rank": 24,
    "mla.kv_lora_rank": 12,
    "mla.qk_nope_head_dim": 8,
    "mla.qk_rope_head_dim": 4,
    "mla.v_head_dim": 6,
}
DELTAS = {
    "layer_pattern": "[TD]G",
    "attention.attention_output_gate": True,
    "deltanet.linear_num_key_heads": 4,
    "deltanet.linear_num_value_heads": 8,
    "deltanet.linear_key_head_dim": 6,
    "deltanet.linear_value_head_dim": 8,
    "deltanet.linear_chunk_size": 8,
}
