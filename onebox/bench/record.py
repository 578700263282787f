"""Results as JSON lines: what a benchmark measured, with commit, command, device and versions, appended to a file."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds over repeats."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))


def time_cuda(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> Timing:
    """Device time of `run`, one pair of events a repeat."""
    for _ in range(warmup):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return Timing.of([float(start.elapsed_time(end)) for start, end in pairs])


def time_cpu(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> Timing:
    """Wall-clock time of `run` on a CPU."""
    samples = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        run()
        if i >= warmup:
            samples.append((time.perf_counter() - start) * 1e3)
    return Timing.of(samples)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, after one eager run that compiles what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def copy_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Bytes a second of a large copy in the device's memory, read and written bytes both counted."""
    n = int(gigabytes * 1e9)
    a, b = torch.empty(n, dtype=torch.uint8, device=device), torch.empty(n, dtype=torch.uint8, device=device)
    a.random_()
    timing = (time_cuda if device.type == "cuda" else time_cpu)(lambda: b.copy_(a), repeats=12)
    return 2 * n / (timing.median_ms * 1e-3)


def commit() -> str:
    """The checkout's commit, with + when tracked files differ; 'unknown' outside one (`--commit` says it then)."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=root, capture_output=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.returncode == 1 else "") if head.returncode == 0 else "unknown"


def environment(device: torch.device, known_commit: str | None = None) -> dict[str, Any]:
    """Commit, command line (without where results go), device and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton
    except ImportError:
        pass
    else:
        versions["triton"] = triton.__version__
    cuda = device.type == "cuda"
    return {
        "commit": known_commit or commit(),
        "command": command_line(),
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "versions": versions,
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Processor and threads: what a CPU's figures depend on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        rows = (line.partition(":") for line in info.read_text().splitlines())
        name = next((value.strip() for key, _, value in rows if key.strip() == "model name"), name)
    return f"{name}, {torch.get_num_threads()} threads"


def command_line() -> str:
    """What to type to repeat the run, without keys, options that only say where files lie, and folders of this machine:
    an absolute path becomes one from here, or the file's name."""
    words, left_out = iter(sys.argv[1:]), ("--out", "--write", "--commit", "--api-key")
    kept: list[str] = []
    for word in words:
        if word in left_out:
            next(words, None)
        elif word.partition("=")[0] not in left_out:
            kept.append(portable(word))
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name if "/" in sys.argv[0] else sys.argv[0]
    if program.split()[0] == "onebox" or (spec is not None and spec.name == "onebox.cli"):
        return shlex.join([*(program.split() if program.startswith("onebox") else ["onebox"]), *kept])
    return "python " + shlex.join(["-m", spec.name, *kept] if spec is not None else [portable(sys.argv[0]), *kept])


def portable(word: str) -> str:
    """A word of a command line without this machine's folders."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = Path(value).expanduser()
    if path.is_absolute() or ".." in path.parts:
        here = Path.cwd()
        value = str(path.relative_to(here)) if path.is_relative_to(here) and path != here else path.name
    return flag + equals + value


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line to `path`, which is made when absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=False) + "\n")


def rounded(value: float, digits: int = 4) -> float:
    """Significant digits for people; the spread says more than the tail."""
    return float(f"{value:.{digits}g}")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table for a terminal: the first row is the head, the first column is left-aligned."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    justify = (str.ljust, *(str.rjust for _ in widths[1:]))
    return ["  ".join(how(cell, w) for how, cell, w in zip(justify, row, widths, strict=True)) for row in table]
