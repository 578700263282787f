"""Launch configurations: a checked-in table a device family, and which family a device is.

A configuration never depends on the number of rows: a row's sums run in the same order whatever its neighbours.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run as Python on CPU tensors


@dataclass(frozen=True)
class Config:
    """Rows of a weight tile, warps a program, loads in flight, programs a multiprocessor that splits aim at."""

    block_n: int = 64
    warps: int = 4
    stages: int = 4
    programs: int = 3
    prefetch: bool = False


_DEFAULT: Mapping[str, Config] = {
    "linear": Config(),
    "linear_add": Config(),
    "route": Config(block_n=16, stages=3, programs=1),
    "gate_up": Config(),
    "down": Config(),
    "head": Config(block_n=128, stages=3),
    "gated_delta": Config(block_n=128, warps=16, stages=1),
    "attention": Config(warps=4, stages=2),
}
TABLE: dict[str, dict[str, Config]] = {
    "sm80": dict(_DEFAULT),
    "sm86": dict(_DEFAULT),
    "sm90": dict(_DEFAULT),
    "sm100": dict(_DEFAULT),
    "sm120": dict(_DEFAULT),
}


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


def config(kernel: str, device: torch.device) -> Config:
    return TABLE[family(device)][kernel]


def override(device: torch.device, kernel: str, **changes: int | bool) -> None:
    """Change one entry of the running process's table: for tuning."""
    row = TABLE[family(device)]
    row[kernel] = replace(row[kernel], **changes)  # type: ignore[arg-type]


def pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later."""
    return _PDL[0] and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


_PDL = [True]


def set_pdl(on: bool) -> None:
    _PDL[0] = on


def splits(tiles: int, steps: int, device: torch.device, programs: int) -> int:
    """Parts of the K loop: the largest power of two that divides `steps` and keeps tiles * parts near the target."""
    target, parts = programs * multiprocessors(device), 1
    while parts < 16 and steps % (parts * 2) == 0 and tiles * parts * 2 <= target * 1.34:
        parts *= 2
    return parts
