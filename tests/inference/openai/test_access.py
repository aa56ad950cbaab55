"""Who may use a server: its key, or, without one, no page of another address."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from lit_ft.inference.openai.application import Limits, application

ORIGIN = "http://localhost:3000"
REBOUND = {"Host": "other.example:8000"}


def asked(headers: dict[str, str], **limits: Any) -> tuple[int, str]:
    """Status and error of a GET with some headers."""
    with TestClient(application({}, Limits(8, **limits), {}), base_url="http://127.0.0.1:8000") as client:
        answer = client.get("/v1/models", headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:8000", "[::1]:8000", "127.8.0.1"])
def test_without_a_key_this_machine_is_asked_by_its_names(host: str) -> None:
    assert asked({"Host": host}) == (200, "")
    assert asked({"Host": host, "Origin": f"http://{host}"}) == (200, "")


@pytest.mark.parametrize("host", ["other.example:8000", "localhost.other.example", "127.0.0.1.nip.io", "10.0.0.1", "["])
def test_without_a_key_other_names_of_this_machine_are_refused(host: str) -> None:
    status, message = asked({"Host": host})
    assert (status, f"the host {host!r}" in message) == (403, True)


def test_other_names_are_taken_by_key_by_origin_and_from_other_machines() -> None:
    assert asked({**REBOUND, "Authorization": "Bearer k"}, api_key="k") == (200, "")
    assert asked(REBOUND, api_key="k")[0] == 401
    assert asked(REBOUND, is_on_loopback=False) == (200, "")
    for origins in (["*"], ["http://other.example:8000"]):
        assert asked(REBOUND, origins=origins) == (200, "")


def test_without_a_key_pages_of_other_origins_are_refused() -> None:
    assert asked({"Origin": ORIGIN}, origins=[ORIGIN]) == (200, "")
    for origin in (ORIGIN, "https://other.example", "null", "http://["):
        for is_on_loopback in (True, False):
            status, message = asked({"Origin": origin}, is_on_loopback=is_on_loopback)
            assert (status, f"a page of {origin!r}" in message) == (403, True)
    assert asked({"Origin": "null"}, origins=["null"]) == (200, "")


@pytest.mark.parametrize(
    ("kind", "status"),
    [("text/plain", 415), (None, 415), ("application/json; charset=utf-8", 404), ("Application/JSON", 404)],
)
def test_bodies_are_declared_as_json(kind: str | None, status: int) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with TestClient(application({}, Limits(8), {}), base_url="http://127.0.0.1") as client:
        assert client.post("/v1/completions", content=b'{"model": "x"}', headers=headers).status_code == status
