"""Every cross-field rule, broken once; the mesh arithmetic."""

import pytest

from mjax.config import load, mesh_sizes, validate
from mjax.config.rules.unread_rules import NEEDS
from mjax.config.schema.keys import leaf_keys
from mjax.config.schema.run import Config, MeshConfig
from mjax.config.validate import RULES
from mjax.errors import UserError

LATENT = [
    "model.layer_pattern=A",
    "model.mla.kv_lora_rank=8",
    "model.mla.qk_nope_head_dim=8",
    "model.mla.qk_rope_head_dim=4",
    "model.mla.v_head_dim=8",
]
STATES = ["model.layer_pattern=M", "model.mamba.mamba_num_heads=6"]
DELTANET = ["model.deltanet={linear_num_key_heads: 2, linear_num_value_heads: 4}"]
EXPERTS = ["model.layer_pattern=E", "model.moe.num_experts=4"]
FIM = ["data.fim_rate=0.5", "data.fim_prefix_token=1", "data.fim_middle_token=2"]
FIM += ["data.fim_suffix_token=3"]
# Rule -> overrides of a legal config that break it, and what the message must show.
MASKED = ["model.layer_pattern=B", "train.objective=masked_lm", "data.masked.mask_token_id=1"]
SAMPLES = [  # without a tokenizer
    "data.masked.sentences=true",
    "data.masked.mask_token_id=1",
    "data.masked.cls_token_id=2",
    "data.masked.sep_token_id=3",
    "data.masked.pad_token_id=4",
]
SPANS = ["train.objective=span_corruption", "data.target_length=32", "data.eod_token_id=1"]
SPANS += ["data.masked={sentinel_ids: [255, 240], pad_token_id: 0}"]
SPANS += ["model.layer_pattern='B*2, [GXD]*2'", "model.decoder_start_token_id=0"]
RETRO = ["model.layer_pattern='[G],[BCD],[RD],[GRD]'", "data.seq_length=128"]
VIT = ["model.layer_pattern=B", "model.position_embedding=learned"]
VIT += ["model.vision={image_size: 32, patch_size: 8, num_labels: 3}"]
VIT += ["train.objective=classify_images"]
LLAVA = ["model.layer_pattern='V,[P],G*2'", "data.seq_length=32"]
LLAVA += [
    "model.vision={image_size: 32, patch_size: 8, hidden_size: 32, intermediate_size: 48, "
    "num_attention_heads: 2, image_token_id: 9}"
]
QWEN_VL = ["model.layer_pattern='vision_2d+mlp, patch_merger, full+mlp*2'"]
QWEN_VL += ["model.rope.mrope_section=[8, 12, 12]", "data.seq_length=32"]
QWEN_VL += [
    "model.vision={patch_size: 8, hidden_size: 32, intermediate_size: 48, num_attention_heads: 2, "
    "image_token_id: 9, max_patches: 64}"
]
CLIP = ["model.layer_pattern='V*2,G*2'", "train.objective=contrastive"]
CLIP += ["train.micro_batch_size=8", "model.contrastive.projection_dim=16"]
CLIP += [
    "model.vision={image_size: 32, patch_size: 8, hidden_size: 32, intermediate_size: 48, "
    "num_attention_heads: 2}"
]
ATTENTION_8_BITS = ["precision.fp8_attention=true", "data.document_mask=false"]
ATTENTION_8_BITS += ["model.attention.head_dim=128", "data.seq_length=128"]
DPO = ["train.objective=preference"]
DISTILL = ["train.objective=distill", "distill.teacher=base"]
POLICY = ["train.objective=policy"]
THREE = ["mesh.cp=3", "data.seq_length=36"]
SOUNDS = (
    "model.audio={max_source_positions: 8, hidden_size: 32, intermediate_size: 48, "
    "num_attention_heads: 2, audio_token_id: 9}"
)
BOTH = ["model.num_hidden_layers=5", "model.layer_pattern='V,[P],S,[Q],G'", SOUNDS]
STREAMED = ["data.mock=false", "data.text=a", "data.stream=true", "data.tokenizer=byte"]
CONVERSATIONS = ["data.mock=false", "data.conversations.path=a.jsonl", "data.tokenizer=byte"]
BROKEN = {
    "tp_overlap_doubles": (
        ["mesh.tp=3", "mesh.tp_overlap=always"],
        "mesh.tp_overlap='always' exchanges with 1, 2, 4, .. devices, but mesh.tp=3 is no power",
    ),
    "expert_tp_is_one_or_tp": (
        ["mesh.tp=4", "mesh.expert_tp=2", *EXPERTS],
        "mesh.expert_tp=2 would cut experts over a part of mesh.tp=4, which is not built",
    ),
    "folded_experts_divide": (
        ["mesh.tp=4", "mesh.ep=2", "mesh.expert_tp=1", *EXPERTS],
        "model.moe.num_experts=4 is not divisible by mesh.ep=2 x mesh.tp=4, over which "
        "mesh.expert_tp=1 lays them",
    ),
    "pipeline_layout_alone": (
        ["mesh.pp=2", "mesh.virtual_stages=2", "mesh.pipeline_layout='Ettt|tL'"],
        "decides what mesh.virtual_stages=2 asks for",
    ),
    "pipeline_stages_filled": (
        ["mesh.pp=2", "mesh.virtual_stages=3"],
        "model.num_hidden_layers=4 leaves some of mesh.pp=2 x mesh.virtual_stages=3 stages empty",
    ),
    "pipeline_zero": (["mesh.pp=2", "mesh.zero=2"], "mesh.zero=2 cannot shard gradients"),
    "dp_positive": (["mesh.dp=0"], "mesh.dp=0"),
    "tp_divides_num_attention_heads": (["mesh.tp=8"], "model.attention.num_attention_heads=4"),
    "tp_divides_intermediate_size": (["mesh.tp=2", "model.intermediate_size=33"], "33"),
    "tp_divides_moe_intermediate_size": (
        ["mesh.tp=2", "mesh.expert_tp=2", *EXPERTS, "model.moe.moe_intermediate_size=33"],
        "model.moe.moe_intermediate_size=33",
    ),
    "tp_divides_shared_expert_intermediate_size": (
        ["mesh.tp=2", *EXPERTS, "model.moe.shared_expert_intermediate_size=33"],
        "model.moe.shared_expert_intermediate_size=33",
    ),
    "tp_divides_mamba_num_heads": (
        [*STATES, "mesh.tp=4"],
        "model.mamba.mamba_num_heads=6 is not divisible by mesh.tp=4",
    ),
    "tp_divides_linear_num_key_heads": (
        ["mesh.tp=4", "model.layer_pattern=T", *DELTANET],
        "model.deltanet.linear_num_key_heads=2 is not divisible by mesh.tp=4",
    ),
    "tp_divides_padded_vocab_size": (
        ["mesh.tp=2", "model.vocab_size=251", "model.vocab_multiple=1"],
        "model.padded_vocab_size=251 is not divisible by mesh.tp=2",
    ),
    "tp_divides_seq_length": (["mesh.tp=2", "data.seq_length=63"], "data.seq_length=63"),
    "cp_divides_seq_length": (
        ["mesh.cp=2", "mesh.tp=2", "data.seq_length=68"],
        "data.seq_length=68 is not divisible by 2 x mesh.cp=2 x mesh.tp=2",
    ),
    "cp_a2a_fits": (
        ["mesh.cp=4", "mesh.cp_type=a2a_ring", "mesh.cp_a2a=4"],
        "mesh.cp_a2a=4 does not fit mesh.cp_type='a2a_ring' and mesh.cp=4",
    ),
    "cp_a2a_divides_heads": (
        ["mesh.cp=8", "mesh.cp_type=a2a"],
        "model.attention.num_attention_heads=4 per mesh.tp=1 is not divisible by 8",
    ),
    "ring_supports": (
        ["mesh.cp=2", "mesh.cp_type=ring", "model.attention.attention_sinks=true"],
        "mesh.cp_type='ring' cannot run with model.attention.attention_sinks",
    ),
    "zero_group_fits": (["mesh.dp=4", "mesh.zero_group=3"], "mesh.zero_group=3 is none of [1, 4]"),
    "layer_sizes_fit": (
        ["model.layer_pattern='G@2,G'", "model.layer_sizes=[{intermediate_size: 8}]"],
        "model.layer_pattern='G@2,G' takes [2] of the 1 entries of model.layer_sizes",
    ),
    "layer_sizes_read": (
        ["model.layer_pattern='G@1,[GE]'", "model.layer_sizes=[{moe: {moe_intermediate_size: 8}}]"],
        "model.layer_sizes[0].moe.moe_intermediate_size has no effect",
    ),
    "kv_heads_divide_heads": (["model.attention.num_key_value_heads=3"], "num_key_value_heads=3"),
    "head_dim_known": (["model.hidden_size=255"], "set model.attention.head_dim"),
    "mla_sizes_given": (["model.layer_pattern=A"], "whose sizes model.mla lacks"),
    "mla_features": (
        [*LATENT, "model.attention.qk_norm=true"],
        "model.attention.qk_norm=True is not built for mla blocks",
    ),
    "mla_rotates_whole_part": (
        [*LATENT, "model.rope.partial_rotary_factor=0.5"],
        "model.rope.partial_rotary_factor=0.5 is not for mla blocks",
    ),
    "mamba_heads_given": (["model.layer_pattern=M"], "whose heads model.mamba lacks"),
    "mamba_groups_divide_heads": (
        [*STATES, "model.mamba.n_groups=4"],
        "model.mamba.mamba_num_heads=6 is not divisible by model.mamba.n_groups=4",
    ),
    "deltanet_heads_fit": (
        ["model.layer_pattern=T", "model.deltanet.linear_num_key_heads=4"],
        "model.deltanet.linear_num_value_heads=0 is no multiple of",
    ),
    "mamba_steps_fit": (
        [*STATES, "model.mamba.time_step_limit=[0.1]"],
        "model.mamba.time_step_limit=[0.1]",
    ),
    "multipliers_fit": (["model.mlp_multipliers=[0.5]"], "model.mlp_multipliers=[0.5]"),
    "rotary_dims_even": (["model.rope.partial_rotary_factor=0.05"], "rotates 3 dims"),
    "scaling_keys_used": (
        ["model.rope.rope_scaling={rope_type: linear, factor: 2.0, beta_fast: 8.0}"],
        "model.rope.rope_scaling.beta_fast=8.0 has no effect with "
        "model.rope.rope_scaling.rope_type='linear'; remove it",
    ),
    "longrope_complete": (
        ["model.rope.rope_scaling={rope_type: longrope, short_factor: [1.0]}"],
        "longrope needs short_factor and long_factor",
    ),
    "all_heads_norm_has_heads": (
        [
            "model.attention.qk_norm=true",
            "model.attention.qk_norm_all_heads=true",
            "model.attention.num_key_value_heads=1",
            "mesh.tp=2",
        ],
        "model.attention.num_key_value_heads=1 is not divisible by mesh.tp=2",
    ),
    "window_given": (["model.layer_pattern=LG"], "set model.attention.sliding_window"),
    "top_k_fits": (
        [*EXPERTS, "model.moe.num_experts_per_tok=5"],
        "exceeds model.moe.num_experts=4",
    ),
    "top_1_learns": ([*EXPERTS, "model.moe.num_experts_per_tok=1"], "makes every gate 1"),
    "groups_fit": (
        [*EXPERTS, "model.moe.n_group=3"],
        "model.moe.n_group=3, model.moe.topk_group=1: groups of equal size",
    ),
    "group_score_fits": (
        [*EXPERTS, "model.moe.n_group=2", "model.moe.group_score_topk=3"],
        "model.moe.group_score_topk=3 exceeds the experts of a group",
    ),
    "sinkhorn_alone": (
        [*EXPERTS, "model.moe.sinkhorn=true", "model.moe.expert_bias=true"],
        "model.moe.sinkhorn=True balances by itself, not with model.moe.expert_bias=True",
    ),
    "layers_averaged_in_one_stream": (
        [*RETRO, "model.layer_pattern='[G],[BCE],[RD],[GRD]'", "model.moe.num_experts=4"]
        + ["model.moe.router_aux_loss_type=mean_over_layers"],
        "model.moe.router_aux_loss_type='mean_over_layers' is not built for experts of neighbors",
    ),
    "batched_experts_have_capacity": (
        [*EXPERTS, "train.experts=batched"],
        "train.experts='batched' needs experts that take a known number of rows",
    ),
    "ep_divides_experts": ([*EXPERTS, "mesh.ep=8"], "not divisible by mesh.ep=8"),
    "swiglu_limit_is_of_experts": (
        ["model.swiglu_limit=7.0"],
        "experts with a gate and silu alone",
    ),
    "prediction_needs_next_token": (
        ["model.num_nextn_predict_layers=1", "train.objective=a:B"],
        "model.num_nextn_predict_layers=1 are not trained by train.objective='a:B'",
    ),
    "prediction_has_no_learned_positions": (
        ["model.num_nextn_predict_layers=1", "model.position_embedding=learned"],
        "not built for model.position_embedding='learned'",
    ),
    "prediction_fits_sequence": (
        ["model.num_nextn_predict_layers=8", "data.seq_length=8"],
        "model.num_nextn_predict_layers=8 reaches beyond data.seq_length=8",
    ),
    "seq_length_fits_positions": (["data.seq_length=4096"], "data.seq_length=4096 exceeds"),
    "neighbors_are_encoded_before_they_are_read": (
        ["model.layer_pattern='[GRD],[BCD],[GRD],G'"],
        "a layer with retrieval stands before all layers of neighbors",
    ),
    "retro_predicts_the_next_token": (
        [*RETRO, "train.objective=classify"],
        "train.objective='classify' knows no neighbors",
    ),
    "chunks_divide": (
        [*RETRO, "data.seq_length=96"],
        "data.seq_length=96 is not divisible by model.retro.chunk_length=64",
    ),
    "chunks_trade_heads": (
        [*RETRO, "mesh.tp=2", "mesh.cp=4"],
        "mesh.tp=2 is not divisible by mesh.cp=4, over which chunks",
    ),
    "neighbors_are_of_one_corpus": (
        [*RETRO, "data.fim_rate=0.5"],
        "data.fim_rate=0.5 rearranges the text whose neighbors were looked up",
    ),
    "images_are_classified": (
        [*VIT, "train.objective=next_token"],
        "train.objective='next_token' reads tokens, but model.vision.patch_size=8",
    ),
    "towers_see_all_patches": ([*VIT, "model.layer_pattern=G"], "model.layer_pattern='G': an"),
    "compared_towers_stand_apart": (
        [*CLIP, "model.layer_pattern='V*2,G,U'"],
        "model.layer_pattern='V*2,G,U': without a projector, vision stands before full alone",
    ),
    "compared_texts_are_plain": (
        [*CLIP, "model.contrastive.projection_dim=0"],
        "model.contrastive.projection_dim=0 is needed to compare images with texts",
    ),
    "pooled_images_have_the_width": (
        [*CLIP, "model.vision.class_token=false"],
        "model.contrastive.projection_dim=16 is not model.vision.hidden_size=32",
    ),
    "patches_fill_an_image": (
        [*VIT, "data.images.image_size=30"],
        "data.images.image_size=30 is no multiple of model.vision.patch_size=8",
    ),
    "tiles_divide_images": (
        [*LLAVA, "model.vision.image_grid_pinpoints=[[32, 64], [48, 32]]"],
        "image_grid_pinpoints has [48, 32], no multiple of model.vision.image_size=32",
    ),
    "tags_tell_tiles_apart": (
        [*LLAVA, "model.vision.tile_tags=[a, b]"],
        "model.vision.tile_tags: 2 for 0 tiles and a whole view",
    ),
    "rows_hold_an_image": (
        [*VIT, "data.seq_length=16"],
        "data.seq_length=16 is less than the 17 tokens of an image",
    ),
    "image_classes_given": ([*VIT, "model.vision.num_labels=0"], "model.vision.num_labels=0"),
    "channels_are_scaled": (
        [*VIT, "data.images.mean=[0.5, 0.5]"],
        "data.images.mean=[0.5, 0.5] does not fit model.vision.num_channels=3",
    ),
    "towers_stand_before_projectors": (
        [*LLAVA, "model.layer_pattern='V,[P],B,G'"],
        "model.layer_pattern='V,[P],B,G': a text with items has the layers of each tower",
    ),
    "packed_towers_stand_before_mergers": (
        [*QWEN_VL, "model.layer_pattern='vision_2d+mlp, full+mlp'"],
        "model.layer_pattern='vision_2d+mlp, full+mlp': packed images have layers of vision_2d",
    ),
    "packed_images_have_sizes": (
        [*QWEN_VL, "model.rope.mrope_section=[8, 8, 8]"],
        "model.rope.mrope_section=[8, 8, 8] is not three numbers of 32 channel pairs in all",
    ),
    "towers_have_sizes": (
        [*LLAVA, "model.vision.intermediate_size=0"],
        "model.vision.intermediate_size=0 is needed for a tower",
    ),
    "towers_divide": (
        [*LLAVA, "mesh.tp=4"],
        "model.vision.num_attention_heads=2 is not divisible by mesh.tp=4",
    ),
    "towers_have_mesh_sizes": (
        [*LLAVA, "mesh.tp=4", "mesh.towers={vision: {tp: 2}}"],
        "mesh.towers={'vision': {'tp': 2}}: sizes between 1 and mesh.tp=4 are not built",
    ),
    "towers_have_tokens_of_their_own": (
        [*LLAVA, *BOTH],
        "model.vision.image_token_id=9 and model.audio.audio_token_id=9 are the same",
    ),
    "texts_with_items_given": (
        [*LLAVA, "data.mock=false", "data.text=x", "data.tokenizer=byte"],
        "the data no items",
    ),
    "rows_can_be_packed": (
        ["data.images.packed=true"],
        "data.images.packed=True has no meaning without texts that hold items",
    ),
    "mock_rows_hold_an_item_of_each": (
        [*LLAVA, *BOTH, "model.vision.image_token_id=8", "data.seq_length=20"],
        "data.seq_length=20 is less than the 24 tokens of an item of each modality",
    ),
    "towers_have_one_objective": (
        [*LLAVA, "train.objective=masked_lm"],
        "train.objective='masked_lm' is not next_token, which model.layer_pattern",
    ),
    "towers_lack": (
        [*LLAVA, "model.residual_multiplier=0.5"],
        "model.residual_multiplier=0.5 is not built beside towers",
    ),
    "next_token_is_hidden": (
        ["model.layer_pattern=B"],
        "train.objective='next_token' is given away where model.layer_pattern='B' has",
    ),
    "sides_are_apart": (
        [*SPANS, "model.layer_pattern='[GXD]*2, B*2'"],
        "model.layer_pattern='[GXD]*2, B*2': an encoder-decoder has bidirectional layers, and then",
    ),
    "decoder_writes_spans": (
        ["model.layer_pattern='B*2, [GXD]*2'"],
        "train.objective='next_token' knows no decoder beside an encoder",
    ),
    "spans_need_a_decoder": (
        [*SPANS, "model.layer_pattern=B"],
        "train.objective='span_corruption' needs an encoder and a decoder",
    ),
    "relative_positions_of_both_sides": (
        ["model.position_embedding=relative"],
        "model.position_embedding='relative' is built for an encoder-decoder",
    ),
    "distances_reach_all_buckets": (
        ["model.relative.max_distance=16"],
        "model.relative.max_distance=16 is too short for model.relative.num_buckets=32",
    ),
    "cross_attention_is_plain": (
        [*SPANS, "model.attention.qk_norm=true"],
        "cross-attention lacks model.attention.qk_norm=True",
    ),
    "target_length_divides": (
        [*SPANS, "mesh.tp=4", "data.target_length=34", "data.seq_length=32"],
        "data.target_length=34 is not divisible by mesh.tp=4, and with mesh.cp=1 by 2 x both",
    ),
    "hidden_tokens_need_an_encoder": (
        ["train.objective=masked_lm"],
        "is for encoders, but model.layer_pattern='full+mlp' has no bidirectional blocks",
    ),
    "padding_is_not_seen": ([*MASKED, "data.document_mask=false"], "data.document_mask=False"),
    "encoders_continue_nothing": (
        [*MASKED, "train.sample_prompt=a", "data.tokenizer=byte"],
        "train.sample_prompt='a': an encoder continues no text",
    ),
    "mask_token_known": (MASKED[:2], "data.masked.mask_token_id=None is unknown"),
    "masked_ids_in_vocab": (
        [*MASKED, "data.masked.mask_token_id=999"],
        "ids of special tokens in data.masked are outside model.vocab_size=256",
    ),
    "samples_have_specials": ([*MASKED, "data.masked.sentences=true"], "needs the ids of [CLS]"),
    "samples_know_words": (
        [*MASKED, *SAMPLES],
        "data.masked.whole_words=True needs data.tokenizer=None, which says what continues a word",
    ),
    "sentences_are_masked": (
        ["model.layer_pattern=B", "train.objective=classify", "data.tokenizer=byte", *SAMPLES],
        "makes samples for masked_lm and span_corruption, not for train.objective='classify'",
    ),
    "spans_have_ids": (
        [*SPANS, "data.masked.sentinel_ids=[255]"],
        "train.objective='span_corruption' needs data.masked.sentinel_ids=[255]",
    ),
    "spans_count_on": (
        [*SPANS, "data.reset_position_ids=true"],
        "data.reset_position_ids=True is not built for the decoder of train.objective='span_corr",
    ),
    "fim_is_of_streams": (
        [*MASKED, *SAMPLES, "data.tokenizer=byte", "data.fim_rate=0.5"],
        "data.fim_rate=0.5 rearranges the documents of a stream",
    ),
    "sentence_samples_fit": (
        [*MASKED, *SAMPLES, "data.tokenizer=byte", "data.seq_length=7"],
        "data.seq_length=7 leaves no room for a sample of train.objective='masked_lm'",
    ),
    "pairs_need_sentences": (
        [*MASKED, "model.bert.num_labels=3"],
        "model.bert.num_labels=3: masked_lm tells two classes of rows",
    ),
    "classes_given": (
        ["model.layer_pattern=B", "train.objective=classify"],
        "train.objective='classify' has no classes to tell",
    ),
    "classes_are_of_text": (
        ["model.layer_pattern=B", "train.objective=classify", "model.bert.num_labels=2"]
        + ["data.mock=false", "data.paths=[a]"],
        "train.objective='classify' needs data.text, a file of JSON lines with a label each",
    ),
    "bert_head_is_tied": (
        [*MASKED, "model.bert.mlm_head=true"],
        "model.bert.mlm_head=True is built on tied embeddings alone",
    ),
    "prediction_has_a_final_norm": (
        ["model.num_nextn_predict_layers=1", "model.norm_placement=post_residual"],
        "model.num_nextn_predict_layers=1 is not built for bidirectional blocks",
    ),
    "one_data_source": (["data.paths=[a]"], "data.paths and data.mock exclude each other"),
    "weights_match_paths": (
        ["data.mock=false", "data.paths=[a, b]", "data.weights=[1.0]"],
        "data.weights=[1.0]",
    ),
    "weights_legal": (
        ["data.mock=false", "data.paths=[a, b]", "data.weights=[1.0, -1.0]"],
        "data.weights=[1.0, -1.0]",
    ),
    "weights_begin_at_0": (
        ["data.mock=false", "data.paths=[a, b]", "data.weights={5: [1, 1]}"],
        "leave out the start of the run",
    ),
    "stream_has_text": (["data.stream=true"], "needs text that files hold"),
    "stream_is_plain": ([*STREAMED, "data.fim_rate=0.5"], "gives rows of plain text"),
    "mirror_is_an_address": (["checkpoint.mirror=runs/a"], "is no address of an object store"),
    "split_legal": (["data.split=[0, 0, 0]"], "data.split=[0.0, 0.0, 0.0]"),
    "held_out_data": (
        ["data.mock=false", "data.paths=[a]", "data.split=[1, 0, 0]", "train.eval_interval=5"],
        "train.eval_interval=5",
    ),
    "third_share_is_left": (
        ["data.mock=false", "data.paths=[a]", "data.split=[9, 1, 0]", "train.test_steps=5"],
        "train.test_steps=5 but no data is left for them: data.split=[9.0, 1.0, 0.0]",
    ),
    "names_of_sets": (
        ["data.eval_sets={'a b': x}", "train.eval_interval=5"],
        "data.eval_sets: 'a b' is no name",
    ),
    "sets_are_of_texts": (
        ["data.eval_sets={a: x}", "train.eval_interval=5"],
        "data.eval_sets holds sets of another kind",
    ),
    "rehearsed_faults": (["run.rehearse=[nan@3, nan@3:1]"], "run.rehearse: 'nan@3:1' is no fault"),
    "rehearsed_faults_are_seen": (
        ["run.rehearse=[hang@3, bit_flip@2:1]"],
        "nothing would see bit_flip with train.check_replicas_interval=None",
    ),
    "text_needs_tokenizer": (["data.mock=false", "data.text=stdlib"], "set data.tokenizer"),
    "conversations_need_tokenizer": (
        ["data.mock=false", "data.conversations.path=a.jsonl"],
        "data.conversations.path='a.jsonl' has no tokenizer",
    ),
    "conversations_are_documents": (
        [*CONVERSATIONS, "data.document_mask=false"],
        "would see each other: data.document_mask=False",
    ),
    "conversations_are_predicted": (
        [
            *CONVERSATIONS,
            "train.objective=masked_lm",
            "model.layer_pattern=B",
            "data.masked.mask_token_id=0",
        ],
        "train.objective='masked_lm' does not read data.conversations.path='a.jsonl'",
    ),
    "trained_tokenizer_needs_text": (["data.tokenizer=train:256"], "no text to train on"),
    "trained_vocab_legal": (
        ["data.mock=false", "data.text=stdlib", "data.tokenizer=train:4k"],
        "data.tokenizer='train:4k' does not fit model.vocab_size=256",
    ),
    "eod_known": (["data.eod_mask_loss=true"], "set data.eod_token_id"),
    "eod_in_vocab": (["data.eod_token_id=256"], "data.eod_token_id=256"),
    "sample_prompt_needs_tokenizer": (["train.sample_prompt=hello"], "set data.tokenizer"),
    "run_dir_is_files": (["run.dir=gs://bucket/run"], "run.dir='gs://bucket/run' is in an object"),
    "local_dir_is_files": (
        ["checkpoint.local_dir=gs://b/x", "checkpoint.local_interval=5"],
        "local_dir='gs://b/x' is in an object",
    ),
    "local_tier_is_whole": (["checkpoint.local_interval=5"], "local_dir=None and"),
    "local_is_more_frequent": (
        ["checkpoint.local_dir=/x", "checkpoint.local_interval=5", "checkpoint.interval=5"],
        "local_interval=5 is not below",
    ),
    "best_is_measured": (
        ["checkpoint.keep_best=1", "checkpoint.interval=30", "train.eval_interval=20"],
        "checkpoint.interval=30 is no multiple of train.eval_interval=20",
    ),
    "optimizer_known": (["optimizer.name=sgd"], "(did you mean optax.sgd?)"),
    "args_not_own": (
        ["optimizer.name=optax.lion", "optimizer.args={weight_decay: 0.5}"],
        "optimizer.args.weight_decay=0.5 has a key of mjax's own, optimizer.weight_decay",
    ),
    "args_known": (
        ["optimizer.name=optax.lion", "optimizer.args={beta: 0.5}"],
        "optimizer.args.beta=0.5: optax.lion has no such argument but b1, b2",
    ),
    "args_typed": (
        ["optimizer.name=optax.sgd", "optimizer.args={nesterov: 1}"],
        "optimizer.args.nesterov=1 of optax.sgd must be true or false",
    ),
    "args_complete": (
        ["optimizer.name=optax.trace"],
        "lacks decay, which optimizer.name='optax.tr",
    ),
    "roles_known": (["optimizer.lr_multipliers={embeding: 2.0}"], "'embeding'"),
    "muon_roles_are_matrices": (["optimizer.muon_roles=[norm]"], "['norm']"),
    "lr_multipliers_legal": (["optimizer.lr_multipliers={head: -1.0}"], "{'head': -1.0}"),
    "weight_decay_rises": (["optimizer.weight_decay_end=0.01"], "weight_decay_end=0.01 is below"),
    "bf16_mu_moves": (["optimizer.mu_dtype=bfloat16", "optimizer.b1=0.999"], "b1=0.999"),
    "bf16_nu_moves": (["optimizer.nu_dtype=bfloat16", "optimizer.b2=0.999"], "b2=0.999"),
    "bf16_optax_moves": (
        ["optimizer.name=optax.lion", "optimizer.mu_dtype=bfloat16"],
        "moments of optimizer.name='optax.lion' in bfloat16 might stand still",
    ),
    "bf16_masters_move": (["precision.params=bfloat16"], "or precision.params=float32"),
    "offload_of_muon": (
        ["optimizer.name=muon", "optimizer.offload=true"],
        "built for elementwise updates, not for optimizer.name='muon'",
    ),
    "fim_sentinels": (
        ["data.fim_rate=0.5", "data.fim_prefix_token=1"],
        "data.fim_rate=0.5 needs data.fim_middle_token=None",
    ),
    "fim_tokenizer": (FIM, "needs data.tokenizer=None"),
    "fim_text": ([*FIM, "data.tokenizer=byte"], "needs text, and data.mock=True has none"),
    "fim_fragments": (
        [*FIM, "data.tokenizer=byte", "data.mock=false", "data.paths=[x]"]
        + ["data.fim_split_sample=7"],
        "data.fim_split_sample=7 and data.fim_fragment_rate=None belong together",
    ),
    "adapters_start_once": (
        ["lora.rank=2", "lora.base=nf4", "precision.fp8=delayed"],
        "lora.base='nf4' is read in precision.compute, not in 8 bits: precision.fp8='delayed'",
    ),
    "adapters_start_on_given_weights": (
        ["lora.rank=2", "lora.init=pissa"],
        "lora.init='pissa' starts from given weights",
    ),
    "adapters_freeze_all_else": (
        ["lora.rank=2", "train.freeze=[norm]"],
        "all that it does not train, so train.freeze=['norm'] would add nothing",
    ),
    "min_lr_below_lr": (["schedule.min_lr=1.0"], "schedule.min_lr=1.0 exceeds schedule.lr=0.0003"),
    "warmup_init_below_lr": (["schedule.warmup_init_lr=1.0"], "lower warmup_init_lr"),
    "warmup_before_decay_ends": (["schedule.warmup_steps=1000"], "all 1000 steps"),
    "wsd_has_decay": (["schedule.decay=wsd"], "set schedule.wsd_decay_steps"),
    "wsd_fits": (
        ["schedule.decay=wsd", "schedule.wsd_decay_steps=600", "schedule.warmup_steps=600"],
        "exceed 1000 steps",
    ),
    "ramp_legal": (["train.rampup_batch_size=[3, 2, 100]"], "train.rampup_batch_size=[3, 2, 100]"),
    "ramp_divisible": (
        ["train.rampup_batch_size=[2, 2, 100]", "train.micro_batch_size=4"],
        "passes 2, which is not divisible by train.micro_batch_size=4",
    ),
    "batch_divisible": (["train.micro_batch_size=3"], "train.global_batch_size=8"),
    "global_balance_needs_one_micro_batch": (
        [*EXPERTS, "model.moe.router_aux_loss_coef=0.1", "mesh.dp=1"]
        + ["model.moe.router_aux_loss_over=global_batch", "train.global_batch_size=16"]
        + ["train.micro_batch_size=8"],
        "needs all choices before the first gradient, but train.global_batch_size=16 is several",
    ),
    "pairs_need_one_micro_batch": (
        [*CLIP, "mesh.dp=1", "train.global_batch_size=16"],
        "compares all rows of a step, but train.global_batch_size=16 is several",
    ),
    "pairs_need_others": (
        [*CLIP, "train.global_batch_size=1", "train.micro_batch_size=1"],
        "train.global_batch_size=1: a pair that is alone has no other",
    ),
    "fp8_experts_in_four_bits": (
        ["precision.fp8=nvfp4", "precision.fp8_experts=true"],
        "precision.fp8_experts=True with the rounding at random of nvfp4 is not built",
    ),
    "fp8_scales_of_recipe": (
        ["precision.fp8=mxfp8", "precision.fp8_scales=free"],
        "precision.fp8_scales='free' is of precision.fp8=block128 alone",
    ),
    "fp8_experts_one_by_one": (
        ["precision.fp8=current", "precision.fp8_experts=true", "train.experts=loop"],
        "train.experts='loop' has no products of 8 bits for precision.fp8='current'",
    ),
    "fp8_dispatch_in_blocks": (
        [*EXPERTS, "precision.fp8_dispatch=true", "model.hidden_size=192"],
        "precision.fp8_dispatch=True: model.hidden_size=192 is no multiple of 128",
    ),
    "fp8_dispatch_rounds_once": (
        [*EXPERTS, "precision.fp8_dispatch=true", "precision.fp8=delayed"]
        + ["precision.fp8_experts=true"],
        "precision.fp8_dispatch=True: experts of precision.fp8='delayed' would round tokens once",
    ),
    "fp8_attention_fits": (
        [*ATTENTION_8_BITS, "mesh.cp=2"],
        "cuDNN has no 8-bit attention to keys that come in blocks (mesh.cp=2)",
    ),
    "fp8_layers_left": (
        ["precision.fp8=current", "precision.fp8_skip_layers=2"],
        "precision.fp8_skip_layers=2 at both ends of model.num_hidden_layers=4 leaves none",
    ),
    "fp8_skip_pipeline": (
        ["precision.fp8=current", "precision.fp8_skip_layers=1", "mesh.pp=2"],
        "precision.fp8_skip_layers=1 is not built for the chunks of mesh.pp=2",
    ),
    "weights_in_groups": (
        ["precision.fp8=current", "precision.weights=mxfp4"],
        "precision.weights='mxfp4' would be rounded a second time by precision.fp8='current'",
    ),
    "fp16_without_fp8": (
        ["precision.compute=float16", "precision.fp8=delayed"],
        "precision.fp8='delayed': its scales are not built for gradients with the loss scale of "
        "precision.compute='float16'",
    ),
    "fp16_masters": (
        ["precision.compute=float16", "precision.params=bfloat16"]
        + ["optimizer.stochastic_rounding=true"],
        "precision.params='bfloat16': precision.compute='float16' needs fp32 masters",
    ),
    "loss_scale_range": (
        ["precision.compute=float16", "precision.initial_loss_scale=0.5"],
        "precision.initial_loss_scale=0.5 is below precision.min_loss_scale=1.0",
    ),
    "offload_kept": (["train.remat=attention", "train.offload=[up]"], "no layer keeps 'up'"),
    "offload_pipeline": (
        ["train.offload=all", "mesh.pp=2"],
        "train.offload='all' is not built for what waits in the stages of mesh.pp=2",
    ),
    "offload_loops": (["train.offload=all", "train.unroll=0"], "unrolled: train.unroll=0"),
    "keep_every_is_saved": (["checkpoint.keep_every=10"], "checkpoint.interval=None"),
    "profile_steps_follow": (["log.profile_steps=[12, 10]"], "log.profile_steps=[12, 10]"),
    "diagnostics_offload": (
        ["log.diagnostics_interval=10", "optimizer.offload=true"],
        "log.diagnostics_interval=10 is not built for moments on the host (optimizer.offload=True)",
    ),
    "cudnn_supports": (
        ["train.attention=cudnn", "model.attention.attention_sinks=true"],
        "train.attention='cudnn' cannot run with model.attention.attention_sinks",
    ),
    "short_rows_are_whole": (
        ["train.attention=triton", "precision.compute=bfloat16", "mesh.cp=2"],
        "takes all keys of a row, but mesh.cp=2 cuts them",
    ),
    "losses_have_weights": (
        [*DPO, "preference.loss_weights=[1, 2]"],
        "preference.loss_weights=[1.0, 2.0] does not have one entry for each",
    ),
    "losses_go_together": (
        [*DPO, "preference.loss_type=[kto, sigmoid]"],
        "preference.loss_type=['kto', 'sigmoid'] mixes losses of single answers with others",
    ),
    "exo_smooths": (
        [*DPO, "preference.loss_type=exo_pair"],
        "exo_pair compares with (1 - preference.label_smoothing=0.0",
    ),
    "reference_is_used": (
        [*DPO, "preference.loss_type=cpo", "preference.reference=base"],
        "preference.reference='base', but nothing reads a reference",
    ),
    "answers_have_a_divisor": (
        [*DPO, "train.loss_divisor=sequences"],
        "train.loss_divisor='sequences' divides losses of tokens",
    ),
    "answers_are_conversations": (
        [*DPO, "data.mock=false", "data.text=stdlib", "data.tokenizer=byte"],
        "train.objective='preference' reads records of answers",
    ),
    "answers_are_documents": (
        [*DPO, "data.document_mask=false"],
        "answers of a row would see each other: data.document_mask=False",
    ),
    "prefixes_can_be_shared": (
        [*DPO, "data.shared_prefixes=true", "mesh.cp=2"],
        "mesh.cp=2 cuts rows, and answers need their prompt whole (data.shared_prefixes=True)",
    ),
    "rewards_have_a_head": (
        ["train.objective=reward"],
        "train.objective='reward' and model.num_labels=0 do not go together",
    ),
    "scores_are_of_decoders": (
        ["train.objective=reward", "model.num_labels=1", "model.bert.embedding_norm=true"],
        "model.num_labels=1 is not built for the architecture encoder",
    ),
    "students_are_decoders": (
        [*DISTILL, "model.bert.embedding_norm=true"],
        "train.objective='distill' is not built for the architecture encoder",
    ),
    "teachers_have_no_pipeline": (
        [*DISTILL, "mesh.pp=2"],
        "mesh.pp=2: the teacher of a step needs distill.teacher_mesh={} or distill.stored=None",
    ),
    "outputs_of_layers_are_computed": (
        [*DISTILL, "distill.stored=folder", "distill.hidden_layers={0: 1}"],
        "distill.hidden_layers={0: 1}: distill.stored='folder' has no outputs of layers",
    ),
    "answers_are_rated_live": (
        [*DISTILL, "distill.student_share=1", "distill.stored=folder"],
        "distill.student_share=1.0: distill.stored='folder' has no answers that are yet to be",
    ),
    "teachers_have_a_mesh": (
        [*DISTILL, "distill.teacher_mesh={devices: 4, tp: 3}"],
        "distill.teacher_mesh={'devices': 4, 'tp': 3} has sizes that do not divide its devices",
    ),
    "students_draw_on_their_devices": (
        [*DISTILL, "distill.student_share=0.5", "reinforce.engine={devices: 4}"],
        "reinforce.engine={'devices': 4} has devices, but students of train.objective='distill'",
    ),
    "teachers_on_devices_are_live": (
        [*DISTILL, "distill.stored=folder", "distill.teacher_mesh={devices: 4}"],
        "distill.teacher_mesh={'devices': 4}: distill.stored='folder' needs no devices",
    ),
    "groups_are_compared": (
        [*POLICY, "reinforce.group_size=1"],
        "reinforce.group_size=1 leaves reinforce.loss_type='grpo' nothing to compare",
    ),
    "scales_fit_the_loss": (
        [*POLICY, "reinforce.loss_type=ppo", "reinforce.advantage_scale=group"],
        "reinforce.advantage_scale='group': reinforce.loss_type='ppo' compares no groups",
    ),
    "divergences_pull": (
        [*POLICY, "reinforce.kl_coef=0.1", "reinforce.kl_estimator=k1"],
        "the gradient of reinforce.kl_estimator='k1' in the loss has a mean of 0",
    ),
    "bounds_are_in_order": (
        [*POLICY, "reinforce.correction=mask", "reinforce.correction_low=2.0"],
        "reinforce.correction_low=2.0 is not below reinforce.correction_high=2.0",
    ),
    "sampling_is_known": (
        [*POLICY, "reinforce.sampling={temperature: 0}"],
        "reinforce.sampling={'temperature': 0.0} has a name or a number that it cannot take",
    ),
    "corrections_see_all_words": (
        [*POLICY, "reinforce.correction=mask", "reinforce.sampling={top_p: 0.9}"],
        "reinforce.correction='mask': reinforce.sampling={'top_p': 0.9} cuts words off",
    ),
    "engines_have_whole_sizes": (
        [*POLICY, "reinforce.engine={devices: 0}"],
        "reinforce.engine={'devices': 0}: devices is 0",
    ),
    "critics_have_no_pipeline": (
        [*POLICY, "data.mock=false", "reinforce.loss_type=ppo", "mesh.pp=2"],
        "mesh.pp=2: the critic of reinforce.loss_type='ppo' needs a mesh without",
    ),
    "invariant_steps_are_built": (
        [*POLICY, "reinforce.engine={batch_invariant: true}", "lora.rank=4"],
        "lora.rank=4: trainer and engine are not built to agree to the bit with it",
    ),
    "every_key_is_read": (
        ["optimizer.muon_steps=4"],
        "optimizer.muon_steps=4 has no effect with optimizer.name='adamw', only with muon",
    ),
}

