"""`python -m mjax.generate --ckpt X --prompt "..." [options]`: continue prompts, as a stream.

One prompt streams to standard output as its tokens are made; several run as one batch, printed one
after the other, each under a line `== prompt I`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mjax.checkpoint.base.companion_files import end_ids
from mjax.checkpoint.base.hub import model_folder
from mjax.config.languages.paths import as_path, path_text
from mjax.config.schema.model import ModelConfig
from mjax.data.base.chat import load_chat_template
from mjax.data.base.documents import is_json_lines, json_rows, read_text
from mjax.data.base.tokenizer import Tokenizer, encode_with_items
from mjax.errors import UNREADABLE, CommandParser, UserError, or_user_error, run_cli
from mjax.generate.options import add_model_arguments, image_scale, load_model, usual_scale
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Sampling

if TYPE_CHECKING:
    from mjax.config.schema.vision import VisionConfig
    from mjax.models.towers.tiles import Tiled

Prompt = str | list[dict]  # text, or the messages of a chat


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    settings = {f.name: getattr(args, f.name) for f in fields(Sampling)}
    most = args.max_new_tokens  # mistakes should show before anything is loaded
    params = SamplingParams(max_tokens=most, seed=args.seed, stop=args.stop, **settings)
    prompts = read_prompts(args)
    from mjax.infer.small_engine import small_engine, with_own_seeds

    model, dtype, tokenizer = load_model(args)
    folder = model.tokenizer_dir
    pictures = args.image or args.video
    mean, std = image_scale(model_folder(args.ckpt)) if pictures else (None, None)
    args.image_mean, args.image_std = args.image_mean or mean, args.image_std or std
    ids = [encode(p, tokenizer, folder, args, model.cfg) for p in prompts]
    ids, items = items_of_prompts(args, model.cfg, tokenizer, ids)
    engine = small_engine(
        model.definition,
        model.params,
        model.cfg,
        list(map(len, ids)),
        most,
        dtype=dtype,
        tokenizer=tokenizer,
        eos=end_ids(folder, tokenizer),
        donate=True,
    )
    each = zip(ids, with_own_seeds(params, len(ids)), items, strict=True)
    rows = {engine.add(row, own, items=beside).output.request_id: [] for row, own, beside in each}
    while engine.has_work:
        for update in engine.step():
            made, pieces = update.sample.answer.output, rows[update.request.output.request_id]
            piece, number = update.text, len(pieces)
            if args.logprobs:
                text = json.dumps(piece, ensure_ascii=False)
                piece = f"{made.token_ids[number]}\t{made.logprobs[number]:.6f}\t{text}\n"
            if len(ids) == 1:
                print(piece, end="", flush=True)
            pieces.append(piece)
    if len(ids) > 1:
        texts = map("".join, rows.values())
        print("\n".join(f"== prompt {i}\n{text}" for i, text in enumerate(texts)), end="")
    print(end="" if args.logprobs else "\n", flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("generate", description="Continue text.")
    add_model_arguments(parser)
    about = "stages of layers, of --tp devices each"
    parser.add_argument("--pp", type=int, default=1, metavar="N", help=about)
    text = "text to continue, or with --chat a user's message; several make a batch"
    parser.add_argument("--prompt", action="append", default=[], help=text)
    file = 'a text file: one prompt; .jsonl: a line each {"prompt": ...} or {"messages": [...]}'
    parser.add_argument("--prompt-file", type=as_path, metavar="F", help=file)
    about = "a picture for each <image> of a prompt, in order; all prompts see the same; repeat"
    many = {"action": "append", "type": path_text, "default": [], "metavar": "F"}
    parser.add_argument("--image", **many, help=about)
    about = "a video for each <video> of a prompt, likewise, for a model that reads them"
    parser.add_argument("--video", **many, help=about)
    about = "a sound for each <audio> of a prompt, likewise: WAV, FLAC, OGG or MP3 of 16 kHz"
    parser.add_argument("--audio", **many, help=about)
    scale = "what images lose and are divided by; without it as the run's data.images.mean and std "
    scale += "or preprocessor_config.json say, else CLIP's, or 0.5 for SigLIP's towers"
    parser.add_argument("--image-mean", type=float, nargs="+", help=scale)
    parser.add_argument("--image-std", type=float, nargs="+", help="likewise")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--system", help="with --chat: the system message of every --prompt")
    bare = "do not put the tokenizer's BOS first"
    parser.add_argument("--no-bos", action="store_true", help=bare)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most")
    about = {
        "temperature": "0: always the likeliest token",
        "top_k": "0: off",
        "top_p": "1: off",
        "min_p": "0: off",
        "repetition_penalty": "1: off",
        "presence_penalty": "0: off",
        "frequency_penalty": "0: off",
    }
    for field in fields(Sampling):
        flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        parser.add_argument(flag, type=kind, default=field.default, help=about[field.name])
    parser.add_argument("--stop", action="append", default=[], help="text that ends a row; repeat")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    lines = "a line for each token: id, log-probability, text"
    parser.add_argument("--logprobs", action="store_true", help=lines)
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of --prompt and --prompt-file, in that order."""
    out: list[Prompt] = list(args.prompt)
    if args.prompt_file is not None:
        if is_json_lines(args.prompt_file):
            out += _json_prompts(args.prompt_file)
        else:
            out.append(read_text(args.prompt_file))
    if not out:
        raise UserError("nothing to continue; give --prompt or --prompt-file")
    return out


