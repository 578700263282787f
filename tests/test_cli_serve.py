"""The command line: mistakes are one line and a code, a start that fails says why, a server says how to call it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TINY, saying

from onebox import cli
from onebox.config import EngineConfig, bundled_model
from onebox.errors import CheckpointError, ConfigError
from onebox.server.serve import ServeOptions, curl_line, in_background, sampling_defaults
from onebox.server.serve import serve as run_server


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "onebox.cli", *argv], capture_output=True, text=True, timeout=60)


def test_version_prints_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("onebox ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--speculative-config", '{"method":"eagle3"}'], "eagle3"),
        (["serve", "--speculative-config", "{"], "--speculative-config"),
        (["serve", "--speculative-config", '{"num_speculative_tokens":9}'], "num_speculative_tokens"),
        (["serve", "--speculative-config", '{"num_speculative_tokens":-1}'], "num_speculative_tokens"),
        (["serve", "--log-level", "zzz"], "--log-level"),
        (["serve", "--kv-gb", "inf"], "kv_gb"),
        (["serve", "--kv-gb", "nan"], "kv_gb"),
        (["serve", "--kv-gb", "-1"], "kv_gb"),
        (["serve", "--device", "cudax"], "cuda:N"),
        (["serve", "--reasoning-parser", "r1"], "r1"),
        (["serve", "--tool-call-parser", "llama"], "llama"),
        (["serve", "--kv-cache-dtype", "fp5"], "fp5"),
        (["serve", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["serve", "--max-model-len", "many"], "many"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs"),
        (["serve", "--override-generation-config", '{"beams": 2}'], "beams"),
        (["serve", "--chat-template", "/no/file"], "/no/file"),
        (["chat", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["build", "/no/such/folder", "--out", "/tmp/none"], "/no/such/folder"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_a_code(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code in (1, 2)
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("onebox: error:")]
    assert len(err) == 1
    assert says in err[0]


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            run_server(ServeOptions(EngineConfig(str(TINY)), port=port), make_engine=never, say=print)


def never(_: EngineConfig) -> Any:
    raise AssertionError("an engine was made")


def test_flags_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("onebox.server.serve.serve", lambda options, *_, **__: seen.append(options))
    argv = "serve --port 8123 --host 0.0.0.0 --max-model-len 32k --max-num-seqs 4 --max-num-batched-tokens 512"
    argv += " --served-model-name a b --dtype float32 --no-enable-prefix-caching --enable-chunked-prefill"
    argv += " --enable-auto-tool-choice --tool-call-parser qwen3_xml --reasoning-parser qwen3 --api-key k1 k2"
    argv += " --gpu-memory-utilization 0.9 --moe-backend triton --load-format fastsafetensors --generation-config vllm"
    with pytest.raises(SystemExit) as e:
        cli.main([*argv.split(), "--speculative-config", '{"method":"mtp","num_speculative_tokens":3}'])
    assert e.value.code == 0
    (options,) = seen
    engine = options.engine
    assert (options.port, options.host, options.served_names, options.api_keys) == (
        8123,
        "0.0.0.0",
        ("a", "b"),
        ("k1", "k2"),
    )
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (32000, 4, 512)
    assert (engine.dtype, engine.prefix_caching, engine.draft_len) == ("float32", False, 3)
    assert engine.model == bundled_model()
    assert (options.tool_parser, options.generation_config) == ("qwen3_xml", "vllm")


def test_flags_that_change_nothing_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onebox.server.serve.serve", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--moe-backend", "x", "--enforce-eager"])
    err = capsys.readouterr().err
    assert "--moe-backend is not needed" in err
    assert "--enforce-eager is not needed" in err


PUBLISHED: list[tuple[str, str, Any]] = [  # flags of published recipes -> where they end, and what is there then
    ("--served-model-name org/name", "served_names", ("org/name",)),
    ("--host 0.0.0.0", "host", "0.0.0.0"),
    ("--port 9001", "port", 9001),
    ("--dtype bfloat16", "engine.dtype", "bfloat16"),
    ("--dtype auto", "engine.dtype", "auto"),
    ("--max-model-len 4096", "engine.max_model_len", 4096),
    ("--max-num-seqs 3", "engine.max_num_seqs", 3),
    ("--max-num-batched-tokens 1024", "engine.max_num_batched_tokens", 1024),
    ("--gpu-memory-utilization 0.85", "engine.gpu_memory_utilization", 0.85),
    ("--enable-prefix-caching", "engine.prefix_caching", True),
    ("--no-enable-prefix-caching", "engine.prefix_caching", False),
    ("--enable-chunked-prefill", None, None),
    ("--enable-auto-tool-choice", "tool_parser", "qwen3_coder"),
    ("--tool-call-parser hermes", "tool_parser", "hermes"),
    ("--tool-call-parser qwen3_coder", "tool_parser", "qwen3_coder"),
    ("--tool-call-parser qwen3_xml", "tool_parser", "qwen3_xml"),
    ("--reasoning-parser qwen3", "reasoning_parser", "qwen3"),
    ('--speculative-config {"method":"qwen3_next_mtp","num_speculative_tokens":2}', "engine.draft_len", 2),
    ('--speculative-config {"method":"mtp","num_speculative_tokens":1}', "engine.draft_len", 1),
    ("--kv-cache-dtype auto", "engine.kv_cache_dtype", "auto"),
    ("--kv-cache-dtype fp8", "engine.kv_cache_dtype", "fp8"),
    ("--kv-cache-dtype fp8_e4m3", "engine.kv_cache_dtype", "fp8"),
    ('--override-generation-config {"temperature":0.6}', "override_generation_config", {"temperature": 0.6}),
    ("--generation-config vllm", "generation_config", "vllm"),
    ("--generation-config auto", "generation_config", "auto"),
    ("--api-key secret", "api_keys", ("secret",)),
    ("--moe-backend triton", None, "--moe-backend"),
    ("--attention-backend FLASHINFER", None, "--attention-backend"),
    ("--load-format fastsafetensors", None, "--load-format"),
    ("--trust-remote-code", None, "--trust-remote-code"),
    ("--tensor-parallel-size 1", None, None),
    # and of this server alone
    ("--compress-over 8000", "intake.compress_over", 8000),
    ("--compress-method llmlingua", "intake.method", "llmlingua"),
    ("--guard flag", "intake.guard", "flag"),
    ("--drain-s 5", "drain_s", 5.0),
    ("--log-format json", "log_format", "json"),
    ("--allowed-origins https://chat.example", "allowed_origins", ("https://chat.example",)),
]


@pytest.mark.parametrize(("flags", "where", "what"), PUBLISHED)
def test_each_flag_of_published_recipes_is_taken_with_its_meaning(
    flags: str, where: str | None, what: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("onebox.server.serve.serve", lambda options, *_, **__: seen.append(options))
    flag, _, value = flags.partition(" ")
    with pytest.raises(SystemExit) as e:
        cli.main(["serve", flag, *([value] if value else [])])
    assert e.value.code == 0
    (found,) = seen
    noted = [line for line in capsys.readouterr().err.splitlines() if "is not needed here" in line]
    if where is None:
        assert noted == ([f"note: {what} is not needed here and changes nothing"] if what else [])
        return
    assert noted == []
    for name in where.split("."):
        found = getattr(found, name)
    assert found == what


@pytest.mark.parametrize("flag", ["--swap-space", "--compilation-config", "--mamba-cache-mode", "--data-parallel-size"])
def test_other_flags_of_vllm_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["serve", flag, "4"])
    assert e.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("auto", None), ("-1", None), (None, None)],
)
def test_lengths_are_read_as_vllm_reads_them(text: str | None, tokens: int | None) -> None:
    assert cli.length(text) == tokens


def test_sampling_defaults_come_from_the_model_an_override_or_nowhere(tmp_path: Path) -> None:
    assert sampling_defaults(TINY, "auto", {}) == {"temperature": 0.8, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults(TINY, "vllm", {}) == {}
    assert sampling_defaults(TINY, "auto", {"top_k": 5})["top_k"] == 5
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.1}))
    assert sampling_defaults(TINY, str(tmp_path), {}) == {"temperature": 0.1}


def test_the_printed_curl_line_gets_an_answer() -> None:
    engine = saying("hm</think>Hello")
    options = ServeOptions(EngineConfig(str(TINY)), port=0, drain_s=1)
    lines: list[str] = []
    with in_background(options, lambda _: engine, say=lines.append) as (url, name):
        command = curl_line(url, name, with_key=False)
        body = command.partition("-d '")[2].removesuffix("'")
        answer = httpx.post(command.split()[1], content=body).json()
        assert answer["choices"][0]["message"]["content"] == "Hello"
    assert any(line.startswith("ready in") for line in lines)


def test_a_start_that_fails_ends_the_server_with_the_reason() -> None:
    engine = saying("x", fail_start=CheckpointError("model.safetensors: cut short"))
    options = ServeOptions(EngineConfig(str(TINY)), port=0, drain_s=1)
    caught: list[BaseException] = []

    def target() -> None:
        try:
            with in_background(options, lambda _: engine, say=lambda _: None):
                pass
        except CheckpointError as e:
            caught.append(e)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(20)
    assert [str(e) for e in caught] == ["model.safetensors: cut short"]


def test_chat_starts_an_engine_when_no_server_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = saying("hm</think>Hello you")
    monkeypatch.setattr(cli, "make_engine", lambda _: engine)
    monkeypatch.setattr("onebox.server.terminal.reachable", lambda _: False)
    with pytest.raises(SystemExit) as e:
        cli.main(["chat", "-m", "Hi", "--max-tokens", "30", "--temperature", "0"])
    assert e.value.code == 0
    assert "Hello you" in capsys.readouterr().out
    assert (engine.requests[0].params.max_tokens, engine.requests[0].params.temperature) == (30, 0)


SERVE_FAKE = """
import sys
sys.path.insert(0, {tests!r})
from onebox import cli
from serving import engine_of
cli.make_engine = lambda _: engine_of([5] * 40, step_s=0.03)
cli.main(["serve", "--port", {port!r}, "--drain-s", "20"])
"""


def test_sigterm_finishes_answers_under_way() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    code = SERVE_FAKE.format(tests=str(Path(__file__).parent), port=port)
    server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(400):
            try:
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 99, "stream": True}) as r:
            lines = r.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in rest[-2]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        server.terminate()
        _, err = server.communicate(timeout=20)
    assert "curl " in err
    assert "Traceback" not in err


def test_a_refusal_while_loading_is_the_only_thing_said_after_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    done = run("serve", str(folder), "--port", "0")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert [line for line in lines if "INFO" in line] == []
    assert [line for line in lines if line.startswith("onebox: error:")] == lines[-1:]
    assert "Traceback" not in done.stderr
