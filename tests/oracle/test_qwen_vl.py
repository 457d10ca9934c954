"""Qwen2.5-VL and Qwen3-VL: in from Hugging Face, equal logits, gradients and tokens, out again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mjax.data.multimodal.pictures import packed_images, patches_of_frames, patches_of_picture
from mjax.errors import UserError
from mjax.interop.huggingface.families.engine import config_from_hf
from mjax.interop.pretrained import from_pretrained
from mjax.models.towers.image_places import PackedImages
from tests.generation import made_ids
from tests.marks import exhaustive, quick
from tests.oracle.families import (
    add_to_vectors,
    assert_gradients_near,
    save_gradients,
    there_and_back,
)

IMAGE, VIDEO, PATCH = 88, 89, 4
# The pictures of each row, [height, width]: two rows a case.
CASES = {
    "two": [[(13, 21), (40, 40)], [(9, 9), (40, 13)]],  # windows are cut off at both borders
    "none": [[], []],
    "one": [[(24, 40)], [(50, 17)]],
    "some": [[(18, 18)], []],
}
VISION = dict(depth=4, hidden_size=24, intermediate_size=20, num_heads=2, patch_size=PATCH)
VISION |= dict(out_hidden_size=40, initializer_range=0.2)
TEXT = dict(vocab_size=91, hidden_size=40, intermediate_size=56, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=256)
TEXT |= dict(bos_token_id=1, eos_token_id=2)
IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO)
IDS |= dict(vision_start_token_id=86, vision_end_token_id=87)


def rope(*section: int, **more: object) -> dict:
    turned = dict(rope_type="default", rope_theta=1000.0, mrope_section=list(section))
    return {"rope_parameters": turned | more}


def qwen2_5() -> torch.nn.Module:
    config = transformers.Qwen2_5_VLConfig(
        vision_config=VISION | dict(window_size=16, fullatt_block_indexes=[1, 3]),
        text_config=TEXT | dict(num_hidden_layers=2) | rope(1, 1, 3),
        attn_implementation="eager",
        **IDS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3() -> torch.nn.Module:
    own = dict(num_position_embeddings=36, deepstack_visual_indexes=[0, 2])
    config = transformers.Qwen3VLConfig(
        vision_config=VISION | own,
        text_config=TEXT
        | dict(num_hidden_layers=3, head_dim=16)
        | rope(4, 2, 2, mrope_interleaved=True),
        attn_implementation="eager",
        **IDS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_moe() -> torch.nn.Module:
    own = dict(num_position_embeddings=36, deepstack_visual_indexes=[1])
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)
    config = transformers.Qwen3VLMoeConfig(
        vision_config=VISION | own,
        text_config=TEXT
        | experts
        | dict(num_hidden_layers=3, head_dim=16, mlp_only_layers=[1], tie_word_embeddings=False)
        | rope(4, 2, 2, mrope_interleaved=True),
        attn_implementation="eager",
        **IDS,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


DELTA = TEXT | dict(num_hidden_layers=3, head_dim=16, tie_word_embeddings=False)
DELTA |= dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=10)
DELTA |= dict(linear_value_head_dim=8, linear_conv_kernel_dim=3)
DELTA |= dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
DELTA |= rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)


def qwen3_5() -> torch.nn.Module:
    config = transformers.Qwen3_5Config(
        vision_config=VISION | dict(num_position_embeddings=36),
        text_config=DELTA,
        attn_implementation="eager",
        **IDS,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe() -> torch.nn.Module:
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)
    text = {k: v for k, v in DELTA.items() if k != "intermediate_size"}
    config = transformers.Qwen3_5MoeConfig(
        vision_config=VISION | dict(num_position_embeddings=36),
        text_config=text | experts | dict(shared_expert_intermediate_size=28),
        attn_implementation="eager",
        **IDS,
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


MAKERS = {"qwen2_5_vl": qwen2_5, "qwen3_vl": qwen3, "qwen3_vl_moe": qwen3_moe}
MAKERS |= {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return add_to_vectors(MAKERS[name]().float().eval())


def as_published(folder, name: str) -> None:
    """Turn Qwen3-VL's experts: transformers 5 saves [E, out, in], the hub has [E, in, out]."""
    if name != "qwen3_vl_moe":
        return
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(tensor.swapaxes(1, 2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=quick(list(MAKERS), 0, 1, 3))
def hf(request, tmp_path_factory):
    model, folder = make(request.param), tmp_path_factory.mktemp(request.param) / "hf"
    model.save_pretrained(folder)
    as_published(folder, request.param)
    return model, folder, request.param


def pictures_of(case: str) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(0, 256, (*s, 3), np.uint8) for s in row] for row in CASES[case]]