def _json_prompts(path: Path) -> Iterator[Prompt]:
    for where, row in json_rows([str(path)]):
        prompt = row.get("messages", row.get("prompt"))
        if not isinstance(prompt, list if "messages" in row else str):
            raise UserError(f'{where}: not {{"prompt": ".."}} or {{"messages": [..]}}; mend it')
        yield prompt


def items_of_prompts(
    args: argparse.Namespace, cfg: ModelConfig, tokenizer: Tokenizer, ids: list[list[int]]
) -> tuple[list[list[int]], list[dict]]:
    """(prompts with all tokens of their items, the items of each)."""
    import jax

    from mjax.data.multimodal.tiles import expanded

    vision = cfg.vision
    if args.video and not (vision.is_packed and vision.video_token_id):
        raise UserError(f"--video {args.video[0]}: the model reads no videos; leave it out")
    if vision.is_packed:
        return _packed_prompts(args, cfg, tokenizer, ids)
    images, texts = read_images(args, cfg, tokenizer)
    given = {"vision": images, "audio": read_sounds(args, cfg)}
    if vision.is_cut:
        ids = [expanded(row, vision.image_token_id, texts)[0] for row in ids]
    items = {name: item for name, item in given.items() if item is not None}
    return ids, [jax.tree.map(lambda array: array[0], items)] * len(ids)


def _packed_prompts(
    args: argparse.Namespace, cfg: ModelConfig, tokenizer: Tokenizer, ids: list[list[int]]
) -> tuple[list[list[int]], list[dict]]:
    """`items_of_prompts` of a model that reads pictures of any size, and videos."""
    from mjax.data.multimodal.pictures import packed_prompt, patches_of_picture
    from mjax.data.multimodal.videos import cut_video, sampled_frames

    vision, scale, images = cfg.vision, scale_of(args, cfg.vision), []
    for name in args.image:
        with or_user_error(f"--image {name}: {{reason}}; give a picture", UNREADABLE):
            images.append(patches_of_picture(Path(name).read_bytes(), vision, *scale))
    films = []
    for name in args.video:
        frames, seconds = sampled_frames(name)
        films.append(cut_video(frames, seconds, vision, tokenizer, *scale))
    prompts, items = [], []
    for row in ids:
        prompt, own = packed_prompt(row, images, vision, films)
        prompts.append(prompt)
        items.append({"vision": own} if (own.features >= 0).any() else {})
    return prompts, items


