"""Texts with images and sounds, for a model that reads them, tokenized into memory.

A sample is {"images": ["a.png"], "audio": ["b.wav"], "prompt": "<image><audio>What is it?", "text":
"A cat."}, as JSON lines, parquet, tar files or folders hold it (`data/multimodal/sources.py`); all
but the text may be left out. Models of packed images read "videos", too, at <video>. The loss is on
the text and the end token after it. A conversation may replace both, which the tokenizer's chat
template writes: the loss is on answers. A model that compares images with texts (CLIP) has samples
of an image and a text, and a text that is too long is cut. Invariant: sample n is a pure function
of (files, settings, seed, n), as in `data/sentences/labelled.py`. A sample whose item cannot be
decoded, or that does not fit `data.seq_length`, counts in no loss and is named in the log.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mjax.config.schema.model import ModelConfig
from mjax.config.schema.run import Config
from mjax.config.schema.vision import FRAMES
from mjax.data.base.chat import ChatTemplate, load_chat_template
from mjax.data.base.conversations import SPEAKERS, answers_by_prefixes
from mjax.data.base.tokenizer import Tokenizer, encode_behind, encode_with_items, require_no_items
from mjax.data.corpus.gpt import FieldArrays
from mjax.data.multimodal.decoders import attempt
from mjax.data.multimodal.pictures import (
    ScaledReader,
    Video,
    patches_of_frames,
    with_items_in_place,
)
from mjax.data.multimodal.readers import ImageReader, NamesOfSamples, Skipped, SoundReader
from mjax.data.multimodal.sources import IMAGES, SOUNDS, VIDEOS, Item, Sample, samples_of
from mjax.data.multimodal.tiles import PictureReader, cut_pictures, expanded, tag_ids
from mjax.data.multimodal.videos import cut_video, import_av, sampled_frames
from mjax.data.sentences.labelled import drawn_part, shuffled
from mjax.errors import UserError, or_user_error
from mjax.models.towers.image_places import CutImages, packed_row
from mjax.models.towers.modalities import MODALITIES, features_of_tiles
from mjax.models.towers.tiles import Features, padded_features
from mjax.objectives.text_with_items import fields_of_packed, items_of

# A modality's key in a line, and what decodes its files.
KEYS = {"vision": IMAGES, "audio": SOUNDS}
READERS = {"vision": ImageReader, "audio": SoundReader}


# What a sample has one of: a text, or messages as chat templates or LLaVA's files have them.
TEXTS = ("text", "messages", "conversations")


@dataclass(frozen=True)
class TokenizedSample:
    """The ids of a sample with those of its items, which of them are answers, items by modality.

    videos: of a model that reads them in their own sizes; each is one id until it is read.
    features: what stands in it for its images in tiles, once they are read, unless tiles have tags.
    Before that an image is one id.
    """

    name: str
    ids: list[int]
    is_answer: list[bool]
    items: dict[str, list[Item]]
    features: Sequence[Features] = ()
    videos: Sequence[Item] = ()

    @property
    def names(self) -> NamesOfSamples:
        """Its own, and those of its items."""
        lists = *self.items.values(), self.videos
        return self.name, *(item.name for items in lists for item in items)

    @property
    def prompt(self) -> int:
        """The number of ids before its first answer."""
        return self.is_answer.index(True)


class ImageTextDataset:
    """`size` samples (None: an epoch), a text each, padded to `data.seq_length`.

    `batch(indices)` gives `tokens`, `labels`, `segment_ids`, `positions` (int32 [B, S]),
    `loss_mask` (fp32 [B, S]), `patches` and `frames` (fp32 [B, I, T, N]) of a model that reads
    them, and `row_label` (int32 [B], -1 where a sample is left out). Raises `UserError` for a line
    that cannot be used, naming it.
    """

    max_documents, padded = 2, True  # the text, and padding

    def __init__(
        self,
        path: str | os.PathLike,
        split: str,
        split_fractions: Sequence[float],
        size: int | None,
        cfg: Config,
        tokenizer: Tokenizer,
    ):
        self.cfg, self.has_end, self.tokenizer = cfg, tokenizer.eod_id is not None, tokenizer
        eos = cfg.model.contrastive.eos_token_id
        if eos not in (None, 2, tokenizer.eod_id):
            raise UserError(
                f"model.contrastive.eos_token_id={eos} is not the end that data.tokenizer puts "
                f"behind a text, {tokenizer.eod_id}; set it to that"
            )
        self.tags = tag_ids(cfg.model.vision, tokenizer)
        lines = read_lines(path, tokenizer, cfg)
        numbers = drawn_part(len(lines), split_fractions, split, f"{path}", "lines")
        self.lines = [lines[number] for number in numbers]
        if any(line.videos for line in self.lines):
            import_av("data.images")
        self.size = len(self.lines) if size is None else size
        self.skipped = Skipped(f"{path}", split, len(self.lines), self.size)
        readers = dict(READERS)
        if cfg.model.vision.is_cut or cfg.model.vision.is_packed:
            readers["vision"] = PictureReader if cfg.model.vision.is_cut else ScaledReader
        self.readers = {name: readers[name](cfg, self.skipped) for name in cfg.model.modalities}

    def __len__(self) -> int:
        return self.size

    @property
    def max_images(self) -> int:
        """The most images of a text, and padding; 0: videos have frames that nobody has counted."""
        if any(line.videos for line in self.lines):
            return 0
        return 1 + max(len(line.items.get("vision", ())) for line in self.lines)

    def batch(self, indices: Sequence[int] | np.ndarray) -> FieldArrays:
        """Samples `indices`, stacked."""
        return self.rows_of(self._chosen(indices))

    def names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """The files of samples `indices`, with what is wrong with them, if anything."""
        return [self.skipped.described(line.names) for line in self._chosen(indices)]

    def _chosen(self, indices: Sequence[int] | np.ndarray) -> list[TokenizedSample]:
        return [self.lines[n] for n in shuffled(indices, len(self.lines), self.cfg.run.seed)]

    def rows_of(self, chosen: Sequence[TokenizedSample]) -> FieldArrays:
        """A row for each of these lines, stacked."""
        cfg = self.cfg
        shape = len(chosen), cfg.data.seq_length
        ids, mask = np.zeros((shape[0], shape[1] + 1), np.int32), np.zeros(shape, np.float32)
        segments, labels = np.zeros(shape, np.int32), np.full(shape[:1], -1, np.int32)
        compared = cfg.model.architecture.compares
        if compared and cfg.model.contrastive.eos_token_id is None:
            ids += cfg.data.masked.pad_token_id or 0  # SigLIP's texts see padding, and end there
            segments += 1
        fits = np.array([self._fits(line) for line in chosen])
        items = {}
        for name in cfg.model.modalities:
            if cfg.model.tower(name).is_packed:
                packed, chosen, is_read = self._packed(chosen, fits)
            elif cfg.model.tower(name).is_cut:
                items[name], chosen, is_read = self._in_tiles(chosen, fits)
            else:
                items[name], is_read = self._items(name, chosen, fits)
            fits = fits & is_read
        self.skipped.judge([line.names for line in chosen], fits)
        for row in np.flatnonzero(fits):
            line = chosen[row]
            labels[row] = 0
            end = len(line.ids) - (not compared)  # there is no next token
            ids[row, : len(line.ids)] = line.ids
            segments[row, :end] = 1
            mask[row, : len(line.ids) - 1] = line.is_answer[1 : len(line.ids)]
        columns = np.arange(shape[1], dtype=np.int32)
        fields = {}
        for name, array in items.items():
            array[~fits] = 0
            fields[MODALITIES[name].field] = array
        if cfg.model.vision.is_packed:
            rows = zip(ids[:, :-1], packed, fits, strict=True)
            vision = cfg.model.vision
            packed = [packed_row(row, own if good else (), vision) for row, own, good in rows]
            fields |= fields_of_packed(packed)
        if cfg.model.vision.is_tiled:
            texts = [line.features if fits[row] else () for row, line in enumerate(chosen)]
            of_row = items_of(cfg, "vision"), *padded_features(texts)
            names = "vision_features", "vision_weights"
            of_tokens = features_of_tiles(ids[:, :-1], cfg.model.vision, *of_row)
            fields |= dict(zip(names, of_tokens, strict=True))
        return fields | {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": mask,
            "segment_ids": segments,
            "positions": np.broadcast_to(columns, shape),
            "row_label": labels,
        }

    def _fits(self, line: TokenizedSample) -> bool:
        """Whether there is room for a line; if not, it is named."""
        model, room = self.cfg.model, self.cfg.data.seq_length
        whys = []
        if len(line.ids) > room + 1:
            whys.append(f"{len(line.ids)} tokens: data.seq_length is {room}")
        for name, items in line.items.items():
            tower = model.tower(name)
            if tower.is_packed:  # patches are counted once pictures are read
                continue
            most = getattr(tower, f"max_{tower.item}s")
            if len(items) > most:
                whys.append(f"{len(items)} {KEYS[name]}: model.{name}.max_{tower.item}s is {most}")
        # A token is predicted from one before it; texts that are compared need more than an end.
        is_empty = not any(line.is_answer[1:])
        if model.architecture.compares:
            is_empty = sum(line.is_answer) <= self.has_end
        if is_empty:
            whys.append("its text is empty")
        if whys:
            self.skipped.note(line.name, whys[0])
        return not whys

    def _items(
        self, name: str, lines: Sequence[TokenizedSample], fits: Sequence[bool]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows [B, I, T, N] of the items of a modality, bool [B]: which lines lack none)."""
        tower = self.cfg.model.tower(name)
        length = tower.row_length(self.cfg.item_size(name))
        rows = np.zeros((len(lines), tower.max_items, length, tower.numbers), np.float32)
        owners, found, places = [], [], []
        for number, line in enumerate(lines):
            items = line.items[name] if fits[number] else []
            owners += [number] * len(items)
            found += items
            places.extend(rows[number, : len(items)])
        is_good = self.readers[name].read(found, places)
        is_bad = np.bincount(np.array(owners, int)[~is_good], minlength=len(lines)) > 0
        return rows, ~is_bad

    def _in_tiles(
        self, lines: Sequence[TokenizedSample], fits: Sequence[bool]
    ) -> tuple[np.ndarray, list[TokenizedSample], np.ndarray]:
        """(tiles [B, I, T, N], lines with the tokens of their pictures, bool [B]: which are whole).

        A line that lacks a picture, or has no room for its tokens, stays as it was.
        """
        vision, scale = self.cfg.model.vision, self.cfg.data.images
        shape = len(lines), vision.max_items, vision.row_length(vision.image_size), vision.numbers
        rows, found, is_whole = np.zeros(shape, np.float32), list(lines), np.ones(shape[0], bool)
        for row, own in enumerate(self._pictures(lines, fits)):
            line = lines[row]
            if own is None:
                is_whole[row] = False
            elif own:
                tiles, texts, features = cut_pictures(own, vision, scale.mean, scale.std, self.tags)
                ids, places = expanded(line.ids, vision.image_token_id, texts)
                is_answer = [line.is_answer[at] for at in places]
                line = replace(line, ids=ids, is_answer=is_answer, features=features)
                is_whole[row] = self._fits(line)
                if is_whole[row]:
                    tiles = MODALITIES["vision"].rows(tiles, vision, shape[2])
                    found[row], rows[row, : len(tiles)] = line, tiles
        return rows, found, is_whole

    def _packed(
        self, lines: Sequence[TokenizedSample], fits: Sequence[bool]
    ) -> tuple[list[CutImages], list[TokenizedSample], np.ndarray]:
        """(patches of each line's pictures and videos, lines with their tokens, bool [B]: which
        are whole)."""
        vision, scale = self.cfg.model.vision, self.cfg.data.images
        found, cut, is_whole = list(lines), [()] * len(lines), np.ones(len(lines), bool)
        for row, own in enumerate(self._pictures(lines, fits)):
            videos = self._videos(lines[row]) if fits[row] and own is not None else []
            if own is None or videos is None:
                is_whole[row] = False
            elif own or videos:
                frames = (np.stack([picture] * FRAMES) for picture in own)
                patches = [patches_of_frames(f, vision, scale.mean, scale.std) for f in frames]
                ids, places, patches = with_items_in_place(lines[row].ids, patches, vision, videos)
                is_answer = [lines[row].is_answer[at] for at in places]
                line = replace(lines[row], ids=ids, is_answer=is_answer)
                total, most = sum(grid.patches for _, grid in patches), vision.max_patches
                if total > most:
                    self.skipped.note(line.name, f"{total} patches: max_patches is {most}")
                is_whole[row] = total <= most and self._fits(line)
                if is_whole[row]:
                    found[row], cut[row] = line, patches
        return cut, found, is_whole

    def _videos(self, line: TokenizedSample) -> list[Video] | None:
        """The videos of a line; None, and named, where one cannot be used."""
        vision, scale = self.cfg.model.vision, self.cfg.data.images
        found = []
        for item in line.videos:
            read = attempt(lambda item=item: sampled_frames(item.name, item.read()))
            if isinstance(read, str):
                self.skipped.note(item.name, read.removeprefix(f"{item.name}: "))
                return None
            found.append(cut_video(*read, vision, self.tokenizer, scale.mean, scale.std))
        return found

    def _pictures(
        self, lines: Sequence[TokenizedSample], fits: Sequence[bool]
    ) -> list[list[np.ndarray] | None]:
        """The pictures of each line, none of one that does not fit; None where one is lacking."""
        of_lines = [line.items["vision"] if fits[n] else [] for n, line in enumerate(lines)]
        items = [item for own in of_lines for item in own]
        read = iter(self.readers["vision"].pictures(items))
        found = []
        for of_line in of_lines:
            own = [next(read) for _ in of_line]
            lacks = any(picture is None for picture in own)
            found.append(None if lacks else own)
        return found


