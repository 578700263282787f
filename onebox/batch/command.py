"""Body of `onebox batch`. Takes files and where to send them, gives an exit status; tells progress and a summary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from onebox.batch.jobs import BadLine, Job, Scan, scan
from onebox.batch.results import Results, encode, is_ok
from onebox.batch.run import Limits, open_sender, run
from onebox.errors import ConfigError

FLAWED = 3  # exit status: everything was tried, and some of it has no answer
LINE_S = 30.0
Say = Callable[[str], None]
Server = AbstractContextManager[tuple[str, str | None]]  # URL and key


class Workers(Protocol):
    """What answers in place of one server. `names` are those of its models."""

    @property
    def names(self) -> Sequence[str]: ...

    def answer(self, path: Path, jobs: Sequence[Job], keep: Callable[[Mapping[str, Any]], None]) -> int | None:
        """`keep` is called with the result of each job of the file. The signal that ended it early, or None."""
        ...


@dataclass
class Tally:
    """What came of a run so far."""

    total: int
    kept: int = 0
    ok: int = 0
    failed: int = 0
    tokens: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        return self.kept + self.ok + self.failed

    def add(self, result: Mapping[str, Any]) -> None:
        self.ok += is_ok(result)
        self.failed += not is_ok(result)
        body = (result["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        for name in ("completion_tokens", "output_tokens"):
            value = usage.get(name) if isinstance(usage, dict) else None
            self.tokens += value if isinstance(value, int) else 0

    def line(self) -> str:
        seconds = max(time.monotonic() - self.begun_s, 1e-3)
        now = self.ok + self.failed
        return (
            f"{self.ended} of {self.total} requests: {self.ok} answered, {self.failed} failed, {self.kept} before;"
            f" {seconds:.1f} s, {now / seconds:.1f} requests/s, {self.tokens / seconds:.0f} tokens/s"
        )


@contextlib.contextmanager
def progress(tally: Tally, say: Say, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Called after each result: a bar on a terminal, a line every half minute elsewhere."""
    if quiet or not sys.stderr.isatty():
        said_s = time.monotonic()

        def advance() -> None:
            nonlocal said_s
            if not quiet and time.monotonic() - said_s > LINE_S:
                said_s = time.monotonic()
                say(tally.line())

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=tally.total, completed=tally.kept, told="")

        def show() -> None:
            speed = tally.tokens / max(time.monotonic() - tally.begun_s, 1e-3)
            told = f"{speed:.0f} tokens/s" + (f", {tally.failed} failed" if tally.failed else "")
            bar.update(task, completed=tally.ended, told=told)

        yield show


def errors_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}.errors{out.suffix or '.jsonl'}")


def write_bad(path: Path, bad: Sequence[BadLine]) -> None:
    """The bad lines of this run; those of an earlier one go. Raises ConfigError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        if bad:
            beside.write_bytes(b"".join(encode(line.json()) for line in bad))
            os.replace(beside, path)
        else:
            path.unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written ({e.strerror or e}).") from e


def check_bad_path(path: Path) -> None:
    """Raises ConfigError when the file there is not one of an earlier run's bad lines."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
        first = file.readline(80)
        if first and not first.startswith(b'{"line":'):
            raise ConfigError(f"{path}: is not a file of bad lines; name another with --errors.")


def left_over(found: Scan, results: Results, *, retry_failed: bool) -> list[Job]:
    """The jobs still to be done. Raises ConfigError for a request that is not the one that was answered."""
    for job in found.jobs:
        done = results.done.get(job.custom_id)
        if done is not None and done.id != job.id:
            raise ConfigError(
                f"{results.path}: line {done.line} answers another request than line {job.line} of the input, "
                f"though both are {job.custom_id!r:.80}; name another file for the results."
            )
    if retry_failed:
        failed = {job.custom_id for job in found.jobs if (d := results.done.get(job.custom_id)) and not d.ok}
        if failed:
            results.drop(failed)
    return [job for job in found.jobs if job.custom_id not in results.done]


def check_models(wanted: Counter[str | None], served: Sequence[str] | None, say: Say, *, fix: str) -> None:
    """Says which models are not served. Raises ConfigError when none is."""
    if served is None:
        return
    lost = {str(name): n for name, n in wanted.items() if name is not None and name not in served}
    if not lost:
        return
    told = ", ".join(f"{name!r:.80} ({n} lines)" for name, n in sorted(lost.items())[:5])
    said = f"the batch asks for {told}, and what is served is {', '.join(served)}; {fix}"
    if len(lost) == len(wanted):
        raise ConfigError(f"{said}.")
    say(f"note: {said}")


def batch(
    source: Path,
    out: Path,
    server: Callable[[], Server] | Workers,
    limits: Limits,
    *,
    errors: Path | None = None,
    retry_failed: bool = False,
    quiet: bool = False,
    fix: str = "",
    say: Say = print,
) -> int:
    """Answer every request of `source` that has no result in `out`. The exit status: 0, FLAWED, or a signal's.

    `server` opens what answers, or is workers; neither begins when nothing is left. Raises OneboxError.
    """
    bad_path = errors or errors_of(out)
    if len({path.resolve() for path in (source, out, bad_path)}) < 3:
        raise ConfigError(f"{source}, {out} and {bad_path} must be three files.")
    found = scan(source)
    check_bad_path(bad_path)
    with Results(out) as results:
        if results.repaired:
            say(f"{out}: took away {results.repaired} bytes of a line that was cut off")
        left = left_over(found, results, retry_failed=retry_failed)
        write_bad(bad_path, found.bad)
        if found.bad:
            first = found.bad[0]
            say(f"{source}: {len(found.bad)} bad lines, told in {bad_path}; line {first.line}: {first.message}")
        tally, number = Tally(len(found.jobs), kept=len(found.jobs) - len(left)), None

        def by_workers(workers: Workers) -> int | None:
            check_models(found.models, workers.names, say, fix=fix)
            tally.begun_s = time.monotonic()
            with progress(tally, say, quiet=quiet) as advance:

                def keep(result: Mapping[str, Any]) -> None:
                    results.append(result)
                    tally.add(result)
                    advance()

                return workers.answer(source, left, keep)

        async def answer(url: str, key: str | None) -> int | None:
            async with open_sender(url, limits, key) as sender:
                sender.stop.on_first = lambda: say("finishing what is under way; once more drops it")
                check_models(found.models, await sender.models(), say, fix=fix)
                tally.begun_s = time.monotonic()
                with progress(tally, say, quiet=quiet) as advance:

                    def tell(result: Mapping[str, Any]) -> None:
                        tally.add(result)
                        advance()

                    return await run(source, left, results, sender, tell=tell)

        if left and not callable(server):
            number = by_workers(server)
        elif left and callable(server):
            with server() as (url, key):
                number = asyncio.run(answer(url, key))
        say(f"{tally.line()} -> {out}")
        if number is not None:
            say(f"stopped by {signal.Signals(number).name}; run it again to go on")
            return 128 + number
        flaws = [job for job in found.jobs if not results.done[job.custom_id].ok]
        if flaws and not retry_failed and tally.failed < len(flaws):
            say(f"{len(flaws)} results are failures; --retry-failed tries them again")
    return FLAWED if flaws or found.bad else 0
