"""Keys of mjax by the names of Megatron-LM's arguments, for hints on keys that there are not.

`interop/megatron` translates values, which often are written otherwise, and knows more names.
"""

_PAIRS = """
num_layers model.num_hidden_layers  ffn_hidden_size model.intermediate_size
num_query_groups model.attention.num_key_value_heads  kv_channels model.attention.head_dim
qk_layernorm model.attention.qk_norm  make_vocab_size_divisible_by model.vocab_multiple
normalization model.norm  norm_epsilon model.norm_eps  init_method_std model.initializer_range
untie_embeddings_and_output_weights model.tie_word_embeddings  rotary_base model.rope.rope_theta
rotary_percent model.rope.partial_rotary_factor  position_embedding_type model.position_embedding
mtp_num_layers model.num_nextn_predict_layers  moe_router_topk model.moe.num_experts_per_tok
moe_ffn_hidden_size model.moe.moe_intermediate_size  moe_z_loss_coeff model.moe.router_z_loss_coef
moe_aux_loss_coeff model.moe.router_aux_loss_coef  tensor_model_parallel_size mesh.tp
pipeline_model_parallel_size mesh.pp  context_parallel_size mesh.cp
expert_model_parallel_size mesh.ep  use_distributed_optimizer mesh.zero
num_virtual_stages_per_pipeline_rank mesh.virtual_stages  lr_decay_style schedule.decay
lr_warmup_iters schedule.warmup_steps  lr_warmup_init schedule.warmup_init_lr
lr_decay_iters schedule.decay_steps  lr_wsd_decay_iters schedule.wsd_decay_steps
lr_wsd_decay_style schedule.wsd_style  adam_beta1 optimizer.b1  adam_beta2 optimizer.b2
adam_eps optimizer.eps  end_weight_decay optimizer.weight_decay_end
clip_grad optimizer.clip_grad_norm  train_iters train.steps  eval_iters train.eval_steps
save_interval checkpoint.interval  save run.dir  load checkpoint.init_from  bf16 precision.compute
fp16 precision.compute  fp8_recipe precision.fp8  fp8_amax_history_len precision.fp8_amax_history
reset_attention_mask data.document_mask  data_cache_path data.cache_dir  mock_data data.mock
data_path data.paths  tokenizer_model data.tokenizer  log_interval log.interval
recompute_granularity train.remat
"""
KEY_OF_ARGUMENT = dict(zip(_PAIRS.split()[::2], _PAIRS.split()[1::2], strict=True))
