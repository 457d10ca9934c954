"""Rewards of puzzles: right answers, near ones, and attempts to be paid for nothing."""

from fractions import Fraction

import pytest

from mjax.post.environments.chat_tokens import final_answer
from mjax.post.environments.countdown import countdown_problem
from mjax.post.environments.environment import draws
from mjax.post.environments.expressions import evaluate_expression, number_text
from tests.unit.post.environments.places import answer, over_bytes, text_of
from tools.countdown_traces import solve_countdown, traces


@pytest.mark.parametrize("digits", [1, 2, 18])
def test_the_sum_is_paid_and_nothing_else(digits):
    environment = over_bytes("arithmetic", digits=digits, terms=3)
    for index in range(20):
        turn = environment.reset(5, index)
        problem = text_of(turn).removesuffix("=")
        assert all(len(number) == digits for number in problem.split("+"))
        right = sum(map(int, problem.split("+")))
        assert answer(environment, turn, f"{right}").reward == 1
        assert answer(environment, turn, f"<answer> {right} </answer>").reward == 1
        for text in (f"{right + 1}", f"{right} {right}", f"{right}!", "", f"{right}.0"):
            assert answer(environment, turn, text).reward == 0


def test_reversed_text_is_paid_by_how_alike_it_is():
    environment = over_bytes("reverse_text", words=3, question="{problem}>")
    turn = environment.reset(1, 2)
    right = text_of(turn).removesuffix(">")[::-1]
    assert answer(environment, turn, right).reward == 1
    assert 0.5 < answer(environment, turn, right[:-2]).reward < 1
    assert answer(environment, turn, "q").reward == 0
    long = answer(environment, turn, right * 4000)  # answered at once
    assert long.reward < 1 and long.metrics == {"correct": 0.0}


PAID = ["(3+7)*2", "2*(7+3)", "7*2+3*2", "<answer>(3 + 7) * 2</answer>", "so\n(3+7)*2 = 20"]
UNPAID = """3+7 20 (3+7)*2*1 (3+7)*2+0 10*2 37*2 3**7 7//3 __import__('os') 3.0*7 -(3+7)*-2+0
(3+7)*2) 2e1 ٣+7*2 (3+7)*02 3+7*2 0 (3+7)*2/1""".split()


def test_an_expression_of_each_number_once_is_paid():
    environment = over_bytes("countdown")
    turn = environment.reset(0, 0).__class__((), {"numbers": [3, 7, 2], "target": 20})
    rewards = {text: answer(environment, turn, text).reward for text in PAID + UNPAID}
    paid = {text for text, reward in rewards.items() if reward == 1}
    assert paid == {*PAID} - {"7*2+3*2"}


def test_hostile_expressions_are_refused_at_once():
    for text in ("9**9**9", "1" * 201, "(" * 100 + "1" + ")" * 100, "1/0", "1+", "a", "", "1 2"):
        if text.startswith("("):
            continue
        with pytest.raises(ValueError):
            evaluate_expression(text)
    assert evaluate_expression(" 2*(3-0.5)/-4 ") == (Fraction(-5, 4), [2, 3, Fraction(1, 2), 4])
    assert [number_text(Fraction(n, 4)) for n in (8, -5, 1)] == ["2", "-1.25", "0.25"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_countdown_has_a_solution_that_the_environment_pays(count):
    environment = over_bytes("countdown", numbers=count, largest=20)
    for record, index in zip(traces(15, 3, numbers=count, largest=20), range(15), strict=True):
        turn = environment.reset(3, index)
        assert record["prompt"] == text_of(turn) and "{" not in record["prompt"]
        assert answer(environment, turn, record["completion"]).reward == 1
        assert record["completion"].count("=") == count - 1


def test_targets_are_positive_and_the_solver_knows_what_is_impossible():
    for index in range(200):
        numbers, target = countdown_problem(draws(0, index), 4, 99)
        assert len(numbers) == 4 and 0 < target and max(numbers) <= 99
    assert solve_countdown([1, 1], 3) is None
    assert solve_countdown([3, 7, 2], 20) == (["7+3=10", "10*2=20"], "(7+3)*2")


def test_the_final_answer_is_the_last_that_is_marked():
    assert final_answer("<answer>1</answer> no, <answer>\n2 </answer>\nbye") == "2"
    assert final_answer("one\n two \n\n") == "two" and final_answer(" \n") == ""
