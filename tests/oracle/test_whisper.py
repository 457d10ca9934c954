"""Whisper's encoder: log-mel frames, hidden states and gradients as transformers computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from mjax.config import load
from mjax.data.multimodal.audio import log_mel
from mjax.errors import UserError
from mjax.interop.huggingface.whisper import whisper_source
from mjax.models.base.context import Context, tokens_of
from mjax.models.base.params import split
from mjax.models.towers.audio import rows_of_frames
from mjax.models.towers.modalities import Items, beside_items
from mjax.run.resume import begin
from mjax.train import Trainer
from tests.oracle.families import add_to_vectors, save_gradients

FRAMES, BINS = 24, 5
SIZES = "hidden_size: 24, intermediate_size: 40, num_attention_heads: 4"
KEYS = [
    "model.vocab_size=256",
    "model.hidden_size=16",
    "model.num_hidden_layers=4",
    "model.layer_pattern='S*2,[Q],G'",
    f"model.audio={{{SIZES}, num_mel_bins: {BINS}, max_source_positions: {FRAMES // 2}, "
    "audio_token_id: 9, max_audios: 2}",
    "data.mock=true",
    "data.seq_length=32",
    "precision.compute=float32",
    "train.global_batch_size=8",
    "mesh.dp=1",
]


def make(kind: type = transformers.WhisperForConditionalGeneration, positions: int = 12):
    """A Whisper whose encoder has random biases and norms."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=24,
        vocab_size=60,
        num_mel_bins=BINS,
        max_source_positions=positions,
        max_target_positions=16,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    return add_to_vectors(kind(config).float().eval())


def start(folder, *keys: str) -> Trainer:
    """A trainer at step 0 whose tower is that of a folder."""
    cfg = load(None, [*KEYS, f"checkpoint.init_audio={folder}", *keys])
    trainer = Trainer(cfg, devices=jax.devices()[:1])
    begin(trainer)
    return trainer


def hidden(trainer: Trainer, params: dict, mels: np.ndarray) -> jax.Array:
    """The output of the tower and of its norm, [B, T, D]."""
    cfg, model = trainer.cfg.model, trainer.definition.bind(params)
    text = tokens_of((len(mels), 16))
    items = Items(1, FRAMES, 16)
    features = jnp.full((len(mels), 16), -1)
    info = beside_items(text, "audio", cfg.audio, items, features)
    rows = {"audio": rows_of_frames(mels, 16)}  # with padding
    tokens = jnp.zeros((len(mels), 16), jnp.int32)
    x = model.embed_items(tokens, rows, {"audio": FRAMES}, info, Context())
    x, _, _ = model.layers(x, info, Context())
    definition, weights = split(model.audio_projector)
    projector = definition.bind(jax.tree.map(lambda w: w[0], weights)).projector
    return projector.norm(x.activations["audio"])[:, : FRAMES // 2]


@pytest.mark.parametrize("bins", [80, 128])
def test_frames_are_those_of_transformers(bins):
    theirs = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
    rng = np.random.default_rng(0)
    for seconds in (0.7, 2.0, 2.5):
        time = np.arange(int(seconds * 16000)) / 16000
        tone = np.sin(2 * np.pi * 440 * time) * rng.random() + 0.01 * rng.normal(size=time.size)
        sound = tone.astype(np.float32)
        want = theirs(sound, sampling_rate=16000, return_tensors="np").input_features[0].T
        found = log_mel(sound, bins, 200)
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)  # theirs is a transform in fp32
    silence = log_mel(np.zeros(5), bins, 200)
    np.testing.assert_array_equal(silence, np.full((200, bins), -1.5, np.float32))


@pytest.mark.parametrize(
    "kind", [transformers.WhisperForConditionalGeneration, transformers.WhisperModel]
)
def test_hidden_states_and_gradients(kind, tmp_path):
    theirs = make(kind)
    theirs.save_pretrained(tmp_path / "hf")
    trainer = start(tmp_path / "hf")
    rng = np.random.default_rng(0)
    mels = rng.normal(size=(2, FRAMES, BINS)).astype(np.float32)
    weight = rng.normal(size=(2, FRAMES // 2, 24)).astype(np.float32)
    encoder = theirs.get_encoder()
    want = encoder(torch.tensor(mels).transpose(1, 2)).last_hidden_state
    params = trainer.params()
    got, vjp = jax.vjp(lambda p: hidden(trainer, p, jnp.asarray(mels)), params)
    scale = want.abs().max().item()
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=0, atol=2e-4 * scale)
    if kind is transformers.WhisperModel:
        return
    encoder.embed_positions.requires_grad_(True)
    want = encoder(torch.tensor(mels).transpose(1, 2)).last_hidden_state
    (want * torch.tensor(weight)).sum().backward()
    folder = save_gradients(theirs, make(kind), tmp_path / "grads", may_lack=True)
    wanted = start(folder).params()
    (found,) = vjp(jnp.asarray(weight))
    compared = 0
    names = ("frame_embedding", "audio_mlp")
    pairs = [(found[name], wanted[name]) for name in names]
    norms = (tree["audio_projector"]["projector"]["norm"] for tree in (found, wanted))
    for mine, their in [*pairs, tuple(norms)]:
        leaves = jax.tree_util.tree_leaves_with_path(mine)
        for (path, g), w in zip(leaves, jax.tree.leaves(their), strict=True):
            bound = 1e-4 * np.abs(w).max()
            assert bound > 0
            np.testing.assert_allclose(g, w, rtol=0, atol=bound, err_msg=str(path))
            compared += 1
    assert compared == 5 + 14 + 2


def test_what_a_file_lacks_is_drawn_and_shorter_sounds_have_its_first_positions(tmp_path):
    theirs = make(positions=20)
    theirs.save_pretrained(tmp_path / "hf")
    trainer = start(tmp_path / "hf")
    params = trainer.params()
    positions = theirs.get_encoder().embed_positions.weight.detach().numpy()
    np.testing.assert_array_equal(params["frame_embedding"]["positions"], positions[:12])
    drawn = Trainer(load(None, KEYS), devices=jax.devices()[:1])
    drawn.init()
    np.testing.assert_array_equal(params["embedding"], drawn.params()["embedding"])
    with pytest.raises(UserError, match="encoder has 2 layers, but model.layer_pattern has 1"):
        start(tmp_path / "hf", "model.layer_pattern='S,[Q],G*2'")
    with pytest.raises(UserError, match="audio.hidden_size=24, but this run has"):
        start(tmp_path / "hf", "model.audio.hidden_size=32")
    with pytest.raises(UserError, match="is not that of a Whisper"):
        whisper = tmp_path / "hf" / "config.json"
        whisper.write_text(whisper.read_text().replace('"whisper"', '"bert"'))
        whisper_source(tmp_path / "hf", trainer.cfg.model)