def read_lines(path: str | os.PathLike, tokenizer: Tokenizer, cfg: Config) -> list[TokenizedSample]:
    """The samples of a source as ids. Raises `UserError` naming the first that is none."""
    samples = samples_of(str(path), TEXTS)
    chats = [_messages(sample) for sample in samples]
    template = None
    if any(chats):
        template = load_chat_template(cfg.data.tokenizer)
    lines = []
    for sample, chat in zip(samples, chats, strict=True):
        turns = _turns(sample.name, chat, template) if chat else _one_turn(sample)
        lines.append(_line(sample, turns, bool(chat), tokenizer, cfg))
    return lines


def _line(
    sample: Sample, turns: list[tuple[str, str]], is_chat: bool, tokenizer: Tokenizer, cfg: Config
) -> TokenizedSample:
    """A sample as ids; of a chat, the template has written all special tokens."""
    model = cfg.model
    items = _items_of(sample, turns, model)
    sizes = {modality: cfg.item_size(modality) for modality in model.modalities}
    ids = [] if is_chat else list(tokenizer.prefix)
    end = [] if is_chat or tokenizer.eod_id is None else [tokenizer.eod_id]
    require_no_items(ids, model, sample.name)
    is_answer = [False] * len(ids)
    for prompt, text in turns:
        before = encode_with_items(prompt, tokenizer, model, sizes, sample.name)
        answer = [*encode_behind(tokenizer, before, text), *end]
        require_no_items(answer, model, sample.name)
        ids += [*before, *answer]
        is_answer += [False] * len(before) + [True] * len(answer)
    if model.architecture.compares and len(ids) > cfg.data.seq_length:
        ids = [*ids[: cfg.data.seq_length - len(end)], *end]
    return TokenizedSample(
        sample.name, ids, is_answer, items, videos=_videos_of(sample, turns, model)
    )