CLASSES = ["model.layer_pattern=B", "train.objective=classify", "model.bert.num_labels=2"]
PATTERN = "model.layer_pattern="
# Overrides of a legal config, the key among them that nothing reads, and what decides it.
UNREAD = [
    (["mesh.virtual_stages=2"], "mesh.virtual_stages=2", "mesh.pp=1"),
    (["reinforce.clip_high=0.1"], "reinforce.clip_high=0.1", "train.objective='next_token'"),
    ([*POLICY, "reinforce.gamma=0.9"], "reinforce.gamma=0.9", "reinforce.loss_type='grpo'"),
    (
        [*DISTILL, "reinforce.group_size=1"],
        "reinforce.group_size=1",
        "train.objective='distill'",
    ),
    (
        [*POLICY, "reinforce.correction_high=3"],
        "reinforce.correction_high=3.0",
        "reinforce.correction='none'",
    ),
    (
        [*POLICY, "data.mock=false", "data.text=stdlib", "data.tokenizer=byte"],
        "data.text='stdlib'",
        "train.objective='policy'",
    ),
    (["model.mla.kv_lora_rank=8"], "model.mla.kv_lora_rank=8", f"{PATTERN}'full+mlp'"),
    (
        [*LATENT, "model.attention.num_key_value_heads=2"],
        "model.attention.num_key_value_heads=2",
        f"{PATTERN}'A'",
    ),
    (["model.mamba.state_size=8"], "model.mamba.state_size=8", f"{PATTERN}'full+mlp'"),
    (["model.deltanet.linear_chunk_size=8"], "model.deltanet.linear_chunk_size=8", PATTERN),
    (["model.relative.max_distance=99"], "model.relative.max_distance=99", "model.position_"),
    (
        ["model.position_embedding=learned", "model.rope.rope_scaling={rope_type: linear}"],
        "model.rope.rope_scaling=",
        "model.position_embedding='learned'",
    ),
    (
        ["model.position_embedding=none", "model.rope.rope_theta=5e5"],
        "model.rope.rope_theta=500000.0",
        "model.position_embedding='none'",
    ),
    ([*STATES, "model.attention.qk_norm=true"], "model.attention.qk_norm=True", f"{PATTERN}'M'"),
    (
        ["model.attention.qk_norm_all_heads=true"],
        "model.attention.qk_norm_all_heads=True",
        "model.attention.qk_norm=False",
    ),
    (
        ["model.attention.sliding_window=8"],
        "model.attention.sliding_window=8",
        f"{PATTERN}'full+mlp'",
    ),
    (["model.norm_bias=false"], "model.norm_bias=False", "model.norm='rmsnorm'"),
    (["model.moe.num_experts=4"], "model.moe.num_experts=4", f"{PATTERN}'full+mlp'"),
    (["model.moe.router_bias=true"], "model.moe.router_bias=True", f"{PATTERN}'full+mlp'"),
    (
        [*EXPERTS, "model.moe.shared_expert_gate=true"],
        "model.moe.shared_expert_gate=True",
        "model.moe.shared_expert_intermediate_size=0",
    ),
    (
        [*EXPERTS, "model.moe.drop_policy=position"],
        "model.moe.drop_policy='position'",
        "model.moe.capacity_factor=None",
    ),
    ([*VIT, "model.vision.pixel_shuffle=true"], "model.vision.pixel_shuffle=True", PATTERN),
    ([*VIT, "model.vision.hidden_size=64"], "model.vision.hidden_size=64", f"{PATTERN}'B'"),
    ([*VIT, "model.bert.type_vocab_size=2"], "model.bert.type_vocab_size=2", PATTERN),
    ([*CLIP, "model.tie_word_embeddings=true"], "model.tie_word_embeddings=True", PATTERN),
    ([*CLIP, "model.vision.max_images=2"], "model.vision.max_images=2", PATTERN),
    ([*LLAVA, "model.vision.num_labels=3"], "model.vision.num_labels=3", "train.objective="),
    ([*LLAVA, "model.contrastive.projection_dim=8"], "model.contrastive.projection_dim=8", PATTERN),
    ([*LLAVA, SOUNDS], "model.audio.hidden_size=32", PATTERN),
    ([*LLAVA, "checkpoint.init_audio=x"], "checkpoint.init_audio='x'", PATTERN),
    (["model.vision.image_size=32"], "model.vision.image_size=32", "model.vision.patch_size=0"),
    (["model.decoder_start_token_id=0"], "model.decoder_start_token_id=0", f"{PATTERN}'full+mlp'"),
    (["data.target_length=32"], "data.target_length=32", "train.objective='next_token'"),
    (
        ["model.bert.position_offset=2"],
        "model.bert.position_offset=2",
        "model.position_embedding='rope'",
    ),
    (["model.bert.prediction_head=true"], "model.bert.prediction_head=True", "model.bert."),
    (["optimizer.args={b1: 0.5}"], "optimizer.args={'b1': 0.5}", "optimizer.name='adamw'"),
    (
        ["optimizer.name=optax.lion", "optimizer.eps=0.5"],
        "optimizer.eps=0.5",
        "optimizer.name='optax.lion'",
    ),
    (
        ["optimizer.stochastic_rounding=true"],
        "optimizer.stochastic_rounding=True",
        "precision.params='float32'",
    ),
    (["data.fim_fragment_rate=0.5"], "data.fim_fragment_rate=0.5", "data.fim_rate=0.0"),
    (["precision.fp8_skip_layers=1"], "precision.fp8_skip_layers=1", "precision.fp8='none'"),
    (["precision.fp8_evaluation=false"], "precision.fp8_evaluation=False", "precision.fp8='none'"),
    (["precision.fp8_dispatch=true"], "precision.fp8_dispatch=True", "model.layer_pattern="),
    (["precision.fp8_backend=te"], "precision.fp8_backend='te'", "precision.fp8='none'"),
    (
        ["precision.fp8=block128", "precision.fp8_backend=te"],
        "precision.fp8_backend",
        "precision.fp8='block128'",
    ),
    (
        ["precision.fp8=nvfp4", "precision.fp8_format=hybrid"],
        "precision.fp8_format",
        "precision.fp8='nvfp4'",
    ),
    (
        ["precision.fp8=mxfp8", "precision.fp8_block=32"],
        "precision.fp8_block=32",
        "precision.fp8='mxfp8'",
    ),
    (["precision.hysteresis=1"], "precision.hysteresis=1", "precision.compute='bfloat16'"),
    (["schedule.wsd_decay_steps=9"], "schedule.wsd_decay_steps=9", "schedule.decay='cosine'"),
]
UNREAD += [
    (
        ["data.mock=false", "data.paths=[x]", "data.eval_sets={a: y}"],
        "data.eval_sets={'a': 'y'}",
        "train.eval_interval=None",
    ),
    (["train.eval_tasks_interval=2"], "train.eval_tasks_interval=2", "train.eval_tasks={}"),
    (
        ["data.mock=false", "data.paths=[x]", "data.valid_paths=[y]", "train.test_steps=2"],
        "train.test_steps=2",
        "data.valid_paths=['y']",
    ),
]
FILES = ["data.mock=false", "data.images.path=x", "data.tokenizer=byte"]
UNREAD += [
    ([*of_images, f"{key}={value}"], f"{key}=", switch)
    for of_images in ([*VIT, *FILES[:2]], [*LLAVA, *FILES], [*CLIP, *FILES])
    for key, value, switch in (
        ("data.valid_paths", "[y]", "data.images.path='x'"),
        ("data.cache_dir", "y", "train.objective="),
        ("data.reset_position_ids", "true", "train.objective="),
        ("data.masked.probability", "0.3", "train.objective="),
    )
]
UNREAD += [
    ([*CLASSES, *changed], key, "train.objective='classify'")
    for changed, key in (
        (["data.cache_dir=y"], "data.cache_dir='y'"),
        (["train.label_smoothing=0.1"], "train.label_smoothing=0.1"),
        (["data.eod_mask_loss=true", "data.eod_token_id=1"], "data.eod_mask_loss=True"),
    )
]
UNREAD += [
    ([*VIT, *FILES[:1], "data.text=x", "data.tokenizer=byte"], "data.text='x'", "model.vision."),
    ([*VIT, *FILES[:1], "data.paths=[x]"], "data.paths=['x']", "model.vision.patch_size=8"),
    (["data.images.mean=[0.1]"], "data.images.mean=[0.1]", f"{PATTERN}'full+mlp'"),
    ([*FILES[:1], "data.images.path=x"], "data.images.path='x'", f"{PATTERN}'full+mlp'"),
    (["data.valid_paths=[x]"], "data.valid_paths=['x']", "data.mock=True"),
    (
        [*FILES[:1], "data.paths=[x]", "data.valid_paths=[y]", "data.split=[9, 1, 0]"],
        "data.split=[9.0, 1.0, 0.0]",
        "data.valid_paths=['y']",
    ),
    ([*MASKED, "data.masked.max_ngram=2"], "data.masked.max_ngram=2", "data.masked.sentences=F"),
    ([*MASKED, "data.masked.mean_span=2.0"], "data.masked.mean_span=2.0", "train.objective='mas"),
    (["data.masked.mask_token_id=1"], "data.masked.mask_token_id=1", "train.objective='next_"),
]


