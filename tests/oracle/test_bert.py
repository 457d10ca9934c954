"""Encoders: in from Hugging Face, equal logits, losses and gradients, out again byte for byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from mjax.config import load
from mjax.config.languages.layer_pattern import expand
from mjax.convert import main as convert
from mjax.convert import verify
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from mjax.kernels.attention import api
from mjax.models.base.context import Context, tokens_of
from mjax.objectives.masked import ClassifyRows, MaskedTokens
from tests.generation import complete
from tests.oracle.families import add_to_vectors

ROWS, SEQ, VOCAB = 3, 24, 251
OPTIONS = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=56,
    initializer_range=0.15,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
CLASSES = [
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "ModernBertForMaskedLM",
    "ModernBertForSequenceClassification",
]
# The first of 4 layers and the last see all tokens, the others 3 to either side.
MODERN = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=56,
    initializer_range=0.15,
    local_attention=6,
    max_position_embeddings=64,
    pad_token_id=1,
    cls_token_id=2,
    sep_token_id=2,
    bos_token_id=2,
    eos_token_id=2,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
)


def make(name: str, pooling: str = "mean") -> torch.nn.Module:
    """An fp32 model whose biases and norms are random too."""
    torch.manual_seed(0)
    family = name.partition("For")[0]
    labels = dict(num_labels=5) if name.endswith("Classification") else {}
    if family == "ModernBert":
        more = MODERN | dict(classifier_pooling=pooling)
    else:
        more = OPTIONS | dict(max_position_embeddings=40 + 2 * (family == "Roberta"))
        more |= dict(type_vocab_size=1) if family == "Roberta" else dict(layer_norm_eps=1e-6)
    config = getattr(transformers, f"{family}Config")(**more, **labels, attn_implementation="eager")
    return add_to_vectors(getattr(transformers, name)(config).float().eval())


@pytest.fixture(scope="module", params=CLASSES)
def hf(request, tmp_path_factory):
    """(name, the transformers model, the folder it was saved in)."""
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    model.save_pretrained(folder)
    return request.param, model, folder


def batch(name: str) -> dict[str, np.ndarray]:
    """Rows of unequal lengths behind which there is padding, some tokens hidden, two texts."""
    rng = np.random.default_rng(0)
    lengths = np.array([SEQ, 17, 9])[:, None]
    column = np.arange(SEQ)
    real = column < lengths
    types = (column >= lengths // 2) & real & name.startswith("Bert")
    labels = 2 if "PreTraining" in name else 5
    return {
        "tokens": np.where(real, rng.integers(3, VOCAB, (ROWS, SEQ)), 1),  # 1: RoBERTa's padding
        "labels": rng.integers(3, VOCAB, (ROWS, SEQ)),
        "loss_mask": ((rng.random((ROWS, SEQ)) < 0.3) & real).astype(np.float32),
        "token_types": types.astype(np.int32),
        "row_label": rng.integers(0, labels, ROWS),
        "segment_ids": real.astype(np.int32),
        "columns": column,
    }


def theirs_of(name: str, model: torch.nn.Module, fields: dict):
    """Their output for a batch, with losses."""
    given = {key: torch.tensor(value, dtype=torch.long) for key, value in fields.items()}
    inputs = {"input_ids": given["tokens"], "attention_mask": given["segment_ids"]}
    if not name.startswith("Modern"):
        inputs["token_type_ids"] = given["token_types"]
    hidden = torch.where(given["loss_mask"] == 1, given["labels"], -100)
    if name.endswith("Classification"):
        return model(**inputs, labels=given["row_label"])
    if name.endswith("PreTraining"):
        return model(**inputs, labels=hidden, next_sentence_label=given["row_label"])
    return model(**inputs, labels=hidden)


def ours_of(name: str, model, params: dict, fields: dict):
    """(the sum of our losses, logits of tokens, logits of rows)."""
    decoder = model.definition.bind(params)
    types, rows = model.cfg.bert.type_vocab_size > 0, model.cfg.bert.num_labels > 0
    if name.endswith("Classification"):
        objective = ClassifyRows(types, 5)
    else:
        objective = MaskedTokens(types, rows, load(None, ["data.mock=true"]).data.masked, VOCAB)
    ctx = Context()
    info = tokens_of((ROWS, SEQ), segments=fields["segment_ids"])
    x = objective.embed(decoder, fields, info, ctx)
    x, *_ = decoder.layers(x, info, ctx)
    sums, counts = objective.losses(decoder, x, fields, info, ctx), objective.counts(fields)
    loss = sum(sums[key] / counts[key] for key in sums)
    return loss, (
        decoder.logits(decoder.normed(x)),
        decoder.row_logits(x, info, ctx) if rows else None,
    )


def test_logits_losses_and_gradients(hf, tmp_path):
    name, theirs, folder = hf
    ours, fields = from_pretrained(folder), batch(name)
    given = {key: jnp.asarray(value) for key, value in fields.items()}

    def loss(params):
        return ours_of(name, ours, params, given)

    (total, (tokens, rows)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(ours.params)
    theirs.zero_grad()
    expected = theirs_of(name, theirs, fields)
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    real = fields["segment_ids"] == 1
    if name.endswith("Classification"):
        pairs = [(rows, expected.logits)]
    elif name.endswith("PreTraining"):
        pairs = [(tokens[real], expected.prediction_logits[real])]
        pairs += [(rows, expected.seq_relationship_logits)]
    else:
        pairs = [(tokens[real], expected.logits[real])]
    for got, want in pairs:
        want = want.detach().numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())

    with torch.no_grad():  # gradients go through the same import, as a checkpoint of their own
        for p in theirs.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    theirs.save_pretrained(tmp_path / "grads")
    theirs.load_state_dict(make(name).state_dict())
    wanted = from_pretrained(tmp_path / "grads").params
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        bound = 1e-4 * max(np.abs(want).max(), 1e-6)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(path))


def run(monkeypatch, *argv) -> None:
    monkeypatch.setattr("sys.argv", ["convert", *map(str, argv)])
    assert convert() == 0


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    name, theirs, folder = hf
    run(monkeypatch, "import", "--hf", folder, "--out", tmp_path / "ckpt")
    out = tmp_path / "back"
    run(monkeypatch, "export", "--ckpt", tmp_path / "ckpt", "--hf", out, "--dtype", "float32")
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.tobytes() == after[key].tobytes() and tensor.shape == after[key].shape, key
    again = getattr(transformers, name).from_pretrained(out, attn_implementation="eager")
    fields = batch(name)
    with torch.no_grad():
        pair = [theirs_of(name, model.eval(), fields).loss.item() for model in (again, theirs)]
    assert pair[0] == pair[1]
    assert verify(tmp_path / "ckpt", out, "float32") == 0


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_windows_in_blocks_and_either_pooling(tmp_path, monkeypatch, pooling):
    """The windows of a long sequence are computed a block of queries at a time."""
    monkeypatch.setattr(api, "_FEWEST_NEAR", 1)
    name = "ModernBertForSequenceClassification"
    theirs, fields = make(name, pooling), batch(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_pretrained(tmp_path / "hf").model
    assert ours.cfg.attention.sliding_window == 4 and ours.cfg.bert.pooling == pooling
    got = ours.classify(fields["tokens"], segments=fields["segment_ids"])
    want = theirs_of(name, theirs, fields).logits.detach().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_older_words_of_modernbert_mean_the_same():
    new = make("ModernBertForMaskedLM").config.to_dict()
    new |= {"architectures": ["ModernBertForMaskedLM"], "layer_types": None}
    old = {
        key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")
    }
    old |= {"global_attn_every_n_layers": 3, "global_rope_theta": 1000.0, "local_rope_theta": 50.0}
    assert config_from_hf(dict(old)) == config_from_hf(dict(new))
    first, windowed, whole = expand("FWB", 3)
    assert config_from_hf(dict(old)).layer_kinds == (first, windowed, windowed, whole)
    every = config_from_hf(old | {"global_attn_every_n_layers": 2})
    assert every.layer_kinds == (first, windowed, whole, windowed)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer_types": ["sliding_attention"] * 4}, "only full_attention in layer 0"),
        ({"layer_types": ["full_attention"] * 3}, "4 in all"),
        ({"architectures": ["ModernBertForTokenClassification"]}, "only ModernBertForMaskedLM"),
        ({"classifier_pooling": "max"}, "bert.pooling"),
        ({"sparse_prediction": True}, "sparse_prediction=True"),
        ({"mlp_dropout": 0.1}, "mlp_dropout=0.1"),
        ({"classifier_bias": True}, "classifier_bias=True"),
    ],
)
def test_what_modernbert_says_and_mjax_lacks_is_named(change, message):
    config = make("ModernBertForMaskedLM").config.to_dict()
    config |= {"architectures": ["ModernBertForMaskedLM"]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)


def test_padding_and_its_content_change_nothing(tmp_path):
    make("BertForMaskedLM").save_pretrained(tmp_path / "hf")
    ours, fields = from_pretrained(tmp_path / "hf"), batch("Bert")
    real = fields["segment_ids"] == 1
    found = []
    for filler in (1, 7):
        tokens = np.where(real, fields["tokens"], filler)
        found.append(np.asarray(ours.model(tokens, segments=fields["segment_ids"]))[real])
    np.testing.assert_array_equal(*found)
    alone = np.asarray(ours.model(fields["tokens"][2:, :9]))
    np.testing.assert_allclose(alone[0], found[0][-9:], atol=1e-4 * np.abs(alone).max())


def test_the_file_says_which_heads_there_are(tmp_path):
    """Published BERTs hold heads that their config.json does not name, and old names of norms."""
    make("BertForPreTraining").save_pretrained(tmp_path / "hf")
    whole = from_pretrained(tmp_path / "hf")
    config = (tmp_path / "hf/config.json").read_text()
    (tmp_path / "hf/config.json").write_text(config.replace("ForPreTraining", "ForMaskedLM"))
    tensors = load_file(tmp_path / "hf/model.safetensors")
    older = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        older[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    older["bert.embeddings.position_ids"] = np.arange(40)[None]
    save_file(older, tmp_path / "hf/model.safetensors")
    again = from_pretrained(tmp_path / "hf")
    assert again.cfg == whole.cfg and again.cfg.bert.num_labels == 2
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["BertModel"]}, "architectures='BertModel' is not supported .only Bert"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"hidden_act": "gelu_10"}, "hidden_act='gelu_10'"),
        ({"new_key": 1}, "new_key=1 is not known"),
        ({"model_type": "roberta", "architectures": ["RobertaForPreTraining"]}, "only RobertaFor"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(change, message):
    config = make("BertForMaskedLM").config.to_dict() | {"architectures": ["BertForMaskedLM"]}
    config_from_hf(dict(config))
    with pytest.raises(UserError, match=message):
        config_from_hf(config | change)


def test_tensors_that_the_class_needs_are_missed(tmp_path):
    make("BertForSequenceClassification").save_pretrained(tmp_path / "hf")
    config = (tmp_path / "hf/config.json").read_text()
    changed = config.replace("ForSequenceClassification", "ForMaskedLM")
    (tmp_path / "hf/config.json").write_text(changed)
    with pytest.raises(UserError, match="tensor cls.predictions.* is missing"):
        from_pretrained(tmp_path / "hf")


def test_an_encoder_continues_no_text(tmp_path):
    make("BertForMaskedLM").save_pretrained(tmp_path / "hf")
    ours = from_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="an encoder .* continues no text"):
        complete((ours.definition, ours.params, ours.cfg), [[1]], 1)
