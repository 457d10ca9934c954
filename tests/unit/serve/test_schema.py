"""Requests that are drawn from the application's own OpenAPI schema, and others against it."""

import contextlib

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.marks import exhaustive

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra clients")
from schemathesis import GenerationMode  # noqa: E402

EXAMPLES = 15  # of each route and mode
STAND_STILL = {"/pause", "/sleep"}  # nothing would end after them
FORM = {"message", "type", "param", "code"}


@exhaustive
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_of_the_schema_or_against_it_fails_the_server(live, mode):
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    operations = [each for each in operations if each.path not in STAND_STILL]
    assert {"/v1/completions", "/v1/chat/completions"} <= {each.path for each in operations}
    asked = dict.fromkeys((each.label for each in operations), 0)
    for operation in operations:
        try:
            cases = operation.as_strategy(generation_mode=mode)
        except schemathesis.errors.SchemathesisException:
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def ask(case):
            reply = case.call(headers={"authorization": "Bearer admin"}, timeout=60)
            asked[case.operation.label] += 1
            check(case.operation.label, reply)

        with contextlib.suppress(Unsatisfiable):  # a route that nothing can be wrong with
            ask()
    print(asked)
    assert asked["POST /v1/completions"] and asked["POST /v1/chat/completions"]
    live.at_rest()
    assert httpx.get(f"{live.url}/health").status_code == 200


def check(label: str, reply) -> None:
    """No defect, and each error an object of OpenAI's form."""
    said = f"{label}: {reply.status_code} {reply.text[:300]}"
    assert reply.status_code < 500 or reply.status_code in (503, 504), said
    if reply.status_code >= 400:
        assert reply.headers["content-type"] == ["application/json"], said
        error = reply.json()
        assert set(error) == {"error"} and set(error["error"]) == FORM, said
