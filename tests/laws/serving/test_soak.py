"""Law: whatever callers do, nothing is left of them, nothing hangs, and errors have one form.

`tests/soak.py` says what is asked and what is checked. The exhaustive case has 10,000 requests.
"""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mjax.infer.engine import Engine
from mjax.infer.sample import Draws
from mjax.infer.scheduling.scheduler import Limits
from mjax.interop.adapter_stack import with_stack
from mjax.interop.peft.adapter_writer import write_adapter
from mjax.interop.pretrained import Pretrained
from mjax.models import definition_of
from tests import soak
from tests.adapters import drawn_adapters
from tests.chats import END, write_tokenizer
from tests.laws.serving import kinds
from tests.laws.serving.kinds import LENGTH
from tests.marks import exhaustive, slow

pytest.importorskip("fastapi", reason="needs the extra serve")
NAMES = "one", "two"


def soaked_engine(home: Path) -> Engine:
    """A tiny engine with two adapters, few rows, few pages and a short queue."""
    from mjax.data.base.tokenizer import load_tokenizer

    cfg, _, params, _ = kinds.model("bytes")
    model = Pretrained(cfg, definition_of(cfg), params, None, None)
    for rank, name in enumerate(NAMES, 2):
        drawn = drawn_adapters(model.definition.specs, rank=rank, scale=float(rank))
        write_adapter(home / name, model.cfg, model.definition.specs, drawn)
    model = with_stack(model, [home / name for name in NAMES])
    folder = write_tokenizer(home / "tokenizer", bos=False)
    tokenizer = load_tokenizer(folder)
    made = Engine(
        model.definition,
        model.params,
        model.cfg,
        dtype="float32",
        limits=Limits(rows=8, chunk=64, length=LENGTH, queued=32),
        pages=48,
        tokenizer=tokenizer,
        eos=(tokenizer.id_of(END),),
        adapters=NAMES,
    )
    made.runner.sizes = tuple(sizes[-1:] for sizes in made.runner.sizes)
    made.warm_up([Draws(random=True, limited=True, penalties=True, top=20)], all_rules=True)
    made.folder = folder
    return made


@pytest.mark.parametrize(
    "count", [pytest.param(30, marks=slow), pytest.param(10_000, marks=(slow, exhaustive))]
)
def test_a_server_under_callers_of_every_kind(count, tmp_path):
    from tests.unit.serve.conftest import behind_socket, served

    engine = soaked_engine(tmp_path)
    compiled = len(engine.runner.compiled)

    def at_rest() -> None:
        for _ in range(600):
            used = sum(lane.pool.used for lane in engine.lanes)
            if not engine.requests and not used:
                break
            time.sleep(0.05)
        for lane in engine.lanes:
            assert not engine.requests and not lane.running and not lane.waiting
            assert lane.pool.used == 0 and lane.pool.free + lane.pool.cached == lane.pool.pages - 1

    options = {"admin_keys": ("admin",), "slow_seconds": 1.0, "body_seconds": 1.0}
    with behind_socket(engine) as behind, served(behind, most_body=2**20, **options) as live:
        live.engines.facts = replace(live.engines.facts, adapters=NAMES)
        port = int(live.url.rpartition(":")[2])
        caller = soak.Caller(port, random.Random(7), NAMES)
        counts = soak.soak(caller, count, at_rest, soak.resident_mb)
        assert not live.app.state.service.running
        assert not any(replica.streams for replica in live.engines._replicas)
    assert len(engine.runner.compiled) == compiled
    assert sum(counts.values()) >= count - 1 and counts["fine", "200, a stream"] > count / 20
