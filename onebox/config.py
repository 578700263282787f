"""What a run is configured with, frozen. Defaults here, `resolve()` fills what depends on machine and checkpoint.

This file alone reads the environment.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from onebox.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_DRAFT_LEN = 4
STATE_DTYPES = ("float32", "bfloat16")
PREFILL_ATTENTION = ("dense", "minference", "auto")
DRAFT_METHODS = ("mtp", "ngram")
SMALL_BYTES = 1e9  # weights that one CPU thread reads at a useful speed
KV_CACHE_DTYPES = ("auto", "bf16", "fp8", "k8v4", "tq4", "tq3.5", "tq3", "tq2.5")


def _waits_spin() -> bool:
    """Whether torch's threads spin while they wait. They sleep if that is said before torch is loaded, so say it."""
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        return True
    return os.environ.setdefault("OMP_WAIT_POLICY", "passive").lower() != "passive"


WAITS_SPIN = _waits_spin()


@dataclass(frozen=True)
class EngineConfig:
    """One engine: which checkpoint, where, and how much of everything. Lengths in tokens, sizes in GB (1e9 bytes).

    `gpu_memory_utilization` is the share of the device's memory that everything here may use, as in vLLM;
    `memory_floor_gb` is left free of what is available (None: 8 on unified memory, up to 8 on a CPU, 1 beside it).
    `state_dtype` bfloat16 halves recurrent states; they are rounded at every step, so text then depends on draft length
    and chunks (docs/log.md has the error).
    `kv_cache_dtype` is what keys and values are kept in: "auto" is the arithmetic's own type, the others are the page
    formats of docs/long-context.md.
    `kv_host_gb` of host memory keep KV pages of prefixes that were pushed out, `snapshot_host_gb` their states.
    `draft_len` None means the checkpoint's best known (2 with an MTP head, else 0). `draft_method` "ngram" drafts what
    followed the newest `lookup_min` to `lookup_max` tokens where they stood before. `adaptive_drafts` lets each request
    draft less than `draft_len`, by what was kept of its drafts and what the ledger says they cost. `draft_vocab` lets
    drafts come from the first so many tokens alone; what is said stays the same.
    `fused` runs decode windows through the Triton kernels, where they can read the weights, and `cuda_graphs` as one
    captured graph a step, with MTP drafts of one length: None means on CUDA, in 16 bits.
    `prefill_kernels` runs prompts' token mixers through Triton kernels too, on CUDA in 16 bits; None tries them first.
    `prefill_attention` "minference" lets the heads of prompts read by sparse patterns (`sparse_table`, a JSON file;
    else one for all) in spans that begin at `sparse_from` tokens or later (None: 16,384); "auto" does so where sparse
    is expected to pay (None: 65,536).
    `self_check` refuses a checkpoint whose logits for a fixed prompt are wrong, once it is loaded (model/selfcheck.py).
    A server runs the engine in a process of its own unless `single_process`, and restarts it when one step lasts
    `stall_s` seconds. Raises ConfigError naming the value out of range.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_waiting: int = 256
    draft_len: int | None = None
    draft_method: str = "mtp"
    lookup_max: int = 4
    lookup_min: int = 2
    adaptive_drafts: bool = False
    draft_vocab: int | None = None
    kv_gb: float | None = None
    gpu_memory_utilization: float | None = None
    memory_floor_gb: float | None = None
    prefix_caching: bool = True
    snapshot_every: int = 2048
    snapshots: int | None = None
    snapshot_host_gb: float = 0.0
    kv_host_gb: float = 0.0
    prefill_attention: str = "dense"
    sparse_from: int | None = None
    sparse_table: str | None = None
    prefill_kernels: bool | None = None
    fused: bool | None = None
    cuda_graphs: bool | None = None
    debug: bool = False
    self_check: bool = True
    single_process: bool = False
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {want}, got {getattr(self, name)!r}.")

        check(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None, "device", "auto, cpu, cuda or cuda:N")
        check(self.dtype in DTYPES, "dtype", "one of " + ", ".join(DTYPES))
        check(self.state_dtype in STATE_DTYPES, "state_dtype", "one of " + ", ".join(STATE_DTYPES))
        check(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", "one of " + ", ".join(KV_CACHE_DTYPES))
        check(
            self.prefill_attention in PREFILL_ATTENTION, "prefill_attention", "one of " + ", ".join(PREFILL_ATTENTION)
        )
        check(self.sparse_from is None or self.sparse_from >= 0, "sparse_from", "0 or more")
        if self.prefill_attention == "dense" and (self.sparse_from is not None or self.sparse_table is not None):
            name = "sparse_from" if self.sparse_from is not None else "sparse_table"
            raise ConfigError(f"{name} needs prefill_attention minference or auto; dense reads everything.")
        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2")
        check(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        check(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", "at least 1")
        check(self.max_waiting >= 0, "max_waiting", "0 or more")
        check(
            self.draft_len is None or 0 <= self.draft_len <= MAX_DRAFT_LEN,
            "draft_len",
            f"between 0 and {MAX_DRAFT_LEN} (num_speculative_tokens)",
        )
        check(self.draft_method in DRAFT_METHODS, "draft_method", "one of " + ", ".join(DRAFT_METHODS))
        check(self.lookup_min >= 1, "lookup_min", "at least 1 (prompt_lookup_min)")
        check(self.lookup_min <= self.lookup_max <= 64, "lookup_max", "prompt_lookup_min to 64 (prompt_lookup_max)")
        check(self.draft_vocab is None or self.draft_vocab >= 1, "draft_vocab", "at least 1")
        check(self.kv_gb is None or 0 < self.kv_gb < math.inf, "kv_gb", "above 0 and finite")
        share = self.gpu_memory_utilization
        check(share is None or 0 < share <= 1, "gpu_memory_utilization", "above 0 and at most 1")
        floor = self.memory_floor_gb
        check(floor is None or 0 <= floor < math.inf, "memory_floor_gb", "0 or more and finite")
        check(self.snapshot_every >= 64, "snapshot_every", "at least 64")
        check(0 <= self.snapshot_host_gb < math.inf, "snapshot_host_gb", "0 or more and finite")
        check(0 <= self.kv_host_gb < math.inf, "kv_host_gb", "0 or more and finite")
        check(0 < self.stall_s < math.inf, "stall_s", "above 0 and finite")
        check(self.snapshots is None or self.snapshots >= 0, "snapshots", "0 or more")

    def resolve_device(self, *, cuda_devices: int) -> EngineConfig:
        """The same config with `device` and `dtype` made definite: fp32 arithmetic on a CPU, bf16 on a GPU."""
        device = self.device if self.device != "auto" else ("cuda" if cuda_devices else "cpu")
        if device.startswith("cuda") and not cuda_devices:
            raise ConfigError(f"device {device!r}: no CUDA device is visible here; use --device cpu.")
        if int(device.partition(":")[2] or 0) >= max(cuda_devices, 1):
            raise ConfigError(f"device {device!r}: the last CUDA device visible here is cuda:{cuda_devices - 1}.")
        if self.fused and not device.startswith("cuda"):
            raise ConfigError(f"fused decode kernels need a CUDA device, not {device!r}; leave fused off.")
        if self.state_dtype != "float32" and device != "cpu":
            raise ConfigError("state_dtype bfloat16 is served on a CPU alone: the kernels keep fp32 states.")
        dtype = self.dtype if self.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
        fast = device.startswith("cuda") and dtype != "float32"
        fused = fast if self.fused is None else self.fused
        in_graph = self.draft_method == "mtp" and not self.adaptive_drafts
        if self.cuda_graphs and not in_graph:
            raise ConfigError(
                "cuda_graphs run MTP drafts of one length; leave out ngram and adaptive drafts, or graphs."
            )
        graphs = fast and fused and in_graph if self.cuda_graphs is None else self.cuda_graphs
        return replace(self, device=device, dtype=dtype, fused=fused, cuda_graphs=graphs)


def bundled_model() -> str:
    """Folder of the model that comes with the package."""
    return str(files("onebox") / "models" / "tiny")


def environment_keys() -> tuple[str, ...]:
    """API keys of ONEBOX_API_KEY (several: by commas), or of VLLM_API_KEY where that is not set."""
    value = os.environ.get("ONEBOX_API_KEY") or os.environ.get("VLLM_API_KEY") or ""
    return tuple(key.strip() for key in value.split(",") if key.strip())


def ray_environment(names: Sequence[str]) -> dict[str, str]:
    """Those of a Ray deployment's settings that the environment has: ONEBOX_RAY_REPLICAS for `replicas`."""
    found = {name: os.environ.get(f"ONEBOX_RAY_{name.upper()}") for name in names if name != "api_keys"}
    return {name: value for name, value in found.items() if value}


def quiet_ray() -> None:
    """Ray that is begun here tells nobody of its use, unless the environment says that it may."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def upstream_key() -> str | None:
    """ONEBOX_UPSTREAM_KEY: the key for the server behind, which a command line would show to every user."""
    return os.environ.get("ONEBOX_UPSTREAM_KEY") or None


def fingerprints() -> Path:
    """Where the logits of self-checks are kept: ONEBOX_CACHE, else `onebox` in XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("ONEBOX_CACHE")
    if cache:
        return Path(cache) / "fingerprints"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onebox" / "fingerprints"


def cpu_threads(weight_bytes: float | None = None) -> int:
    """Threads for CPU arithmetic: OMP_NUM_THREADS when set, else the cores this process may use.

    One for small weights where waiting threads spin (torch was loaded before onebox): beside other busy processes two
    threads that spin took 65 s where one took 1 s.
    """
    value = os.environ.get("OMP_NUM_THREADS", "")
    if value:
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"OMP_NUM_THREADS must be a whole number above 0, got {value!r}.")
        return int(value)
    if WAITS_SPIN and weight_bytes is not None and weight_bytes < SMALL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
