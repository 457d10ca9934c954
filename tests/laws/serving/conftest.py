"""Small pages, so that short texts have many."""

import pytest

from tests.laws.serving.kinds import PAGE


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """The engine's pages have PAGE tokens."""
    for module in ("engine", "programs", "step_runner"):
        monkeypatch.setattr(f"mjax.infer.{module}.PAGE", PAGE)
