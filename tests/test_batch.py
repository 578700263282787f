"""`onebox batch`: one result a request, whatever ends the run; bad lines are told and stop nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import app_of, running, saying

from onebox import cli
from onebox.batch.jobs import scan
from onebox.batch.results import Results, encode
from onebox.batch.run import Limits, Sender, run
from onebox.errors import ConfigError

URL = "/v1/chat/completions"


def line(id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Say {id}."}], "max_tokens": 4}
    return {"custom_id": id, "method": "POST", "url": URL, "body": body, **changes}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def command(*argv: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", *map(str, argv)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def url():
    with running(app_of(saying("hm</think>Hello", max_waiting=64))) as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(12)]), tmp_path / "out.jsonl"


def answer(files: tuple[Path, Path], handler: Any, **limits: Any) -> int | None:
    """The batch through a handler in place of a server; what the command does between files and sender."""

    async def all_of_it() -> int | None:
        sender = Sender("http://box", Limits(**{"pause_s": 0.001, **limits}), transport=httpx.MockTransport(handler))
        with Results(files[1]) as results:
            left = [job for job in scan(files[0]).jobs if job.custom_id not in results.done]
            return await run(files[0], left, results, sender, tell=lambda _: None)

    return asyncio.run(all_of_it())


def test_each_request_has_one_result_in_openais_form(files, url, capsys):
    source, out = files
    assert command(source, "--out", out, "--base-url", url + "/v1") == 0
    found = rows(out)
    assert sorted(r["custom_id"] for r in found) == sorted(f"r{i}" for i in range(12))
    for r in found:
        assert set(r) == {"id", "custom_id", "response", "error"} and r["error"] is None
        assert r["response"]["status_code"] == 200 and r["response"]["request_id"]
        assert r["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert "12 answered, 0 failed" in capsys.readouterr().err
    assert not (out.parent / "out.errors.jsonl").exists()


def test_results_that_are_there_are_kept_and_not_asked_for(files):
    out = files[1]
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 5:
            return httpx.Response(418, json={"error": {"message": "tea"}})
        return httpx.Response(200, json={})

    assert answer(files, handler, concurrency=1) is None
    before = out.read_bytes()
    assert answer(files, handler) is None and out.read_bytes() == before and len(asked) == 12
    assert Counter(r["response"]["status_code"] for r in rows(out)) == {200: 11, 418: 1}


def test_failed_results_are_tried_again_when_asked(tmp_path, url, capsys):
    source = write(tmp_path / "in.jsonl", [line("good"), line("bad")])
    out = tmp_path / "out.jsonl"
    job = next(job for job in scan(source).jobs if job.custom_id == "bad")
    out.write_bytes(encode({"id": job.id, "custom_id": "bad", "response": None, "error": {"code": "timeout"}}))
    assert command(source, out, "--base-url", url) == 3
    assert "--retry-failed" in capsys.readouterr().err
    assert command(source, out, "--base-url", url, "--retry-failed") == 0
    assert sorted(r["custom_id"] for r in rows(out)) == ["bad", "good"]
    assert all(r["response"]["status_code"] == 200 for r in rows(out))


def test_bad_lines_are_told_by_number_and_stop_nobody(tmp_path, url):
    bad = ["{", "[1]", line("r0"), line("", body={}), line("x", method="GET"), line("y", url="/v1/images")]
    bad += [line("z", body=[]), line("s", body={"stream": True}), '{"custom_id": "n", "body": NaN}']
    source, out = write(tmp_path / "in.jsonl", [line("r0"), "", *bad, line("r1")]), tmp_path / "out.jsonl"
    with source.open("ab") as file:
        file.write(b"\xff\xfe\n")
    assert command(source, "--out", out, "--base-url", url) == 3
    told = rows(tmp_path / "out.errors.jsonl")
    assert [row["line"] for row in told] == [*range(3, 12), 13]
    assert "stands on line 1" in told[2]["error"]["message"] and told[4]["custom_id"] == "x"
    assert sorted(r["custom_id"] for r in rows(out)) == ["r0", "r1"]
    write(source, [line("r0"), line("r1")])
    assert command(source, "--out", out, "--base-url", url) == 0 and not (tmp_path / "out.errors.jsonl").exists()


@pytest.mark.parametrize("cut", [1, 8, 20, 60, -1])
def test_a_torn_last_line_is_repaired_and_asked_again(files, url, cut):
    source, out = files
    assert command(source, "--out", out, "--base-url", url) == 0
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:5]) + kept[5][:cut])
    assert command(source, "--out", out, "--base-url", url) == 0
    assert Counter(r["custom_id"] for r in rows(out)) == {f"r{i}": 1 for i in range(12)}
    assert out.read_bytes().startswith(b"".join(kept[:5]))


@pytest.mark.parametrize(
    "content", ["my notes", "my notes\n", '{"a": 1}\n{"b": 2}', '{"id":"batch_req_1","custom_id"\n']
)
def test_a_file_that_holds_something_else_is_left_alone(files, url, content, capsys):
    source, out = files
    out.write_text(content)
    assert command(source, "--out", out, "--base-url", url) == 1
    assert out.read_text() == content and "line 1 is no result" in capsys.readouterr().err


def test_a_request_that_changed_is_not_taken_for_the_answered_one(files, url, capsys):
    source, out = files
    assert command(source, "--out", out, "--base-url", url) == 0
    write(source, [line("r0", body={"model": "tiny", "messages": []})])
    assert command(source, "--out", out, "--base-url", url) == 1
    assert "answers another request than line 1" in capsys.readouterr().err


def test_two_runs_do_not_share_a_file(files, capsys):
    with Results(files[1]):
        assert command(files[0], "--out", files[1], "--base-url", "http://127.0.0.1:9") == 1
    assert "another run writes it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["none.jsonl", "--out", "o"], "none.jsonl: cannot be read"),
        (["in.jsonl"], "--out is missing"),
        (["in.jsonl", "a", "--out", "b"], "two files for the results"),
        (["in.jsonl", "in.jsonl"], "must be three files"),
        (["in.jsonl", "o", "--base-url", "box"], "--base-url must be such as"),
        (["in.jsonl", "o", "--base-url", "http://127.0.0.1:9"], "no server answers there"),
        (["in.jsonl", "o", "--base-url", "http://127.0.0.1:9", "--kv-gb", "1"], "--kv-gb is for a model in here"),
        (["in.jsonl", "o", "--concurrency", "-1"], "--concurrency must be at least 1"),
        (["in.jsonl", "no/such/folder/o"], "cannot be written"),
        (["in.jsonl", "/dev/null"], "is no plain file"),
    ],
)
def test_a_mistake_is_one_line(files, argv, says, capsys, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    assert command(*argv) == 1
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_a_model_that_is_not_served_is_told_before_anything_is_asked(tmp_path, url, capsys):
    source = write(tmp_path / "in.jsonl", [line("a", body={"model": "gpt", "messages": []})])
    assert command(source, tmp_path / "out.jsonl", "--base-url", url) == 1
    assert "'gpt' (1 lines), and what is served is tiny" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize("failure", [429, 500, 503, httpx.ConnectError("gone"), httpx.ReadError("cut")])
def test_what_may_pass_is_tried_again(files, failure):
    seen = Counter()

    def handler(request: httpx.Request) -> httpx.Response:
        seen[request.content] += 1
        if seen[request.content] > 2:
            return httpx.Response(200, json={"ok": True})
        if isinstance(failure, Exception):
            raise failure
        return httpx.Response(failure, json={})

    answer(files, handler)
    assert [r["response"]["status_code"] for r in rows(files[1])] == [200] * 12 and set(seen.values()) == {3}


def test_one_request_that_always_fails_is_a_result_and_the_rest_go_on(files):
    def handler(request: httpx.Request) -> httpx.Response:
        if b"r5." in request.content:
            raise httpx.ReadError("cut")
        return httpx.Response(200, json={})

    answer(files, handler, attempts=2)
    failed = [r for r in rows(files[1]) if r["error"]]
    assert [(r["custom_id"], r["error"]["code"]) for r in failed] == [("r5", "connection_lost")]
    assert len(rows(files[1])) == 12


def test_a_server_that_goes_away_ends_the_run_and_nothing_is_written_off(files):
    n = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal n
        n += 1
        if n > 4:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, json={})

    with pytest.raises(ConfigError, match="run it again to go on"):
        answer(files, handler, patience_s=0.05)
    assert len(rows(files[1])) == 4


def test_no_more_than_so_many_at_a_time(files):
    now, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return httpx.Response(200, json={})

    answer(files, handler, concurrency=3)
    assert most == 3


def started(source: Path, out: Path, url: str, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "onebox.cli", "batch", source, "--out", out, "--base-url", url, *flags]
    return subprocess.Popen(list(map(str, argv)), stderr=subprocess.PIPE, text=True)


def wait_for(out: Path, n: int, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < n:
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)


def test_killed_twice_and_resumed_there_is_one_result_each(tmp_path):
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(500)])
    out = tmp_path / "out.jsonl"
    engine = saying("hm</think>Hello", step_s=0.002, max_waiting=64)
    with running(app_of(engine)) as url:
        for n in (100, 250):
            process = started(source, out, url)
            wait_for(out, n, process)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            assert n <= out.read_bytes().count(b"\n") < 500
        assert command(source, "--out", out, "--base-url", url) == 0
    assert Counter(r["custom_id"] for r in rows(out)) == {f"r{i}": 1 for i in range(500)}
    assert 500 <= len(engine.requests) <= 500 + 2 * 16  # what was under way was asked for again, and no more


def test_ctrl_c_finishes_what_is_under_way(tmp_path):
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(400)])
    out = tmp_path / "out.jsonl"
    engine = saying("hm</think>Hello", step_s=0.005)
    with running(app_of(engine)) as url:
        process = started(source, out, url, "--concurrency", "4")
        wait_for(out, 20, process)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in err and "run it again to go on" in err
    assert len(rows(out)) == len(engine.requests) < 400


@pytest.mark.slow
def test_the_bundled_model_answers_with_tools_and_is_resumed(tmp_path):
    weather = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [weather], "tool_choice": "required"}
    source = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(6)] + [line("t", body=body)])
    out = tmp_path / "out.jsonl"
    argv = [sys.executable, "-m", "onebox.cli", "batch", str(source), "--out", str(out), "--concurrency", "2"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    wait_for(out, 2, process)
    process.kill()
    process.communicate()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {r["custom_id"]: r for r in rows(out)}
    assert len(found) == len(rows(out)) == 7
    assert found["t"]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
