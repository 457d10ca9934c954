"""A model without arithmetic, which shows what every planned token would read from the pages.

The toy device runs programs at once and in order; the toy host reads their samples whenever a test
says so. An entry of a page says whose history it is: it is a hash of the tokens up to its own, of
the salt, and of the weights that each of these tokens was computed with. A sample depends on the
tokens and the salt alone, so outputs have a reference without any scheduler.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from zlib import crc32

from mjax.infer.scheduling.scheduler import Plan, Scheduler, TokenSequence

END = 0  # a sampled token that ends its sequence


def sample(tokens: list[int], salt: tuple) -> int:
    return crc32(repr((salt, tokens)).encode()) % 24


def reference(sequence: TokenSequence, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < sequence.limit and (tokens == prompt or tokens[-1] != END):
        tokens.append(sample(tokens, sequence.salt))
    return tokens


@dataclass(eq=False)
class Client:
    """What a test knows of a sequence that the scheduler does not."""

    sequence: TokenSequence
    prompt: list[int]
    tokens: list[int]  # with the samples that the host has not read
    entries: list[int] = field(default_factory=list)  # of its pages, by position
    admissions: int = 0
    has_ended: bool = False


class Toy:
    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.pool = scheduler, scheduler.pool
        self.clients: dict[TokenSequence, Client] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.in_flight: deque[tuple[Client, list[int]]] = deque()
        self.computed = Counter()  # prompt tokens by sequence
        self.preemptions = self.drafted = 0
        self.weights = 0  # their version
        self.states: dict[int, int] = {}  # of slots: the entry of the last token
        self.snapshots: dict[int, int] = {}
        self.restored = 0

    def add(self, sequence: TokenSequence) -> None:
        self.scheduler.add(sequence)
        prompt = list(sequence.tokens)
        self.clients[sequence] = Client(sequence, prompt, list(prompt))

    def abort(self, sequence: TokenSequence) -> None:
        self.scheduler.finish(sequence)
        self.clients[sequence].has_ended = True

    def forget(self) -> None:
        """Changes the weights."""
        self.pool.forget()
        self.weights += 1

    def read(self) -> None:
        """Reads the oldest sample in flight, and finishes its sequence if that was the last."""
        client, tokens = self.in_flight.popleft()
        sequence = client.sequence
        for number, token in enumerate(tokens):
            before = list(sequence.tokens)
            self.scheduler.read(sequence, token, after_draft=number > 0)
            assert not client.has_ended or sequence.tokens == before
            self._end(client, token == END)
        self._end(client, False)

    def _end(self, client: Client, is_end: bool) -> None:
        sequence = client.sequence
        if not client.has_ended and (is_end or len(sequence.tokens) == sequence.limit):
            assert sequence.tokens == reference(sequence, client.prompt)
            self.scheduler.finish(sequence)
            client.has_ended = True

    def read_all(self) -> None:
        while self.in_flight:
            self.read()

    def step(self) -> Plan:
        has_work = any(not client.has_ended for client in self.clients.values())
        running = list(self.scheduler.running.values())
        plan = self.scheduler.plan()
        rows = sum(1 + len(sequence.drafts) for sequence in plan.decode)
        rows += sum(chunk.count for chunk in plan.chunks)
        if has_work:
            assert rows or plan.preempted or self.in_flight
            assert rows or plan.preempted or plan.drain
        else:
            assert not rows and not plan.drain
        if any(chunk.sequence.whole for chunk in plan.chunks):
            (chunk,) = plan.chunks
            assert chunk.first == 0 and chunk.count == len(chunk.sequence.tokens)
        else:
            assert rows <= self.scheduler.limits.tokens
            assert sum(chunk.count for chunk in plan.chunks) <= self.scheduler.limits.chunk
        assert not self.scheduler.limits.prefill_alone or len(plan.chunks) <= 1
        assert not plan.drain or not rows
        for sequence in plan.preempted:
            assert not sequence.flying and sequence.queued
            assert all(s in running for s in self.scheduler.running.values())
        if any(s not in running for s in self.scheduler.running.values()):
            growing = [
                s.limit - 1 > len(s.pages) * self.pool.page for s in self.scheduler.running.values()
            ]
            assert self.pool.available >= sum(growing), "the next steps preempt a newcomer"
        self.preemptions += len(plan.preempted)
        self.launch(plan)
        self.check()
        if plan.drain:
            self.read_all()
        return plan

    def launch(self, plan: Plan) -> None:
        work = [(sequence, sequence.computed - 1, 1, True) for sequence in plan.decode]
        work += [(c.sequence, c.first, c.count, c.samples) for c in plan.chunks]
        assert len({id(sequence) for sequence, *_ in work}) == len(work)
        for sequence in plan.decode:
            if self.scheduler.window is not None:
                unseen = sequence.computed - 1 - self.scheduler.window
                assert not any(sequence.pages[: max(0, unseen) // self.pool.page])
            assert not sequence.waits or sequence.flying == 1
            client = self.clients[sequence]
            assert self.last[sequence.slot] == client.tokens[sequence.computed - 1]
        for chunk in plan.chunks:
            client, end = self.clients[chunk.sequence], chunk.first + chunk.count
            assert chunk.sequence.tokens == client.tokens, "a chunk has samples in flight"
            assert not chunk.samples or end == len(client.tokens)
            if client.admissions != chunk.sequence.admissions:
                client.admissions, client.entries = chunk.sequence.admissions, []
                assert chunk.first < len(client.tokens) and chunk.first % self.pool.page == 0
            if client.admissions == 1:
                self.computed[chunk.sequence] += chunk.count
        for sequence, first, count, _ in work:
            self._write(self.clients[sequence], first, first + count)
        for sequence, first, count, _ in work:
            self._check_reads(self.clients[sequence], first, first + count)
        if self.pool.snapshots:
            self._follow_states(plan)
        for sequence, first, count, samples in work:
            client = self.clients[sequence]
            if samples:
                kept = self._draw(client, sequence.drafts)
                self.last[sequence.slot] = kept[-1]
                self.in_flight.append((client, kept))
            elif first + count == sequence.limit:
                self.in_flight.append((client, []))

    def _follow_states(self, plan: Plan) -> None:
        """The state that a row goes on from is that after its last token."""
        rows = [(sequence, sequence.computed - 1, 1, -1, -1) for sequence in plan.decode]
        rows += [(c.sequence, c.first, c.count, c.restored, c.saved) for c in plan.chunks]
        for sequence, first, count, restored, saved in rows:
            slot, entries = sequence.slot, self.clients[sequence].entries
            if restored >= 0:
                self.states[slot] = self.snapshots[restored]
                self.restored += 1
            assert not first or self.states[slot] == entries[first - 1]
            self.states[slot] = entries[first + count - 1]
            if saved >= 0:
                assert saved < self.pool.snapshots
                self.snapshots[saved] = self.states[slot]

    def _draw(self, client: Client, drafts: list[int]) -> list[int]:
        """Draws after the tokens and after each right draft, whose entries stay."""
        sequence, entries = client.sequence, list(client.entries)
        for position, draft in enumerate(drafts, len(entries)):
            entries.append(hash((entries[-1], draft, self.weights)))
            number, place = divmod(position, self.pool.page)
            assert sequence.pages[number]
            self.cells[sequence.pages[number], place] = entries[-1]
        kept = []
        for draft in [*drafts, None]:
            kept.append(sample(client.tokens, sequence.salt))
            client.tokens.append(kept[-1])
            if kept[-1] != draft:
                break
        client.entries = entries[: len(client.entries) + len(kept) - 1]
        self.drafted += len(kept) - 1
        assert len(client.tokens) <= sequence.limit
        return kept

    def _write(self, client: Client, first: int, end: int) -> None:
        pages, page = client.sequence.pages, self.pool.page
        for position in range(len(client.entries), end):
            before = client.entries[-1] if client.entries else client.sequence.salt
            entry = hash((before, client.tokens[position], self.weights))
            client.entries.append(entry)
        for position in range(first, end):
            number = pages[position // page]
            assert number
            self.cells[number, position % page] = client.entries[position]

    def _check_reads(self, client: Client, first: int, end: int) -> None:
        pages, page, window = client.sequence.pages, self.pool.page, self.scheduler.window
        begin = 0 if window is None else max(0, first - window + 1)
        for position in range(begin, end):
            cell = pages[position // page], position % page
            assert cell[0] and self.cells[cell] == client.entries[position]

    def check(self) -> None:
        """Pages are counted, and no page of a sequence is free or given to another one."""
        pool, running = self.pool, self.scheduler.running
        assert pool.free + pool.cached + pool.used == pool.pages - 1
        owners = Counter(page for s in running.values() for page in s.pages if page)
        assert pool.used == len(owners)
        for slot, sequence in running.items():
            assert sequence.slot == slot and len(sequence.pages) * pool.page >= sequence.computed
            if sequence.sampled:
                assert sequence.computed == len(sequence.tokens) + sequence.flying - 1
            else:
                assert not sequence.flying
            known = min(len(sequence.tokens), sequence.computed) // pool.page
            assert all(owners[page] == 1 for page in sequence.pages[known:] if page)
        waiting = self.scheduler.waiting
        assert not any(s.computed or s.flying or s.pages or s.sampled for s in waiting)
        for sequence, client in self.clients.items():
            places = (sequence.slot >= 0) + (sequence in waiting)
            assert places == (not client.has_ended)

    def finish(self) -> None:
        """Runs until every sequence has ended."""
        clients = [client for client in self.clients.values() if not client.has_ended]
        chunk = min(self.scheduler.limits.chunk, self.scheduler.limits.tokens)
        for _ in range(20 + 20 * sum(client.sequence.limit + chunk for client in clients)):
            if all(client.has_ended for client in clients):
                break
            self.step()
            while len(self.in_flight) > 3:
                self.read()
        assert all(client.has_ended for client in clients), "a sequence starves"
        self.read_all()
        assert not self.pool.used and not self.scheduler.running
