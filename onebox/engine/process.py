"""The engine in its own process: ZeroMQ over local sockets, msgspec messages, a heartbeat, restarts.

The parent holds an EngineClient; the child runs the step loop. docs/decisions/process-split.md has the reasons.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing import resource_tracker
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import zmq

from onebox import errors
from onebox.config import EngineConfig
from onebox.engine.client import (
    EngineInfo,
    EngineStats,
    Health,
    Items,
    Progress,
    StartClock,
    Status,
    Took,
    follow,
    untakable,
)
from onebox.errors import EngineUnavailableError, OneboxError, QueueFullError, RequestError
from onebox.request import Output, Request

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from onebox.engine.engine import Engine

logger = logging.getLogger(__name__)

BEAT_S = 0.25
SILENT_S = 5.0  # without a heartbeat the engine is not ready, and after twice that it is restarted
LOADING_SILENT_S = 300.0  # a library or a page from a slow disk may hold the interpreter that long
MAX_RESTARTS = 5  # without STEADY_S of service between them
STEADY_S = 300.0
BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
GAUGES = (
    *("running", "waiting", "pages_total", "pages_free", "pages_cached", "slots_total", "slots_free"),
    *("snapshots_total", "snapshots_free", "host_snapshots_total", "host_snapshots_free"),
    *("host_pages_total", "host_pages_free"),
)


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of errors.py on the wire."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: int = 1

    @classmethod
    def of(cls, e: OneboxError) -> Fault:
        return cls(type(e).__name__, str(e), getattr(e, "param", None), getattr(e, "retry_after_s", 1))

    def error(self) -> OneboxError:
        kind: Any = getattr(errors, self.kind, OneboxError)
        options: dict[str, Any] = {}
        if issubclass(kind, QueueFullError):
            options = {"retry_after_s": self.retry_after_s}
        elif issubclass(kind, RequestError):
            options = {"param": self.param}
        error: OneboxError = kind(self.message, **options)
        return error


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Add(Message, frozen=True, array_like=True, tag=True):
    request: Request


class Cancel(Message, frozen=True, array_like=True, tag=True):
    request_id: str


class Stop(Message, frozen=True, array_like=True, tag=True):
    pass


class Loading(Message, frozen=True, array_like=True, tag=True):
    """A start under way: its phase, how much of it is done, its seconds so far, and the phases before it."""

    phase: str
    share: float | None = None
    seconds: float = 0.0
    took: tuple[Took, ...] = ()


class Ready(Message, frozen=True, array_like=True, tag=True):
    info: EngineInfo
    stats: EngineStats
    took: tuple[Took, ...] = ()


class Stepped(Message, frozen=True, array_like=True, tag=True):
    outputs: list[Output]
    stats: EngineStats


class Refused(Message, frozen=True, array_like=True, tag=True):
    request_id: str
    fault: Fault


class Beat(Message, frozen=True, array_like=True, tag=True):
    """Sent by a thread of its own, so it tells a stopped process from a long step."""

    steps: int
    busy: bool


class Failed(Message, frozen=True, array_like=True, tag=True):
    fault: Fault


Command: TypeAlias = Add | Cancel | Stop
Report: TypeAlias = Loading | Ready | Stepped | Refused | Beat | Failed
encode = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
MakeEngine: TypeAlias = Callable[[EngineConfig, Progress], "Engine"]


Logs: TypeAlias = tuple[int, logging.Formatter | None]  # the least level, and how a line is written


def parents_logs() -> Logs:
    """How this process writes its log, for a child to do the same."""
    root = logging.getLogger()
    own = [h.formatter for h in root.handlers if type(h) is logging.StreamHandler and h.formatter]
    return root.getEffectiveLevel(), own[0] if own else None


def load_engine(config: EngineConfig, progress: Progress) -> Engine:
    from onebox.engine.engine import load_engine

    return load_engine(config, progress)


# The child


class Pulse:
    """Beats on a socket of its own, every BEAT_S, whatever the step loop does."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.steps, self.busy = 0, False
        self.clock: StartClock | None = StartClock("libraries")
        self._socket = context.socket(zmq.PUSH)
        self._socket.connect(address)
        self._done = Event()
        self._thread = Thread(target=self._run, name="onebox-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            clock = self.clock
            if clock is not None:
                self._socket.send(encode(Loading(clock.phase, clock.share, clock.seconds, clock.took)))
            else:
                self._socket.send(encode(Beat(self.steps, self.busy)))
            if self._done.wait(BEAT_S):
                self._socket.close(linger=0)
                return

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def die_with_parent() -> None:
    """End when the parent does: by the kernel on Linux (a stopped process too), else when its pipe closes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, name="onebox-parent", daemon=True).start()


def child_main(config: EngineConfig, make: MakeEngine, commands_at: str, reports_at: str, logs: Logs) -> None:
    """The child: load, then step until told to stop. What goes wrong is reported before the end."""
    die_with_parent()
    handler = logging.StreamHandler()
    handler.setFormatter(logs[1] or logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logs[0], handlers=[handler])
    context: zmq.Context[Any] = zmq.Context()
    reports, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    reports.connect(reports_at)
    commands.connect(commands_at)
    pulse = Pulse(context, reports_at)
    code = 0
    try:
        assert pulse.clock is not None
        engine = make(config, pulse.clock)
        pulse.clock.end()
        reports.send(encode(Ready(engine.info, engine.stats(), pulse.clock.took)))
        pulse.clock = None
        serve_commands(engine, commands, reports, pulse)
    except OneboxError as e:
        code = 1
        reports.send(encode(Failed(Fault.of(e))))
    except Exception as e:
        logger.exception("the engine failed")
        code = 1
        fault = EngineUnavailableError(f"The engine failed ({type(e).__name__}: {str(e)[:500]}); its log says where.")
        reports.send(encode(Failed(Fault.of(fault))))
    pulse.stop()
    commands.close(linger=0)
    reports.close(linger=1000)
    context.term()
    os._exit(code)  # no destructors of a device that may be lost


def addressee(data: bytes) -> str | None:
    """The request that an unreadable Add is about, if it can be made out."""
    try:
        return str(msgspec.msgpack.decode(data)[1]["id"])
    except Exception:
        return None


def serve_commands(engine: Engine, commands: zmq.Socket[Any], reports: zmq.Socket[Any], pulse: Pulse) -> None:
    """Steps while there is work, else waits for a command."""
    while True:
        changed = False
        while True:
            pulse.busy = engine.has_work
            if changed and not engine.has_work:  # no step will tell of it
                reports.send(encode(Stepped([], engine.stats())))
                changed = False
            try:
                data = commands.recv(zmq.NOBLOCK if engine.has_work else 0)
            except zmq.Again:
                break
            changed = True
            try:
                command = decode_command(data)
            except Exception as e:
                logger.exception("a command that cannot be read")
                if request_id := addressee(data):
                    reports.send(encode(Refused(request_id, Fault.of(untakable(e)))))
                continue
            if isinstance(command, Stop):
                return
            if isinstance(command, Cancel):
                engine.cancel(command.request_id)
                continue
            request = command.request
            try:
                engine.add(request)
            except OneboxError as e:
                reports.send(encode(Refused(request.id, Fault.of(e))))
            except Exception as e:  # a bug, but this request's alone
                logger.exception("request %s could not be taken", request.id)
                reports.send(encode(Refused(request.id, Fault.of(untakable(e)))))
        outputs = engine.step()
        pulse.steps += 1
        reports.send(encode(Stepped(outputs, engine.stats())))


# The parent


@dataclass(eq=False)
class Child:
    """One engine process and the parent's ends of its sockets."""

    process: SpawnProcess
    commands: zmq.Socket[Any]
    reports: zmq.Socket[Any]
    fd: int
    began_s: float

    def ended(self) -> str:
        """How the process ended, in words."""
        code = self.process.exitcode
        if code is None:
            return "was lost"
        if code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended with code {code}"


class ProcessEngine:
    """An EngineClient whose engine is a process of its own. One event loop may use it, the one that starts it.

    Not ready after SILENT_S without a heartbeat; restarted after twice that, or when one step takes `stall_s`, or when
    the process ends: what is in flight gets EngineUnavailableError. A failure to start for the first time is raised;
    after MAX_RESTARTS without a steady stretch of service the engine stays failed.
    """

    def __init__(self, config: EngineConfig, *, make: MakeEngine = load_engine) -> None:
        self._config, self._make = config, make
        self._stall_s = config.stall_s
        self._silent_s = min(SILENT_S, config.stall_s)
        self._status: Status = "stopped"
        self._detail = "The engine has not started."
        self._loading: Loading | None = None
        self._took: tuple[Took, ...] = ()
        self._info: EngineInfo | None = None
        self._now, self._before = EngineStats(), EngineStats()  # this process's counters; those of the ones before it
        self._restarts = self._failures = 0
        self._sinks: dict[str, Items] = {}
        self._child: Child | None = None
        self._started: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self._context: zmq.Context[Any] | None = None
        self._n_children = 0
        self._heard_s = self._moved_s = self._looked_s = 0.0
        self._steps = -1

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailableError(self._detail or "The engine is loading.")
        return self._info

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None else None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._folder = Path(tempfile.mkdtemp(prefix="onebox-"))
        self._context = zmq.Context()
        atexit.register(self._kill)
        self._status, self._detail = "starting", "the engine starts"
        self._spawn()
        self._run_task(self._watch())
        try:
            await self._started
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        child, self._child = self._child, None
        if self._status != "failed":
            self._status, self._detail = "stopped", "The engine was stopped."
        self._fail_all(EngineUnavailableError(self._detail))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if child is not None:
            with suppress(zmq.ZMQError):
                child.commands.send(encode(Stop()), zmq.NOBLOCK)
            await asyncio.to_thread(child.process.join, 5 if self._loading is None else 0)
            await self._bury(child)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self._kill)

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        items: Items = asyncio.Queue()

        def begin() -> None:
            if self._status != "ready":
                raise EngineUnavailableError(self.health().detail)
            if request.id in self._sinks:
                raise RequestError(f"Request id {request.id!r} is in use.", param="request_id")
            try:
                data = encode(Add(request))
            except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as e:
                raise RequestError(f"The request cannot be passed to the engine: {e}.") from e
            self._sinks[request.id] = items
            self._send(data)

        def cancel() -> None:
            if self._sinks.get(request.id) is items:
                del self._sinks[request.id]
                self._send(encode(Cancel(request.id)))

        return follow(begin, items, cancel)

    def stats(self) -> EngineStats:
        """Counters since the first start: those of ended processes are added."""
        return replace(added(self._before, self._now), restarts=self._restarts)

    def alive(self) -> bool:
        return self._status == "ready"

    def health(self) -> Health:
        loading = self._loading
        if loading is None or self._status not in ("starting", "restarting"):
            return Health(self._status, self._detail, took=self._took)
        told = f"{loading.phase}, {loading.share:.0%}" if loading.share is not None else loading.phase
        detail = f"{self._detail} ({told})"
        return Health(self._status, detail, loading.phase, loading.share, loading.seconds, loading.took)

    def _run_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn(self) -> None:
        assert self._context is not None and self._folder is not None
        self._n_children += 1
        addresses = [f"ipc://{self._folder}/{self._n_children}{end}" for end in "cr"]
        commands, reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, address in ((commands, addresses[0]), (reports, addresses[1])):
            socket.set_hwm(0)  # what is in flight is bounded by the engine's own queue
            socket.bind(address)
        process = multiprocessing.get_context("spawn").Process(
            target=child_main,
            args=(self._config, self._make, *addresses, parents_logs()),
            name="onebox-engine",
        )
        resource_tracker.ensure_running()  # started by process.start, it would unblock what is blocked next
        # inherited: Ctrl-C and a supervisor's SIGTERM reach the whole group, and the parent drains first
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        now_s = time.monotonic()
        child = Child(process, commands, reports, int(reports.getsockopt(zmq.FD)), now_s)
        self._child, self._loading, self._steps = child, Loading("process"), -1
        self._heard_s = self._moved_s = self._looked_s = now_s
        self._loop.add_reader(child.fd, self._receive, child)
        self._loop.add_reader(process.sentinel, self._ended, child)
        self._receive(child)  # the descriptor tells of changes only

    def _send(self, data: bytes) -> None:
        if self._child is not None:
            self._child.commands.send(data, zmq.NOBLOCK)

    def _receive(self, child: Child) -> None:
        while child is self._child:
            try:
                data = child.reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s = time.monotonic()
            try:
                report = decode_report(data)
            except Exception:
                logger.exception("a report of the engine that cannot be read")
                continue
            self._take(report)

    def _take(self, report: Report) -> None:
        match report:
            case Stepped(outputs, stats):
                self._now, self._moved_s = stats, self._heard_s
                for output in outputs:
                    self._tell(output.request_id, output, last=output.finish_reason is not None)
            case Beat(steps, busy):
                if not busy or steps != self._steps:
                    self._steps, self._moved_s = steps, self._heard_s
            case Refused(request_id, fault):
                self._tell(request_id, fault.error(), last=True)
            case Loading():
                if self._status in ("starting", "restarting"):
                    self._loading = report
                self._moved_s = self._heard_s
            case Ready(info, stats, took):
                self._info, self._now, self._loading, self._took = info, stats, None, took
                self._status, self._detail, self._moved_s = "ready", "", self._heard_s
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Failed(fault):
                self._lost(fault.error())

    def _tell(self, request_id: str, item: Output | OneboxError, *, last: bool) -> None:
        items = self._sinks.pop(request_id, None) if last else self._sinks.get(request_id)
        if items is not None:
            items.put_nowait(item)

    def _fail_all(self, error: EngineUnavailableError) -> None:
        sinks, self._sinks = self._sinks, {}
        for items in sinks.values():
            items.put_nowait(error)

    def _ended(self, child: Child) -> None:
        self._loop.remove_reader(child.process.sentinel)
        child.process.join(0)

        def settle() -> None:  # its last words may still be on their way through the socket's thread
            self._receive(child)
            if child is self._child:
                self._lost(EngineUnavailableError(f"The engine process {child.ended()}."))

        self._loop.call_later(0.05, settle)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            child, now_s = self._child, time.monotonic()
            if child is None:
                continue
            self._receive(child)
            if now_s - self._looked_s > 1.0 + BEAT_S:  # this process itself was stopped or busy: judge nobody by it
                self._heard_s, self._moved_s = now_s, max(self._moved_s, now_s - self._stall_s / 2)
            self._looked_s = now_s
            silent_s, still_s = now_s - self._heard_s, now_s - self._moved_s
            if self._status in ("starting", "restarting"):
                if silent_s > LOADING_SILENT_S:
                    self._lost(EngineUnavailableError(f"The engine was silent for {silent_s:.0f} s while loading."))
            elif silent_s > 2 * self._silent_s:
                self._lost(EngineUnavailableError(f"The engine process gave no sign of life for {silent_s:.0f} s."))
            elif still_s > self._stall_s:
                self._lost(EngineUnavailableError(f"The engine made no progress for {still_s:.0f} s."))
            elif silent_s > self._silent_s:
                self._status = "stalled"
                self._detail = f"the engine process has given no sign of life for {silent_s:.0f} s"
            elif self._status == "stalled":
                self._status, self._detail = "ready", ""
            if self._status == "ready" and self._failures and now_s - child.began_s > STEADY_S:
                self._failures = 0

    def _lost(self, error: OneboxError) -> None:
        """This process is over: fail what it had, and start another unless it never started or too many ended."""
        child, self._child = self._child, None
        if child is None:
            return
        self._before = added(self._before, self._now)
        self._now, self._loading = EngineStats(), Loading("ending")  # the old process, before the new one
        first = self._started is not None and not self._started.done()
        self._failures += 1
        wait_s = None if first or self._failures > MAX_RESTARTS else BACKOFF_S[self._failures - 1]
        if wait_s is None:
            self._status = "failed"
            self._detail = str(error) if first else f"{error} It ended {self._failures} times; restart the server."
        else:
            self._status, self._detail = "restarting", f"{error} It is being restarted"
            logger.error("%s Restarting it in %g s.", error, wait_s)
        self._fail_all(EngineUnavailableError(f"{error} This request was lost with it; send it again."))
        if first and self._started is not None:
            self._started.set_exception(error)
        self._run_task(self._replace(child, wait_s))

    async def _replace(self, child: Child, wait_s: float | None) -> None:
        await self._bury(child)
        if wait_s is None:
            return
        await asyncio.sleep(wait_s)
        self._restarts += 1
        self._spawn()

    async def _bury(self, child: Child) -> None:
        """Kill what is left of a process, and close its sockets."""
        for fd in (child.fd, child.process.sentinel):
            self._loop.remove_reader(fd)
        child.process.kill()
        try:
            await asyncio.to_thread(child.process.join)
        finally:
            for socket in (child.commands, child.reports):
                socket.close(linger=0)

    def _kill(self) -> None:
        """At the interpreter's exit, which would otherwise wait for the child."""
        if self._child is not None:
            self._child.process.kill()


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters of both, gauges of the later."""
    changes: dict[str, Any] = {}
    for f in fields(EngineStats):
        a, b = getattr(before, f.name), getattr(now, f.name)
        if f.name in GAUGES:
            continue
        if isinstance(b, int):
            changes[f.name] = a + b
        elif isinstance(b, tuple):
            width = max(len(a), len(b))
            padded = ((*x, *[0] * (width - len(x))) for x in (a, b))
            changes[f.name] = tuple(map(sum, zip(*padded, strict=True)))
        else:
            changes[f.name] = {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    return replace(now, **changes)
