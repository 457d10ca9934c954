"""Options of the command line that `mjax.generate` and `mjax.evaluate` share: a model and its
tokenizer."""

import argparse
from pathlib import Path

from mjax.checkpoint.base.companion_files import side_folders
from mjax.checkpoint.base.steps import newest_step
from mjax.checkpoint.base.stored import read_record
from mjax.config.languages.paths import path_text
from mjax.config.schema.vision import VisionConfig
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.json_file import read_json

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ckpt",
        type=path_text,
        required=True,
        help="a run, a checkpoint, RUN@best, RUN@160, a Hugging Face folder, org/name of the hub",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="devices to split it over")
    kinds = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=kinds, help="default: bfloat16, on a CPU float32")
    parser.add_argument(
        "--tokenizer", type=path_text, help="default: the model's own; see data.tokenizer"
    )


def load_model(args: argparse.Namespace):
    """(the `Pretrained` of --ckpt on --tp devices, its dtype, its tokenizer)."""
    from mjax.checkpoint.base.companion_files import tokenizer_of
    from mjax.infer.weights import usual_dtype
    from mjax.interop.pretrained import from_pretrained
    from mjax.sharding.mesh import tensor_parallel_mesh
    from mjax.sharding.processes.compiled_programs import keep_compiled_programs

    keep_compiled_programs()
    stages = getattr(args, "pp", 1)
    option = f"--tp {args.tp}" + (f" --pp {stages}" if stages != 1 else "")
    mesh = tensor_parallel_mesh(args.tp, option, stages)
    dtype = args.dtype or usual_dtype()
    model = from_pretrained(args.ckpt, mesh=mesh, dtype=dtype)
    spec = args.tokenizer or tokenizer_of(args.ckpt)
    if spec is None:
        raise UserError(f"{args.ckpt}: holds no tokenizer; give --tokenizer")
    return model, dtype, load_tokenizer(spec)


def usual_scale(vision: VisionConfig) -> tuple[list[float], list[float]]:
    """Mean and deviation of images where nothing says them: CLIP's for its towers, else 0.5."""
    is_clip = vision.class_token and vision.num_channels == 3
    return (CLIP_MEAN, CLIP_STD) if is_clip else ([0.5], [0.5])


def image_scale(path: Path) -> tuple[list[float] | None, list[float] | None]:
    """Mean and deviation of images in the training of the weights in `path`, or None twice.

    A run's record says it, or the preprocessor_config.json of a published model.
    """
    step = newest_step(path)
    images = {} if step is None else read_record(step)["config"].get("data", {}).get("images", {})
    if images:
        return images.get("mean"), images.get("std")
    for folder in side_folders(path):
        said = read_json(folder / "preprocessor_config.json", missing={})
        if said.get("do_normalize", True) and "image_mean" in said:
            return said["image_mean"], said.get("image_std")
    return None, None
