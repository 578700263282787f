"""From options to a listening server: names, defaults, socket, start-up told phase by phase, a clean end."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from typing import Any

import uvicorn

from onebox.config import EngineConfig
from onebox.engine.process import EngineClient
from onebox.errors import ConfigError, OneboxError
from onebox.server.app import create_app
from onebox.server.chat import Tokenizer, read_json
from onebox.server.intake import IntakeOptions
from onebox.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from onebox.server.protocol import DEFAULTED

MakeEngine = Callable[[EngineConfig], EngineClient]
Say = Callable[[str], None]
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True)
class ServeOptions:
    """What a server is started with. `generation_config` is auto (the model folder's), vllm (none) or a folder."""

    engine: EngineConfig
    served_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str = "qwen3"
    tool_parser: str = "qwen3_coder"
    chat_template: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    log_level: str = "info"
    drain_s: float = 30.0
    intake: IntakeOptions = field(default_factory=IntakeOptions)

    def __post_init__(self) -> None:
        def check(value: str, known: tuple[str, ...], flag: str) -> None:
            if value not in known:
                raise ConfigError(f"{flag} {value!r} is not known. Known: {', '.join(known)}.")

        check(self.reasoning_parser, (*REASONING_PARSERS, "none"), "--reasoning-parser")
        check(self.tool_parser, (*TOOL_PARSERS, "none"), "--tool-call-parser")
        check(self.log_level.lower(), LOG_LEVELS, "--log-level")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")


def bundled_model() -> str:
    """Folder of the model that comes with the package."""
    return str(files("onebox") / "models" / "tiny")


def model_folder(model: str) -> Path:
    """The folder of a served model. Raises ConfigError when there is none."""
    folder = Path(model)
    if not folder.is_dir():
        raise ConfigError(f"{model}: no such folder; give a checkpoint folder, or nothing for the bundled model.")
    return folder


def load_tokenizer(folder: Path, chat_template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    if chat_template is not None:
        try:
            tokenizer.template_text = Path(chat_template).read_text("utf-8")
        except OSError as e:
            raise ConfigError(f"--chat-template {chat_template}: {e.strerror or e}.") from e
    return tokenizer


def sampling_defaults(folder: Path, mode: str, override: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters a request may leave out. Raises ConfigError for an override that is not one of them."""
    if mode != "vllm" and mode != "auto":
        folder = model_folder(mode)
    found = {} if mode == "vllm" else read_json(folder / "generation_config.json")
    if unknown := set(override) - set(DEFAULTED):
        raise ConfigError(f"--override-generation-config: {', '.join(sorted(unknown))} not known. Known: {DEFAULTED}.")
    return {k: v for k, v in {**found, **override}.items() if k in DEFAULTED and isinstance(v, int | float)}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is found before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as e:
        sock.close()
        raise ConfigError(f"{host}:{port}: {e.strerror or e}; choose another --port or --host.") from e
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    """A command that gets an answer from the server."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 200})
    key = " -H 'Authorization: Bearer KEY'" if with_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


@dataclass
class Start:
    """How a start went: `done` is set once it is known, `failure` says why not."""

    done: Event = field(default_factory=Event)
    failure: OneboxError | None = None


def make_server(
    options: ServeOptions, make_engine: MakeEngine, say: Say
) -> tuple[uvicorn.Server, socket.socket, Start, str]:
    """A server ready to run, its socket, how its start goes, and its first served name."""
    started_s = time.perf_counter()
    folder = model_folder(options.engine.model)
    names = options.served_names or (folder.name,)
    sock = listen(options.host, options.port)
    url, start = url_of(sock), Start()
    try:
        tokenizer = load_tokenizer(folder, options.chat_template)
        defaults = sampling_defaults(folder, options.generation_config, options.override_generation_config)
        say(f"tokenizer: {tokenizer.n_ids} tokens, sampling defaults {defaults or 'none'}")
        say(f"engine: loading {folder} (state at {url}/health/ready)")
        engine = make_engine(options.engine)
    except BaseException:
        sock.close()
        raise

    def on_start(failure: OneboxError | None) -> None:
        start.failure = failure
        if failure is not None:
            server.should_exit = True
        else:
            info = engine.info
            say(
                f"ready in {time.perf_counter() - started_s:.1f} s: {info.build} on {info.device}, context "
                f"{info.max_model_len}, {info.max_num_seqs} answers at a time, {info.draft_len} drafts a step"
            )
        start.done.set()

    app = create_app(
        engine,
        tokenizer=tokenizer,
        served_names=names,
        defaults=defaults,
        reasoning=options.reasoning_parser != "none",
        tools=options.tool_parser != "none",
        template_options=options.template_options,
        api_keys=options.api_keys,
        drain_s=options.drain_s,
        intake=options.intake,
        on_start=on_start,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
    )
    server = uvicorn.Server(config)
    return server, sock, start, names[0]


def serve(options: ServeOptions, make_engine: MakeEngine, *, say: Say = print) -> None:
    """Serves until a signal says otherwise. Raises OneboxError when the start fails."""
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server, sock, start, name = make_server(options, make_engine, say)
    url = url_of(sock)

    def announce() -> None:
        start.done.wait()
        if start.failure is None:
            say("try it:\n  " + curl_line(url, name, with_key=bool(options.api_keys)))

    Thread(target=announce, daemon=True).start()
    with sock:
        server.run(sockets=[sock])
    if start.failure is not None:
        raise start.failure


@contextmanager
def in_background(options: ServeOptions, make_engine: MakeEngine, *, say: Say = print) -> Iterator[tuple[str, str]]:
    """The same server in a thread: URL and served name once it is ready. Raises OneboxError when the start fails."""
    server, sock, start, name = make_server(options, make_engine, say)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        while not start.done.wait(0.05):
            if not thread.is_alive():
                raise ConfigError("the server ended before it was ready; its log says why.")
        if start.failure is not None:
            raise start.failure
        yield url_of(sock), name
    finally:
        server.should_exit = True
        thread.join(options.drain_s + 5)
        sock.close()
