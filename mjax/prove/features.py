"""The features of the proof: a small model, and the keys that each feature sets in it.

A feature's place in the table decides which ZeRO stage, micro-batches and exchange of keys meet
which mesh. So new ones go to the end.
"""

STEPS = 20  # of a run
VOCAB = 251
ROWS = (24, 40, 56)  # sequences of a batch: between them 1 to 8 micro-batches fit any mesh
SMALL = [
    f"model.vocab_size={VOCAB}",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=8",
    "model.attention.num_key_value_heads=2",
    "model.attention.head_dim=4",
    "model.intermediate_size=48",
    "model.num_hidden_layers=4",
    "model.initializer_range=0.1",
    "data.mock=true",
    "data.seq_length=16",
    "precision.compute=float32",
    "train.attention=xla",
    f"train.steps={STEPS}",
    "schedule.lr=3e-3",
    "schedule.warmup_steps=4",
]
# Sizes that 6 devices divide.
SIX = ["model.attention.num_attention_heads=12", "model.vocab_multiple=96", "data.seq_length=24"]
# The parameters of seed 1 keep experts' scores apart for 20 steps. Where two meet, as with those of
# seed 1234, rounding decides where a token goes, and the curve leaves the reference by 1e-4
# (docs/lab/2026-11-23-router.md). Rows whose scores are closer have fewer and weaker experts.
EXPERTS = [
    "run.seed=1",
    "model.layer_pattern=E",
    "model.moe.num_experts=8",
    "model.moe.num_experts_per_tok=2",
    "model.moe.moe_intermediate_size=24",
    "model.moe.router_aux_loss_coef=0.1",
]
LAST_EXPERTS = [  # in the last layer alone
    *EXPERTS,
    "model.layer_pattern=GGGE",
    "model.moe.routed_scaling_factor=0.5",
]
STATES = [
    "model.mamba.mamba_num_heads=24",
    "model.mamba.mamba_head_dim=4",
    "model.mamba.state_size=6",
    "model.mamba.chunk_size=4",
]
DELTANET = [
    "model.deltanet={linear_num_key_heads: 24, linear_num_value_heads: 48, linear_chunk_size: 4, "
    "linear_key_head_dim: 6, linear_value_head_dim: 4}",
]
# Up to two images and two sounds, towers of unlike widths before one text.
MIMO = [
    "model.layer_pattern='V,[P],S,[Q],G'",
    "model.num_hidden_layers=5",
    "model.vision={image_size: 8, patch_size: 8, num_channels: 2, hidden_size: 16, "
    "intermediate_size: 24, num_attention_heads: 8, image_token_id: 7, max_images: 2}",
    "model.audio={num_mel_bins: 3, max_source_positions: 3, hidden_size: 24, "
    "intermediate_size: 16, num_attention_heads: 8, audio_token_id: 9, max_audios: 2}",
    "model.hidden_dropout=0.1",
]
MIMO_DEEP = ["model.layer_pattern='V*2,[P],S*2,[Q],G*2'"]
QWEN_VL = [
    "model.num_hidden_layers=6",
    "model.vision={image_size: 10, patch_size: 2, num_channels: 2, hidden_size: 32, norm: rmsnorm, "
    "intermediate_size: 24, num_attention_heads: 8, hidden_act: silu, image_token_id: 7, "
    "video_token_id: 9, max_patches: 40, length_multiple: 64, window_size: 8, "
    "deepstack_visual_indexes: [0]}",
    "model.attention.head_dim=8",
    "model.rope.mrope_section=[2, 1, 1]",
    "model.rope.mrope_interleaved=true",
    "model.hidden_dropout=0.1",
]
# As encoders of texts and images are after BERT.
AS_BERT = [
    "model.norm=layernorm",
    "model.position_embedding=learned",
    "model.mlp_gated=false",
    "model.hidden_dropout=0.1",
]
# Each is a feature whose sharding could go wrong on its own.
FEATURES = {
    "dense": [],
    "experts": EXPERTS,
    "tied": ["model.tie_word_embeddings=true", "model.attention.num_key_value_heads=1"],
    "biases": [
        "model.attention.attention_bias=true",
        "model.attention.attention_out_bias=true",
        "model.mlp_bias=true",
        "model.norm=layernorm",
        "model.mlp_gated=false",
        "model.hidden_act=gelu_tanh",
    ],
    "windows": [
        "model.layer_pattern=LG",
        "model.attention.sliding_window=5",
        "model.rope.rope_local_theta=100.0",
        "model.attention.qk_norm=true",
        "model.norm_placement=sandwich",
        "model.norm_zero_centered=true",
        # unit q and k else make fp32 itself differ by 1e-5
        "model.attention.attention_multiplier=0.1",
    ],
    "learned positions": ["model.position_embedding=learned"],
    "sinks": [
        "model.attention.attention_sinks=true",
        "model.attention.attn_logit_softcapping=2.0",
        "model.final_logit_softcapping=3.0",
        "model.embedding_multiplier=4.0",
        "model.attention.num_key_value_heads=4",
        "train.loss_chunk=48",
    ],
    "dropout": ["model.hidden_dropout=0.2", "model.attention.attention_dropout=0.1"],
    "muon": [
        "optimizer.name=muon",
        "model.attention.num_attention_heads=24",
        "model.attention.num_key_value_heads=6",
    ],
    "uneven layers": ["model.num_hidden_layers=5"],  # 11 where there are more stages: primes
    "odd widths": [  # which no ZeRO group divides
        "model.vocab_multiple=254",
        "model.hidden_size=35",
        "model.attention.num_attention_heads=2",
        "model.attention.head_dim=10",
        "model.intermediate_size=50",
    ],
    "gpt-oss": [
        *EXPERTS,
        "model.layer_pattern='window, full, full, window+experts'",
        "model.moe.routed_scaling_factor=0.5",
        "model.attention.sliding_window=5",
        "model.attention.attention_sinks=true",
        "model.attention.attention_bias=true",
        "model.moe.router_bias=true",
        "model.mlp_bias=true",
        "model.swiglu_limit=0.5",
    ],
    "routing": [  # DeepSeek-V3's, with all that a router may have
        *LAST_EXPERTS,
        "model.moe.scoring_func=sigmoid",
        "model.moe.n_group=2",
        "model.moe.router_bias=true",
        "model.moe.router_z_loss_coef=0.01",
        "model.moe.shared_expert_intermediate_size=24",
        "model.moe.shared_expert_gate=true",
    ],
    "expert bias": [
        *LAST_EXPERTS,
        "model.moe.scoring_func=sigmoid",
        "model.moe.expert_bias=true",
    ],
    "multi-token prediction": [  # by two depths of experts
        *EXPERTS,
        "model.layer_pattern=GE",
        "model.moe.expert_bias=true",
        "model.moe.scoring_func=sigmoid",
        "model.num_nextn_predict_layers=2",
        "model.hidden_dropout=0.1",
        "train.mtp_loss_scaling_factor=0.5",
    ],
    "capacity": [  # a third of all pairs is dropped
        *LAST_EXPERTS,
        "model.moe.capacity_factor=0.75",
    ],
    "all-to-all": [  # of tokens over ep; some exchanges have more tokens than room, and gather
        *EXPERTS,
        "train.expert_exchange=all_to_all",
    ],
    "sinkhorn": [  # and jitter
        *LAST_EXPERTS,
        "model.moe.router_aux_loss_coef=0.0",
        "model.moe.sinkhorn=true",
        "model.moe.router_jitter_noise=0.05",
    ],
    "unlike layers": [  # a branch a layer, two at once, and a wider MLP
        "model.layer_pattern='[G][D][G|D]G@1'",
        "model.layer_sizes=[{intermediate_size: 96}]",
    ],
    "frozen": ["train.freeze=[embedding, '*.mlp.*']"],
    "latent attention": [  # DeepSeek's
        "model.layer_pattern=A",
        "model.attention.num_key_value_heads=0",
        "model.mla.q_lora_rank=20",
        "model.mla.kv_lora_rank=12",
        "model.mla.qk_nope_head_dim=6",
        "model.mla.qk_rope_head_dim=4",
        "model.mla.v_head_dim=8",
        "model.rope.rope_scaling={rope_type: yarn, factor: 4.0, mscale: 0.7, "
        "mscale_all_dim: 1.0, original_max_position_embeddings: 8}",
    ],
    "mamba": ["model.layer_pattern=M", "model.mamba.n_groups=2", *STATES],
    "hybrid": [  # one group for all heads, attention beside a mixer, experts
        *EXPERTS,
        "model.layer_pattern='mamba+mlp, mamba|full, mamba, experts'",
        *STATES,
    ],
    "bert": [  # masked tokens and pairs of texts
        "model.layer_pattern=B",
        *AS_BERT,
        "model.norm_placement=post_residual",
        "model.bert={type_vocab_size: 2, embedding_norm: true, mlm_head: true, num_labels: 2}",
        "model.attention.attention_bias=true",
        "model.tie_word_embeddings=true",
        "model.hidden_act=gelu",
        "train.objective=masked_lm",
        "data.masked.mask_token_id=250",
    ],
    "t5": [  # an encoder, and a decoder of longer sequences
        "model.layer_pattern='B*2,[GXD]*2'",
        "model.position_embedding=relative",
        "model.relative={num_buckets: 8, max_distance: 12}",
        "model.tie_word_embeddings=true",
        "model.logits_scaling=5.0",
        "model.mlp_gated=false",
        "model.hidden_act=relu",
        "model.hidden_dropout=0.1",
        "train.objective=span_corruption",
        "data.target_length=48",
        "data.eod_token_id=1",
        "data.masked={pad_token_id: 0, sentinel_ids: [250, 240]}",
        "model.decoder_start_token_id=0",
    ],
    "gated deltanet": [  # Qwen3-Next's layers, before MLPs: experts have rows of their own
        "model.layer_pattern='deltanet+mlp, full+mlp'",
        *DELTANET,
        "model.attention.attention_output_gate=true",
        "model.attention.qk_norm=true",
        "model.rope.partial_rotary_factor=0.5",
        "model.norm_zero_centered=true",
        # norms of heads of 4 channels, near zero, make fp32 itself differ by 2e-5
        "model.norm_eps=1e-3",
    ],
    "retro": [  # layers of neighbors between those of a text, and read by two of them
        "model.layer_pattern='[G],[BCD],[RD],[GRD]'",
        "model.retro={chunk_length: 8, num_neighbors: 2, num_retrieved_chunks: 6}",
        "model.hidden_dropout=0.1",
        "model.attention.attention_dropout=0.1",
    ],
    "vit": [  # images of 10 tokens and padding, their positions resized from another grid
        "model.layer_pattern=B",
        *AS_BERT,
        "model.vision={image_size: 8, patch_size: 4, num_channels: 2, num_labels: 5}",
        "data.images.image_size=12",
        "model.attention.attention_bias=true",
        "model.hidden_act=gelu",
        "train.objective=classify_images",
    ],
    "llava": [  # up to two images in a text of another width
        "model.layer_pattern='V,[P],G*2'",
        "model.vision={image_size: 8, patch_size: 4, num_channels: 2, hidden_size: 16, "
        "intermediate_size: 24, num_attention_heads: 8, hidden_act: quick_gelu, patch_bias: false, "
        "embedding_norm: true, image_token_id: 7, max_images: 2}",
        "model.hidden_dropout=0.1",
    ],
    "clip": [  # images and packed texts of another width; all pairs of the batch
        "model.layer_pattern='V*2,G*2'",
        *AS_BERT,
        "model.vision={image_size: 8, patch_size: 4, num_channels: 2, hidden_size: 16, "
        "intermediate_size: 24, num_attention_heads: 8, hidden_act: quick_gelu, patch_bias: false, "
        "embedding_norm: true}",
        "model.contrastive={projection_dim: 12, eos_token_id: 7}",
        "model.attention.attention_bias=true",
        "model.hidden_act=quick_gelu",
        "train.objective=contrastive",
    ],
    "siglip": [  # texts see both ways; attention pools images, whose positions are resized
        "model.layer_pattern='V*2,U*2'",
        *AS_BERT,
        "model.vision={image_size: 8, patch_size: 4, num_channels: 2, hidden_size: 16, "
        "intermediate_size: 24, num_attention_heads: 8, hidden_act: gelu_tanh, class_token: false}",
        "model.contrastive={projection_dim: 16, loss: sigmoid}",
        "data.images.image_size=12",
        "model.hidden_act=gelu_tanh",
        "train.objective=contrastive",
    ],
    "mimo": MIMO,
    "modernbert": [  # windows to both sides, no norm before the first layer; masked tokens, pairs
        "model.layer_pattern=FWWB",
        "model.attention.sliding_window=4",
        "model.rope.rope_local_theta=100.0",
        "model.norm=layernorm",
        "model.norm_bias=false",
        "model.bert={embedding_norm: true, mlm_head: true, prediction_head: true, num_labels: 2, "
        "pooling: mean}",
        "model.tie_word_embeddings=true",
        "model.hidden_act=gelu",
        "model.hidden_dropout=0.1",
        "train.objective=masked_lm",
        "data.masked.mask_token_id=250",
    ],
    "llava-onevision": [  # a picture in up to three tiles, or two of one; four patches a token
        "model.layer_pattern='V,[P],G*2'",
        "model.vision={image_size: 8, patch_size: 2, num_channels: 2, hidden_size: 16, "
        "intermediate_size: 24, num_attention_heads: 8, hidden_act: gelu_tanh, class_token: false, "
        "image_token_id: 7, max_images: 2, image_grid_pinpoints: [[8, 8], [8, 16], [16, 8]], "
        "vision_aspect_ratio: anyres_max_1, pixel_shuffle: true, length_multiple: 8}",
        "model.hidden_dropout=0.1",
    ],
    # weights of both towers are whole over tp; whole images, not parts of all, go over cp
    "mimo, own mesh": [*MIMO, "mesh.towers={vision: {tp: 1, cp: 1}, audio: {tp: 1}}"],
    "sft": ["train.loss_divisor=sequences", "train.neftune_alpha=5.0"],
}
ADAPTERS = {
    "lora": ("dense", ["lora.targets=['*',embedding,head]", "lora.dropout=0.1"]),
    "lora, experts": ("experts", ["lora.trained=[router]"]),
    "lora, latent attention": ("latent attention", ["lora.rslora=true", "lora.alpha=3.0"]),
    "lora, hybrid": ("hybrid", []),
    "dora": ("dense", ["lora.dora=true", "lora.alpha=3.0"]),
}
for _name, (_feature, _keys) in ADAPTERS.items():
    FEATURES[_name] = [*FEATURES[_feature], "lora.rank=3", *_keys]