@pytest.mark.parametrize("overrides, key, switch", UNREAD, ids=[case[1] for case in UNREAD])
def test_a_key_that_nothing_reads_is_one_line(overrides, key, switch):
    with pytest.raises(UserError) as e:
        load(None, ["data.mock=true", *overrides])
    line = str(e.value)
    assert line.startswith(key) and f" has no effect with {switch}" in line and "\n" not in line


def test_every_row_of_needs_names_keys_and_what_decides_them():
    keys, groups = leaf_keys(Config), {key.rpartition(".")[0] for key in leaf_keys(Config)}
    for need in NEEDS:
        assert set(need.names) <= {*keys, *groups} and need.switch in keys, need


def test_every_rule_is_broken_once():
    assert list(BROKEN) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", BROKEN)
def test_rule(name):
    overrides, expected = BROKEN[name]
    with pytest.raises(UserError) as e:
        load(None, ["data.mock=true", *overrides])
    remedy = next(rule.remedy for rule in RULES if rule.name == name)
    assert expected in str(e.value)
    assert str(e.value).endswith(f"; {remedy}")  # this rule failed, not an earlier one


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["model.vision.vision_aspect_ratio=anyres_max_4"], "has no effect without"),
        (["model.vision.pixel_shuffle=true", "data.images.image_size=16"], "image_size=16 is not"),
        (["model.vision.pixel_shuffle=true", "model.vision.patch_size=32"], "side of 1 patches"),
        (
            ["model.vision.pixel_shuffle=true", "model.vision.length_multiple=8", *THREE],
            "length_multiple=8: cp tp does not divide the tokens of a pixel shuffle",
        ),
    ],
)
def test_what_tiles_and_pixel_shuffle_need_is_said(overrides, said):
    with pytest.raises(UserError, match=said):
        load(None, ["data.mock=true", *LLAVA, *overrides])


