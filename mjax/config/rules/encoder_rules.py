"""The rules about encoders and their objectives: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.layer_pattern import BRANCHES, branches_of_model, of_decoder, roles_of
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.keys import value_of
from mjax.config.schema.model import BertConfig
from mjax.config.schema.run import Config

_OF_ENCODERS = ("masked_lm", "classify")
_FRAME = ("cls_token_id", "sep_token_id", "pad_token_id")
_SPANS = "span_corruption"
_OF_SPANS = (
    "data.target_length",
    "data.eod_token_id",
    "model.decoder_start_token_id",
    "data.masked.pad_token_id",
)
NOT_IN_CROSS_ATTENTION = (
    "attention_sinks",
    "attention_output_gate",
    "qk_norm",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
)


def _knows(c: Config, *names: str) -> bool:
    """Whether these ids in data.masked are given."""
    return all(getattr(c.data.masked, name) is not None for name in names)


@rule("set train.objective=masked_lm, or use full blocks")
def next_token_is_hidden(c: Config) -> Iterator[str]:
    if c.model.architecture.encodes and c.train.objective == "next_token":
        yield (
            "`train.objective` is given away where `model.layer_pattern` has bidirectional blocks, "
            "which see all tokens"
        )


@rule("write it as 'bidirectional+mlp*12, full+cross+mlp*12'")
def sides_are_apart(c: Config) -> Iterator[str]:
    kinds = c.model.layer_kinds
    encoders = sum(not of_decoder(kind) for kind in kinds)
    encoder, decoder = kinds[:encoders], kinds[encoders:]
    seen = {word for word in branches_of_model(encoder) if BRANCHES[word].has_heads}
    masks = {BRANCHES[word].mask for word in branches_of_model(decoder)}
    in_order = all("cross_attention" in roles_of(kind) for kind in decoder)
    are_apart = in_order and seen == {"bidirectional"} and masks == {"causal", "cross"}
    if c.model.architecture.reads_target and not are_apart:
        yield (
            "`model.layer_pattern`: an encoder-decoder has bidirectional layers, and then layers "
            "with a causal branch and cross"
        )


@rule("set train.objective=span_corruption")
def decoder_writes_spans(c: Config) -> Iterator[str]:
    if c.model.architecture.reads_target and c.train.objective in ("next_token", *_OF_ENCODERS):
        yield (
            "`train.objective` knows no decoder beside an encoder (cross in `model.layer_pattern`)"
        )


@rule("set model.layer_pattern to 'bidirectional+mlp*12, full+cross+mlp*12' or the like")
def spans_need_a_decoder(c: Config) -> Iterator[str]:
    if c.train.objective == _SPANS and not c.model.architecture.reads_target:
        yield "`train.objective` needs an encoder and a decoder; `model.layer_pattern` has no cross"


@rule("set it to rope")
def relative_positions_of_both_sides(c: Config) -> Iterator[str]:
    if c.model.position_embedding == "relative" and not c.model.architecture.reads_target:
        yield (
            "`model.position_embedding` is built for an encoder-decoder (X in "
            "`model.layer_pattern`)"
        )


@rule("make it more than half of their number")
def distances_reach_all_buckets(c: Config) -> Iterator[str]:
    if c.model.relative.max_distance <= c.model.relative.num_buckets // 2:
        yield "`model.relative.max_distance` is too short for `model.relative.num_buckets`"


@rule("leave it out")
def cross_attention_is_plain(c: Config) -> Iterator[str]:
    for name in NOT_IN_CROSS_ATTENTION:
        reads = "encoder" in c.model.architecture.streams
        if reads and getattr(c.model.attention, name) not in (None, False):
            yield f"cross-attention lacks `model.attention.{name}`"


@rule("change either")
def target_length_divides(c: Config) -> Iterator[str]:
    parts = c.mesh.tp if c.mesh.cp == 1 else 2 * c.mesh.cp * c.mesh.tp
    if (c.data.target_length or 0) % parts:
        yield "`data.target_length` is not divisible by `mesh.tp`, and with `mesh.cp` by 2 x both"


@rule("set model.layer_pattern=B, or train.objective=next_token")
def hidden_tokens_need_an_encoder(c: Config) -> Iterator[str]:
    if c.train.objective in _OF_ENCODERS and not c.model.architecture.encodes:
        yield (
            "`train.objective` is for encoders, but `model.layer_pattern` has no bidirectional "
            "blocks"
        )


@rule("set it to true")
def padding_is_not_seen(c: Config) -> Iterator[str]:
    has_padding = c.model.architecture.encodes or c.train.objective == _SPANS
    if not c.data.document_mask and has_padding:
        yield "`data.document_mask` keeps padding and other documents out of an encoder's sight"


@rule("set it to null")
def encoders_continue_nothing(c: Config) -> Iterator[str]:
    has_encoder = c.model.architecture.encodes or c.model.architecture.has_streams
    if has_encoder and c.train.sample_prompt is not None:
        yield "`train.sample_prompt`: an encoder continues no text"


@rule("give the id of [MASK]: any that the tokenizer does not use, below model.vocab_size")
def mask_token_known(c: Config) -> Iterator[str]:
    if c.train.objective == "masked_lm" and not _knows(c, "mask_token_id"):
        yield "`data.masked.mask_token_id` is unknown"


@rule("change either")
def masked_ids_in_vocab(c: Config) -> Iterator[str]:
    ids = [value for name, value in c.data.masked if name.endswith("_token_id")]
    ids += [*c.data.masked.sentinel_ids, c.model.decoder_start_token_id]
    if any(i is not None and not 0 <= i < c.model.vocab_size for i in ids):
        yield "ids of special tokens in data.masked are outside `model.vocab_size`"


@rule("set cls_token_id, sep_token_id, mask_token_id and pad_token_id of data.masked")
def samples_have_specials(c: Config) -> Iterator[str]:
    knows_specials = c.train.objective == _SPANS or _knows(c, *_FRAME, "mask_token_id")
    if c.data.masked.sentences and not knows_specials:
        yield "`data.masked.sentences` needs the ids of [CLS], [SEP], [MASK] and [PAD]"


@rule("set data.tokenizer to that of the data, or data.masked.whole_words=false")
def samples_know_words(c: Config) -> Iterator[str]:
    masked = c.data.masked
    if masked.sentences and masked.whole_words and c.data.tokenizer is None:
        yield "`data.masked.whole_words` needs `data.tokenizer`, which says what continues a word"


@rule("set train.objective=masked_lm or data.masked.sentences=false")
def sentences_are_masked(c: Config) -> Iterator[str]:
    if c.data.masked.sentences and c.train.objective not in ("masked_lm", _SPANS):
        yield (
            "`data.masked.sentences` makes samples for masked_lm and span_corruption, not for "
            "`train.objective`"
        )


@rule("set it; sentinel_ids are the first and the last one (docs/models/encoders.md)")
def spans_have_ids(c: Config) -> Iterator[str]:
    if c.train.objective != _SPANS:
        return
    if len(c.data.masked.sentinel_ids) != 2:
        yield "`train.objective` needs `data.masked.sentinel_ids`"
    for key in _OF_SPANS:
        if value_of(c, key) is None:
            yield f"`train.objective` needs `{key}`"


@rule("set it to false")
def spans_count_on(c: Config) -> Iterator[str]:
    if c.train.objective == _SPANS and c.data.reset_position_ids:
        yield "`data.reset_position_ids` is not built for the decoder of `train.objective`"


@rule("set it to 0")
def fim_is_of_streams(c: Config) -> Iterator[str]:
    if c.data.fim_rate and (c.data.masked.sentences or c.train.objective == "classify"):
        yield (
            "`data.fim_rate` rearranges the documents of a stream, not sentences or texts with "
            "classes"
        )


@rule("make it 8 or more")
def sentence_samples_fit(c: Config) -> Iterator[str]:
    if c.data.seq_length < 8 and (c.data.masked.sentences or c.train.objective == _SPANS):
        yield "`data.seq_length` leaves no room for a sample of `train.objective`"


@rule("set it to 2 with data.masked.sentences=true, or to 0")
def pairs_need_sentences(c: Config) -> Iterator[str]:
    classes = (0, 2) if c.data.masked.sentences or c.data.mock else (0,)
    if c.train.objective == "masked_lm" and c.model.bert.num_labels not in classes:
        yield "`model.bert.num_labels`: masked_lm tells two classes of rows, of pairs of texts"


@rule("set model.bert.num_labels to their number")
def classes_given(c: Config) -> Iterator[str]:
    if c.train.objective == "classify" and c.model.bert.num_labels < 2:
        yield "`train.objective` has no classes to tell"


@rule("set them")
def classes_are_of_text(c: Config) -> Iterator[str]:
    has_tokenizer = not (c.data.tokenizer or "train:").startswith("train:")
    is_given = c.data.text is not None and has_tokenizer and _knows(c, *_FRAME)
    if c.train.objective == "classify" and not c.data.mock and not is_given:
        yield (
            "`train.objective` needs data.text, a file of JSON lines with a label each, its "
            "data.tokenizer, and the ids of [CLS], [SEP] and [PAD] in data.masked"
        )


@rule("set model.tie_word_embeddings=true")
def bert_head_is_tied(c: Config) -> Iterator[str]:
    if c.model.bert.mlm_head and not c.model.tie_word_embeddings:
        yield "`model.bert.mlm_head` is built on tied embeddings alone: `model.tie_word_embeddings`"


@rule("set it to 0")
def prediction_has_a_final_norm(c: Config) -> Iterator[str]:
    m = c.model
    has_encoder = m.architecture.encodes or m.architecture.has_streams
    is_like_bert = has_encoder or m.norm_placement == "post_residual" or m.bert != BertConfig()
    if m.num_nextn_predict_layers and is_like_bert:
        yield (
            "`model.num_nextn_predict_layers` is not built for bidirectional blocks, "
            "norm_placement=post_residual and model.bert"
        )


ENCODER_RULES = rules_of(globals())
