"""The OpenAPI document, checked by schemathesis: whatever it allows or forbids, no answer is a 5xx or undocumented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import app_of, running, saying
from test_server_intake import in_place, phrases  # noqa: F401  # a process and a trained head are slow here


def is_no_server_error(_: object, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """501 is a documented answer: of embeddings, and where an optional part is not installed."""
    assert response.status_code < 500 or response.status_code == 501, f"{case.path}: {response.text}"


CHECKS = [is_no_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(app_of(saying("hm</think>Hello", max_waiting=4096))) as url:
        yield url


pytestmark = pytest.mark.usefixtures("phrases")
schema = schemathesis.openapi.from_dict(app_of(saying("x")).openapi())
CALM = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


@schema.parametrize()
@settings(max_examples=20, **CALM)
def test_no_request_gets_an_undocumented_answer(url: str, case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=150, **CALM)
def test_no_request_of_many_gets_an_undocumented_answer(url: str, case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)
