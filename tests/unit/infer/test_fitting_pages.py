"""Pages fill the memory that a device says it has, beside weights and the largest programs."""

import pytest

from mjax.errors import UserError
from mjax.infer import step_runner
from tests.laws.serving.tiny import tiny_engine, tiny_model

GIGABYTE = 10**9


def pages_of(monkeypatch: pytest.MonkeyPatch, free: int) -> int:
    """The pages of a tiny engine on a device with so many bytes left of a gigabyte."""
    stats = {"bytes_limit": GIGABYTE, "bytes_in_use": GIGABYTE - free}
    monkeypatch.setattr(step_runner, "memory_of", lambda params: stats)
    return tiny_engine(tiny_model("keys and values"), pages=None).programs.sizes.pages


def test_pages_take_what_is_left(monkeypatch):
    """Four fifths of a gigabyte more hold as many pages more as that memory has room for."""
    few, many = (pages_of(monkeypatch, part * GIGABYTE // 10) for part in (2, 10))
    programs = tiny_engine(tiny_model("keys and values")).programs
    two, three = (programs.resized(programs.sizes._replace(pages=n)) for n in (2, 3))
    of_page = three.bytes_of_caches() - two.bytes_of_caches()
    assert abs(many - few - 0.8 * GIGABYTE / of_page) <= 1


def test_without_room_for_one_text_a_line_says_so(monkeypatch):
    with pytest.raises(UserError, match="no text of full length fits"):
        pages_of(monkeypatch, GIGABYTE // 50)
