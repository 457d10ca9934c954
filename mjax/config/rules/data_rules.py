"""The rules about `data`, `run` and `checkpoint`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.languages.paths import MOUNT_IT, NEEDS_FILES, is_address
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config


def _trained_vocab(c: Config) -> str | None:
    """The VOCAB of tokenizer 'train:VOCAB'."""
    name = c.data.tokenizer or ""
    return name.removeprefix("train:") if name.startswith("train:") else None


@rule(
    "set exactly one of data.paths, data.text, data.conversations.path, data.images.path, data.mock"
)
def one_data_source(c: Config) -> Iterator[str]:
    given = {"paths": c.data.paths, "text": c.data.text, "mock": c.data.mock}
    given["images.path"] = c.data.images.path
    given["conversations.path"] = c.data.conversations.path
    sources = [f"data.{name}" for name, value in given.items() if value]
    if not sources:
        yield "data: nothing to train on"
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other"


@rule("give one weight a path, or null to weigh by tokens")
def weights_match_paths(c: Config) -> Iterator[str]:
    key, paths = "data.paths", c.data.paths
    if c.data.images.path is not None:
        key, paths = "data.images.path", c.data.images.paths
    if c.data.conversations.path is not None:
        key, paths = "data.conversations.path", c.data.conversations.paths
    if c.data.weights is not None and len(c.data.weights) != len(paths):
        yield f"`data.weights` does not have one entry for each of `{key}`"


@rule("use numbers of at least 0 that are not all 0")
def weights_legal(c: Config) -> Iterator[str]:
    if c.data.weights is not None and not min(c.data.weights) >= 0 < sum(c.data.weights):
        yield "`data.weights` are not shares"


@rule("use numbers of at least 0 that are not all 0")
def split_legal(c: Config) -> Iterator[str]:
    if not min(c.data.split) >= 0 < sum(c.data.split):
        yield "`data.split` are not shares of train, valid, test"


@rule("give it a second share, set data.valid_paths, or set train.eval_interval=null")
def held_out_data(c: Config) -> Iterator[str]:
    others = c.data.valid_paths or c.data.images.valid_path is not None
    has_data = c.data.mock or others or c.data.split[1] > 0
    if c.train.eval_interval is not None and not has_data:
        yield "`train.eval_interval` but no data is held out: `data.split`"


@rule("set data.tokenizer, for example byte or train:4096")
def text_needs_tokenizer(c: Config) -> Iterator[str]:
    if c.data.text is not None and c.data.tokenizer is None:
        yield "`data.text` has no tokenizer"


@rule("set data.tokenizer to the folder of the model that is fine-tuned")
def conversations_need_tokenizer(c: Config) -> Iterator[str]:
    if c.data.conversations.path is not None and c.data.tokenizer is None:
        yield "`data.conversations.path` has no tokenizer"


@rule("set data.document_mask=true, or data.conversations.rows=padded")
def conversations_are_documents(c: Config) -> Iterator[str]:
    conversations = c.data.conversations
    is_packed = conversations.path is not None and conversations.rows == "packed"
    if is_packed and not c.data.document_mask:
        yield "conversations of a row would see each other: `data.document_mask`"


@rule("set train.objective=next_token, or to module.path:Name")
def conversations_are_predicted(c: Config) -> Iterator[str]:
    readers = "next_token", "preference", "reward"
    reads = c.train.objective in readers or ":" in c.train.objective
    if c.data.conversations.path is not None and not reads:
        yield "`train.objective` does not read `data.conversations.path`"


@rule("set data.text or name a tokenizer file")
def trained_tokenizer_needs_text(c: Config) -> Iterator[str]:
    if _trained_vocab(c) is not None and c.data.text is None:
        yield "`data.tokenizer` has no text to train on"


@rule("write train:N with N from 257 (the bytes and an end mark) to model.vocab_size")
def trained_vocab_legal(c: Config) -> Iterator[str]:
    n = _trained_vocab(c)
    if n is not None and not (n.isdecimal() and 257 <= int(n) <= c.model.vocab_size):
        yield "`data.tokenizer` does not fit `model.vocab_size`"


@rule("set data.eod_token_id or data.tokenizer")
def eod_known(c: Config) -> Iterator[str]:
    if c.data.eod_mask_loss and c.data.eod_token_id is None and c.data.tokenizer is None:
        yield "`data.eod_mask_loss` but the EOD token is unknown"


@rule("change either")
def eod_in_vocab(c: Config) -> Iterator[str]:
    if c.data.eod_token_id is not None and c.data.eod_token_id >= c.model.vocab_size:
        yield "`data.eod_token_id` is outside `model.vocab_size`"


@rule("set data.tokenizer or train.sample_prompt=null")
def sample_prompt_needs_tokenizer(c: Config) -> Iterator[str]:
    if c.train.sample_prompt is not None and c.data.tokenizer is None:
        yield "`train.sample_prompt` cannot be read without a tokenizer"


@rule(MOUNT_IT)
def run_dir_is_files(c: Config) -> Iterator[str]:
    if is_address(c.run.dir):
        yield f"`run.dir` {NEEDS_FILES}"


@rule(MOUNT_IT)
def init_from_is_files(c: Config) -> Iterator[str]:
    for key in ("init_from", "init_audio"):
        if is_address(getattr(c.checkpoint, key)):
            yield f"`checkpoint.{key}` {NEEDS_FILES}"


@rule("give a folder of this machine's disk or memory")
def local_dir_is_files(c: Config) -> Iterator[str]:
    if is_address(c.checkpoint.local_dir):
        yield f"`checkpoint.local_dir` {NEEDS_FILES}"


@rule("set both or neither")
def local_tier_is_whole(c: Config) -> Iterator[str]:
    if (c.checkpoint.local_dir is None) != (c.checkpoint.local_interval is None):
        yield "`checkpoint.local_dir` and `checkpoint.local_interval` go together"


@rule("lower the first, or set checkpoint.local_dir=null and checkpoint.local_interval=null")
def local_is_more_frequent(c: Config) -> Iterator[str]:
    if (c.checkpoint.local_interval or 0) >= (c.checkpoint.interval or 10**18):
        yield (
            "`checkpoint.local_interval` is not below `checkpoint.interval`, so no save would be "
            "local"
        )


@rule("set both, the first as a multiple of the second")
def best_is_measured(c: Config) -> Iterator[str]:
    measured = c.train.eval_interval
    follows = measured is not None and (c.checkpoint.interval or 0) % measured == 0
    if c.checkpoint.keep_best and not follows:
        yield (
            "`checkpoint.keep_best` needs the held-out loss of every step that is saved, but "
            "`checkpoint.interval` is no multiple of `train.eval_interval`"
        )


DATA_RULES = rules_of(globals())
