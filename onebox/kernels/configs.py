"""Launch configurations: a checked-in table a device family, and which family a device is.

A configuration never depends on the number of rows: a row's sums run in the same order whatever its neighbours.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

INTERPRET = bool(triton.knobs.runtime.interpret)  # kernels run as Python on CPU tensors


@dataclass(frozen=True)
class Config:
    """Rows of a weight tile, warps, loads in flight, scale groups an iteration, programs a multiprocessor.

    `registers` is the most a thread may have; 0 leaves it to the compiler.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 4
    unroll: int = 1
    programs: int = 3
    prefetch: bool = False
    registers: int = 0


PATH = Path(__file__).with_name("configs.json")


def load(path: Path = PATH) -> dict[str, dict[str, Config]]:
    """Family -> kernel or kernel@hidden-width -> Config. A family's entries override those of 'default'."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return {name: {kernel: Config(**values) for kernel, values in row.items()} for name, row in table.items()}


def save(table: dict[str, dict[str, Config]], path: Path = PATH) -> None:
    rows = {
        name: {kernel: {k: v for k, v in asdict(c).items() if v != getattr(Config(), k)} for kernel, c in row.items()}
        for name, row in table.items()
    }
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


TABLE = load()


@functools.cache
def family(device: torch.device) -> str:
    """The row of TABLE for a device; unknown chips get the nearest older family."""
    if device.type != "cuda":
        return "sm80"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 12:
        return "sm120"
    if major >= 10:
        return "sm100"
    if major == 9:
        return "sm90"
    return "sm86" if minor in (6, 7, 9) else "sm80"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def config(kernel: str, device: torch.device, width: int = 0) -> Config:
    """The entry of `kernel` for a model of hidden size `width`, else of any model, else the default family's."""
    for row in (TABLE.get(family(device), {}), TABLE["default"]):
        for key in (f"{kernel}@{width}", kernel):
            if key in row:
                return row[key]
    raise KeyError(kernel)


def override(device: torch.device, kernel: str, width: int, **changes: int | bool) -> None:
    """Change one entry of the running process's table: for tuning."""
    new = replace(config(kernel, device, width), **changes)  # type: ignore[arg-type]
    TABLE.setdefault(family(device), {})[f"{kernel}@{width}" if width else kernel] = new


def pdl(device: torch.device) -> int:
    """Programmatic dependent launch (Hopper and later): 0 off, 1 from a kernel's start, 2 before its last stores."""
    return _PDL[0] if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 else 0


_PDL = [2]  # docs/log.md has the three measured


def set_pdl(mode: int) -> None:
    _PDL[0] = mode


def splits(tiles: int, steps: int, device: torch.device, programs: int) -> int:
    """Parts of the K loop: the largest power of two that divides `steps` and keeps tiles * parts near the target."""
    target, parts = programs * multiprocessors(device), 1
    while parts < 16 and steps % (parts * 2) == 0 and tiles * parts * 2 <= target * 1.34:
        parts *= 2
    return parts
