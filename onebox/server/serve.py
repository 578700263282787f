"""From options to a listening server: names, defaults, socket, start-up told phase by phase, a clean end."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any, get_args
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from onebox.config import EngineConfig
from onebox.engine.client import EngineClient
from onebox.errors import ConfigError, OneboxError, RequestError
from onebox.request import SamplingParams
from onebox.server import logs, starting
from onebox.server.app import create_app
from onebox.server.chat import Tokenizer, read_json
from onebox.server.intake import IntakeOptions
from onebox.server.logs import LogFormat
from onebox.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from onebox.server.protocol import DEFAULTED

MakeEngine = Callable[[EngineConfig], EngineClient]
Say = Callable[[str], None]
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What any server is started with, whatever stands behind it. Raises ConfigError naming the flag at fault."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    drain_s: float = 30.0
    intake: IntakeOptions = field(default_factory=IntakeOptions)

    def __post_init__(self) -> None:
        known(self.log_level.lower(), LOG_LEVELS, "--log-level")
        known(self.log_format, get_args(LogFormat), "--log-format")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError(f"--drain-s must be 0 or more seconds, got {self.drain_s:g}.")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"--allowed-origins: {origin!r} is no origin such as https://chat.example, nor '*'.")
        if not all(self.api_keys):
            raise ConfigError("--api-key: an empty key would let anyone in; leave the flag out instead.")


@dataclass(frozen=True)
class ServeOptions(HttpOptions):
    """An engine behind it. `generation_config` is auto (the model folder's), vllm (none) or a folder."""

    engine: EngineConfig
    served_names: tuple[str, ...] = ()
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str = "qwen3"
    tool_parser: str = "qwen3_coder"
    chat_template: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    response_store: str = ":memory:"  # an SQLite file

    def __post_init__(self) -> None:
        super().__post_init__()
        known(self.reasoning_parser, (*REASONING_PARSERS, "none"), "--reasoning-parser")
        known(self.tool_parser, (*TOOL_PARSERS, "none"), "--tool-call-parser")


@dataclass(frozen=True)
class UpstreamOptions(HttpOptions):
    """Another server behind it. `key` is sent there in place of the caller's; `read_s` without a byte is too slow."""

    url: str
    key: str | None = None
    read_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"--upstream must be a base URL such as https://host/v1, got {self.url!r}.")
        if not 0 < self.read_s < math.inf:
            raise ConfigError(f"--upstream-timeout must be above 0 seconds, got {self.read_s:g}.")


def known(value: str, values: tuple[str, ...], flag: str) -> None:
    if value not in values:
        raise ConfigError(f"{flag} {value!r} is not known. Known: {', '.join(values)}.")


def all_keys(given: Sequence[str], file: str | None, environment: Sequence[str]) -> tuple[str, ...]:
    """API keys of the flags, of a file (one a line, # for remarks) and of the environment. Raises ConfigError."""
    keys = [*given, *environment]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--api-key-file {file}: cannot be read ({e}).") from e
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {file}: holds no key, and would let anyone in.")
        keys += found
    return tuple(dict.fromkeys(keys))


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
        raise ConfigError(
            f"--override-generation-config: {', '.join(sorted(unknown))} not known. Known: {', '.join(DEFAULTED)}."
        )
    check_sampling(override, "--override-generation-config")
    found = {k: v for k, v in found.items() if k in DEFAULTED and v is not None}
    check_sampling(found, str(folder / "generation_config.json"))
    return {**found, **override}


