"""What whoever runs a server relies on: ids, logs, keys, origins, stores, limits, metrics and their dashboard."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import client_of, post, saying

from onebox import cli
from onebox.errors import ConfigError
from onebox.server import logs
from onebox.server.responses import Store
from onebox.server.serve import ServeOptions, all_keys, sampling_defaults

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "A secret plan"}]
ROOT = Path(__file__).parent.parent


def get(path: str, *, method: str = "GET", headers: Any = None, engine: Any = None, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(engine or saying("hm</think>Hello"), **options) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


@pytest.fixture
def lines() -> Any:
    """Log lines written meanwhile, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(logs.RequestIds())
    handler.setFormatter(logs.JsonLines())
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_request_keeps_the_id_it_came_with() -> None:
    assert get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("given", ["", "two words", "tab\tbed", "\u00e9"])
def test_an_id_that_would_not_do_in_a_log_is_replaced(given: str) -> None:
    made = get("/version", headers={"x-request-id": given.encode("latin-1")}).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{32}", made)


def test_failures_carry_the_id_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = get("/v1/models/none", headers={"x-request-id": "abc-2"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "abc-2")
    engine = saying("x")
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    answer = get("/v1/onebox/stats", headers={"x-request-id": "abc-3"}, engine=engine)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc-3")


def test_the_access_log_has_ids_and_no_prompt_text(lines: Any) -> None:
    answer = post(saying("hm</think>Hello"), CHAT, {"messages": HI, "unheard_of_field": "A secret plan"})
    post(saying("x"), CHAT, {"messages": "A secret plan"})
    found = [line for line in lines() if line["logger"] == "onebox.access"]
    assert [(line["method"], line["path"], line["status"]) for line in found] == [
        ("POST", CHAT, 200),
        ("POST", CHAT, 400),
    ]
    assert found[0]["request_id"] == answer.headers["x-request-id"]
    assert found[0]["ms"] > 0
    assert "secret plan" not in json.dumps(lines())


def test_records_of_a_request_carry_its_id(lines: Any) -> None:
    answer = post(saying("x"), CHAT, {"messages": HI, "tools": [{"type": "web_search"}]})
    (line,) = [line for line in lines() if "web_search" in line["message"]]
    assert line["request_id"] == answer.headers["x-request-id"]


def test_prompts_are_logged_when_asked_for(lines: Any) -> None:
    post(saying("x"), CHAT, {"messages": HI}, log_prompts=True)
    assert any("A secret plan" in line["message"] for line in lines())


def test_json_lines_are_objects_whatever_is_logged(lines: Any) -> None:
    try:
        raise ValueError('quote " and\nnewline')
    except ValueError:
        logging.getLogger("x").exception("failed: %s", {"a": 1})
    (line,) = lines()
    assert {"time", "level", "logger", "message", "exception"} <= set(line)
    assert line["exception"].endswith('quote " and\nnewline')


ORIGIN = {"origin": "https://chat.example", "access-control-request-method": "POST"}


def test_pages_of_other_origins_may_not_call_unless_named() -> None:
    assert "access-control-allow-origin" not in get(CHAT, method="OPTIONS", headers=ORIGIN).headers
    named = get(CHAT, method="OPTIONS", headers=ORIGIN, allowed_origins=["https://chat.example"], api_keys=["k"])
    assert (named.status_code, named.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    other = get(CHAT, method="OPTIONS", headers=ORIGIN, allowed_origins=["https://else.example"])
    assert "access-control-allow-origin" not in other.headers


def test_keys_add_up_from_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nk2\n\n  k3  \nk1\n")
    monkeypatch.setenv("ONEBOX_API_KEY", "k4, k5")
    seen: list[ServeOptions] = []
    monkeypatch.setattr("onebox.server.serve.serve", lambda options, *_, **__: seen.append(options))
    with pytest.raises(SystemExit):
        cli.main(["serve", "--api-key", "k1", "--api-key-file", str(file)])
    assert seen[0].api_keys == ("k1", "k4", "k5", "k2", "k3")


def test_a_key_file_that_would_let_anyone_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for file in ("empty", "missing"):
        with pytest.raises(ConfigError, match=file):
            all_keys((), str(tmp_path / file), ())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer k1"}, 200),
        ({"authorization": "bearer  k2"}, 200),
        ({"x-api-key": "k2"}, 200),
        ({"authorization": "Bearer k"}, 401),
        ({"authorization": "Bearer k1k2"}, 401),
        ({"authorization": "Basic k1"}, 401),
        ({}, 401),
    ],
)
def test_any_of_several_keys_opens(headers: dict[str, str], status: int) -> None:
    assert get("/v1/models", headers=headers, api_keys=["k1", "k2"]).status_code == status


def test_refused_keys_are_counted() -> None:
    async def run() -> str:
        async with client_of(saying("x"), api_keys=["k"]) as client:
            assert (await client.get("/v1/models")).status_code == 401
            return (await client.get("/metrics")).text

    assert 'onebox:http_errors_total{code="invalid_api_key",status="401"} 1.0' in asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--drain-s", "-1"], "--drain-s"),
        (["--drain-s", "inf"], "--drain-s"),
        (["--api-key", ""], "--api-key"),
        (["--allowed-origins", "chat.example"], "--allowed-origins"),
        (["--allowed-origins", "["], "JSON"),
        (["--log-format", "xml"], "--log-format"),
        (["--upstream", "host:80"], "--upstream"),
        (["--upstream", "http://h", "--upstream-timeout", "0"], "--upstream-timeout"),
        (["model", "--upstream", "http://h"], "leave 'model' out"),
        (["--compress-over", "0"], "--compress-over"),
        (["--guard", "shout"], "--guard"),
        (["--response-store", "/no/such/folder/x.db"], "--response-store"),
        (["--override-generation-config", '{"temperature": "x"}'], "temperature must be a number"),
        (["--override-generation-config", '{"temperature": -1}'], "temperature"),
        (["--override-generation-config", '{"top_k": 1.5}'], "top_k must be a whole number"),
        (["--override-generation-config", '{"top_p": true}'], "top_p must be a number"),
        (["--override-generation-config", '{"min_p": null}'], "min_p must be a number"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["serve", "--port", "0", *flags])
    assert e.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("onebox: error:")]
    assert says in line


