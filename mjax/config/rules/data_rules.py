"""The rules about `data`, `run` and `checkpoint`: a part of the table of rules (`validate.py`)."""

import re
from collections.abc import Iterator

from mjax.config.languages.paths import MIRROR_IT, NEEDS_FILES, is_address
from mjax.config.languages.rehearsal import parse_fault
from mjax.config.rules.reinforce_rules import draws_answers
from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config


def _trained_vocab(c: Config) -> str | None:
    """The VOCAB of tokenizer 'train:VOCAB'."""
    name = c.data.tokenizer or ""
    return name.removeprefix("train:") if name.startswith("train:") else None


def _lists_of_weights(c: Config) -> list[list[float]]:
    weights = c.data.weights
    if weights is None:
        return []
    return list(weights.values()) if isinstance(weights, dict) else [weights]


def data_sources(c: Config) -> list[str]:
    """The keys that name a source of data."""
    given = {"paths": c.data.paths, "text": c.data.text, "mock": c.data.mock}
    given["images.path"] = c.data.images.path
    given["conversations.path"] = c.data.conversations.path
    return [f"data.{name}" for name, value in given.items() if value]


@rule(
    "set exactly one of data.paths, data.text, data.conversations.path, data.images.path, data.mock"
)
def one_data_source(c: Config) -> Iterator[str]:
    sources = data_sources(c)
    draws_all = draws_answers(c) and c.distill.student_share in (0, 1)
    if not sources and not draws_all:
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
    if any(len(weights) != len(paths) for weights in _lists_of_weights(c)):
        yield f"`data.weights` does not have one entry for each of `{key}`"


@rule("use numbers of at least 0 that are not all 0")
def weights_legal(c: Config) -> Iterator[str]:
    if any(not min(weights) >= 0 < sum(weights) for weights in _lists_of_weights(c) if weights):
        yield "`data.weights` are not shares"


@rule("begin with 0, as in {0: [1, 1], 5000: [1, 3]}, and give steps that grow")
def weights_begin_at_0(c: Config) -> Iterator[str]:
    steps = list(c.data.weights) if isinstance(c.data.weights, dict) else [0]
    if steps[:1] != [0] or steps != sorted(steps):
        yield "the steps of `data.weights` leave out the start of the run, or are not in order"


@rule("set data.text to files, a data set or an address, and data.tokenizer to a file or byte")
def stream_has_text(c: Config) -> Iterator[str]:
    if c.data.stream and (c.data.text in (None, "-", "stdlib") or _trained_vocab(c) is not None):
        yield "`data.stream` needs text that files hold and a tokenizer that is there"


@rule("set data.stream=false, which tokenizes `data.text` before the run")
def stream_is_plain(c: Config) -> Iterator[str]:
    is_plain = c.train.objective == "next_token" or ":" in c.train.objective
    whole = c.data.fim_rate or c.data.masked.sentences or c.model.architecture.reads_neighbors
    if c.data.stream and (whole or not is_plain):
        yield (
            "`data.stream` gives rows of plain text, not what `data.fim_rate`, "
            "`data.masked.sentences`, RETRO or this `train.objective` read"
        )


@rule("give an address such as s3://bucket/run")
def mirror_is_an_address(c: Config) -> Iterator[str]:
    if c.checkpoint.mirror is not None and not is_address(c.checkpoint.mirror):
        yield "`checkpoint.mirror` is no address of an object store"


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


@rule("give it a third share, or set train.test_steps=0")
def third_share_is_left(c: Config) -> Iterator[str]:
    if c.train.test_steps and not c.data.mock and c.data.split[2] == 0:
        yield "`train.test_steps` but no data is left for them: `data.split`"


@rule("give each a short name of letters, digits, _, . and -")
def names_of_sets(c: Config) -> Iterator[str]:
    for name in c.data.eval_sets:
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            yield f"data.eval_sets: {name!r} is no name of a field in the log"


@rule("train on data.paths, data.text or data.conversations, or leave data.eval_sets out")
def sets_are_of_texts(c: Config) -> Iterator[str]:
    data, is_read = c.data, c.data.paths or c.data.text or c.data.conversations.path
    takes_pairs = c.train.objective == "classify" or c.model.architecture.reads_neighbors
    if data.eval_sets and (not is_read or takes_pairs):
        yield "data.eval_sets holds sets of another kind than the training data"


@rule("write FAULT@STEP or FAULT@STEP:PROCESS with nan, nan_once, bit_flip, hang or die")
def rehearsed_faults(c: Config) -> Iterator[str]:
    for text in c.run.rehearse:
        fault = parse_fault(text)
        if fault is None or (fault.process and fault.kind.startswith("nan")):
            yield f"run.rehearse: {text!r} is no fault that a run can rehearse"


@rule("set that key, or rehearse another fault")
def rehearsed_faults_are_seen(c: Config) -> Iterator[str]:
    kinds = {fault.kind for fault in map(parse_fault, c.run.rehearse) if fault}
    if "bit_flip" in kinds and c.train.check_replicas_interval is None:
        yield "run.rehearse: nothing would see bit_flip with `train.check_replicas_interval`"
    if "hang" in kinds and c.train.step_timeout_minutes is None:
        yield "run.rehearse: nothing would end hang with `train.step_timeout_minutes`"


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
    readers = "next_token", "preference", "reward", "distill"
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


@rule(MIRROR_IT)
def run_dir_is_files(c: Config) -> Iterator[str]:
    if is_address(c.run.dir):
        yield f"`run.dir` {NEEDS_FILES}"


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
