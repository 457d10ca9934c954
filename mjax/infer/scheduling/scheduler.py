"""Decides which tokens the next step computes. Host only, a pure function of what was asked.

One rule covers prefill, decode and resumption, as in vLLM: a step moves `computed` of each sequence
towards its known tokens, under one budget of tokens. Running sequences come first. The pages of a
whole prompt are reserved at admission, so only decode can run short of pages. Then the sequence of
the worst priority, of these the last admitted, is preempted: it loses its pages and waits again,
and its outputs are computed as part of its prompt (mostly found in the prefix cache).

The host runs ahead: it plans a step before it has read the tokens of the step before. `computed`
and `flying` count what is launched, `tokens` what is read.

Invariants, for a running sequence between two plans:

- before its first sample: `flying == 0` and `sampled` is False.
- after it: `computed == len(tokens) + flying - 1`, as the last token is not yet in the cache.
- `pages` covers `computed`, and no other sequence writes to a page that it has.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count

from mjax.errors import UserError
from mjax.infer.scheduling.pages import NULL_PAGE, PagePool, chain


class QueueFull(UserError):
    """Too much is waiting already; the same request may be accepted later."""


@dataclass(frozen=True)
class Limits:
    """Sizes of a step and of the queue.

    - rows: sequences that run at a time.
    - tokens: tokens of a step.
    - chunk: tokens of prompts in a step.
    - length: tokens of a sequence, outputs counted.
    - queued, queued_tokens: sequences and their tokens that may wait. None: any number.
    - prefill_alone: at most one chunk a step, for models with recurrent layers.
    """

    rows: int = 256
    tokens: int = 8192
    chunk: int = 2048
    length: int = 8192
    queued: int | None = None
    queued_tokens: int | None = None
    prefill_alone: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "chunk", "length"):
            given = getattr(self, name)
            if not isinstance(given, int) or given < 1:
                raise UserError(f"{name} is {given}: it must be an integer of at least 1")


@dataclass(eq=False)
class Sequence:
    """One sample of a request. The engine gives the first group of fields, `Scheduler` the rest.

    - tokens: the prompt, then the outputs that the host has read.
    - limit: most tokens, prompt counted. If the prompt has as many, nothing is sampled: the engine
      finishes the sequence when it has what it wants from the prompt.
    - priority: lower ones run first.
    - salt: sequences share cached prefixes only if this is equal (`pages.chain`).
    - reads_prefix: False computes the whole prompt, as its log-probabilities need every logit.

    - waits: no token is planned for it while one is in flight, as the next one depends on it.

    - computed: tokens whose cache entries launched programs write.
    - flying: samples of launched programs that the host has not read.
    - pages: page numbers, in order. Pages that have left the window are the null page.
    - slot: row of the device's table while it runs, else -1.
    - hits: tokens that its first admission found in the cache.
    - sampled: True if its last token is in the device's table.
    - admissions: how often it was admitted; all but the first follow a preemption.
    - arrival: its place among all sequences, -1 before `add`.
    - queued: True while it waits.
    - hashes: of its full pages. The first `published` of them are known to the pool.
    - passed: pages that have left the window.
    - generation: generation of the weights that its first pages were computed with.
    """

    id: int
    tokens: list[int]
    limit: int
    priority: int = 0
    salt: tuple = ()
    reads_prefix: bool = True
    waits: bool = False

    computed: int = 0
    flying: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    hits: int = 0
    sampled: bool = False
    admissions: int = 0
    arrival: int = -1
    queued: bool = False
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    passed: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)  # samples of one request must not share their outputs

    @property
    def is_launched(self) -> bool:
        """True if no step is left to plan: the engine reads its results and finishes it."""
        if self.sampled:
            return len(self.tokens) + self.flying >= self.limit
        return self.computed == len(self.tokens)


@dataclass(frozen=True)
class Chunk:
    """Tokens first .. first + count - 1 of a sequence, whose cache entries a step computes.

    - samples: True if they end at the last known token and the sequence wants another.
    """

    sequence: Sequence
    first: int
    count: int
    samples: bool


@dataclass
class Plan:
    """Work of one step. Sequences change in the next plan, so arrays are built from it at once.

    - decode: sequences that get one token each, at position `computed - 1`.
    - chunks: parts of prompts.
    - preempted: sequences that have lost their pages.
    - drain: nothing is planned until the engine has read all samples in flight and has finished
      what ended.
    """

    decode: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    drain: bool = False


class Scheduler:
    """Sequences from `add` to `finish`.

    - running: sequences with pages, by slot, in order of admission.
    - window: most tokens that a query sees (itself counted) in a model in which each attention
      layer has a window, else None. Pages that no later query sees are released.
    """

    def __init__(self, limits: Limits, pool: PagePool, window: int | None = None):
        self.limits, self.pool, self.window = limits, pool, window
        self.running: dict[int, Sequence] = {}
        self._queue: list[tuple[int, int, Sequence]] = []  # sorted by priority, then arrival
        self._queued_tokens = 0
        self._slots = list(range(limits.rows))[::-1]
        self._arrivals = count()

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait to run, the next one first."""
        return [sequence for *_, sequence in self._queue]

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue.

        Raises `UserError` for a sequence that can never run, and `QueueFull` if too much waits.
        """
        assert sequence.arrival < 0, "a sequence is added once"
        self._check_size(sequence)
        self._check_queue(sequence)
        sequence.arrival = next(self._arrivals)
        if self.pool.cache_prefixes:
            sequence.hashes = chain(sequence.tokens, self.pool.page, sequence.salt)
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence anywhere in its life; nothing happens if it has ended.

        Its pages are free at once. Samples in flight are dropped by `read`.
        """
        if sequence.queued:
            self._dequeue(sequence)
        elif sequence.slot >= 0:
            self._stop(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence whose client has left, as `finish` does."""
        self.finish(sequence)

    def read(self, sequence: Sequence, token: int) -> None:
        """Notes a sample that the host has read; one of an ended sequence is dropped."""
        if sequence.slot >= 0:
            sequence.tokens.append(token)
            sequence.flying -= 1
            self._publish(sequence)

    def plan(self) -> Plan:
        """Returns the next step's work, counted as launched. It is empty if nothing can run."""
        plan = Plan()
        self._leave_windows()
        if not self._decode(plan):
            return Plan(drain=True)
        room = min(self.limits.chunk, self.limits.tokens - len(plan.decode))
        for sequence in self.running.values():
            if not sequence.sampled:
                room = self._prefill(plan, sequence, room)
        if room and self._slots and not plan.preempted:
            self._admit(plan, room)
        for chunk in plan.chunks:
            self._publish(chunk.sequence)
        if not plan.decode and not plan.chunks:
            assert self.running or not self._queue, "an empty engine admits any sequence"
            plan.drain = bool(self.running)
        return plan

    # Parts of a plan

    def _decode(self, plan: Plan) -> bool:
        """Plans one token for each row that has its last one on the device, False: drain first.

        Preempts others until each row has its page. A sequence alone always has: see `add`.
        """
        while True:
            running = self.running.values()
            rows = [s for s in running if s.sampled and not s.is_launched]
            rows = [s for s in rows if not (s.waits and s.flying)]
            del rows[self.limits.tokens :]
            page = self.pool.page
            growing = [s for s in rows if s.computed == len(s.pages) * page]
            if len(growing) <= self.pool.available:
                break
            victims = [s for s in reversed(running) if not s.is_launched]
            if len(victims) == 1 or any(s.flying for s in running):
                return False
            victim = max(victims, key=lambda s: s.priority)  # the first, so the last admitted
            self._stop(victim)
            self._enqueue(victim)
            plan.preempted.append(victim)
        for sequence in growing:
            sequence.pages += self.pool.take(1)
        for sequence in rows:
            sequence.computed += 1
            sequence.flying += 1
        plan.decode = rows
        return True

    def _prefill(self, plan: Plan, sequence: Sequence, room: int) -> int:
        """Plans the next chunk of at most `room` tokens and returns what is left of them."""
        known = len(sequence.tokens)
        count = min(room, known - sequence.computed)
        if not count:
            return room
        first = sequence.computed
        sequence.computed += count
        sequence.sampled = sequence.computed == known < sequence.limit
        sequence.flying += sequence.sampled
        plan.chunks.append(Chunk(sequence, first, count, sequence.sampled))
        return 0 if self.limits.prefill_alone else room - count

    def _admit(self, plan: Plan, room: int) -> None:
        """Starts waiting sequences in order, up to the first that finds no slot or no pages.

        A sequence whose next page is in a chunk of this step waits for it and does not stop
        others. It does so for as long as the chunks of one sequence go along its own prompt.

        A page stays free for each sequence that may need another one. Without this reserve the
        next steps would preempt the newcomer, at the price of its whole prompt.
        """
        started, postponed = [], 0
        reserve = sum(self._may_grow(s, len(s.pages)) for s in self.running.values())
        computing = {hash for chunk in plan.chunks for hash in self._hash_at(chunk)}
        for *_, sequence in self._queue:
            if not room or postponed == len(self._slots):
                break
            usable = (len(sequence.tokens) - 1) // self.pool.page if sequence.reads_prefix else 0
            hashes = sequence.hashes[:usable]
            if not computing.isdisjoint(hashes):
                postponed += 1
            elif self._start(sequence, hashes, reserve):
                started.append(sequence)
                reserve += self._may_grow(sequence, len(sequence.pages))
                room = self._prefill(plan, sequence, room)
                computing.update(self._hash_at(plan.chunks[-1]))
            else:
                break
        for sequence in started:
            self._dequeue(sequence)

    def _hash_at(self, chunk: Chunk) -> list[bytes]:
        """Returns the hash of the page in which a chunk begins, if it will be shared later."""
        number = chunk.first // self.pool.page
        return [h for h in chunk.sequence.hashes[number : number + 1] if h not in self.pool]

    def _start(self, sequence: Sequence, hashes: list[bytes], reserve: int) -> bool:
        """Gives a waiting sequence a slot and the pages of all its tokens, False: they are short.

        - hashes: of the pages that it may share.
        - reserve: pages that others may need in the next steps.
        """
        pool = self.pool
        needed = self._pages(len(sequence.tokens))
        reserve += self._may_grow(sequence, needed)
        hits = pool.match(hashes)
        if needed - len(hits) + reserve > pool.available:
            pool.release(hits)
            return False
        sequence.pages = hits + pool.take(needed - len(hits))
        sequence.computed = len(hits) * pool.page
        sequence.published = len(hits)
        sequence.generation = pool.generation
        if not sequence.admissions:
            sequence.hits = sequence.computed
        sequence.admissions += 1
        sequence.slot = self._slots.pop()
        self.running[sequence.slot] = sequence
        return True

    def _stop(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        del self.running[sequence.slot]
        self._slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.sampled = -1, [], False
        sequence.computed = sequence.published = sequence.passed = 0

    def _leave_windows(self) -> None:
        """Releases pages that neither this step's queries nor later ones see."""
        if self.window is None:
            return
        for sequence in self.running.values():
            old = sequence.passed
            new = (sequence.computed - self.window) // self.pool.page
            if new > old:
                self.pool.release(sequence.pages[old:new])
                sequence.pages[old:new] = [NULL_PAGE] * (new - old)
                sequence.passed = new

    def _publish(self, sequence: Sequence) -> None:
        """Shares full pages of known tokens, unless the weights have changed since admission."""
        pool = self.pool
        full = min(sequence.computed, len(sequence.tokens)) // pool.page
        if full == sequence.published or not pool.cache_prefixes:
            return
        if sequence.generation == pool.generation:
            known = sequence.hashes
            sequence.hashes = chain(sequence.tokens, pool.page, sequence.salt, known)
            for number in range(max(sequence.published, sequence.passed), full):
                pool.publish(sequence.pages[number], sequence.hashes[number])
        sequence.published = full

    # The queue

    def _enqueue(self, sequence: Sequence) -> None:
        """A preempted sequence arrived before all that wait with its priority, so it leads them."""
        insort(self._queue, (sequence.priority, sequence.arrival, sequence))
        self._queued_tokens += len(sequence.tokens)
        sequence.queued = True

    def _dequeue(self, sequence: Sequence) -> None:
        del self._queue[bisect_left(self._queue, (sequence.priority, sequence.arrival))]
        self._queued_tokens -= len(sequence.tokens)
        sequence.queued = False

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)

    def _may_grow(self, sequence: Sequence, pages: int) -> bool:
        return sequence.limit - 1 > pages * self.pool.page

    def _most_pages(self, sequence: Sequence) -> int:
        """Pages at the sequence's end; its very last token needs no entry in the cache."""
        return self._pages(max(sequence.limit - 1, len(sequence.tokens)))

    def _check_size(self, sequence: Sequence) -> None:
        tokens, limit, length = len(sequence.tokens), sequence.limit, self.limits.length
        if not 1 <= tokens <= limit:
            raise UserError(f"a prompt of {tokens} tokens with room for {limit}: give 1 to {limit}")
        if limit > length:
            raise UserError(
                f"a prompt of {tokens} tokens and up to {limit - tokens} new ones are more than "
                f"{length}, the model's length here: shorten the prompt or lower max_tokens"
            )
        most, pages = self._most_pages(sequence), self.pool.pages - 1
        if most > pages:
            raise UserError(
                f"a prompt of {tokens} tokens and up to {limit - tokens} new ones need {most} "
                f"cache pages of {pages}: lower max_tokens or give the cache more memory"
            )

    def _check_queue(self, sequence: Sequence) -> None:
        """Check that the queue has room; an empty one takes a sequence of any size."""
        waiting, limits = len(self._queue), self.limits
        if limits.queued is not None and waiting >= limits.queued:
            raise QueueFull(f"{waiting} requests wait already: send it again later")
        tokens = self._queued_tokens
        most = limits.queued_tokens
        if most is not None and waiting and tokens + len(sequence.tokens) > most:
            raise QueueFull(f"requests of {tokens} tokens wait already: send it again later")
