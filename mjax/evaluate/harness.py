"""EleutherAI's lm-evaluation-harness over an mjax model: `python -m mjax.evaluate harness`.

The adapter turns the harness' three kinds of requests into rows of token ids, scored or continued
in batches of like length, padded to powers of two so that few programs are compiled. Rules are
those of the harness' own Hugging Face backend (lm-eval 0.4): spaces between context and
continuation belong to the continuation, long rows lose tokens on the left, an empty context is the
BOS (or else the end-of-document token). Invariant: the order of answers is that of the requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property

import numpy as np

from mjax.checkpoint.base.companion_files import end_ids
from mjax.data.base.chat import load_chat_template
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError, or_user_error
from mjax.evaluate.row_scores import Row, batch_of, scorer
from mjax.infer.checks import require_decoder
from mjax.infer.engine import Engine
from mjax.infer.requests import SamplingParams
from mjax.infer.sample import Sampling
from mjax.infer.small_engine import completed, small_engine
from mjax.infer.text import windows
from mjax.interop.pretrained import Pretrained
from mjax.sharding.processes.agreement import run_by_all

with or_user_error(
    "the harness needs lm-evaluation-harness ({reason}); install mjax[lm-eval]", ImportError
):
    from lm_eval.api.model import LM

_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(LM):
    """A model as the harness sees it. Raises `UserError` for requests it cannot answer.

    beat: is called after each batch.
    """

    beat: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        model: Pretrained,
        tokenizer: Tokenizer,
        *,
        dtype: str = "float32",
        batch_size: int = 8,
        max_length: int | None = None,
    ):
        """`max_length`: tokens the model sees at once; default: what it takes, at most 4096."""
        super().__init__()
        require_decoder(model.cfg)
        limit = model.cfg.max_position_embeddings
        self.max_length = min(limit, 4096) if max_length is None else max_length
        if not 2 <= self.max_length <= limit or batch_size < 1:
            raise UserError(
                f"--seq-length {self.max_length} --batch-size {batch_size}: need 2 to "
                f"model.max_position_embeddings={limit} tokens and a batch of 1 or more"
            )
        start = tokenizer.prefix or (() if tokenizer.eod_id is None else (tokenizer.eod_id,))
        if not start:
            raise UserError("the tokenizer has neither BOS nor an end of document to start with")
        self.batch_size, self._start = batch_size, start[-1]
        self._model, self._tokenizer = model, tokenizer
        self._dtype = dtype
        self._eos = end_ids(model.tokenizer_dir, tokenizer)
        self._program = scorer(model)

    @cached_property
    def _engine(self) -> Engine:
        """Made for the first request that generates, because it holds a copy of the layers."""
        model = self._model
        return small_engine(
            model.definition,
            model.params,
            model.cfg,
            [self.max_length - 1] * self.batch_size,
            1,
            dtype=self._dtype,
            tokenizer=self._tokenizer,
            eos=self._eos,
        )

    def update_weights(self, params: dict) -> None:
        """Answer with other weights of the same model from now on."""
        self._model = replace(self._model, params=params)
        if "_engine" in vars(self):
            self._engine.update_weights(params)
            self._engine.wake()

    def rest(self) -> None:
        """Let go of weights and caches until the next `update_weights`."""
        self._model = replace(self._model, params={})
        if "_engine" in vars(self):
            self._engine.sleep(weights=True)

    # ---- requests: each has `args`, a tuple ----

    def loglikelihood(self, requests: Sequence, disable_tqdm: bool = False) -> list:
        """(context, continuation) -> (log-probability, whether greedy decoding would make it)."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """(text,) -> log-probability of all its tokens, each scored once."""
        rows: list[Row] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            ids = [self._start, *self._tokenizer.encode(request.args[0])]
            size = min(self.max_length, len(ids) - 1)
            for begin, first, end in windows(len(ids) - 1, size, size):
                rows.append((ids[begin : end + 1], end - first))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(owner, self._score(rows), strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """(context, settings) -> text up to a string of settings["until"] or the end of text."""
        prompts, params = [], []
        for number, request in enumerate(requests):
            context, given = request.args
            new, stop, sampling = settings(given)
            if new >= self.max_length:
                raise UserError(f"max_gen_toks={new} leaves no room in {self.max_length} tokens")
            prompts.append(self._encode(context)[new - self.max_length :] or [self._start])
            drawn = {"max_tokens": new, "stop": stop, "seed": number}
            params.append(SamplingParams(**drawn, **vars(sampling)))
        return run_by_all(self, "texts_of", prompts, params)

    def texts_of(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[str]:
        """The continuation of each prompt; in several processes all call."""
        found = [made.text for made in completed(self._engine, prompts, params)]
        self.beat()
        return found

    # ---- chat ----

    @property
    def tokenizer_name(self) -> str:
        """Keys the harness' cache of requests."""
        return str(self._model.tokenizer_dir).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, for the record of results."""
        return self._template(chat_template).source

    def apply_chat_template(self, chat_history: list, add_generation_prompt: bool = True) -> str:
        """Messages -> text."""
        return self._template(True).render(chat_history, add_generation_prompt)

    def _template(self, name: bool | str):
        if self._model.tokenizer_dir is None:
            raise UserError("the model's folder holds no chat template; leave out --chat")
        named = name if isinstance(name, str) else None
        return load_chat_template(self._model.tokenizer_dir, named)

    # ---- rows ----

    def _encode(self, text: str) -> list[int]:
        """Ids of a context, with what the tokenizer puts first unless the text has it already."""
        ids, prefix = self._tokenizer.encode(text), list(self._tokenizer.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _pair(self, context: str, continuation: str) -> Row:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if kept:
            whole = self._encode(kept + continuation)
            scored = max(0, len(whole) - len(self._encode(kept)))
        else:
            ids = self._tokenizer.encode(continuation)
            whole = ids if ids[:1] == [self._start] else [self._start, *ids]
            scored = len(whole) - 1
        if scored > self.max_length:
            raise UserError(
                f"a continuation of {scored} tokens does not fit --seq-length {self.max_length}"
            )
        return whole[-self.max_length - 1 :], scored

    def _score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """For each row: sum of its scored tokens' log-probabilities, whether all are likeliest.

        Rows of similar lengths share a batch.
        """
        lengths = [len(ids) for ids, _ in rows]
        order = sorted(range(len(rows)), key=lambda n: -lengths[n])
        out: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for at in range(0, len(order), self.batch_size):
            part = order[at : at + self.batch_size]
            found = run_by_all(self, "scores_of", [rows[n] for n in part])
            for n, score in zip(part, found, strict=False):
                out[n] = score
        return out

    def scores_of(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """The scores of one batch, the longest row first; in several processes all call."""
        batch = batch_of(rows, self.batch_size, self.max_length)
        found = self._program(self._model.params, *batch)
        sums, greedy = (np.asarray(values).tolist() for values in found)
        self.beat()
        return list(zip(sums, greedy, strict=True))


def settings(given: dict) -> tuple[int, tuple[str, ...], Sampling]:
    """A task's generation settings -> (most new tokens, stop strings, how to draw)."""
    rest = dict(given)
    new = [rest.pop(name) for name in _NEW_TOKENS if name in rest]
    until = rest.pop("until", None) or []
    draw = rest.pop("do_sample", False)
    known = {f.name: rest.pop(f.name) for f in fields(Sampling) if f.name in rest}
    if rest:
        raise UserError(f"generation setting {sorted(rest)[0]!r} of a task is not known to mjax")
    known["temperature"] = float(known.get("temperature", 1.0)) if draw else 0.0
    stop = (until,) if isinstance(until, str) else tuple(until)
    return int(new[0]) if new else 256, tuple(s for s in stop if s), Sampling(**known)