def check_sampling(values: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError naming the source for a value that no request could send."""
    for name, value in values.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ConfigError(f"{source}: {name} must be a {'whole ' if whole else ''}number, got {value!r}.")
        given: dict[str, Any] = {name: value}
        try:
            SamplingParams(**given)
        except RequestError as e:
            raise ConfigError(f"{source}: {e}") from e


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

    engine: EngineClient
    done: Event = field(default_factory=Event)
    failure: OneboxError | None = None
    began_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def over(self, failure: OneboxError | None) -> None:
        self.failure, self.seconds = failure, time.perf_counter() - self.began_s
        self.done.set()

    def line(self) -> str:
        """What there is, once it is ready."""
        info = self.engine.info
        return (
            f"ready in {self.seconds:.1f} s: {info.build} on {info.device}, context {info.max_model_len}, "
            f"{info.max_num_seqs} answers at a time, {info.draft_len} drafts a step"
        )


def make_server(
    options: ServeOptions, make_engine: MakeEngine, say: Say
) -> tuple[uvicorn.Server, socket.socket, Start, str]:
    """A server ready to run, its socket, how its start goes, and its first served name."""
    began_s = time.perf_counter()
    folder = model_folder(options.engine.model)
    names = options.served_names or (folder.name,)
    sock = listen(options.host, options.port)
    url = url_of(sock)
    try:
        tokenizer = load_tokenizer(folder, options.chat_template)
        defaults = sampling_defaults(folder, options.generation_config, options.override_generation_config)
        say(f"tokenizer: {tokenizer.n_ids} tokens, sampling defaults {defaults or 'none'}")
        say(f"engine: loading {folder} (state at {url}/health/ready)")
        engine = make_engine(options.engine)
    except BaseException:
        sock.close()
        raise
    start = Start(engine, began_s=began_s)

    def on_start(failure: OneboxError | None) -> None:
        if failure is not None:
            server.should_exit = True
        start.over(failure)

    try:
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
            allowed_origins=options.allowed_origins,
            log_prompts=options.log_prompts,
            response_store=options.response_store,
            on_start=on_start,
        )
        server = uvicorn_server(app, options)
    except BaseException:
        sock.close()
        raise
    return server, sock, start, names[0]


def configured_logs(options: HttpOptions, say: Say) -> Say:
    """Logs as the options want them, and how to say what is not one: as a log line where each must be an object."""
    logs.configure(options.log_level, options.log_format)
    return starting.log.info if options.log_format == "json" else say


class Server(uvicorn.Server):
    """The first signal ends it gracefully, the second at once, whichever they are."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)


def uvicorn_server(app: FastAPI, options: HttpOptions) -> uvicorn.Server:
    """Our own access log, and logging as it is configured already."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
    )
    return Server(config)


def serve(options: ServeOptions, make_engine: MakeEngine, *, say: Say = print) -> None:
    """Serves until a signal says otherwise. Raises OneboxError when the start fails."""
    say = configured_logs(options, say)
    server, sock, start, name = make_server(options, make_engine, say)
    url = url_of(sock)

    def announce() -> None:
        with starting.told(start.engine.health):
            start.done.wait()
        if start.failure is None:
            say(start.line())
            say("try it:\n  " + curl_line(url, name, with_key=bool(options.api_keys)))

    Thread(target=announce, daemon=True).start()
    with sock:
        server.run(sockets=[sock])
    if start.failure is not None:
        raise start.failure


def serve_upstream(options: UpstreamOptions, *, say: Say = print) -> None:
    """Serves in front of another server until a signal says otherwise. Loads no model, and so no torch."""
    from onebox.server.upstream import create_upstream_app

    say = configured_logs(options, say)
    app = create_upstream_app(
        options.url,
        intake=options.intake,
        key=options.key,
        api_keys=options.api_keys,
        allowed_origins=options.allowed_origins,
        log_prompts=options.log_prompts,
        read_s=options.read_s,
        drain_s=options.drain_s,
    )
    with listen(options.host, options.port) as sock:
        say(f"ready: {url_of(sock)}/v1 in front of {options.url}")
        uvicorn_server(app, options).run(sockets=[sock])


@contextmanager
def in_background(options: ServeOptions, make_engine: MakeEngine, *, say: Say = print) -> Iterator[tuple[str, str]]:
    """The same server in a thread: URL and served name once it is ready. Raises OneboxError when the start fails."""
    server, sock, start, name = make_server(options, make_engine, say)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        with starting.told(start.engine.health):
            while not start.done.wait(0.05):
                if not thread.is_alive():
                    raise ConfigError("the server ended before it was ready; its log says why.")
        if start.failure is not None:
            raise start.failure
        say(start.line())
        yield url_of(sock), name
    finally:
        server.should_exit = True
        thread.join(options.drain_s + 5)
        sock.close()
