"""Videos as frames, decoded by PyAV, and what stands in a text for them (Qwen2.5-VL, Qwen3-VL).

Frames are taken evenly, two a second, and two are a patch. All tokens of a video stand together if
`model.vision.tokens_per_second` is set, and their positions tell the time. Else each pair of frames
stands alone, after its time as text, as transformers' Qwen3VLProcessor writes it.
"""

import io
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from mjax.config.schema.vision import FRAMES, VisionConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.data.multimodal.pictures import Video, bounds_of, patches_of_frames
from mjax.errors import UserError, or_user_error

FPS, FEWEST, MOST = 2.0, 4, 768  # frames a second, and of a video
_START, _END = "<|vision_start|>", "<|vision_end|>"


def sampled_frames(path: str, encoded: bytes | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """(uint8 [H, W, 3] frames of a video file, an even number; the second of each, [F]).

    `encoded`: what the file holds, if it has been read. Raises `UserError` without PyAV, and for a
    file that is no video.
    """
    av = import_av(path)
    with or_user_error(f"{path}: {{reason}}; give a video", (OSError, ValueError, IndexError)):
        with av.open(path if encoded is None else io.BytesIO(encoded)) as file:
            stream = file.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
            rate = float(stream.average_rate or 24)
    if not frames:
        raise UserError(f"{path}: a video without frames; give another")
    count = int(np.clip(len(frames) / rate * FPS, FEWEST, MOST))
    count = min(count, len(frames))
    chosen = np.linspace(0, len(frames) - 1, count)
    chosen = chosen.round().astype(int)
    chosen = np.append(chosen, chosen[-1:].repeat(-len(chosen) % FRAMES))
    return [frames[number] for number in chosen], chosen / rate


def import_av(where: str) -> ModuleType:
    """PyAV. Raises `UserError`, which says `where`, without it."""
    with or_user_error(f"{where}: videos need {{reason}}; install mjax[vision]", ImportError):
        import av
    return av


def cut_video(
    frames: Sequence[np.ndarray],
    seconds: np.ndarray,
    vision: VisionConfig,
    tokenizer: Tokenizer,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
) -> Video:
    """A video's patches and ids; its frames have `max_patches` together at most."""
    from PIL import Image

    bounds, pairs = bounds_of(vision), len(frames) // FRAMES
    room = vision.max_patches * vision.patch_size**2 // pairs
    bounds = bounds._replace(least=min(bounds.least, room), most=min(bounds.most, room))
    height, width = bounds.nearest(*frames[0].shape[:2])
    scaled = [Image.fromarray(frame).resize((width, height), 3) for frame in frames]  # 3: bicubic
    patches, grid = patches_of_frames(np.stack(list(map(np.asarray, scaled))), vision, mean, std)
    if vision.tokens_per_second:
        each = (seconds[-1] - seconds[0]) / max(len(seconds) - 1, 1) * FRAMES
        grid = grid._replace(interval=vision.tokens_per_second * each)
        return Video([vision.video_token_id] * grid.tokens, [(patches, grid)])
    one, ids, cut = grid._replace(frames=1), [], []
    for own, times in zip(np.split(patches, pairs), seconds.reshape(-1, FRAMES), strict=True):
        ids += tokenizer.encode(f"<{times.mean():.1f} seconds>{_START}")
        ids += [*[vision.video_token_id] * one.tokens, *tokenizer.encode(_END)]
        cut.append((own, one))
    return Video(ids, cut)