def tower(folder):
    """The tower's config, whose pictures are small."""
    vision = from_pretrained(folder).cfg.vision
    return vision.model_copy(update={"min_pixels": 64, "max_pixels": 1600})


def inputs_of(vision, case: str):
    """Ids of two texts, left of whose shorter one is padding; our images; transformers' inputs."""
    pictures = pictures_of(case)
    rng = np.random.default_rng(7)
    cut = [[patches_of_picture(p, vision, [0.5], [0.5]) for p in row] for row in pictures]
    texts = []
    for own in cut:
        ids = rng.integers(3, 80, 5).tolist()
        for _, grid in own:
            ids += [86, *[IMAGE] * grid.tokens, 87, *rng.integers(3, 80, 3).tolist()]
        texts.append(ids)
    longest = max(map(len, texts))
    ids = np.array([[*rng.integers(3, 80, longest - len(t)), *t] for t in texts], np.int32)
    theirs = {"input_ids": torch.tensor(ids.astype(int))}
    theirs["mm_token_type_ids"] = (theirs["input_ids"] == IMAGE).int()
    flat = [p for row in pictures for p in row]
    if flat:
        processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 64, "longest_edge": 1600},
            patch_size=PATCH,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        theirs |= dict(processor(flat, return_tensors="pt"))
    return ids, packed_images(ids, cut, vision) if flat else None, theirs


def test_patches_are_those_of_transformers(hf):
    vision = tower(hf[1])
    _, _, theirs = inputs_of(vision, "two")
    cut = [patches_of_picture(p, vision, [0.5], [0.5]) for row in pictures_of("two") for p in row]
    ours = np.concatenate([patches for patches, _ in cut])
    np.testing.assert_allclose(ours, theirs["pixel_values"].numpy(), atol=1e-5)
    np.testing.assert_array_equal([grid[:3] for _, grid in cut], theirs["image_grid_thw"])