def test_malformed_layer_pattern_is_refused():
    with pytest.raises(UserError, match="layer_pattern"):
        load(None, ["data.mock=true", "model.layer_pattern=Q"])


@pytest.mark.parametrize(
    "pattern,said",
    [
        ("'[G],[CD],[RD],G'", "RETRO has bidirectional and retrieval layers"),
        ("'[BCD],G,G,G'", "RETRO has bidirectional and retrieval layers"),
        ("'[BCD],[BRD],[GRD],G'", "neighbors have bidirectional, chunk and mlp"),
        ("'B,[GXD],[GRD],G'", "neighbors have bidirectional, chunk and mlp; cross"),
    ],
)
def test_layers_of_retro_have_their_sides(pattern, said):
    with pytest.raises(UserError) as refused:
        validate(load(None, [f"model.layer_pattern={pattern}", "data.seq_length=128"]))
    assert said in str(refused.value) and "write it as" in str(refused.value)


def test_mesh_sizes_are_ordered_and_multiply_to_the_devices():
    mesh = MeshConfig(tp=2, pp=2)
    assert mesh_sizes(mesh, 8) == {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert list(mesh_sizes(mesh, 8)) == ["pp", "dp", "ep", "cp", "tp"]
    with pytest.raises(UserError, match="does not divide the 6 devices"):
        mesh_sizes(mesh, 6)
    with pytest.raises(UserError, match="need 12 devices but there are 8"):
        mesh_sizes(MeshConfig(dp=3, tp=2, pp=2), 8)


def test_device_rules_wait_for_the_device_count():
    cfg = load(None, ["data.mock=true", "train.micro_batch_size=4", "mesh.tp=2"])
    validate(cfg, 4)
    with pytest.raises(UserError, match="micro_batch_size=4 x mesh.dp=4"):
        validate(cfg, 8)
    with pytest.raises(UserError, match="does not divide"):
        validate(cfg, 3)
    with pytest.raises(UserError, match="need 4 devices"):
        validate(load(None, ["data.mock=true", "train.micro_batch_size=2", "mesh.dp=4"]), 8)


@pytest.mark.parametrize(
    ("sizes", "overrides", "said"),
    [
        ("{intermediate_size: 30}", ["mesh.tp=4"], "model.intermediate_size=30 is not divisible"),
        ("{attention: {num_key_value_heads: 3}}", [], "num_key_value_heads=3"),
        (
            "{attention: {num_attention_heads: 2, num_key_value_heads: 2}}",
            ["mesh.cp=4", "mesh.cp_type=a2a"],
            "num_attention_heads=2 per mesh.tp=1 is not divisible by 4",
        ),
        (
            "{attention: {num_key_value_heads: 1}}",
            ["mesh.tp=4", "model.attention.qk_norm=true", "model.attention.qk_norm_all_heads=true"],
            "num_key_value_heads=1 is not divisible by mesh.tp=4",
        ),
    ],
)
def test_sizes_of_marked_layers_are_held_to_the_rules(sizes, overrides, said):
    marked = ["data.mock=true", "model.layer_pattern='G,G@1'", f"model.layer_sizes=[{sizes}]"]
    with pytest.raises(UserError) as e:
        load(None, [*marked, *overrides])
    assert said in str(e.value) and str(e.value).startswith("layers marked '@1'")
