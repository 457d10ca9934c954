"""Programs that pass tests, run in a sandbox.

Outputs and values are compared here, outside of the sandbox, so a program that ends early or
prints "passed" earns nothing. A test that is no comparison with a literal is run beside the
program, which could then pretend that it had passed.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from mjax.errors import UserError
from mjax.post.environments.chat_tokens import ChatTokens
from mjax.post.environments.environment import Turn
from mjax.post.environments.problem_files import problem_at, read_problems
from mjax.post.environments.sandbox import Sandbox

_NO_LITERAL = ValueError, SyntaxError, RecursionError, MemoryError, TypeError


class CodeTests:
    """Problems of a file with the fields prompt and tests; the reward is 1 if all tests pass.

    A test is {"input": .., "output": ..}, texts of standard input and output, or Python code such
    as "assert add(1, 2) == 3". `seconds` are for each input, and for all tests that are code.
    """

    def __init__(self, chat: ChatTokens, path: str, seconds: float = 5.0, memory: int = 512):
        self.chat, self.sandbox = chat, Sandbox(seconds, memory)
        self.problems = read_problems(path, prompt=str, tests=list)
        for number, problem in enumerate(self.problems):
            if not all(map(_is_test, problem["tests"])):
                said = f"{path}: problem {number}: a test is no code and no input with output"
                raise UserError(f"{said}; mend it or leave it out")
        self.sandbox.run("")  # or it says what is missing

    def reset(self, seed: int, index: int) -> Turn:
        """A problem of the file."""
        number = problem_at(seed, index, len(self.problems))
        return Turn(self.chat.prompt(self.problems[number]["prompt"]), number)

    def step(self, state: Any, ids: Sequence[int]) -> Turn:
        """The reward of the program in the last block of code, or of the whole answer."""
        text = self.chat.text(ids)
        blocks = re.findall(r"```(?:python|py)?[^\S\n]*\n(.*?)```", text, re.DOTALL)
        tests = self.problems[state]["tests"]
        faults = self._faults(blocks[-1] if blocks else text, tests)
        reason = next(filter(None, faults), "passed")
        passed = faults.count("") / len(tests)
        return Turn((), None, float(passed == 1), {"passed": passed}, reason)

    def _faults(self, program: str, tests: Sequence[str | dict]) -> list[str]:
        """Why each test failed; "" of those that passed."""
        codes = [test for test in tests if isinstance(test, str)]
        faults = self._faults_of_calls(program, codes) if codes else []
        for test in tests:
            if isinstance(test, dict):
                output, fault = self.sandbox.run(program, test["input"])
                is_right = output.split() == test["output"].split()
                faults.append(fault or ("" if is_right else "wrong output"))
            if faults and faults[-1] == "time limit":
                return [*faults, *["time limit"] * (len(tests) - len(faults))]
        return faults

    def _faults_of_calls(self, program: str, tests: Sequence[str]) -> list[str]:
        calls, wanted = zip(*map(_as_call, tests), strict=True)
        output, fault = self.sandbox.run(program, calls=calls)
        faults = []
        for line, literal in zip(output.splitlines(), wanted, strict=False):
            has_value, value = _as_value(line)
            if has_value:
                value = "" if _equals(value, literal) else "wrong value"
            faults.append(value)
        return faults + [fault or "ended early"] * (len(tests) - len(faults))


def _is_test(test: Any) -> bool:
    """Whether it is code, or the texts of an input and an output."""
    if isinstance(test, dict) and test.keys() == {"input", "output"}:
        return all(isinstance(text, str) for text in test.values())
    return isinstance(test, str)


def _as_call(test: str) -> tuple[tuple[str, str], Any]:
    """((kind, code) for the sandbox, the value that it must have)."""
    try:
        (statement,) = ast.parse(test).body
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            compared = statement.test
            if [type(op) for op in compared.ops] == [ast.Eq]:
                wanted = ast.literal_eval(compared.comparators[0])
                return ("eval", ast.unparse(compared.left)), wanted
    except _NO_LITERAL:
        pass
    return ("exec", test), None


def _as_value(line: str) -> tuple[bool, str]:
    """(whether a call had a value, its repr or the error)."""
    try:
        has_value, said = json.loads(line)
        return has_value is True, str(said)
    except _NO_LITERAL:
        return False, "wrong output"


def _equals(value: str, literal: Any) -> bool:
    """Whether a repr is that of a value that equals a literal."""
    try:
        return bool(ast.literal_eval(value) == literal)
    except _NO_LITERAL:
        return False