def scale_of(args: argparse.Namespace, vision: "VisionConfig") -> tuple[list[float], list[float]]:
    """Mean and deviation of images. Raises `UserError` for numbers that are none."""
    usual = usual_scale(vision)
    mean, std = args.image_mean or usual[0], args.image_std or usual[1]
    for option, numbers in (("--image-mean", mean), ("--image-std", std)):
        if len(numbers) not in (1, vision.num_channels) or not np.isfinite(numbers).all():
            said = f"give one finite number, or model.vision.num_channels={vision.num_channels}"
            raise UserError(f"{option} {' '.join(map(str, numbers))}: {said}")
    if min(std) <= 0:
        raise UserError(f"--image-std {' '.join(map(str, std))}: give numbers above 0")
    return mean, std


def read_images(
    args: argparse.Namespace, cfg: ModelConfig, tokenizer: Tokenizer
) -> tuple["np.ndarray | Tiled | None", list[list[int]]]:
    """The images of --image, fp32 [1, I, H, W, C], or None; the ids of each, if cut into tiles.

    Raises `UserError` for a file that is no picture.
    """
    if not args.image:
        return None, []
    from mjax.data.multimodal.pixels import decode_image, decode_picture, norm_image
    from mjax.data.multimodal.tiles import tagged_images, tiled_images

    _require_tower(cfg, "vision", f"--image {args.image[0]}")
    vision, found = cfg.vision, []
    mean, std = scale_of(args, vision)
    for name in args.image:
        with or_user_error(f"--image {name}: {{reason}}; give a picture", UNREADABLE):
            encoded = Path(name).read_bytes()
            if vision.is_cut:
                found.append(decode_picture(encoded, vision.num_channels))
            else:
                pixels = decode_image(encoded, vision.image_size, vision.num_channels)
                found.append(norm_image(pixels, mean, std))
    if not vision.is_cut:
        return np.stack([found]), []
    if vision.tile_tags:
        tagged, (texts,) = tagged_images([found], vision, tokenizer, mean, std)
        return tagged, texts
    with or_user_error(f"--image {args.image[0]}: {{reason}}; give another", ValueError):
        tiled, (counts,) = tiled_images([found], vision, mean, std)
    return tiled, [[vision.image_token_id] * count for count in counts]


def _require_tower(cfg: ModelConfig, modality: str, option: str) -> None:
    if modality not in cfg.modalities:
        raise UserError(
            f"{option}: the model has no tower that reads it (model.layer_pattern="
            f"{cfg.layer_pattern}); leave it out"
        )


def read_sounds(args: argparse.Namespace, cfg: ModelConfig) -> np.ndarray | None:
    """The sounds of --audio, fp32 [1, I, F, M], or None. Raises `UserError` if one is no sound."""
    if not args.audio:
        return None
    _require_tower(cfg, "audio", f"--audio {args.audio[0]}")
    from mjax.data.multimodal.audio import decode_frames

    found = []
    for name in args.audio:
        with or_user_error(f"--audio {name}: {{reason}}; give a sound", UNREADABLE):
            encoded, frames = Path(name).read_bytes(), 2 * cfg.audio.max_source_positions
            found.append(decode_frames(encoded, cfg.audio.num_mel_bins, frames))
    return np.stack([found])


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer,
    folder: Path | None,
    args: argparse.Namespace,
    cfg: ModelConfig,
) -> list[int]:
    """Ids of a prompt: a chat through its template, which writes all special tokens itself."""
    if isinstance(prompt, str) and not args.chat:
        prefix = () if args.no_bos else tokenizer.prefix
        return [*prefix, *encode_with_items(prompt, tokenizer, cfg)]
    if folder is None:
        raise UserError(f"{args.ckpt}: holds no chat template; leave out --chat and messages")
    if isinstance(prompt, str):
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompt = [*system, {"role": "user", "content": prompt}]
    return encode_with_items(load_chat_template(folder).render(prompt), tokenizer, cfg)


if __name__ == "__main__":
    run_cli(main)