def test_a_generation_config_of_the_model_is_checked_as_a_request_would_be(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 7, "do_sample": true}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*top_p"):
        sampling_defaults(tmp_path, "auto", {})


def test_stored_responses_outlive_the_server(tmp_path: Path) -> None:
    file = str(tmp_path / "responses.db")
    body = {"input": "Remember heron.", "model": "tiny"}
    id = post(saying("hm</think>Yes."), "/v1/responses", body, response_store=file).json()["id"]
    assert get(f"/v1/responses/{id}", response_store=file).json()["output"][-1]["content"][0]["text"] == "Yes."
    engine = saying("hm</think>Heron.")
    again = {"input": "What was it?", "previous_response_id": id}
    assert post(engine, "/v1/responses", again, response_store=file).status_code == 200


def test_a_store_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("these are notes, not SQLite " * 50)
    with pytest.raises(ConfigError, match=r"notes\.db"):
        Store(str(tmp_path / "notes.db"))


@pytest.mark.parametrize("opening", ['{"messages":' + "[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_nesting_without_end_is_refused(opening: str) -> None:
    answer = post(saying("x"), CHAT, opening.encode())
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_a_schema_nested_as_deep_as_a_body_may_be_is_no_failure() -> None:
    schema = '{"a":' * 150 + "1" + "}" * 150
    tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
    body = '{"messages":[{"role":"user","content":"x"}],"tools":[' + tool + "]}"
    assert post(saying("x"), CHAT, body.encode()).status_code in (200, 400)


def families(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", text, re.M)) | set(re.findall(r"^([A-Za-z_:][\w:]*)", text, re.M))


def test_every_series_of_the_dashboard_is_on_the_metrics_page() -> None:
    async def run() -> str:
        async with client_of(saying("hm</think>Hello there", tokens_per_step=3)) as client:
            await client.post(CHAT, json={"messages": HI})
            await client.post(CHAT, json={"messages": []})
            return (await client.get("/metrics")).text

    known = families(asyncio.run(run()))
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for expression in expressions for name in re.findall(r"(?:vllm|onebox):\w+", expression)}
    assert len(used) >= 25
    assert used <= known, f"not on /metrics: {sorted(used - known)}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


ROUTED = """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info lora_requests_info
prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total generation_tokens_total num_preemptions_total
request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_inference_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total"""


def test_series_that_routers_and_dashboards_of_vllm_read_are_on_the_metrics_page() -> None:
    async def run() -> str:
        async with client_of(saying("one two three four", tokens_per_step=2)) as client:
            await client.post(CHAT, json={"messages": HI})
            return (await client.get("/metrics")).text

    text = asyncio.run(run())
    assert {f"vllm:{name}" for name in ROUTED.split()} <= set(re.findall(r"^([\w:]+)", text, re.M))
    assert 'vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 0.0' in text


def test_times_of_a_request_add_up_to_its_latency() -> None:
    """Two requests, the second of which waits for the slot of the first."""

    async def run() -> str:
        engine = saying("one two three four", step_s=0.01, prefill_s=0.05, max_num_seqs=1)
        async with client_of(engine) as client:
            await asyncio.gather(*(client.post(CHAT, json={"messages": HI}) for _ in range(2)))
            return (await client.get("/metrics")).text

    text = asyncio.run(run())
    sums = {name: float(s) for name, s in re.findall(r"^vllm:(\w+)_sum\S* (\S+)", text, re.M)}
    queue, prefill = sums["request_queue_time_seconds"], sums["request_prefill_time_seconds"]
    decode, whole = sums["request_decode_time_seconds"], sums["e2e_request_latency_seconds"]
    assert prefill >= 0.1 and decode > 0.05
    assert whole / 4 < queue < whole / 2  # the second waited while the first was answered
    assert sums["request_inference_time_seconds"] == pytest.approx(prefill + decode, rel=0.01)
    assert sums["time_to_first_token_seconds"] == pytest.approx(queue + prefill, rel=0.01)
    assert queue + prefill + decode == pytest.approx(whole, rel=0.1)


def test_acceptance_is_counted_by_position() -> None:
    async def run() -> str:
        async with client_of(saying("one two three four five six seven", tokens_per_step=3)) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 99})
            assert answer.status_code == 200
            return (await client.get("/metrics")).text

    text = asyncio.run(run())

    def value(name: str, position: int | None = None) -> float:
        label = f',position="{position}"' if position is not None else ""
        found = re.search(rf'^vllm:{name}_total{{engine="0",model_name="tiny"{label}}} (\S+)', text, re.M)
        assert found, name
        return float(found[1])

    windows = value("spec_decode_num_drafts")
    assert windows >= 2
    assert value("spec_decode_num_accepted_tokens_per_pos", 0) == windows
    assert value("spec_decode_num_accepted_tokens_per_pos", 1) == windows - 1


@pytest.mark.parametrize("file", ["prometheus.yml"])
def test_the_prometheus_sample_scrapes_the_metrics_page(file: str) -> None:
    text = (ROOT / "deploy" / file).read_text("utf-8")
    assert "metrics_path: /metrics" in text
    assert "8000" in text
