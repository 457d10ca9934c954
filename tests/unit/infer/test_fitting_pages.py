"""Pages fill the memory that a device says it has, beside weights and the largest programs."""

from types import SimpleNamespace

import pytest

from mjax.errors import UserError
from mjax.infer import step_runner
from mjax.infer.programs import EnginePrograms
from tests.laws.serving.tiny import tiny_engine, tiny_model

GIGABYTE = 10**9
SCRATCH = {None: 3 * 10**7, 32: 5 * 10**7}  # bytes of decoding, and of a step with prompts


def pages_of(monkeypatch: pytest.MonkeyPatch, free: int) -> tuple[int, int]:
    """(the pages of a tiny engine on a device with `free` bytes left of a gigabyte, bytes of one).

    Programs say that they need `SCRATCH`.
    """

    def lowered(self, params: dict, tokens: int | None, *_: object) -> SimpleNamespace:
        memory = SimpleNamespace(temp_size_in_bytes=SCRATCH[tokens] - 7, output_size_in_bytes=7)
        made = SimpleNamespace(memory_analysis=lambda: memory)
        return SimpleNamespace(compile=lambda compiler_options: made)

    stats = {"bytes_limit": GIGABYTE, "bytes_in_use": GIGABYTE - free}
    monkeypatch.setattr(step_runner, "memory_of", lambda params: stats)
    monkeypatch.setattr(EnginePrograms, "lowered", lowered)
    programs = tiny_engine(tiny_model("keys and values"), pages=None).programs
    two, three = (programs.resized(programs.sizes._replace(pages=n)) for n in (2, 3))
    return programs.sizes.pages, three.bytes_of_caches() - two.bytes_of_caches()


def test_pages_take_what_is_left(monkeypatch):
    """Of a gigabyte, 3 % stay free, and twice the memory of the program that needs most."""
    pages, of_one = pages_of(monkeypatch, GIGABYTE)
    left = GIGABYTE * 0.97 - 2 * max(SCRATCH.values())
    assert abs(pages * of_one - left) < 3 * of_one


def test_without_room_for_one_text_a_line_says_so(monkeypatch):
    with pytest.raises(UserError, match="0.1 GB are scratch: no text of full length fits"):
        pages_of(monkeypatch, GIGABYTE // 8)
