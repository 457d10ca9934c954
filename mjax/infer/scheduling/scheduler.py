"""Decides which tokens the next step computes, on the host.

One rule covers prefill, decode and resumption, as in vLLM: a step moves `computed` of each sequence
towards its known tokens, under one budget of tokens. Running sequences come first. The pages of a
whole prompt are reserved at admission, so only decode can run short of pages. Then a sequence is
preempted, the last admitted of the worst priority. It loses its pages and waits again; later its
outputs are computed like a part of the prompt, unless the prefix cache still has them.

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
from typing import NamedTuple

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
    - computes_once: a sequence begins with the pages of its whole text, so it is never preempted,
      and only pages of prompts are shared. So no token that decoding computed is prefilled.
    """

    rows: int = 256
    tokens: int = 8192
    chunk: int = 2048
    length: int = 8192
    queued: int | None = None
    queued_tokens: int | None = None
    prefill_alone: bool = False
    computes_once: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "chunk", "length"):
            given = getattr(self, name)
            if not isinstance(given, int) or given < 1:
                raise UserError(f"{name} is {given}: it must be an integer of at least 1")


@dataclass(eq=False)
class TokenSequence:
    """One sample of a request. The engine gives the first group of fields, `Scheduler` the rest.

    - tokens: the prompt, then the outputs that the host has read.
    - limit: most tokens, prompt counted. If the prompt has as many, nothing is sampled: the engine
      finishes the sequence when it has what it wants from the prompt.
    - priority: lower ones run first.
    - salt: sequences share cached prefixes only if this is equal (`pages.chain`).
    - reads_prefix: False computes the whole prompt, as its log-probabilities need every logit.

    - waits: no token is planned for it while one is in flight, as the next one depends on it.
    - drafts: guesses of the tokens after the known ones, given anew before each plan. The next step
      computes them too; a plan drops those that no page or limit has room for.
    - whole: all its known tokens are one chunk, of any size and alone in its step, as they are
      computed with images, sounds or a source. It neither reads nor shares prefixes.

    - computed: tokens whose cache entries launched programs write.
    - flying: samples of launched programs that the host has not read.
    - pages: page numbers, in order. Pages that have left the window are the null page.
    - slot: row of the device's table while it runs, else -1.
    - hits: tokens that were cached at its first admission.
    - sampled: True if its last token is in the device's table.
    - admissions: how often it was admitted; all but the first follow a preemption.
    - arrival: its place among all sequences, -1 before `add`.
    - queued: True while it waits.
    - prompt: tokens that it was added with.
    - hashes: of its full pages. The first `published` of them are known to the pool.
    - passed: pages that have left the window.
    - generation: `PagePool.generation` at its admission.
    - border: where a chunk ends, as other prompts go on differently there, and the state is kept.
    - restored: the snapshot that its first chunk begins with, else -1.
    """

    id: int
    tokens: list[int]
    limit: int
    priority: int = 0
    salt: tuple = ()
    reads_prefix: bool = True
    waits: bool = False
    drafts: list[int] = field(default_factory=list)
    whole: bool = False

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
    border: int = 0
    restored: int = -1

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.tokens = list(self.tokens)  # samples of one request must not share their outputs


class Chunk(NamedTuple):
    """Tokens first .. first + count - 1 of a sequence, whose cache entries a step computes.

    - samples: True if they end at the last known token and the sequence wants another.
    - restored, saved: snapshots of the state before and after them, -1: none.
    """

    sequence: TokenSequence
    first: int
    count: int
    samples: bool
    restored: int = -1
    saved: int = -1


