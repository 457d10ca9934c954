"""A thread of the first process that acts after each save, while the run trains."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mjax.errors import UserError


class FollowUp:
    """Runs `action` after saves, one after the other; None: nothing follows."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None
        self._pool = ThreadPoolExecutor(1)
        self._under_way: tuple[int, Future] | None = None

    def begin(self, step: int) -> None:
        """Begin what follows the save of a step."""
        if self.action is not None:
            self._under_way = step, self._pool.submit(self.action)

    def end(self, waits: bool = True) -> tuple[int, UserError] | None:
        """The step and the error if the last action failed, once. waits: for it to end."""
        if self._under_way is None or not (waits or self._under_way[1].done()):
            return None
        (step, action), self._under_way = self._under_way, None
        try:
            action.result()
        except UserError as e:
            return step, e
        return None
