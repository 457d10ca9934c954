"""Equal answers in other forms are paid; without math-verify there is one line."""

import importlib.util
import sys

import pytest

from mjax.errors import UserError
from mjax.post.environments.workers import EnvironmentWorkers
from tests.chats import write_lines
from tests.marks import slow
from tests.unit.post.environments.places import BYTES, answer, over_bytes, text_of

ANSWERS = {
    r"\frac{1}{2}": ([r"so \boxed{0.5}", "<answer>1/2</answer>", "Thus\n$2^{-1}$"], ["2", ""]),
    r"\sqrt{8}": ([r"\boxed{2\sqrt{2}}"], [r"\boxed{2.83}", "the root"]),
    "7": ([r"3, no, \boxed{7}", "7.0", "x = 7"], [r"7 \boxed{8}", "7\nor 8", "-7"]),
    "x^2+1": ([r"\boxed{1+x^2}"], [r"\boxed{x^2}"]),
}


@pytest.fixture
def path(tmp_path):
    rows = [{"question": f"What is {x}?", "answer": x} for x in ANSWERS]
    return write_lines(tmp_path / "m.jsonl", rows)


def test_without_math_verify_there_is_one_line(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"environment math needs `pip install 'mjax\[math\]'`"):
        over_bytes("math", path=path)


@slow
@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs mjax[math]")
def test_equal_answers_are_paid_also_in_a_worker(path):
    environment = over_bytes("math", path=path)
    for index in range(len(ANSWERS)):
        turn = environment.reset(3, index)
        right, wrong = ANSWERS[text_of(turn).removeprefix("What is ").removesuffix("?\n")]
        assert [answer(environment, turn, text).reward for text in right] == [1] * len(right)
        assert [answer(environment, turn, text).reward for text in wrong] == [0] * len(wrong)
    with EnvironmentWorkers("math", "byte", args={"path": path}, count=1) as workers:
        workers.submit(0, "step", turn.state, BYTES.encode(right[0]))
        assert workers.ready(60)[0][1].reward == 1
