"""The pages at /ui as files: what is sent, with which policy, without a key; and the forecast that one of them draws.
What they do in a browser is in test_server_ui.py."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from serving import client_of, saying

from onebox.server import face
from onebox.server.upstream import create_upstream_app


def get(*paths: str, headers: dict[str, str] | None = None, **options: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with client_of(saying("x"), **options) as client:
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(run())


def test_ui_leads_to_its_page_which_names_only_files_that_are_served() -> None:
    moved, page = get("/ui", "/ui/")
    assert moved.status_code == 307 and moved.headers["location"] == "ui/"
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    assert named and named <= set(face.NAMES)


def test_every_file_carries_the_policy_and_its_type() -> None:
    paths = sorted(face.PATHS - {"/ui"})
    assert len(paths) >= 8
    for path, response in zip(paths, get(*paths), strict=True):
        assert response.status_code == 200, path
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert response.headers["x-content-type-options"] == "nosniff"
        if path.endswith(".js"):
            assert response.headers["content-type"] == "text/javascript; charset=utf-8"


def test_nothing_in_the_files_would_be_stopped_by_the_policy_or_come_from_elsewhere() -> None:
    for name in face.NAMES:
        text = (face.FOLDER / name).read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{name}: {addresses}"
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text)


def test_imports_between_the_scripts_are_served() -> None:
    for name in face.NAMES:
        if name.endswith(".js"):
            text = (face.FOLDER / name).read_text("utf-8")
            imported = re.findall(r'from "\./([\w.]+)"', text)
            assert set(imported) <= set(face.NAMES)
            for module, names in re.findall(r'^import \{([^}]+)\} from "\./([\w.]+)"', text, re.M):
                exported = (face.FOLDER / names).read_text("utf-8")
                for one in module.replace(" ", "").split(","):
                    assert re.search(rf"export (async )?(const|function\*?|class) ?\*? ?{one}\b", exported), one


def test_the_pages_need_no_key_and_what_they_ask_for_does() -> None:
    answers = get("/ui/", "/ui/main.js", "/v1/onebox/plan", "/ui/../v1/models", api_keys=["k"])
    assert [r.status_code for r in answers] == [200, 200, 401, 401]


@pytest.mark.parametrize("path", ["/ui/nothing", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui//main.js"])
def test_no_other_path_is_a_file(path: str) -> None:
    (response,) = get(path)
    assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"


def test_a_file_that_is_the_same_is_not_sent_again() -> None:
    (first,) = get("/ui/main.js")
    (again,) = get("/ui/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


def test_the_pages_are_not_in_the_api_document() -> None:
    (document,) = get("/openapi.json")
    assert not [path for path in document.json()["paths"] if path.startswith("/ui")]
    assert "/v1/onebox/forecast" in document.json()["paths"]


def test_a_server_in_front_of_another_has_the_pages_too() -> None:
    async def run() -> httpx.Response:
        app = create_upstream_app("http://127.0.0.1:9/v1")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/ui/")

    assert asyncio.run(run()).status_code == 200


def test_the_forecast_is_that_of_the_command_line() -> None:
    from onebox.engine.forecast import Subject, forecast

    known, made = get("/v1/onebox/forecast", "/v1/onebox/forecast?model=qwen3.5-35b-a3b&box=h200&context=2048&users=4")
    assert "qwen3.5-35b-a3b" in known.json()["models"] and known.json()["boxes"]["h200"] == "H200 SXM"
    expected = forecast(Subject.of("qwen3.5-35b-a3b"), "h200", context=2048, users=4)
    assert made.json()["ladder"][0]["rung"] == "INT4"
    assert made.json()["ladder"][-1]["expected_tok_s"] == pytest.approx(expected.ladder[-1].expected_tok_s)


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("model=/etc&box=h200", "model", "must be one of"),
        ("model=qwen3.5-35b-a3b&box=toaster", None, "toaster"),
        ("model=qwen3.5-35b-a3b&box=h200&users=0", "users", "whole number"),
        ("model=qwen3.5-35b-a3b&box=h200&context=many", "context", "whole number"),
        ("model=qwen3.5-122b-a10b&box=rtx-4090", None, "do not fit"),
        ("model=qwen3.5-35b-a3b&box=h200&build=clay", None, "clay"),
    ],
)
def test_a_forecast_that_cannot_be_made_says_why(query: str, param: str | None, words: str) -> None:
    (response,) = get(f"/v1/onebox/forecast?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param and words in response.json()["error"]["message"]
