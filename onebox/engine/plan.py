"""The memory plan: a machine, a checkpoint's headers and a config in; how much of everything out, before any is taken.

A plan that does not fit is a ConfigError with the numbers and a setting that would fit.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from onebox.checkpoint.reader import LoadReport, WeightReader
from onebox.config import EngineConfig
from onebox.engine.pages import PAGE_SIZE, pages_for
from onebox.errors import ConfigError
from onebox.kernels.turboquant_ref import FORMATS
from onebox.ledger import Build, kv_bytes_per_token, resident_bytes, slot_bytes, workspace_bytes
from onebox.model.complete import check_complete, takes_mtp
from onebox.model.load import Loaded
from onebox.spec import Spec

logger = logging.getLogger(__name__)

GB = 1e9
DEFAULT_DRAFT_LEN = 2
CPU_KV_GB = 1.0  # unless one request needs more
SNAPSHOT_GB = {"cpu": 0.25, "unified": 4.0, "discrete": 4.0}
FLOOR_GB = {"cpu": 8.0, "unified": 8.0, "discrete": 1.0}
CPU_FLOOR_SHARE = 0.25  # of a machine that is smaller than the floor is for
GRAPH_GB = 0.5  # captured steps and their scratch
USUAL_CONTEXT = 8192  # tokens that slots and snapshots leave room for when no length is asked for
MIN_PAGES = 2
MIN_SNAPSHOTS, MAX_SNAPSHOTS = 4, 256
UNPACKED_EXPERTS = 32  # model/moe.py unpacks so many at once


@dataclass(frozen=True)
class Machine:
    """Memory of one device, in bytes. On `cpu` and `unified` machines device and host share it.

    `free` is what an allocation may still take on the device, `host_free` in host memory.
    """

    kind: Literal["discrete", "unified", "cpu"]
    name: str
    total: float
    free: float
    host_free: float

    @classmethod
    def probe(cls, device: torch.device) -> Machine:
        total, available = host_memory()
        if device.type == "cpu":
            return cls("cpu", "CPU", total, available, available)
        properties = torch.cuda.get_device_properties(device)
        if properties.is_integrated:  # cudaMemGetInfo counts the page cache as taken
            return cls("unified", properties.name, total, available, available)
        free, total = torch.cuda.mem_get_info(device)
        return cls("discrete", properties.name, total, free, available)

    @property
    def shared(self) -> bool:
        return self.kind != "discrete"

    def floor(self, config: EngineConfig) -> float:
        """Bytes left to everything else."""
        if config.memory_floor_gb is not None:
            return config.memory_floor_gb * GB
        floor = FLOOR_GB[self.kind] * GB
        return min(floor, self.total * CPU_FLOOR_SHARE) if self.kind == "cpu" else floor

    def capacity(self, config: EngineConfig) -> float:
        """Bytes that the plan may use: what is free above the floor, and no more than the share that was asked for."""
        room = max(self.free - self.floor(config), 0.0)
        share = config.gpu_memory_utilization
        return room if share is None else min(self.total * share, self.free if not self.shared else room)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the counts that they buy. `notes` says what was cut, one line each."""

    machine: Machine
    capacity: float
    floor: float
    weights: float
    workspace: float
    graphs: float
    states: float
    snapshots: float
    kv: float
    host_snapshots: float
    n_pages: int
    n_snapshots: int
    n_host_snapshots: int
    max_num_seqs: int
    max_model_len: int
    kv_format: str = "bf16"
    notes: tuple[str, ...] = ()
    host_kv: float = 0.0
    n_host_pages: int = 0

    @property
    def used(self) -> float:
        """Bytes out of `capacity`; host snapshots have memory of their own on a discrete device."""
        device = self.weights + self.workspace + self.graphs + self.states + self.snapshots + self.kv
        return device + (self.host_snapshots + self.host_kv if self.machine.shared else 0.0)

    def rows(self) -> list[tuple[str, float, str]]:
        """(use, bytes, what for)."""
        tokens = self.n_pages * PAGE_SIZE
        where = "in the same memory" if self.machine.shared else "in host memory"
        return [
            ("weights", self.weights, "checkpoint, as it is loaded"),
            ("workspace", self.workspace, "activations and sampling, at most"),
            ("graphs", self.graphs, "captured steps"),
            ("states", self.states, f"{self.max_num_seqs} answers at a time"),
            ("KV pages", self.kv, f"{self.n_pages} pages, {tokens} tokens in {self.kv_format}"),
            ("snapshots", self.snapshots, f"{self.n_snapshots} states of the prefix cache"),
            ("host snapshots", self.host_snapshots, f"{self.n_host_snapshots} states {where}"),
            ("host KV pages", self.host_kv, f"{self.n_host_pages} pages {where}"),
            ("used", self.used, f"of {self.capacity / GB:.2f} GB on {self.machine.name}"),
            ("floor", self.floor, f"left free of {self.machine.free / GB:.2f} GB available now"),
        ]

    def lines(self) -> list[str]:
        table = [f"{name:<14} {size / GB:>9.3f} GB  {what}" for name, size, what in self.rows()]
        return [*table, f"{'context':<14} {self.max_model_len:>9} tokens, prompt and answer together"]

    def json(self) -> dict[str, Any]:
        """What /v1/onebox/plan answers: bytes and counts."""
        return {
            "device": self.machine.name,
            "kind": self.machine.kind,
            "capacity_bytes": round(self.capacity),
            "free_bytes": round(self.machine.free),
            "bytes": {name.replace(" ", "_").lower(): round(size) for name, size, _ in self.rows()},
            "pages": self.n_pages,
            "page_tokens": PAGE_SIZE,
            "kv_format": self.kv_format,
            "snapshots": self.n_snapshots,
            "host_snapshots": self.n_host_snapshots,
            "host_pages": self.n_host_pages,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "notes": list(self.notes),
        }


