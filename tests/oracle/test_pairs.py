"""Pairs of texts are framed as the model's own tokenizer frames them, types included."""

import json

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mjax.config.schema.model import BertConfig
from mjax.config.schema.run import Config
from mjax.data.base.tokenizer import BERT_PAIR, ROBERTA_PAIR, PairFrame, load_tokenizer
from mjax.data.sentences.labelled import LabelledDataset
from mjax.data.sentences.masked import frame_of_pairs

WORDS = ["<s>", "<pad>", "</s>", "<mask>", *"abcdefgh"]
LENGTH = 12
LINES = [("a b c", "d e"), ("a", None), ("a b c d e f g h a b", "c d e"), ("b", "b " * 9)]


def tokenizer_of(family: str) -> Tokenizer:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor = processors.RobertaProcessing if family == "roberta" else processors.BertProcessing
    ends = ("</s>", 2), ("<s>", 0)
    if family == "template":  # as transformers 5 writes them
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0",
            special_tokens=[("<s>", 0), ("</s>", 2)],
        )
    elif family != "none":
        inner.post_processor = processor(*ends)
    return inner


@pytest.mark.parametrize("family, types", [("roberta", 1), ("template", 1), ("bert", 2)])
def test_classified_pairs_are_those_of_the_tokenizer(family, types, tmp_path):
    tokenizer_of(family).save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": a, "text_pair": b, "label": n} for n, (a, b) in enumerate(LINES)]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, rows)))
    model = {"vocab_size": 12, "bert": {"num_labels": 4, "type_vocab_size": types}}
    data = {"masked": {"cls_token_id": 0, "sep_token_id": 2, "pad_token_id": 1}}
    cfg = Config(model=model, data=data | {"seq_length": LENGTH})
    given = tmp_path / "lines", "train", (1, 0, 0), len(rows), cfg
    batch = LabelledDataset(*given, load_tokenizer(tmp_path)).batch(np.arange(len(rows)))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<pad>"
    )
    order = {"padding": "max_length", "truncation": "longest_first", "max_length": LENGTH}
    for n, label in enumerate(batch["row_label"]):
        texts = [text for text in LINES[label] if text]
        want = theirs(*texts, **order, return_token_type_ids=True)
        np.testing.assert_array_equal(batch["tokens"][n], want["input_ids"])
        np.testing.assert_array_equal(batch["token_types"][n], want["token_type_ids"])
        np.testing.assert_array_equal(batch["segment_ids"][n], want["attention_mask"])


def test_the_model_says_it_where_the_tokenizer_does_not(tmp_path):
    tokenizer_of("none").save(str(tmp_path / "tokenizer.json"))
    silent, bert = load_tokenizer(tmp_path), {"type_vocab_size": 2}
    assert silent.pair is load_tokenizer("byte").pair is None
    roberta = {"type_vocab_size": 1, "position_offset": 2}
    for tokenizer in (silent, None):
        assert frame_of_pairs(tokenizer, BertConfig(**bert)) == BERT_PAIR
        assert frame_of_pairs(tokenizer, BertConfig(**roberta)) == ROBERTA_PAIR
    tokenizer_of("bert").save(str(tmp_path / "tokenizer.json"))
    of_one_type = frame_of_pairs(load_tokenizer(tmp_path), BertConfig(type_vocab_size=1))
    assert of_one_type == PairFrame(separators=1, second_type=0)
