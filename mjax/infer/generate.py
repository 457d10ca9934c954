"""Text from a decoder, beside an encoder or alone: a jitted prefill, then a jitted step per token.

A batch of prompts goes together. Parameters are global arrays on any mesh; a step runs on local
shards in one `shard_map` with the `Parallel` of training, so its kernels work on any mesh. Heads,
MLP and vocabulary lie over tp, experts over ep, rows over dp and ep; tp does not cut tokens. The
device knows nothing of end tokens and stop strings: it runs one step ahead while the host reads,
decodes and decides, so a step must not make the host wait (`sample.Draws`). Invariant: what a row
gives depends on its prompt, its settings, the seed and its number alone, not on other rows, padding
or the mesh. Lengths of prompts and caches are rounded up to powers of two, so that few programs are
compiled.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.schema.model import ModelConfig
from mjax.data.base.tokenizer import Tokenizer
from mjax.errors import UserError
from mjax.infer.cache import (
    KVCache,
    cache_partitions,
    empty_cache,
    extend,
    last_real,
    require_decoder,
)
from mjax.infer.sample import (
    Counts,
    DrawRows,
    Draws,
    Sampling,
    Settings,
    draw,
    draws_of,
    settings_of,
)
from mjax.infer.text import TextStream
from mjax.infer.weights import mesh_of, partitions_apart, take_apart
from mjax.models.base.inputs import Prompt
from mjax.models.base.params import Definition
from mjax.models.towers.tiles import PADDING, Tiled
from mjax.sharding.collectives import DATA_AXES, LOCAL, Parallel, mesh_axes
from mjax.sharding.cpu_collective_order import in_program_order
from mjax.sharding.mesh import on_shards, parallel_of
from mjax.sharding.rules import partition

_SMALLEST = 16  # tokens of the smallest bucket


@dataclass(frozen=True)
class Token:
    """One token of row `row`, as it is made. `text` is what became certain with it; `finish` is
    empty, or why the row ends here: 'eos', 'stop' or 'length'."""

    row: int
    id: int
    logprob: float
    text: str
    finish: str


@dataclass(frozen=True)
class Completion:
    """A finished row: all ids that were made (an end token and those of a stop string included),
    their log-probabilities, and the text before either."""

    ids: list[int]
    logprobs: list[float]
    text: str
    finish: str


class Generator:
    """A model ready to continue prompts; keeps its compiled programs."""

    def __init__(
        self,
        definition: Definition,
        params: dict,
        cfg: ModelConfig,
        *,
        dtype: str = "float32",
        tokenizer: Tokenizer | None = None,
        donate: bool = False,
    ):
        """`params`: nested dict of global arrays, stacks of layers among them.

        The model runs in `dtype`, from copies of which each layer's weights are arrays of their own
        (`weights.take_apart`). `donate` frees what was copied: `params` are of no use afterwards,
        and memory holds the model once. Without a tokenizer texts are empty and stop strings
        refused.
        """
        if not cfg.architecture.reads_target:
            require_decoder(cfg)
        elif cfg.decoder_start_token_id is None:
            raise UserError(
                "model.decoder_start_token_id: generation begins with it; give the id that the "
                "model was trained with"
            )
        self.cfg, self.tokenizer = cfg, tokenizer
        self._mesh = mesh = mesh_of(params)
        self._take_apart = partial(
            take_apart, definition.specs, dtype=jnp.dtype(dtype), donate=donate
        )
        self._params = self._take_apart(params)
        self._programs = programs = DecodePrograms(definition, cfg, mesh, jnp.dtype(dtype))
        self._prefill = jax.jit(programs.prefill, static_argnames=("draws", "length"))
        self._step = jax.jit(programs.step, static_argnames="draws", donate_argnames="state")

    def load(self, params: dict | None) -> None:
        """Go on with other weights of the same model and mesh; None lets go of those before."""
        self._params = None if params is None else self._take_apart(params)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        *,
        seed: int = 0,
        eos: Sequence[int] = (),
        stop: Sequence[str] = (),
        images: np.ndarray | Tiled | None = None,
        audio: np.ndarray | None = None,
    ) -> Iterator[Token]:
        """Continue each of `prompts`, lists of ids, by up to `max_new_tokens`: tokens as they come.

        A row ends with an id of `eos`, or where its text holds one of `stop`. An encoder reads the
        prompts, if the model has one, and what follows is its decoder's. `images`, fp32
        [B, I, H, W, C] or `Tiled`, and `audio`, log-mel frames [B, I, F, M], stand in the places of
        their tokens, one for each patch or two frames, those of a row in order; what is more is not
        read.
        Raises `UserError` for what the model cannot continue.
        """
        self._check(prompts, max_new_tokens, stop)
        given = {"vision": images, "audio": audio}
        items = {name: array for name, array in given.items() if array is not None}
        self._check_items(prompts, items)
        open_rows = {row: self._text_stream(ids, stop) for row, ids in enumerate(prompts)}
        ids, count = padded(prompts, bucket(max(map(len, prompts))))
        sampled = [sampling] * len(prompts)
        # Where the model is, so that they are not sent again with every step.
        rows = self._programs.row_partition(len(prompts))
        where = None if self._mesh is None else NamedSharding(self._mesh, rows)
        settings = jax.device_put(settings_of(sampled), where)
        draws = replace(draws_of(sampled), penalties=True)  # one program, whatever they are
        length = ids.shape[1] + bucket(max_new_tokens)
        seed = np.uint32(seed % 2**32)
        inputs = ids, count, settings, draws, seed
        state, made = self._prefill(self._params, *inputs, length=length, items=items)
        for left in range(max_new_tokens - 1, -1, -1):
            now = made
            if left:
                state, made = self._step(self._params, settings, draws, state=state)
            tokens, logprobs = (np.asarray(x) for x in now)  # the device is a step ahead
            for row, text in list(open_rows.items()):
                token, finish = int(tokens[row]), ""
                piece = "" if token in eos else text.push(token)
                if token in eos or text.stopped or not left:
                    finish = "eos" if token in eos else "stop" if text.stopped else "length"
                    piece += text.close()
                    finish = "stop" if text.stopped else finish
                    del open_rows[row]
                yield Token(row, token, float(logprobs[row]), piece, finish)
            if not open_rows:
                return

    def complete(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *args, **options
    ) -> list[Completion]:
        """The finished rows of `stream`, which takes the same arguments."""
        rows: list[list[Token]] = [[] for _ in prompts]
        for token in self.stream(prompts, max_new_tokens, *args, **options):
            rows[token.row].append(token)
        return [
            Completion(
                [t.id for t in row],
                [t.logprob for t in row],
                "".join(t.text for t in row),
                row[-1].finish,
            )
            for row in rows
        ]

    def _text_stream(self, prompt: Sequence[int], stop: Sequence[str]) -> TextStream:
        if self.tokenizer is None:
            return TextStream(lambda ids: "", prompt, stop)
        return TextStream(self.tokenizer.decode, prompt, stop, self.tokenizer.special_text)

    def _check(self, prompts, max_new_tokens: int, stop: Sequence[str]) -> None:
        limit = self.cfg.max_position_embeddings
        if self.cfg.position_embedding == "relative":
            limit = math.inf
        if not prompts or max_new_tokens < 1:
            raise UserError(
                f"generate: {len(prompts)} prompts, {max_new_tokens} new tokens; give one or more"
            )
        for row, ids in enumerate(prompts):
            if not len(ids) or len(ids) + max_new_tokens > limit:
                raise UserError(
                    f"generate: prompt {row} of {len(ids)} tokens and {max_new_tokens} new ones "
                    f"do not fit 1 to model.max_position_embeddings={limit}; shorten either"
                )
            if min(ids) < 0 or max(ids) >= self.cfg.vocab_size:
                raise UserError(
                    f"generate: prompt {row} has an id outside model.vocab_size="
                    f"{self.cfg.vocab_size}; use the tokenizer that the model was trained with"
                )
        if stop and self.tokenizer is None:
            raise UserError("generate: stop strings need a tokenizer; give one")
        if "" in stop:
            raise UserError("generate: a stop string is empty; leave it out")

    def _check_items(
        self, prompts: Sequence[Sequence[int]], items: Mapping[str, np.ndarray]
    ) -> None:
        for name in items:
            if name not in self.cfg.modalities:
                mark = self.cfg.tower(name).mark
                raise UserError(f"generate: {mark} is given, but the model has no tower for it")
        for name in self.cfg.modalities:
            tower = self.cfg.tower(name)
            found, given, size = items.get(name), 0, None
            if found is not None:
                given, size = (found.pixels if tower.is_tiled else found).shape[1:3]
            for row, ids in enumerate(prompts):
                count, each = list(ids).count(tower.token_id), tower.text_tokens(size)
                if tower.is_tiled and given:
                    given, each = 1, (found.corners[row, :, 0] != PADDING).sum()
                if count > given * each or count % max(each, 1):
                    raise UserError(
                        f"generate: prompt {row} has {count} tokens {tower.token_id}, and {given} "
                        f"{tower.mark} of {each} tokens are given; give each its tokens"
                    )


@dataclass(frozen=True, eq=False)  # hashed by identity
class DecodePrograms:
    """The two jitted functions, over what is static.

    A state is (cache, last tokens [B], (seed, index) of the noise [B], counts of tokens [B, V]).
    Both functions also return (tokens [B], log-probs [B]) for the host. On a mesh each is one
    `shard_map` over all axes, as training is: rows over dp and ep if these divide them, heads and
    vocabulary over tp.
    """

    definition: Definition
    cfg: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype

    def prefill(
        self, params, ids, count, settings: Settings, draws: Draws, seed, length: int, items=None
    ):
        numbers = jnp.arange(len(ids), dtype=jnp.int32)
        rows, whole = self.row_partition(len(ids)), PartitionSpec()
        inputs = params, ids, count, settings, numbers, items or {}, seed
        partitions = self._weights, rows, rows, rows, rows, rows, whole
        return self._run(partial(self._prefill, draws, length), inputs, partitions, rows)

    def step(self, params, settings: Settings, draws: Draws, state: tuple):
        rows = self.row_partition(len(state[1]))
        partitions = self._weights, rows, self._states(rows)
        return self._run(partial(self._step, draws), (params, settings, state), partitions, rows)

    @property
    def parallel(self) -> Parallel:
        """The devices that share work: those of pp and cp hold and compute the same."""
        if self.mesh is None:
            return LOCAL
        return replace(parallel_of(self.mesh), pp=1, cp=1, cuts_sequence=False)

    @property
    def _weights(self) -> dict:
        return partitions_apart(self.definition.specs, self.parallel)

    def row_partition(self, batch: int) -> PartitionSpec:
        """The partition of `batch` rows."""
        is_cut = batch % self.parallel.size(*DATA_AXES) == 0
        return partition(("batch" if is_cut else None,), self.parallel)

    def _states(self, rows: PartitionSpec) -> tuple:
        return cache_partitions(self.cfg, self.parallel, rows), rows, rows, rows

    def _run(self, function: Callable, inputs: tuple, partitions: tuple, rows: PartitionSpec):
        """A function of this device's shards of `inputs`, on the mesh."""
        whole_rows = partial(self._gathered, function, mesh_axes(rows))
        if self.mesh is None:
            return whole_rows(*inputs)
        devices = self.mesh.devices.flat
        if devices[0].platform == "cpu" and len(devices) > 1:
            whole_rows = in_program_order(whole_rows)
        outputs = self._states(rows), PartitionSpec()
        return on_shards(whole_rows, self.mesh, partitions, outputs)(*inputs)

    def _gathered(self, function: Callable, axes: tuple[str, ...], *inputs):
        """(state, what a function made for the host, of all rows)."""
        state, made = function(*inputs)
        return state, jax.tree.map(lambda x: self.parallel.all_gather(x, axes, 0), made)

    def _prefill(
        self, draws: Draws, length: int, params, ids, count, settings, numbers, items, seed
    ):
        source_length = ids.shape[1]
        prompt = self.definition.bind(params, self.parallel).prompt(ids, count, items)
        ids, count, _ = prompt
        is_real = jnp.ones(ids.shape, bool)
        if count is not None:
            is_real = jnp.arange(ids.shape[1]) < count[:, None]
        counts = Counts.of_prompts(ids, is_real, self.cfg.vocab_size)
        stream = jnp.broadcast_to(seed, numbers.shape), numbers
        sizes = len(ids), length, self.dtype, self.parallel, source_length
        cache = empty_cache(self.cfg, *sizes)
        return self._next(params, settings, draws, cache, prompt, stream, counts)

    def _step(self, draws: Draws, params, settings, state):
        cache, token, stream, counts = state
        following = token[:, None], None, {}
        return self._next(params, settings, draws, cache, following, stream, counts)

    def _next(self, params, settings, draws, cache: KVCache, new: Prompt, stream, counts):
        model = self.definition.bind(params, self.parallel)
        ids, count, inputs = new
        x, cache = extend(model, cache, ids, count, inputs, self.parallel)
        last = last_real(x, count)
        logits = model.logits(last, self.parallel)
        drawn = draw(logits, DrawRows(settings, *stream, cache.lengths, counts), draws)
        state = cache, drawn.token, stream, counts.add(drawn.token)
        return state, (drawn.token, drawn.logprob)


def padded(prompts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids -> (ids int32 [B, length], zeros after a row's own; how many these are [B])."""
    ids = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return ids, np.array([len(prompt) for prompt in prompts], np.int32)


def bucket(n: int) -> int:
    """The power of two, at least 16, that holds `n`."""
    return max(_SMALLEST, 1 << (n - 1).bit_length())