@pytest.mark.parametrize("case", quick(list(CASES), 0))
def test_logits_and_greedy_tokens(hf, case):
    theirs, folder, _ = hf
    ours = from_pretrained(folder)
    ids, images, given = inputs_of(tower(folder), case)
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
        made = theirs.generate(**given, max_new_tokens=64, do_sample=False, eos_token_id=None)
    got = jax.jit(lambda ids: ours.model(ids, images=images))(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    model = ours.definition, ours.params, ours.cfg
    for row, tokens in enumerate(ids.tolist()):
        items = {"vision": PackedImages(*(array[row] for array in images))} if images else None
        assert made_ids(model, [tokens], 64, items) == made[row : row + 1, ids.shape[1] :].tolist()


@exhaustive
def test_a_video_beside_an_image(hf):
    """Qwen2.5-VL has it in one run of tokens; Qwen3-VL has a run a pair of frames."""
    theirs, folder, name = hf
    ours, vision, rng = from_pretrained(folder), tower(folder), np.random.default_rng(3)
    frames = rng.integers(0, 256, (4, 24, 32, 3), np.uint8)
    patches, grid = patches_of_frames(frames, vision, [0.5], [0.5])
    picture = patches_of_picture(frames[0], vision)
    runs = [(patches, grid._replace(interval=vision.tokens_per_second * 0.7))]
    if name != "qwen2_5_vl":
        runs = [(own, grid._replace(frames=1)) for own in np.split(patches, 2)]
    ids = [5, *[IMAGE] * picture[1].tokens, 6]
    for _, own in runs:
        ids += [7, *[VIDEO] * own.tokens, 8, 9]
    ids = np.array([ids], np.int32)
    images = packed_images(ids, [[picture, *runs]], vision)
    given = {"input_ids": torch.tensor(ids.astype(int))}
    given["mm_token_type_ids"] = torch.tensor((ids == IMAGE) + 2 * (ids == VIDEO)).int()
    given["pixel_values"] = torch.tensor(picture[0])
    given["image_grid_thw"] = torch.tensor([picture[1][:3]])
    given["pixel_values_videos"] = torch.tensor(patches)
    given["video_grid_thw"] = torch.tensor([grid[:3]])
    if name == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([0.7])
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
    got = jax.jit(lambda ids: ours.model(ids, images=images))(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_loss_and_gradients(hf, tmp_path):
    theirs, folder, name = hf
    theirs.zero_grad()
    ours = from_pretrained(folder)
    ids, images, given = inputs_of(tower(folder), "two")
    labels = np.where(ids == IMAGE, -100, ids)

    def loss(params):
        logits = ours.definition.bind(params)(jnp.asarray(ids), images=images)
        counts = labels[:, 1:] != -100
        chances = jax.nn.log_softmax(logits[:, :-1])
        of_label = jnp.take_along_axis(chances, jnp.asarray(ids)[:, 1:, None], 2)[..., 0]
        return -jnp.sum(of_label * counts) / counts.sum()

    total, grads = jax.jit(jax.value_and_grad(loss))(ours.params)
    expected = theirs(**given, labels=torch.tensor(labels.astype(int)))
    expected.loss.backward()
    np.testing.assert_allclose(total, expected.loss.item(), rtol=1e-5)
    saved = save_gradients(theirs, make(name), tmp_path / "grads", may_lack=True)
    as_published(saved, name)
    # keys' biases move nothing: softmax takes what is equal for all keys away
    assert_gradients_near(grads, from_pretrained(saved).params, least=1e-3)


def test_export_gives_back_every_byte(hf, tmp_path, monkeypatch):
    theirs, folder, _ = hf
    out = tmp_path / "back"
    before, after = there_and_back(folder, tmp_path / "ckpt", out, monkeypatch)
    assert set(after) == set(before)
    for key, tensor in after.items():
        assert tensor.tobytes() == before[key].tobytes() and tensor.shape == before[key].shape, key
    again = type(theirs).from_pretrained(out, attn_implementation="eager").eval()
    given = inputs_of(tower(folder), "some")[2]
    with torch.no_grad():
        pair = [model(**given).logits for model in (again, theirs)]
    assert torch.equal(*pair)
    assert from_pretrained(out).cfg == from_pretrained(folder).cfg


def eight_bits(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix, which is one block, and its scale [1, 1]."""
    scale = tensor.abs().max() / 448
    return (tensor / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)


def test_files_of_eight_bits_have_experts_apart_and_modules_in_wide_dtypes(tmp_path):
    """As Qwen publishes them: blocks of 128, `weight_scale_inv`, all but some of the text."""
    theirs, coded = make("qwen3_5_moe"), {}
    theirs.save_pretrained(tmp_path)
    wide = "visual", "lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "conv1d", "gate.weight"
    for name, tensor in theirs.state_dict().items():
        if any(part in name for part in (*wide, "_gate.weight")) or tensor.ndim == 1:
            coded[name] = tensor.clone()
            continue
        matrices = {name: tensor}
        if tensor.ndim == 3:
            before, halves = name.rpartition(".")[0], tensor.chunk(2, 1)
            pair = zip(("gate_proj", "up_proj"), halves, strict=True)
            kinds = dict(pair) if "gate_up" in name else {"down_proj": tensor}
            matrices = {
                f"{before}.{number}.{kind}.weight": of_all[number]
                for kind, of_all in kinds.items()
                for number in range(len(of_all))
            }
        for own, matrix in matrices.items():
            codes, scale = eight_bits(matrix)
            matrix.copy_(codes.float() * scale)  # a view: transformers computes with what is read
            coded |= {own: codes, f"{own}_scale_inv": scale}
    safetensors.torch.save_file(coded, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    said = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
    said |= dict(weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "model.visual"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    ids, images, given = inputs_of(tower(tmp_path), "two")
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
    ours = from_pretrained(tmp_path)
    assert ours.cfg.modalities and not from_pretrained(tmp_path, text=True).cfg.modalities
    got = jax.jit(lambda ids: ours.model(ids, images=images))(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act='relu' is not supported"),
        ({"vision_config": {"spatial_merge_size": 4}}, "spatial_merge_size=4 is not supported"),
        ({"vision_config": {"patch_size": 0}}, "make no patches"),
        ({"vision_config": {"num_heads": 8}}, "channels are a multiple of 4"),
        ({"vision_config": {"num_heads": 0}}, "make no patches"),
        (
            {"vision_config": {"hidden_size": "a"}},
            "vision_config.hidden_size='a' is not of the kind",
        ),
        ({"text_config": {"rope_parameters": {"mrope_section": [1, 1]}}}, "is not three of"),
        ({"vision_config": {"novel": 1}}, "novel=1 is not known"),
        ({"text_config": {"model_type": "llama"}}, "model_type='llama' is not supported"),
    ],
)
def test_what_a_config_says_and_mjax_lacks_is_named(hf, change, message):
    config = hf[0].config.to_dict()
    config_from_hf(dict(config))
    for key, values in change.items():
        config[key] = config[key] | values
    with pytest.raises(UserError, match=message):
        config_from_hf(config)