@dataclass
class Plan:
    """Work of one step. The engine builds its arrays at once, as the next call changes sequences.

    - decode: sequences that get one token each, at position `computed - 1`, and their drafts.
    - chunks: parts of prompts.
    - preempted: sequences that have lost their pages.
    - drain: True if no token is planned until the engine has read all results in flight and has
      finished the sequences that they end.
    """

    decode: list[TokenSequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[TokenSequence] = field(default_factory=list)
    drain: bool = False


class Scheduler:
    """Sequences from `add` to `finish`.

    - running: sequences with pages, by slot, in order of admission.
    - window: most tokens that a query sees (itself counted) in a model in which each attention
      layer has a window, else None. Pages that no later query sees are released.
    """

    def __init__(self, limits: Limits, pool: PagePool, window: int | None = None):
        self.limits, self.pool, self.window = limits, pool, window
        self.running: dict[int, TokenSequence] = {}
        self._queue: list[tuple[int, int, TokenSequence]] = []  # sorted by priority, then arrival
        self._queued_tokens = 0
        self._slots = list(range(limits.rows))[::-1]
        self._arrivals = count()

    @property
    def waiting(self) -> list[TokenSequence]:
        """Sequences that wait to run, the next one first."""
        return [sequence for *_, sequence in self._queue]

    @property
    def load(self) -> int:
        """Number of sequences that run or wait."""
        return len(self.running) + len(self._queue)

    def add(self, sequence: TokenSequence) -> None:
        """Puts a new sequence into the queue.

        Raises `UserError` for a sequence that can never run, and `QueueFull` if too much waits.
        """
        assert sequence.arrival < 0, "a sequence is added once"
        self._check_size(sequence)
        self._check_queue(sequence)
        sequence.arrival = next(self._arrivals)
        if self.pool.cache_prefixes and not sequence.whole:
            sequence.hashes = chain(sequence.tokens, self.pool.page, sequence.salt)
        self._enqueue(sequence)

    def finish(self, sequence: TokenSequence) -> None:
        """Ends a sequence anywhere in its life; nothing happens if it has ended.

        Its pages are free at once. Samples in flight are dropped by `read`.
        """
        if sequence.queued:
            self._dequeue(sequence)
        elif sequence.slot >= 0:
            self._stop(sequence)

    def read(self, sequence: TokenSequence, token: int, *, after_draft: bool = False) -> None:
        """Notes a sample that the host has read; one of an ended sequence is dropped.

        `after_draft`: it is a further sample of the same step, after a draft that was right, whose
        cache entry stays. Entries of wrong drafts are written over later.
        """
        if sequence.slot >= 0:
            sequence.tokens.append(token)
            if after_draft:
                sequence.computed += 1
            else:
                sequence.flying -= 1
            if len(sequence.tokens) // self.pool.page > sequence.published:
                self._publish(sequence)

    def plan(self) -> Plan:
        """Returns the next step's work, counted as launched. It is empty if nothing can run."""
        plan = Plan()
        self._leave_windows()
        if not self._decode(plan):
            return Plan(drain=True)
        left = self.limits.tokens - sum(1 + len(s.drafts) for s in plan.decode)
        room = min(self.limits.chunk, left)
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
        """Plans one token for each row whose last one is on the device; False: drain first.

        Preempts sequences until each row has its page. A sequence alone always has (`add`).
        """
        while True:
            running = self.running.values()
            rows = [s for s in running if s.sampled and len(s.tokens) + s.flying < s.limit]
            rows = [s for s in rows if not (s.waits and s.flying)][: self.limits.tokens]
            page = self.pool.page
            growing = [s for s in rows if s.computed == len(s.pages) * page]
            if len(growing) <= self.pool.available:
                break
            if any(s.flying for s in running):
                return False
            # The first of equals wins: in this order the one admitted last.
            victim = max(reversed(running), key=lambda s: s.priority)
            self._stop(victim)
            self._enqueue(victim)
            plan.preempted.append(victim)
        for sequence in growing:
            sequence.pages += self.pool.take(1)
        left = self.limits.tokens - len(rows)
        for sequence in rows:
            sequence.computed += 1
            sequence.flying += 1
            if sequence.drafts:
                self._fit_drafts(sequence, left)
                left -= len(sequence.drafts)
        plan.decode = rows
        return True

    def _fit_drafts(self, sequence: TokenSequence, most: int) -> None:
        """Drops drafts beyond `most` or the limit, or beyond the pages where no more are free."""
        drafts, size = sequence.drafts, self.pool.page
        del drafts[min(most, sequence.limit - 1 - sequence.computed) :]
        needed = self._pages(sequence.computed + len(drafts)) - len(sequence.pages)
        more = self.pool.take(max(needed, 0))
        if more is None:
            del drafts[len(sequence.pages) * size - sequence.computed :]
        else:
            sequence.pages += more

    def _prefill(self, plan: Plan, sequence: TokenSequence, room: int) -> int:
        """Plans the next chunk of at most `room` tokens and returns what is left of them."""
        known = len(sequence.tokens)
        count = known - sequence.computed
        count = count if sequence.whole else min(room, count)
        if not count:
            return room
        first, restored = sequence.computed, sequence.restored
        if first < sequence.border:
            count = min(count, sequence.border - first)
        sequence.computed += count
        sequence.restored = saved = -1
        if sequence.computed == sequence.border and sequence.generation == self.pool.generation:
            saved = self.pool.take_snapshot(sequence.hashes[sequence.border // self.pool.page - 1])
        sequence.sampled = sequence.computed == known < sequence.limit
        sequence.flying += sequence.sampled
        plan.chunks.append(Chunk(sequence, first, count, sequence.sampled, restored, saved))
        return 0 if self.limits.prefill_alone or sequence.whole else room - count

    def _admit(self, plan: Plan, room: int) -> None:
        """Starts waiting sequences in order, up to the first that finds no slot or no pages.

        A sequence is passed over while a chunk of this step computes a page of its own prompt,
        which it will find in the cache. Slots are kept for sequences passed over.

        A page stays free for each sequence that may need another one. Without this reserve the
        next steps would preempt the newcomer, at the price of its whole prompt.
        """
        started, postponed = [], 0
        reserve = sum(self._may_grow(s, len(s.pages)) for s in self.running.values())
        computing = {hash for chunk in plan.chunks for hash in self._hash_at(chunk)}
        for *_, sequence in self._queue:
            if not room or postponed == len(self._slots) or (sequence.whole and plan.chunks):
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

    def _start(self, sequence: TokenSequence, hashes: list[bytes], reserve: int) -> bool:
        """Gives a waiting sequence a slot and pages for all its tokens; False: pages are short.

        - hashes: of the pages that it may share.
        - reserve: pages that others may need in the next steps.
        """
        pool = self.pool
        needed = self._pages(len(sequence.tokens))
        if self.limits.computes_once:
            needed = self._most_pages(sequence)
        reserve += self._may_grow(sequence, needed)
        known = usable = pool.known(hashes)
        if pool.snapshots:
            usable, sequence.restored = pool.last_snapshot(hashes[:known])
        hits = pool.match(hashes[:usable])
        if needed - len(hits) + reserve > pool.available:
            pool.release(hits)
            return False
        sequence.pages = hits + pool.take(needed - len(hits))
        sequence.computed = len(hits) * pool.page
        sequence.published = len(hits)
        sequence.border = known * pool.page if known > usable else 0
        sequence.generation = pool.generation
        if not sequence.admissions:
            sequence.hits = sequence.computed
        sequence.admissions += 1
        sequence.slot = self._slots.pop()
        self.running[sequence.slot] = sequence
        return True

    def _stop(self, sequence: TokenSequence) -> None:
        """Takes slot and pages from a running sequence."""
        del self.running[sequence.slot]
        self._slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.sampled, sequence.drafts = -1, [], False, []
        sequence.computed = sequence.passed = 0

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

    def _publish(self, sequence: TokenSequence) -> None:
        """Shares full pages of known tokens, unless the weights have changed since admission."""
        pool = self.pool
        known = sequence.prompt if self.limits.computes_once else len(sequence.tokens)
        full = min(sequence.computed, known) // pool.page
        if full == sequence.published or sequence.whole or not pool.cache_prefixes:
            return
        if sequence.generation == pool.generation:
            known = sequence.hashes
            sequence.hashes = chain(sequence.tokens, pool.page, sequence.salt, known)
            for number in range(max(sequence.published, sequence.passed), full):
                pool.publish(sequence.pages[number], sequence.hashes[number])
        sequence.published = full

    # The queue

    def _enqueue(self, sequence: TokenSequence) -> None:
        """A preempted sequence arrived before all that wait with its priority, so it leads them."""
        insort(self._queue, (sequence.priority, sequence.arrival, sequence))
        self._queued_tokens += len(sequence.tokens)
        sequence.queued = True

    def _dequeue(self, sequence: TokenSequence) -> None:
        del self._queue[bisect_left(self._queue, (sequence.priority, sequence.arrival))]
        self._queued_tokens -= len(sequence.tokens)
        sequence.queued = False

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)

    def _may_grow(self, sequence: TokenSequence, pages: int) -> bool:
        return sequence.limit - 1 > pages * self.pool.page

    def _most_pages(self, sequence: TokenSequence) -> int:
        """Pages at the sequence's end; its very last token needs no entry in the cache."""
        return self._pages(max(sequence.limit - 1, len(sequence.tokens)))

    def _check_size(self, sequence: TokenSequence) -> None:
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

    def _check_queue(self, sequence: TokenSequence) -> None:
        """Refuses what the queue has no room for; an empty one takes a sequence of any size."""
        waiting, limits = len(self._queue), self.limits
        if limits.queued is not None and waiting >= limits.queued:
            raise QueueFull(f"{waiting} requests wait already: send it again later")
        tokens = self._queued_tokens
        most = limits.queued_tokens
        if most is not None and waiting and tokens + len(sequence.tokens) > most:
            raise QueueFull(f"requests of {tokens} tokens wait already: send it again later")
