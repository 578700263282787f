"""Ray Serve: several engines, one GPU each, behind one OpenAI endpoint: `serve run onebox.integrations.ray_serve:app`.

A front takes each request and asks the replica that ray_routing names; a replica is an engine and its whole server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import torch
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette

from onebox.config import EngineConfig, bundled_model, environment_keys, ray_environment
from onebox.engine.client import EngineClient
from onebox.engine.process import ProcessEngine
from onebox.errors import ConfigError, EngineUnavailableError, QueueFullError, RequestError
from onebox.integrations.ray_routing import Mark, Memory, marks_of_request, order
from onebox.server import messages
from onebox.server.app import MAX_BODY_BYTES, encode_json, error_json, named_event, read_bytes, shaped_error
from onebox.server.serve import ServeOptions, in_background

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"onebox.integrations.ray_serve needs Ray ({e}); install it with: pip install 'onebox[ray]'", name=e.name
    ) from e

log = logging.getLogger("ray.serve")
MakeEngine = Callable[[EngineConfig], EngineClient]
ROUTINGS = ("prefix", "load")
ATTEMPTS = 3  # at a request of which nothing was sent to the client yet
BUSY = (429, 503)  # a replica's way to say that another may do better
HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"})
ASKED = HOP_HEADERS | {"accept-encoding"}
TOLD = HOP_HEADERS | {"date", "server", "x-request-id"}  # the last: Serve names requests itself
REPLICA_HEADER = "x-onebox-replica"
NO_APP = Starlette()  # a request belongs to one, and Serve names none


@dataclass(frozen=True)
class Options:
    """What `serve run` is given as KEY=VALUE, or the environment as ONEBOX_RAY_KEY.

    `replicas` at least and `max_replicas` at most: one more while those that are there have more than `target` requests
    each for `up_s` seconds, one fewer after `down_s` seconds of less. `gpus` and `cpus` for each; `gpus` left out is 1
    where there is a GPU. `waiting` requests wait in the front before it refuses more. `routing` load leaves the choice
    to Serve. Another `generation` restarts all replicas, one after the other; each has `drain_s` to finish. `engine` is
    a JSON object of EngineConfig's fields. Raises ConfigError.
    """

    model: str = ""
    served_model_name: str = ""
    replicas: int = 1
    max_replicas: int = 0
    gpus: float = math.nan
    cpus: float = 1.0
    target: float = 16.0
    up_s: float = 30.0
    down_s: float = 600.0
    waiting: int = 256
    fronts: int = 1
    routing: str = "prefix"
    drain_s: float = 60.0
    generation: str = ""
    max_num_seqs: int = 16
    engine: str = "{}"
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Options:
        """From texts or numbers by name."""
        kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
        known = {f.name: kinds[str(f.type)] for f in fields(cls) if f.name != "api_keys"}
        if unknown := set(args) - set(known):
            raise ConfigError(f"ray_serve: {', '.join(sorted(unknown))} not known. Known: {', '.join(known)}.")
        made: dict[str, Any] = {}
        for name, value in args.items():
            if name == "engine" and isinstance(value, Mapping):
                value = json.dumps(value)
            try:
                made[name] = known[name](value)
            except (TypeError, ValueError) as e:
                raise ConfigError(f"ray_serve: {name} must be a number, got {value!r:.40}.") from e
        return cls(**made, api_keys=environment_keys())

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("fronts", 1), ("target", 0.1), ("max_num_seqs", 1), ("cpus", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"ray_serve: {name} must be at least {least}, got {getattr(self, name)}.")
        for name in ("up_s", "down_s", "waiting", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"ray_serve: {name} must be 0 or more, got {getattr(self, name)}.")
        if self.gpus < 0 or math.isinf(self.gpus):
            raise ConfigError(f"ray_serve: gpus must be 0 or more, got {self.gpus}.")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(f"ray_serve: max_replicas must be replicas ({self.replicas}) or more.")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"ray_serve: routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r:.40}.")
        self.serve_options()

    def serve_options(self) -> ServeOptions:
        """Those of each replica's server. Raises ConfigError."""
        try:
            given = json.loads(self.engine)
            if not isinstance(given, dict):
                raise ValueError("no object")
            made = {"model": self.model or bundled_model(), "max_num_seqs": self.max_num_seqs, **given}
            config = EngineConfig(**made)
        except (ValueError, TypeError) as e:
            raise ConfigError(f"ray_serve: engine must be a JSON object of the engine's settings: {e}.") from e
        names = (self.served_model_name,) if self.served_model_name else ()
        return ServeOptions(engine=config, port=0, drain_s=1, served_names=names, api_keys=self.api_keys)

    def actor(self) -> dict[str, float]:
        """What a replica takes of the cluster."""
        gpus = self.gpus
        if math.isnan(gpus):
            there = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else torch.cuda.device_count()
            gpus = 1.0 if there else 0.0
        return {"num_gpus": gpus, "num_cpus": self.cpus}