def kv_format(config: EngineConfig) -> str:
    """Name of the KV pages' format in the ledger."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "fp32" if config.dtype == "float32" else "bf16"


def check_kv_format(config: EngineConfig, spec: Spec) -> None:
    """Raise ConfigError for heads that the config's KV format cannot hold."""
    if config.kv_cache_dtype in FORMATS and spec.head_dim % 32:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs heads of a multiple of 32 dimensions, these have "
            f"{spec.head_dim}; use auto."
        )


@dataclass(frozen=True)
class Sizes:
    """Bytes of each thing that a plan counts out."""

    page: float
    slot: float
    snapshot: float

    @classmethod
    def of(cls, config: EngineConfig, spec: Spec, *, draft_len: int, mtp: bool, kv: str | None = None) -> Sizes:
        element = float(getattr(torch, config.dtype).itemsize)
        state = "fp32" if config.state_dtype == "float32" else "bf16"
        build = Build(kv=kv or kv_format(config), state=state)
        return cls(
            page=kv_bytes_per_token(spec, build, mtp=mtp) * PAGE_SIZE,
            slot=slot_bytes(spec, 1 + draft_len, build, element=element),
            snapshot=slot_bytes(spec, 0, build, element=element),
        )


def plan_memory(
    config: EngineConfig,
    spec: Spec,
    machine: Machine,
    *,
    weights: float,
    draft_len: int,
    mtp: bool,
    kv: str | None = None,
) -> MemoryPlan:
    """Divide the machine's memory. `config` has a definite device and dtype; `kv` None stores KV in that dtype.

    Weights, workspace and graphs come first; then one answer; then what was asked for by number; the rest goes to
    slots (at most half of it), snapshots and pages, in this order. Raises ConfigError when it does not fit.
    """
    asked_len, positions = config.max_model_len, spec.max_positions
    if asked_len is not None and asked_len > positions:
        raise ConfigError(
            f"max_model_len {asked_len} is more than the checkpoint's {positions} positions (max_position_embeddings)."
        )
    check_kv_format(config, spec)
    sizes = Sizes.of(config, spec, draft_len=draft_len, mtp=mtp, kv=kv)
    longest, drafted = asked_len or positions, 2 * draft_len
    n_host = int(config.snapshot_host_gb * GB / sizes.snapshot) if config.prefix_caching else 0
    n_host_pages = int(config.kv_host_gb * GB / sizes.page) if config.prefix_caching else 0
    host_kv = n_host_pages * sizes.page
    host = n_host * sizes.snapshot + host_kv
    # which of the two flags to lower, and what the other takes
    flag, asked_gb, beside = "--snapshot-host-gb", config.snapshot_host_gb, host_kv
    if host_kv:
        flag, asked_gb, beside = "--kv-host-gb", config.kv_host_gb, n_host * sizes.snapshot
    element = float(getattr(torch, config.dtype).itemsize)
    graphs = GRAPH_GB * GB if config.fused else 0.0

    def workspace(n_seqs: int, context: int) -> float:
        return workspace_bytes(
            spec,
            rows=config.max_num_batched_tokens,
            window_rows=n_seqs * (1 + draft_len),
            context=min(context, positions),
            element=element,
            unpacked_experts=0 if machine.kind == "cpu" else UNPACKED_EXPERTS,
            unpacked_kv=config.kv_cache_dtype in FORMATS and (machine.kind == "cpu" or config.prefill_kernels is False),
        )

    def page_bytes(n: int) -> float:
        return n * sizes.page

    capacity = machine.capacity(config)
    if not machine.shared and host > max(machine.host_free - FLOOR_GB["cpu"] * GB / 2, 0.0):
        most = _down(max(machine.host_free - FLOOR_GB["cpu"] * GB / 2 - beside, 0.0) / GB)
        raise ConfigError(
            f"{flag} {asked_gb:g} does not fit: {machine.host_free / GB:.2f} GB of host "
            f"memory are available, of which 4 GB stay free. What fits: {flag} {most:g}."
        )
    # nobody's page, slot and snapshot, where padding rows write
    nobody = sizes.page + sizes.slot + sizes.snapshot
    shared_host = host if machine.shared else 0.0
    fixed = weights + graphs + nobody + shared_host

    def has_room(n_seqs: int, n_pages: int, context: int) -> bool:
        return fixed + workspace(n_seqs, context) + n_seqs * sizes.slot + page_bytes(n_pages) <= capacity

    def longest_that_fits() -> int:
        """Longest context for one answer, pages for itself alone; 0 when not even two pages fit."""
        low, high = 0, positions
        while low < high:
            middle = (low + high + 1) // 2
            fits = has_room(1, max(pages_for(middle + drafted), MIN_PAGES), middle)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def shortage(what: str, fits: str) -> ConfigError:
        return ConfigError(
            f"{what} does not fit: {capacity / GB:.2f} GB may be used on {machine.name} ({machine.free / GB:.2f} GB "
            f"free, floor {machine.floor(config) / GB:.2f} GB); weights take {weights / GB:.2f} GB, workspace "
            f"{workspace(1, MIN_PAGES * PAGE_SIZE) / GB:.2f} GB or more, an answer's state {sizes.slot / GB:.3f} GB, "
            f"1,000 tokens of KV {sizes.page / PAGE_SIZE * 1000 / GB:.3f} GB. {fits}"
        )

    if not has_room(1, MIN_PAGES, MIN_PAGES * PAGE_SIZE):
        need = fixed + workspace(1, MIN_PAGES * PAGE_SIZE) + sizes.slot + page_bytes(MIN_PAGES)
        rest = f"One answer of {MIN_PAGES * PAGE_SIZE} tokens needs {need / GB:.2f} GB."
        if has_host := shared_host and need - shared_host <= capacity:
            most = _down(max(capacity - need + shared_host - beside, 0.0) / GB)
            rest += f" What fits: {flag} {most:g}."
        if not has_host:
            rest += " No setting makes it fit: free memory, or serve a smaller build of the model ('onebox build')."
        raise shortage("The model", rest)

    limit = longest_that_fits()
    if config.kv_gb is not None:
        n_pages = int(config.kv_gb * GB / sizes.page)
        if n_pages < MIN_PAGES:
            raise ConfigError(
                f"--kv-gb {config.kv_gb:g} is not {MIN_PAGES} pages of {sizes.page / 1e6:.3f} MB; the least is "
                f"--kv-gb {_up(page_bytes(MIN_PAGES) / GB):g}."
            )
        pool_tokens = min(n_pages * PAGE_SIZE - drafted, positions)
        if asked_len is not None and asked_len > pool_tokens:
            need = _up(page_bytes(pages_for(asked_len + drafted)) / GB)
            other = f", or --kv-gb {need:g}" if asked_len <= limit else ""
            raise ConfigError(
                f"max_model_len {asked_len} needs {pages_for(asked_len + drafted)} KV pages of "
                f"{sizes.page / 1e6:.3f} MB; --kv-gb {config.kv_gb:g} is {n_pages}. What fits: --max-model-len "
                f"{pool_tokens}{other}."
            )
        context = asked_len or pool_tokens
        if not has_room(1, n_pages, context):
            most = capacity - fixed - workspace(1, min(context, limit)) - sizes.slot
            raise shortage(f"--kv-gb {config.kv_gb:g}", f"What fits: --kv-gb {_down(most / GB):g}.")
    else:
        if asked_len is not None and asked_len > limit:
            raise shortage(f"max_model_len {asked_len}", f"What fits: --max-model-len {limit}.")
        context = asked_len or min(positions, limit)
        n_pages = pages_for(context + drafted) if asked_len else pages_for(min(context, USUAL_CONTEXT) + drafted)

    # slots: as many as were asked for, as long as they take no more than half of what a choice of pages leaves
    n_seqs = config.max_num_seqs
    while n_seqs > 1:
        left = capacity - fixed - workspace(n_seqs, context) - page_bytes(n_pages)
        if n_seqs * sizes.slot <= (left if config.kv_gb is not None else left / 2):
            break
        n_seqs -= 1
    if config.kv_gb is not None:
        n_seqs = max(min(n_seqs, n_pages // MIN_PAGES), 1)
    notes = []
    if n_seqs < config.max_num_seqs:
        notes.append(
            f"max_num_seqs {config.max_num_seqs} is cut to {n_seqs}: an answer's state takes {sizes.slot / GB:.3f} GB "
            f"and {MIN_PAGES} of {n_pages} KV pages at the least, and {capacity / GB:.2f} GB may be used"
        )
    left = capacity - fixed - workspace(n_seqs, context) - n_seqs * sizes.slot - page_bytes(n_pages)
    n_snapshots = _snapshots(config, machine, sizes, left if config.kv_gb is not None else left / 2)
    left -= n_snapshots * sizes.snapshot
    if config.kv_gb is None:
        budget = left + page_bytes(n_pages)
        if machine.kind == "cpu":
            budget = min(budget, max(CPU_KV_GB * GB, page_bytes(pages_for(context + drafted))))
        n_pages = min(int(budget / sizes.page), n_seqs * pages_for(context + drafted))
    max_model_len = min(context, n_pages * PAGE_SIZE - drafted)
    if asked_len is None and max_model_len < positions:
        notes.append(
            f"max_model_len is {max_model_len}: {n_pages} KV pages hold no more; the checkpoint allows {positions}"
            + (f" (--kv-gb {_up(page_bytes(pages_for(longest + drafted)) / GB):g})" if limit == positions else "")
        )
    plan = MemoryPlan(
        machine=machine,
        capacity=capacity,
        floor=machine.floor(config),
        weights=weights,
        workspace=workspace(n_seqs, max_model_len),
        graphs=graphs,
        states=(1 + n_seqs) * sizes.slot,
        snapshots=(1 + n_snapshots) * sizes.snapshot,
        kv=page_bytes(1 + n_pages),
        host_snapshots=n_host * sizes.snapshot,
        host_kv=host_kv,
        n_pages=n_pages,
        n_snapshots=n_snapshots,
        n_host_snapshots=n_host if n_snapshots else 0,
        n_host_pages=n_host_pages if n_snapshots else 0,
        max_num_seqs=n_seqs,
        max_model_len=max_model_len,
        kv_format=kv or (config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype),
        notes=tuple(notes),
    )
    assert plan.used <= capacity, plan
    return plan


def users_that_fit(
    config: EngineConfig,
    spec: Spec,
    machine: Machine,
    *,
    context: int,
    weights: float,
    draft_len: int,
    mtp: bool,
    kv: str | None = None,
    most: int = 4096,
) -> int:
    """How many answers of `context` tokens each `plan_memory` takes at once, `most` at the most; 0 when not one."""
    sizes = Sizes.of(config, spec, draft_len=draft_len, mtp=mtp, kv=kv)
    pages = max(pages_for(context + 2 * draft_len), MIN_PAGES)

    def fits(n: int) -> bool:
        kv_gb = n * pages * sizes.page * (1 + 1e-9) / GB
        wanted = replace(config, max_num_seqs=n, max_model_len=context, kv_gb=kv_gb, snapshots=None)
        try:
            made = plan_memory(wanted, spec, machine, weights=weights, draft_len=draft_len, mtp=mtp, kv=kv)
        except ConfigError:
            return False
        return made.max_num_seqs == n

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _snapshots(config: EngineConfig, machine: Machine, sizes: Sizes, room: float) -> int:
    """Device snapshots within `room` bytes; none without a prefix cache."""
    if not config.prefix_caching:
        return 0
    most = int(max(room, 0.0) / sizes.snapshot)
    if config.snapshots is not None:
        if config.snapshots > most:
            raise ConfigError(
                f"snapshots {config.snapshots} of {sizes.snapshot / GB:.3f} GB do not fit beside the rest; {most} do."
            )
        return config.snapshots
    return min(max(int(SNAPSHOT_GB[machine.kind] * GB / sizes.snapshot), MIN_SNAPSHOTS), MAX_SNAPSHOTS, most)


@dataclass(frozen=True)
class Facts:
    """What the headers of a checkpoint say, before any weight is read."""

    spec: Spec
    mtp: bool
    report: LoadReport

    @classmethod
    def read(cls, config: EngineConfig) -> Facts:
        """Raises CheckpointError for a folder that could not be served."""
        reader = WeightReader.open(config.model)
        spec = Spec.from_config(reader.config)
        mtp = takes_mtp(reader, spec, wants_mtp(config))
        reader.shards.close()
        return cls(spec, mtp, check_complete(config.model, mtp=mtp))


def wants_mtp(config: EngineConfig) -> bool | None:
    """What `load_model` is asked about the MTP head."""
    if config.draft_method != "mtp":
        return False
    return {None: None, 0: False}.get(config.draft_len, True)


def weight_bytes(spec: Spec, formats: Mapping[str, float], config: EngineConfig, *, mtp: bool) -> float:
    """Weights in memory: packed ones as stored on a GPU, all of them dense in the run's dtype on a CPU."""
    element = float(getattr(torch, config.dtype).itemsize)
    if config.device == "cpu":
        return resident_bytes(spec, Build(), slots=0, mtp=mtp).weights / 2 * element
    stored = {"bf16": 2.0, "fp32": 4.0}
    return sum(size / stored[name] * element if name in stored else size for name, size in formats.items())


def plan_for(config: EngineConfig, machine: Machine | None = None) -> MemoryPlan:
    """The plan of a config with a definite device, from the checkpoint's headers and the machine as it is now."""
    facts = Facts.read(config)
    return plan_of(config, facts.spec, facts.report, facts.mtp, machine or Machine.probe(torch.device(config.device)))


def plan_loaded(config: EngineConfig, loaded: Loaded) -> MemoryPlan:
    """The plan around a model that is in memory already."""
    model, machine = loaded.model, Machine.probe(torch.device(config.device))
    weights = weight_bytes(model.spec, loaded.report.formats, config, mtp=model.mtp is not None)
    machine = replace(machine, free=machine.free + weights)
    return plan_of(config, model.spec, loaded.report, model.mtp is not None, machine)


def drafts_of(config: EngineConfig, *, mtp: bool) -> int:
    """Drafts a step: what was asked for, else the default where there is something to draft with."""
    if config.draft_len is not None:
        return config.draft_len
    return DEFAULT_DRAFT_LEN if mtp or config.draft_method != "mtp" else 0


def plan_of(config: EngineConfig, spec: Spec, report: LoadReport, mtp: bool, machine: Machine) -> MemoryPlan:
    draft_len = drafts_of(config, mtp=mtp)
    weights = weight_bytes(spec, report.formats, config, mtp=mtp)
    return plan_memory(config, spec, machine, weights=weights, draft_len=draft_len, mtp=mtp)


def announce(plan: MemoryPlan) -> None:
    """Say the plan: a table on a terminal, else log lines; what was cut is a warning."""
    if logger.isEnabledFor(logging.INFO):
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")  # a bar of the process that waits for this one may stand there
            table(plan, sys.stderr)
        else:
            for line in plan.lines():
                logger.info(line)
    for note in plan.notes:
        logger.warning(note)


def table(plan: MemoryPlan, stream: TextIO) -> None:
    """Print the plan as a table."""
    from rich.console import Console
    from rich.table import Table

    made = Table(title="memory plan", caption=f"context {plan.max_model_len} tokens, prompt and answer together")
    made.add_column("use")
    made.add_column("GB", justify="right")
    made.add_column("what for")
    for name, size, what in plan.rows():
        made.add_row(name, f"{size / GB:.3f}", what)
    Console(file=stream).print(made)


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Bytes of host memory in total and available: MemAvailable, and no more than a container's limit leaves."""
    found: dict[str, float] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = float(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        found = {}
    if "MemTotal" not in found or "MemAvailable" not in found:
        raise ConfigError("/proc/meminfo cannot be read, and how much memory is free is not known; run on Linux.")
    total, available = found["MemTotal"], found["MemAvailable"]
    for limit, usage, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        group = root / "sys/fs/cgroup"
        try:
            most, used = float((group / limit).read_text()), float((group / usage).read_text())
            stat = dict(line.split() for line in (group / cache).read_text().splitlines())
        except (OSError, ValueError):  # no such controller, or no limit ("max")
            continue
        if most < total:
            clean = float(stat.get("inactive_file", 0.0))  # page cache that goes when memory is asked for
            total, available = most, min(available, most - used + clean)
    return total, available


def _down(gigabytes: float) -> float:
    """Three significant digits, never more than the value."""
    return _rounded(gigabytes, math.floor)


def _up(gigabytes: float) -> float:
    """Three significant digits, never less than the value."""
    return _rounded(gigabytes, math.ceil)


def _rounded(value: float, how: Any) -> float:
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{how(value / unit - 1e-9 if how is math.ceil else value / unit + 1e-9) * unit:.6g}")
