"""The rules about encoders and their objectives: a part of the table of rules (`validate.py`)."""

from mjax.config.keys import value_of
from mjax.config.mesh_rules import Rule
from mjax.config.model_schema import BertConfig
from mjax.config.pattern import BRANCHES, branches_of_model, has_heads, reads_encoder
from mjax.config.schema import Config

_OF_ENCODERS = ("masked_lm", "classify")
_FRAME = ("cls_token_id", "sep_token_id", "pad_token_id")
_SPECIAL = ("mask_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
_SPANS = "span_corruption"
_OF_SPANS = (
    "data.target_length",
    "data.eod_token_id",
    "model.decoder_start_token_id",
    "data.masked.pad_token_id",
)


def _is_like_bert(c: Config) -> bool:
    """Whether the model has a part of encoders."""
    m = c.model
    has_encoder = m.is_encoder or m.is_encoder_decoder
    return has_encoder or m.norm_placement == "post_residual" or m.bert != BertConfig()


def _missing_for_spans(c: Config) -> list[str]:
    """The keys that train.objective=span_corruption needs and that are not given."""
    if c.train.objective != _SPANS:
        return []
    missing = [key for key in _OF_SPANS if value_of(c, key) is None]
    return missing if len(c.data.masked.sentinel_ids) == 2 else ["data.masked.sentinel_ids"]


def _special_ids(c: Config) -> list[int]:
    """The ids in data.masked that are given."""
    ids = [value for name, value in c.data.masked if name.endswith("_token_id")]
    ids += [*c.data.masked.sentinel_ids, c.model.decoder_start_token_id]
    return [i for i in ids if i is not None]


def _sides_are_apart(c: Config) -> bool:
    """Whether an encoder of B branches comes first, and then a decoder that sees no token ahead."""
    kinds = c.model.layer_kinds
    if not c.model.is_encoder_decoder:
        return True
    encoders = sum(not reads_encoder(kind) for kind in kinds)
    encoder, decoder = kinds[:encoders], kinds[encoders:]
    if not encoder or not all(map(reads_encoder, decoder)):
        return False
    masks = {BRANCHES[letter].mask for letter in branches_of_model(decoder)}
    seen = {letter for letter in branches_of_model(encoder) if has_heads(letter)}
    return seen == {"B"} and masks == {"causal", "cross"}


def _not_in_cross_attention(c: Config) -> list[str]:
    """The keys that change attention and that cross-attention lacks."""
    attention = c.model.attention
    keys = {
        "attention_sinks": attention.attention_sinks,
        "qk_norm": attention.qk_norm,
        "key_multiplier": attention.key_multiplier is not None,
        "attention_in_multiplier": attention.attention_in_multiplier is not None,
        "attention_out_multiplier": attention.attention_out_multiplier is not None,
    }
    return [key for key, given in keys.items() if given and c.model.is_encoder_decoder]


def _cuts_of_a_sequence(c: Config) -> int:
    """The parts that the mesh cuts a sequence into."""
    return c.mesh.tp if c.mesh.cp == 1 else 2 * c.mesh.cp * c.mesh.tp


ENCODER_RULES: tuple[Rule, ...] = (
    Rule(
        "next_token_is_hidden",
        lambda c: not c.model.is_encoder or c.train.objective != "next_token",
        "`train.objective` is given away where `model.layer_pattern` has B blocks, which see all "
        "tokens",
        "set train.objective=masked_lm, or use G blocks",
    ),
    Rule(
        "sides_are_apart",
        _sides_are_apart,
        "`model.layer_pattern`: an encoder-decoder has layers of B blocks, and then layers with a "
        "causal branch and X",
        "write it as 'B*12, [GXD]*12'",
    ),
    Rule(
        "decoder_writes_spans",
        lambda c: (
            not c.model.is_encoder_decoder or c.train.objective not in ("next_token", *_OF_ENCODERS)
        ),
        "`train.objective` knows no decoder beside an encoder (X in `model.layer_pattern`)",
        "set train.objective=span_corruption",
    ),
    Rule(
        "spans_need_a_decoder",
        lambda c: c.train.objective != _SPANS or c.model.is_encoder_decoder,
        "`train.objective` needs an encoder and a decoder; `model.layer_pattern` has no X",
        "set model.layer_pattern to 'B*12, [GXD]*12' or the like",
    ),
    Rule(
        "relative_positions_of_both_sides",
        lambda c: c.model.position_embedding != "relative" or c.model.is_encoder_decoder,
        "`model.position_embedding` is built for an encoder-decoder (X in `model.layer_pattern`)",
        "set it to rope",
    ),
    Rule(
        "distances_reach_all_buckets",
        lambda c: c.model.relative.max_distance > c.model.relative.num_buckets // 2,
        "`model.relative.max_distance` is too short for `model.relative.num_buckets`",
        "make it more than half of their number",
    ),
    Rule(
        "cross_attention_is_plain",
        lambda c: not _not_in_cross_attention(c),
        lambda c: f"cross-attention lacks `model.attention.{_not_in_cross_attention(c)[0]}`",
        "leave it out",
    ),
    Rule(
        "target_length_divides",
        lambda c: not c.data.target_length or c.data.target_length % _cuts_of_a_sequence(c) == 0,
        "`data.target_length` is not divisible by `mesh.tp`, and with `mesh.cp` by 2 x both",
        "change either",
    ),
    Rule(
        "hidden_tokens_need_an_encoder",
        lambda c: c.model.is_encoder or c.train.objective not in _OF_ENCODERS,
        "`train.objective` is for encoders, but `model.layer_pattern` has no B block",
        "set model.layer_pattern=B, or train.objective=next_token",
    ),
    Rule(
        "padding_is_not_seen",
        lambda c: c.data.document_mask or not (c.model.is_encoder or c.train.objective == _SPANS),
        "`data.document_mask` keeps padding and other documents out of an encoder's sight",
        "set it to true",
    ),
    Rule(
        "encoders_continue_nothing",
        lambda c: (
            not (c.model.is_encoder or c.model.is_encoder_decoder) or c.train.sample_prompt is None
        ),
        "`train.sample_prompt`: an encoder continues no text",
        "set it to null",
    ),
    Rule(
        "mask_token_known",
        lambda c: c.train.objective != "masked_lm" or c.data.masked.mask_token_id is not None,
        "`data.masked.mask_token_id` is unknown",
        "give the id of [MASK]: any that the tokenizer does not use, below model.vocab_size",
    ),
    Rule(
        "masked_ids_in_vocab",
        lambda c: all(0 <= token < c.model.vocab_size for token in _special_ids(c)),
        "ids of special tokens in data.masked are outside `model.vocab_size`",
        "change either",
    ),
    Rule(
        "samples_have_specials",
        lambda c: (
            not c.data.masked.sentences
            or c.train.objective == _SPANS
            or all(getattr(c.data.masked, name) is not None for name in _SPECIAL)
        ),
        "`data.masked.sentences` needs the ids of [CLS], [SEP], [MASK] and [PAD]",
        "set cls_token_id, sep_token_id, mask_token_id and pad_token_id of data.masked",
    ),
    Rule(
        "samples_know_words",
        lambda c: (
            not c.data.masked.sentences
            or not c.data.masked.whole_words
            or c.data.tokenizer is not None
        ),
        "`data.masked.whole_words` needs `data.tokenizer`, which says what continues a word",
        "set data.tokenizer to that of the data, or data.masked.whole_words=false",
    ),
    Rule(
        "sentences_are_masked",
        lambda c: not c.data.masked.sentences or c.train.objective in ("masked_lm", _SPANS),
        "`data.masked.sentences` makes samples for masked_lm and span_corruption, not for "
        "`train.objective`",
        "set train.objective=masked_lm or data.masked.sentences=false",
    ),
    Rule(
        "target_length_used",
        lambda c: c.data.target_length is None or c.train.objective == _SPANS,
        "`data.target_length` has no effect with `train.objective`",
        "remove it, or set train.objective=span_corruption",
    ),
    Rule(
        "spans_have_ids",
        lambda c: not _missing_for_spans(c),
        lambda c: f"`train.objective` needs `{_missing_for_spans(c)[0]}`",
        "set it; sentinel_ids are the first and the last one (docs/encoders.md)",
    ),
    Rule(
        "spans_count_on",
        lambda c: c.train.objective != _SPANS or not c.data.reset_position_ids,
        "`data.reset_position_ids` is not built for the decoder of `train.objective`",
        "set it to false",
    ),
    Rule(
        "fim_is_of_streams",
        lambda c: (
            c.data.fim_rate == 0 or not (c.data.masked.sentences or c.train.objective == "classify")
        ),
        "`data.fim_rate` rearranges the documents of a stream, not sentences or texts with classes",
        "set it to 0",
    ),
    Rule(
        "sentence_samples_fit",
        lambda c: (
            c.data.seq_length >= 8 or not (c.data.masked.sentences or c.train.objective == _SPANS)
        ),
        "`data.seq_length` leaves no room for a sample of `train.objective`",
        "make it 8 or more",
    ),
    Rule(
        "pairs_need_sentences",
        lambda c: (
            c.train.objective != "masked_lm"
            or c.model.bert.num_labels == 0
            or (c.model.bert.num_labels == 2 and (c.data.masked.sentences or c.data.mock))
        ),
        "`model.bert.num_labels`: masked_lm tells two classes of rows, of pairs of texts",
        "set it to 2 with data.masked.sentences=true, or to 0",
    ),
    Rule(
        "classes_given",
        lambda c: c.train.objective != "classify" or c.model.bert.num_labels >= 2,
        "`train.objective` has no classes to tell",
        "set model.bert.num_labels to their number",
    ),
    Rule(
        "classes_are_of_text",
        lambda c: (
            c.train.objective != "classify"
            or c.data.mock
            or (
                c.data.text is not None
                and c.data.tokenizer is not None
                and not c.data.tokenizer.startswith("train:")
                and all(getattr(c.data.masked, name) is not None for name in _FRAME)
            )
        ),
        "`train.objective` needs data.text, a file of JSON lines with a label each, its "
        "data.tokenizer, and the ids of [CLS], [SEP] and [PAD] in data.masked",
        "set them",
    ),
    Rule(
        "offset_is_of_positions",
        lambda c: c.model.bert.position_offset == 0 or c.model.position_embedding == "learned",
        "`model.bert.position_offset` has no effect with `model.position_embedding`",
        "set it to 0",
    ),
    Rule(
        "bert_head_is_tied",
        lambda c: not c.model.bert.mlm_head or c.model.tie_word_embeddings,
        "`model.bert.mlm_head` is built on tied embeddings alone: `model.tie_word_embeddings`",
        "set model.tie_word_embeddings=true",
    ),
    Rule(
        "prediction_has_a_final_norm",
        lambda c: c.model.num_nextn_predict_layers == 0 or not _is_like_bert(c),
        "`model.num_nextn_predict_layers` is not built for B blocks, norm_placement=post_residual "
        "and model.bert",
        "set it to 0",
    ),
)