class PrefixRouter(RequestRouter):
    """Serve's part of the choice: how busy each replica is, and which are there."""

    def initialize_state(self, room: int = 16) -> None:
        self._room, self._memory = room, Memory()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._memory.keep({r.replica_id.unique_id for r in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica a rank of its own: one that takes no more is passed over."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        marks, avoid = (pending_request.kwargs.get(name, ()) for name in ("marks", "avoid"))
        replicas = {r.replica_id.unique_id: r for r in candidate_replicas}
        loads = {id: self.replica_queue_len_cache.get(r.replica_id) or 0 for id, r in replicas.items()}
        ids = order(marks, self._memory.seen(marks), loads, room=self._room, avoid=avoid)
        return [[replicas[id]] for id in ids]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        self._memory.note(pending_request.kwargs.get("marks", ()), replica_id.unique_id)


@dataclass(frozen=True)
class Head:
    """What a replica says first: status and headers; and the body, unless it streams."""

    status: int
    headers: list[tuple[str, str]]
    replica: str
    body: bytes | None


class Box:
    """A replica: one engine and its server, asked over a port of its own. Begun once it is ready to answer."""

    def __init__(self, options: Options, make: MakeEngine = ProcessEngine) -> None:
        self._stack = ExitStack()
        url, _ = self._stack.enter_context(in_background(options.serve_options(), make, say=log.info))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=10.0), limits=limits)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def check_health(self) -> None:
        """Raises while no request could be answered; Serve replaces the replica when that lasts."""
        (await self._client.get("/health/ready", timeout=10.0)).raise_for_status()

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        marks: Sequence[Mark] = (),
        avoid: Sequence[str] = (),
    ) -> AsyncIterator[Head | bytes]:
        """A Head, then the body as it comes where it streams. `marks` and `avoid` are for the router."""
        try:
            request = self._client.build_request(method, path, headers=list(headers), content=body)
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as e:
            refusal = shaped_error(path, EngineUnavailableError(f"The replica's server is gone ({type(e).__name__})."))
            yield Head(refusal.status_code, list(refusal.headers.items()), self._id, bytes(refusal.body))
            return
        try:
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            kept = [(k, v) for k, v in response.headers.multi_items() if k not in TOLD]
            yield Head(response.status_code, kept, self._id, None if streams else await response.aread())
            if streams:
                async for part in response.aiter_raw():
                    yield part
        finally:
            await response.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self._stack.close()


class Front:
    """The endpoint: asks a replica and passes the answer on; asks another where nothing was passed on yet."""

    def __init__(self, boxes: DeploymentHandle) -> None:
        self._boxes = boxes.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Any request, as Serve hands it over."""
        path = request.url.path
        request.scope.setdefault("app", NO_APP)
        try:
            body = await read_bytes(request, MAX_BODY_BYTES)
            return await self._answer(request, body)
        except RequestError as e:
            return shaped_error(path, e)
        except BackPressureError:
            return shaped_error(path, QueueFullError("Too many requests are waiting; try again later."))
        except DeploymentUnavailableError:
            return shaped_error(path, EngineUnavailableError("No replica can be started; Serve's status says why."))

    async def _answer(self, request: Request, body: bytes) -> Response:
        """Raises RequestError when no replica could be asked."""
        session = request.headers.get("x-session-id")
        marks = await asyncio.to_thread(marks_of_request, body, session) if body or session else []
        headers = [(k, v) for k, v in request.headers.items() if k not in ASKED]
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        avoid: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._boxes.ask.remote(request.method, path, headers, body, marks=marks, avoid=avoid)
            try:
                head = await anext(aiter(parts))
            except RayActorError:
                log.warning("a replica went away with a request of which nothing was sent yet; attempt %d", attempt)
                continue
            if head.status in BUSY and head.replica not in avoid and attempt < ATTEMPTS:
                avoid.append(head.replica)
                continue
            told = {**dict(head.headers), REPLICA_HEADER: head.replica}
            if head.body is not None:
                return Response(head.body, head.status, told)
            return StreamingResponse(passed_on(parts, request.url.path), head.status, told)
        raise EngineUnavailableError("The replicas that were asked went away; try again later.")


async def passed_on(parts: Any, path: str) -> AsyncGenerator[bytes, None]:
    """A stream's bytes; where its replica goes away, an event that says so. Left early, it cancels the answer."""
    ended = False
    try:
        async for part in parts:
            yield part
        ended = True
    except RayActorError:
        ended = True
        e = EngineUnavailableError("The replica went away in the middle of the answer; send the request again.")
        log.warning("a replica went away in the middle of a stream")
        if path.startswith("/v1/messages"):
            yield named_event("error", messages.error_json(e))
        else:
            yield b"data: " + encode_json(error_json(e)) + b"\n\ndata: [DONE]\n\n"
    finally:
        if not ended:
            parts.cancel()


def build(options: Options, make: MakeEngine = ProcessEngine) -> Any:
    """The application of Serve."""
    router: dict[str, Any] = {}
    if options.routing == "prefix":
        kwargs = {"room": options.max_num_seqs}
        router["request_router_config"] = RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs=kwargs
        )
    boxes = serve.deployment(
        Box,
        name="Box",
        ray_actor_options=options.actor(),
        autoscaling_config={
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas or options.replicas,
            "target_ongoing_requests": options.target,
            "upscale_delay_s": options.up_s,
            "downscale_delay_s": options.down_s,
        },
        max_ongoing_requests=2 * options.max_num_seqs,  # the second half waits in the engine
        max_queued_requests=options.waiting,
        health_check_period_s=10,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=options.drain_s,
        **router,
    )
    ingress = serve.deployment(
        Front,
        name="Front",
        num_replicas=options.fronts,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(boxes.bind(options, make))


def app(args: dict[str, Any]) -> Any:
    """What `serve run onebox.integrations.ray_serve:app model=FOLDER replicas=2` runs. A mistake ends in one line."""
    try:
        return build(Options.of({**ray_environment([f.name for f in fields(Options)]), **args}))
    except ConfigError as e:
        raise SystemExit(f"error: {e}") from e
