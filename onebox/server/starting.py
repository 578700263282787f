"""How a start is told while it lasts, so that a slow one is never taken for a hang.

Takes what an engine says of its health, gives a bar on a terminal and log lines elsewhere: each phase when it is over,
with its seconds, and a long one every EVERY_S with how far it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

from onebox.engine.client import Health

log = logging.getLogger("onebox.start")

LOOK_S = 0.1
EVERY_S = 10.0
Show = Callable[[Health], None]
Tell = Callable[[str, Mapping[str, object]], None]


class Phases:
    """Which lines a health is worth: each phase that ended since the last, and a long one now and then."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self.n_told = 0
        self._told_at_s = 0.0  # of the phase under way

    def lines(self, health: Health) -> Iterator[tuple[str, dict[str, object]]]:
        """Lines, each with its figures as fields."""
        for phase, seconds in health.took[self.n_told :]:
            self._told_at_s = 0.0
            yield f"{phase}: {seconds:.1f} s", {"phase": phase, "seconds": seconds}
        self.n_told = max(self.n_told, len(health.took))
        if health.phase and health.seconds >= self._told_at_s + self.every_s:
            self._told_at_s = health.seconds
            share = "" if health.progress is None else f"{health.progress:.0%}, "
            fields = {"phase": health.phase, "seconds": health.seconds, "progress": health.progress}
            yield f"{health.phase}: {share}{health.seconds:.0f} s so far", fields


@contextmanager
def told(health: Callable[[], Health], *, stream: TextIO | None = None) -> Iterator[None]:
    """Tells of a start until the block is left: beside a bar where `stream` (stderr) is a terminal, else in the log."""
    stream = stream or sys.stderr
    over = Event()
    thread = Thread(target=_follow, args=(health, stream, over), name="onebox-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)


def _follow(health: Callable[[], Health], stream: TextIO, over: Event) -> None:
    phases = Phases()
    with _bar(stream) if stream.isatty() else _logged() as (show, tell):
        while True:
            last = over.wait(LOOK_S)
            found = health()
            for line, fields in phases.lines(found):
                tell(line, fields)
            if last:
                return
            show(found)


@contextmanager
def _logged() -> Iterator[tuple[Show, Tell]]:
    yield lambda _: None, lambda line, fields: log.info("start: %s", line, extra=fields)


@contextmanager
def _bar(stream: TextIO) -> Iterator[tuple[Show, Tell]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[share]}"),
        TextColumn("{task.fields[seconds]:.0f} s"),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bars:
        task = bars.add_task("", total=None, share="", seconds=0.0)

        def show(health: Health) -> None:
            share = health.progress
            bars.update(
                task,
                description=health.phase,
                total=None if share is None else 1.0,
                completed=share or 0.0,
                share="" if share is None else f"{share:.0%}",
                seconds=health.seconds,
            )

        yield show, lambda line, _: bars.console.print("  " + line, highlight=False, markup=False)
