"""Ray Data: batch files and bulk compression over the machines of a cluster, or over processes of this one.

The work goes out, results come back to the one process that began it, which keeps each once: what `onebox batch` and
`onebox compress` promise without Ray holds with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from onebox.batch.jobs import Call, Job, open_input, read
from onebox.batch.run import Limits, open_sender
from onebox.config import EngineConfig, quiet_ray
from onebox.engine.client import EngineClient
from onebox.engine.process import ProcessEngine
from onebox.errors import ConfigError
from onebox.prompt.bulk import Made, Settings, Shortener, Text, Work
from onebox.server.serve import ServeOptions, in_background

try:
    import ray
    import ray.data
    from ray.exceptions import RayError
except ModuleNotFoundError as e:
    raise ConfigError(f"--ray needs Ray ({e}); install it with: pip install 'onebox[ray]'") from e

MakeEngine = Callable[[EngineConfig], EngineClient]


class Ended(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def absent(address: str, why: Exception) -> ConfigError:
    told = " ".join(str(why).split())[:200]
    return ConfigError(f"--ray {address}: no Ray cluster answers there ({told}); --ray local begins one.")


def reached(address: str) -> None:
    """Raises ConfigError when nothing listens at HOST:PORT or ray://HOST:PORT; Ray itself takes minutes to say so."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # local, auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as e:
        raise absent(address, e) from e


@contextlib.contextmanager
def cluster(address: str) -> Iterator[None]:
    """Ray, begun on this machine for `local`, else met at its address; left as it was. Raises ConfigError."""
    if ray.is_initialized():
        yield
        return
    quiet_ray()
    reached(address)
    where = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **where)
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise absent(address, e) from e
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Ended."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not the main thread
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


def quiet_data() -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def one_line(e: BaseException) -> str:
    """The last line of a failure in a worker, which is the failure; the lines above are where it happened."""
    return (str(e).strip().splitlines() or [type(e).__name__])[-1]


def spread(
    items: Sequence[Mapping[str, Any]],
    worker: type,
    given: Sequence[Any],
    *,
    workers: int,
    at_a_time: int,
    **needs: Any,
) -> Iterator[Mapping[str, Any]]:
    """Rows that `workers` objects of class `worker` make of `items`, in the order in which they come.

    An item is a unit of work: what a lost worker had of them is done again elsewhere. Raises ConfigError.
    """
    quiet_data()
    pool = ray.data.ActorPoolStrategy(
        size=workers, max_concurrent_calls_per_actor=at_a_time, enable_true_multi_threading=at_a_time > 1
    )
    data = ray.data.from_items(list(items), override_num_blocks=len(items))
    made = data.map(worker, fn_constructor_args=list(given), compute=pool, **needs)
    try:
        yield from made.iter_rows()
    except RayError as e:
        raise ConfigError(f"a worker failed: {one_line(e)}; what is done is kept, run it again to go on.") from e


class Answerer:
    """A worker of `onebox batch`: an engine and its server; answers a few requests at once."""

    def __init__(self, options: ServeOptions, limits: Limits, make: MakeEngine = ProcessEngine) -> None:
        self._limits, self._stack = limits, ExitStack()
        self._key = options.api_keys[0] if options.api_keys else None
        self._url, _ = self._stack.enter_context(in_background(options, make, say=logging.getLogger("ray").info))

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"results": asyncio.run(self._answer([Call(*asked) for asked in json.loads(item["calls"])]))}

    async def _answer(self, calls: Sequence[Call]) -> str:
        async with open_sender(self._url, self._limits, self._key) as sender:
            return json.dumps(await asyncio.gather(*(sender.result(call) for call in calls)))


@dataclass(frozen=True)
class Spread:
    """Engines of a cluster for `onebox batch`: `workers` of them (None: one a GPU, or one) at `address`."""

    address: str
    options: ServeOptions
    limits: Limits
    workers: int | None = None
    make: MakeEngine = ProcessEngine

    @property
    def names(self) -> tuple[str, ...]:
        return self.options.served_names or (Path(self.options.engine.model).name,)

    def answer(self, path: Path, jobs: Sequence[Job], keep: Callable[[Mapping[str, Any]], None]) -> int | None:
        """`keep` is called with the result of each job. The signal that ended it early. Raises ConfigError."""
        size = self.options.engine.max_num_seqs
        with open_input(path) as file:
            calls = [read(file, job) for job in jobs]
        asked = [[(c.custom_id, c.url, c.body) for c in calls[at : at + size]] for at in range(0, len(calls), size)]
        items = [{"calls": json.dumps(some)} for some in asked]
        kept: set[str] = set()
        try:
            with cluster(self.address), signals():
                gpus = int(ray.cluster_resources().get("GPU", 0)) if self.options.engine.device != "cpu" else 0
                for row in spread(
                    items,
                    Answerer,
                    (self.options, self.limits, self.make),
                    workers=min(self.workers or max(gpus, 1), len(items)),
                    at_a_time=2,  # the next ones wait in the engine
                    num_gpus=1 if gpus else 0,
                    num_cpus=1,
                ):
                    for result in json.loads(row["results"]):
                        if result is not None and result["custom_id"] not in kept:
                            kept.add(result["custom_id"])
                            keep(result)
        except Ended as e:
            return e.number
        return None


class Shortening:
    """A worker of `onebox compress`."""

    def __init__(self, settings: Settings) -> None:
        self._shorten = Shortener(settings)

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        texts: list[Text] = [(text, question) for text, question in json.loads(item["texts"])]
        return {"part": item["part"], "made": json.dumps([asdict(made) for made in self._shorten(texts)])}


def over_cluster(address: str, settings: Settings, workers: int | None = None) -> Work:
    """Work of `compress_file`, over `workers` processes (None: one a CPU) of the cluster at `address`."""

    def work(parts: Iterable[tuple[int, list[Text]]]) -> Iterator[tuple[int, list[Made]]]:
        items = [{"part": number, "texts": json.dumps(texts)} for number, texts in parts]
        if not items:
            return
        with cluster(address):
            cpus = int(ray.cluster_resources().get("CPU", 1))
            n = min(workers or max(cpus, 1), len(items))
            for row in spread(items, Shortening, (settings,), workers=n, at_a_time=1, num_cpus=1):
                yield int(row["part"]), [Made(**made) for made in json.loads(row["made"])]

    return work
