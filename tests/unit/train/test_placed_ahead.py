"""Batches are placed one ahead: in order, each before the step in front of it, errors in turn."""

import pytest

from mjax.errors import UserError
from mjax.train.batch import placed_ahead


def numbered(events: list, bad: int | None = None):
    """Batches 0 to 3, of which one cannot be read."""
    for i in range(4):
        if i == bad:
            raise UserError(f"batch {i} cannot be read")
        events.append(f"read {i}")
        yield i


def test_the_next_batch_is_placed_before_the_step_in_front_of_it():
    events = []

    def place(i: int) -> str:
        events.append(f"placed {i}")
        return f"on devices {i}"

    for batch, placed in placed_ahead(place, numbered(events)):
        assert placed == f"on devices {batch}"
        events.append(f"step {batch}")
    steps = [events.index(f"step {i}") for i in range(4)]
    assert [events.index(f"placed {i}") for i in range(4)] == [1, *(step - 1 for step in steps[:3])]
    assert steps == sorted(steps) and len(events) == 12


@pytest.mark.parametrize("bad_read, bad_place", [(2, None), (None, 2), (0, None), (None, 0)])
def test_the_error_of_a_batch_comes_after_all_before_it(bad_read, bad_place):
    def place(i: int) -> int:
        if i == bad_place:
            raise UserError(f"batch {i} cannot be placed")
        return i

    seen = []
    with pytest.raises(UserError, match="batch [02] cannot be (read|placed)"):
        for batch, _ in placed_ahead(place, numbered([], bad_read)):
            seen.append(batch)
    assert seen == list(range(bad_read if bad_place is None else bad_place))