# Images and a video in windows of two sizes, DeepStack, positions of three axes by turns.
FEATURES["qwen-vl"] = [
    *QWEN_VL,
    "model.layer_pattern='vision_2d+mlp,vision_window+mlp,"
    "patch_merger,full+mlp,deep_merger,full+mlp'",
]
# Whole experts over ep and tp.
FEATURES["folded experts"] = [*EXPERTS, "mesh.expert_tp=1"]
FEATURES["folded, with all"] = [
    *FEATURES["routing"],
    "mesh.expert_tp=1",
    "train.expert_exchange=all_to_all",
    "model.moe.capacity_factor=1.5",
    "model.moe.latent_size=20",
    "model.mlp_bias=true",
]
FEATURES["preferences"] = [
    "train.objective=preference",
    "preference.loss_type=[sigmoid, ipo, sft]",
    "preference.precompute_ref_log_probs=true",
]
POLICY = [
    "train.objective=policy",
    "reinforce.updates_per_rollout=2",
    "reinforce.kl_coef=0.1",
    "reinforce.sampling={temperature: 0.8}",
]
FEATURES["policy"] = [*POLICY, "reinforce.loss_type=grpo", "reinforce.correction=truncate"]
FEATURES["policy, answers"] = [
    *POLICY,
    "reinforce.loss_type=gspo",
    "reinforce.clip_low=0.4",
    "reinforce.clip_high=0.4",
    "reinforce.correction=sequence_mask",
    "reinforce.entropy_coef=0.01",
]
FEATURES["values"] = ["train.objective=value", "model.num_labels=1", "reinforce.loss_type=ppo"]
FEATURES["rewards"] = [
    "train.objective=reward",
    "model.num_labels=1",
    "reward.center_rewards_coefficient=0.1",
]
# From a wider model with random weights (`random_teacher`).
FEATURES["distillation"] = ["train.objective=distill", "distill.hidden_layers={0: 1, 2: 2}"]
FEATURES["distillation"] += ["distill.beta=0.3", "distill.hidden_losses={cosine: 1.0, mse: 0.5}"]
FEATURES["distillation"] += ["distill.temperature=1.5", "distill.label_weight=0.25"]
# Features in words, for the page.
NAMES = {
    "dense": "a Llama-like model with grouped heads",
    "experts": "2 of 8 experts a token, with a balance loss",
    "tied": "embedding and head tied, one kv head",
    "biases": "LayerNorm, biases, a plain MLP",
    "windows": "sliding windows in turn with full attention, QK norm, sandwich norms",
    "learned positions": "learned positions",
    "sinks": "attention sinks, soft-caps, a chunked loss",
    "dropout": "dropout of activations and of attention",
    "muon": "Muon",
    "uneven layers": "layers that pipeline stages do not divide",
    "odd widths": "widths that no ZeRO group divides",
    "gpt-oss": "gpt-oss: windows, sinks, experts with biases",
    "routing": "DeepSeek-V3's router: sigmoid scores, groups, a shared expert",
    "expert bias": "experts balanced by a bias",
    "multi-token prediction": "multi-token prediction, by two depths of experts",
    "capacity": "capacity: a third of all pairs is dropped",
    "all-to-all": "experts' tokens by all-to-all",
    "sinkhorn": "Sinkhorn routing, jitter",
    "unlike layers": "layers of one branch, of two at once, and a wider MLP",
    "frozen": "frozen parameters",
    "latent attention": "latent attention (MLA), YaRN",
    "mamba": "Mamba-2",
    "hybrid": "Mamba-2, attention beside it, experts",
    "bert": "BERT: masked tokens and pairs of texts",
    "t5": "T5: an encoder, and a decoder of longer sequences",
    "gated deltanet": "Gated DeltaNet in turn with gated attention",
    "retro": "RETRO: neighbors that two layers read",
    "vit": "ViT, positions resized from another grid",
    "llava": "LLaVA: up to two images in a text",
    "clip": "CLIP: images and packed texts, all pairs of the batch",
    "siglip": "SigLIP: pooling by attention, a sigmoid loss",
    "mimo": "images and sounds in a text",
    "modernbert": "ModernBERT: windows to both sides",
    "llava-onevision": "LLaVA-OneVision: images in tiles",
    "mimo, own mesh": "images and sounds, each tower with a mesh of its own",
    "sft": "fine-tuning: each document counts as one, noise on embeddings",
    "lora": "LoRA on all matrices and tables, with dropout",
    "lora, experts": "LoRA on experts, routers trained whole",
    "lora, latent attention": "rsLoRA on latent attention",
    "lora, hybrid": "LoRA on Mamba-2, attention and experts",
    "dora": "DoRA",
    "qwen-vl": "Qwen-VL: packed images and videos, mRoPE, DeepStack",
    "folded experts": "whole experts over ep and tp, with a balance loss",
    "folded, with all": "whole experts: a shared one, latents, capacity, biases, all-to-all",
    "preferences": "DPO and IPO of packed pairs, with a term for chosen answers",
    "policy": "GRPO: ratios of tokens, a reference, truncated corrections",
    "policy, answers": "GSPO: ratios of answers, masked corrections, a bonus for entropy",
    "values": "PPO's critic",
    "rewards": "a reward model of packed pairs, centered",
    "distillation": "distillation from a wider teacher, layers' outputs too; no pipelines",
}
# What a row has besides where there are twice as many layers.
DEEP = {
    "t5": ["model.layer_pattern='B*4,[GXD]*4'"],
    "llava": ["model.layer_pattern='V*3,[P],G*4'"],
    "mimo": MIMO_DEEP,
    "mimo, own mesh": MIMO_DEEP,
    "llava-onevision": ["model.layer_pattern='V*3,[P],G*4'"],
    "qwen-vl": [
        "model.layer_pattern='vision_2d+mlp,vision_window+mlp,patch_merger,full+mlp,deep_merger,"
        "(full+mlp)*3'",
    ],
    "retro": ["model.layer_pattern='G,[G],[BCD]*2,[RD],G,[GRD]*2'"],
    "clip": ["model.layer_pattern='V*4,G*4'"],
    "lora, hybrid": ["lora.alpha=1.0"],  # else eight layers magnify the rounding of fp32 tenfold
    "siglip": ["model.layer_pattern='V*4,U*4'"],
}
ONE_MICRO_BATCH = ("clip", "siglip")  # whose losses compare all rows of a step
NO_RING = (
    "sinks",
    "dropout",
    "gpt-oss",
    "latent attention",
    "lora, latent attention",
    "multi-token prediction",
    "bert",
    "t5",
    "retro",
    "vit",
    "llava",
    "llava-onevision",
    "clip",
    "siglip",
    "mimo",
    "mimo, own mesh",
    "qwen-vl",
    "modernbert",
)
MOST_TP = {"odd widths": 2}
MOST_PP = {"distillation": 1}  # the teacher's forward pass goes through no pipeline
TEACHER = ["model.hidden_size=48", "model.num_hidden_layers=3", "run.seed=7"]
TEACHER += ["model.attention.num_attention_heads=24", "model.attention.num_key_value_heads=24"]
# Their towers have heads and lengths that 3 does not divide.
NOT_ON_SIX = ("llava", "llava-onevision", "clip", "siglip", "mimo", "mimo, own mesh", "qwen-vl")
