"""How the supervisors of a job meet before each start, through small files in the run folder.

Every process of a job has a supervisor (`supervisor.py`), and each has a file of its own in
RUN/restarts. Process 0's supervisor leads: it opens a round under a fresh name and the others
answer with that name. Once enough have answered, it names the members of the round. Invariants:
a process is started only within a round that names it; a round ends for all when it ends for one;
files of an earlier job never count, because they answer to another name; clocks are not compared.
After torchrun's rendezvous, without a server.
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mjax.errors import or_user_error
from mjax.files import replace_text
from mjax.run.monitor.log_writer import warn

LOOK = 0.5  # seconds between two looks at the files of the others
SIGN_OF_LIFE = 10.0  # seconds between two signs of life of process 0 within a round


@dataclass(frozen=True)
class Round:
    """members: the numbers of the job's processes that take part, in order; the first is 0."""

    name: str
    members: tuple[int, ...]


@dataclass
class Rendezvous:
    """Process `index` of `count` among the supervisors of the run in `folder`.

    patience: seconds to wait for processes that stay away. smallest: fewest members of a round.
    fits: whether so many members can train.
    """

    folder: Path
    index: int
    count: int
    patience: float
    smallest: int
    fits: Callable[[int], bool]
    _round: Round = field(default_factory=lambda: Round("", ()))
    _known: set[str] = field(default_factory=set)  # rounds that this process took part in
    _beat: int = 0
    _next_beat: float = 0.0

    def meet(self, is_over: Callable[[], bool]) -> Round | None:
        """The next round; None once `is_over`, if one has `ended`, or if too few came in time."""
        with or_user_error(
            f"cannot make folder {self.folder}: {{reason}}; set run.dir to a folder you may write"
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._round = self._lead(is_over) if self.index == 0 else self._follow(is_over)
        return self._round if self._round.members else None

    def why_broken(self) -> str:
        """Why the round has to end for this process, or ""."""
        if self.index > 0:
            name = self._read(0).get("name", self._round.name)
            return "" if name == self._round.name else "process 0 starts again"
        if time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + min(SIGN_OF_LIFE, self.patience / 2)
            self._beat += 1
            self._write({**asdict(self._round), "beat": self._beat})
        for member in self._round.members[1:]:
            if self._read(member).get("answers", self._round.name) != self._round.name:
                return f"process {member} starts again"
        return ""

    def could_grow(self) -> bool:
        """Whether processes wait that would make the round larger; for process 0."""
        if len(self._round.members) == self.count:
            return False
        waiting = [i for i in range(1, self.count) if self._read(i).get("asks") == self._round.name]
        possible = len(self._round.members) + len(waiting)
        return self._largest(possible) > len(self._round.members)

    def end(self, code: int) -> None:
        """Tell the others that this process has ended for good with exit code `code`."""
        mine = {"name": self._round.name} if self.index == 0 else {"answers": self._round.name}
        self._write(mine | {"end": [self._round.name, code]})

    def ended(self) -> tuple[int, int] | None:
        """(number, exit code) of a process that has ended for good since this one came.

        Process 0 asks all others, and they ask process 0.
        """
        for i in range(1, self.count) if self.index == 0 else [0]:
            name, code = self._read(i).get("end") or ("", 0)
            if name in self._known:
                return i, code
        return None

    def _lead(self, is_over: Callable[[], bool]) -> Round:
        name = uuid.uuid4().hex
        self._known.add(name)
        self._write({"name": name})
        late = time.monotonic() + self.patience
        others = range(1, self.count)
        while not is_over() and self.ended() is None:
            here = [0, *(i for i in others if self._read(i).get("answers") == name)]
            is_late = time.monotonic() > late
            size = self._largest(len(here)) if is_late else self.count
            if size and len(here) >= size:
                found = Round(name, tuple(here[:size]))
                self._write(asdict(found))
                return found
            if is_late:
                warn(
                    f"{len(here)} of {self.count} processes came within {self.patience / 60:g} "
                    f"minutes, {self.smallest} are needed: start the missing ones"
                )
                break
            time.sleep(LOOK)
        return Round(name, ())

    def _follow(self, is_over: Callable[[], bool]) -> Round:
        """The next round that names this process; it asks to be let in to one that does not."""
        self._write({"answers": None})
        late = time.monotonic() + self.patience
        seen: dict = {}
        answer = None
        while not is_over() and self.ended() is None:
            found = self._read(0)
            name, members = found.get("name"), found.get("members")
            if found and found != seen:  # process 0 lives
                seen, late = found, time.monotonic() + 2 * self.patience
            if name and members is None and name != answer:
                self._known.add(name)
                self._write({"answers": name})
                answer = name
            elif members and name == answer and self.index in members:
                return Round(name, tuple(members))
            elif members:
                self._known.add(name)
                self._write({"answers": None, "asks": name})
            if time.monotonic() > late:
                warn(f"process 0 did not come within {self.patience / 60:g} minutes: start it")
                break
            time.sleep(LOOK)
        return Round("", ())

    def _largest(self, present: int) -> int:
        """The most processes among so many that can train; 0 if too few."""
        sizes = range(present, self.smallest - 1, -1)
        return next((size for size in sizes if size == self.count or self.fits(size)), 0)

    def _read(self, index: int) -> dict:
        try:
            found = json.loads((self.folder / str(index)).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, record: dict) -> None:
        try:
            replace_text(self.folder / str(self.index), json.dumps(record))
        except OSError as e:
            warn(f"{self.folder / str(self.index)} cannot be written: {e.strerror}")
