"""How a long build is shown: bars on a terminal, one line a file elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told of bytes as they are done, and of each finished file."""

    def advance(self, n_bytes: int, what: str) -> None: ...

    def finished(self, file: str, n_bytes: int) -> None: ...


class Silent:
    def advance(self, n_bytes: int, what: str) -> None:
        pass

    def finished(self, file: str, n_bytes: int) -> None:
        pass


class Lines:
    """One line a finished file."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.start = stream, time.monotonic()

    def advance(self, n_bytes: int, what: str) -> None:
        pass

    def finished(self, file: str, n_bytes: int) -> None:
        elapsed = time.monotonic() - self.start
        print(f"{file}: {n_bytes / 1e6:,.1f} MB ({elapsed:.0f} s)", file=self.stream, flush=True)


@contextmanager
def progress(total_bytes: int, title: str, *, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Progress]:
    """Bars with bytes a second and time left when `stream` is a terminal and not `quiet`; else `Lines`."""
    stream = stream or sys.stderr
    if quiet or not stream.isatty():
        yield Lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(file=stream), transient=True) as bars:
        task = bars.add_task(title, total=total_bytes)

        class Bar:
            def advance(self, n_bytes: int, what: str) -> None:
                bars.update(task, advance=n_bytes, description=what[-48:])

            def finished(self, file: str, n_bytes: int) -> None:
                bars.console.print(f"{file}: {n_bytes / 1e6:,.1f} MB", highlight=False)

        yield Bar()