def _one_turn(sample: Sample) -> list[tuple[str, str]]:
    """The prompt and the text of a sample."""
    prompt, text = sample.facts.get("prompt") or "", sample.facts.get("text")
    if not isinstance(prompt, str) or not isinstance(text, str):
        keys = ", ".join(f'"{key}": [".."]' for key in KEYS.values())
        raise UserError(f'{sample.name}: not {{{keys}, "prompt": "..", "text": ".."}}')
    return [(prompt, text)]


def _messages(sample: Sample) -> list[tuple[dict[str, str], bool]]:
    """({"role": .., "content": ..}, whether its weight is 1) of a conversation, or nothing."""
    wrong = f'{sample.name}: not [{{"role": "user", "content": ".."}}, ..] ({{reason}})'
    found = []
    with or_user_error(wrong, (AttributeError, TypeError, LookupError)):
        for one in sample.facts.get("conversations") or ():
            message = {"role": SPEAKERS[one["from"]], "content": one["value"]}
            found.append((message, _weight(one)))
        for one in sample.facts.get("messages") or ():
            message = {"role": one["role"], "content": one["content"]}
            found.append((message, _weight(one)))
    return found


def _weight(message: dict) -> bool:
    """Whether a message counts in the loss, if it is an answer."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise LookupError(f"weight {weight!r}, not 0 or 1")
    return weight != 0


def _turns(
    name: str, chat: list[tuple[dict[str, str], bool]], template: ChatTemplate
) -> list[tuple[str, str]]:
    """(what stands before an answer, the answer with its end) of each answer that is trained on."""
    messages = [message for message, _ in chat]
    answers = [n for n, (m, counts) in enumerate(chat) if counts and m["role"] == "assistant"]
    text, spans = answers_by_prefixes(name, template, messages, answers)
    turns, seen = [], 0
    for begin, end in spans:
        turns.append((text[seen:begin], text[begin:end]))
        seen = end
    if not turns:
        raise UserError(
            f"{name}: a conversation in which the assistant says nothing to train on; leave it out"
        )
    return turns


def _items_of(
    sample: Sample, turns: list[tuple[str, str]], model: ModelConfig
) -> dict[str, list[Item]]:
    """The items of a sample by modality. Raises `UserError` where its texts call for others."""
    prompt, text = map("".join, zip(*turns, strict=True))
    items = {}
    for modality, key in KEYS.items():
        found = sample.items.get(key, [])
        if modality not in model.modalities:
            if found:
                raise UserError(f"{sample.name}: {key}, but model.layer_pattern reads none")
            continue
        items[modality] = found
        mark = model.tower(modality).mark
        if model.architecture.compares:
            if prompt or len(found) != 1:
                said = "to compare an image with a text, give one image and no prompt"
                raise UserError(f"{sample.name}: {said}")
        elif (prompt + text).count(mark) != len(found) or mark in text:
            said = f"{len(found)} {key}, and not as many {mark} in its prompt"
            raise UserError(f"{sample.name}: {said}")
    return items


def _videos_of(sample: Sample, turns: list[tuple[str, str]], model: ModelConfig) -> Sequence[Item]:
    """The videos of a sample. Raises `UserError` where its texts call for others."""
    found, mark = sample.items.get(VIDEOS, ()), "<video>"
    prompt, text = map("".join, zip(*turns, strict=True))
    if found and not (model.vision.is_packed and model.vision.video_token_id):
        raise UserError(f"{sample.name}: {VIDEOS}, but the model reads none")
    if model.vision.is_packed and (prompt.count(mark) != len(found) or mark in text):
        said = f"{len(found)} {VIDEOS}, and not as many {mark} in its prompt"
        raise UserError(f"{sample.name}: {said}")
    return found
