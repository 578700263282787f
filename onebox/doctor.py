"""`onebox doctor`: what this machine has, what is wrong with it, and the way out of each finding.

Takes a checkpoint folder and a port, gives Findings. Nothing is changed: one file of the disk test is written beside
the model hub's cache and removed. Paths under /proc and /sys are read below `root`, which tests replace.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from onebox.config import EngineConfig, cpu_threads, fingerprints
from onebox.errors import ConfigError, OneboxError

PYTHON, CAPABILITY = (3, 11), (8, 0)
FAILED = 3  # exit status: something keeps models from being served
DISK_BYTES = 64_000_000
SLOW_DISK = 0.5e9  # bytes a second; 66 GB of weights then take over two minutes
LOW_DISK = 20e9  # bytes; the smallest published hybrid build is 19.4 GB
BUSY_CACHE = 0.5  # of unified memory
CLOCK_SHARE = 0.5  # of the highest clock, under load
PORTS_TRIED = 20
SELF_TEST_TOKENS = 24
PROMPT = "The capital of France is"

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One look. `note`: it works, though not as well as it could. `problem`: nothing can be served before `fix`."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def lines(self) -> Iterator[str]:
        yield f"{self.status:8} {self.name:12} {self.found}"
        if self.fix:
            yield f"{'':8} {'':12} -> {self.fix}"


def examine(
    model: str,
    *,
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    self_test: bool = True,
    root: Path = Path("/"),
) -> Iterator[Finding]:
    """Every finding, one after another, the cheap ones first. A look that fails is itself a finding."""
    looks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch", lambda: check_torch(root)),
        ("triton", check_triton),
        ("processor", lambda: check_processor(root)),
        ("memory", lambda: check_memory(root)),
        ("gpu", lambda: check_gpus(root)),
        ("disk", lambda: check_disk(hub_cache())),
        ("hub cache", lambda: check_hub(hub_cache())),
        ("checks", lambda: check_writable(fingerprints())),
        ("port", lambda: check_port(host, port)),
        ("plan", lambda: check_plan(model, device)),
    ]
    if self_test:
        looks.append(("self-test", lambda: check_engine(model, device)))
    for name, look in looks:
        try:
            found = look()
        except OneboxError as e:
            found = Finding(name, "problem", " ".join(str(e).split()), "the message says what would work")
        except OSError as e:
            found = Finding(
                name, "note", f"could not be looked at: {e.strerror or e}", "run it as a user who may read it"
            )
        yield from found if isinstance(found, list) else [found]


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if tuple(version[:2]) < PYTHON:
        want = ".".join(map(str, PYTHON))
        return Finding("python", "problem", found, f"install Python {want} or newer and make a new environment")
    if platform.system() != "Linux":
        return Finding("python", "note", found, "only Linux was tried; memory is read from /proc")
    return Finding("python", "ok", found)


def check_packages(required: Sequence[str] | None = None) -> Finding:
    """Whether every dependency is there in a version that is new enough."""
    if required is None:
        try:
            required = metadata.requires("onebox") or []
        except metadata.PackageNotFoundError:
            return Finding(
                "packages", "note", "onebox itself is not installed, its needs were not looked at", "pip install ."
            )
    wrong, n = [], 0
    for line in required:
        name, least, extra = requirement(line)
        if extra:
            continue
        n += 1
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if least and numbers(have) < numbers(least):
            wrong.append(f"{name} {have} is older than {least}")
    if wrong:
        return Finding("packages", "problem", "; ".join(wrong), "pip install --upgrade onebox")
    return Finding("packages", "ok", f"{n} dependencies, all new enough")


def requirement(line: str) -> tuple[str, str, bool]:
    """Name, least version ('' for any), and whether it belongs to an extra: of a line such as `torch>=2.11`."""
    found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:[^;]*?>=\s*([0-9][0-9.]*))?", line)
    assert found is not None, line
    return found[1], found[2] or "", "extra ==" in line


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_torch(root: Path = Path("/")) -> Finding:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{torch.__version__}, {built}"
    driver = driver_version(root)
    if driver and not torch.version.cuda:
        return Finding("torch", "problem", f"{found}; an NVIDIA driver {driver} is there", "install torch's CUDA build")
    if driver and not torch.cuda.is_available():
        return Finding(
            "torch", "problem", f"{found}, and no device visible through driver {driver}",
            "update the driver, or let the container see the device (--gpus all); CUDA_VISIBLE_DEVICES may hide it",
        )  # fmt: skip
    return Finding("torch", "ok", found)


def check_triton() -> Finding:
    import torch

    try:
        import triton
    except ImportError as e:
        if torch.cuda.is_available():
            return Finding("triton", "problem", f"cannot be imported ({e})", "pip install triton")
        return Finding("triton", "ok", "not installed; a CPU does without it")
    return Finding("triton", "ok", f"{triton.__version__}" + ("" if torch.cuda.is_available() else ", unused on a CPU"))


def driver_version(root: Path = Path("/")) -> str:
    """The NVIDIA kernel driver's version, '' without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"(?:Kernel Module|for \S+)\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else "of unknown version"


def check_processor(root: Path = Path("/")) -> Finding:
    name = platform.machine()
    try:
        text = (root / "proc/cpuinfo").read_text()
        name = next(
            (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), name
        )
    except OSError:
        pass
    threads = cpu_threads()
    found = f"{name}, {threads} threads for arithmetic"
    try:
        load = float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        load = 0.0
    if load > threads:
        return Finding(
            "processor", "note", f"{found}, load {load:.1f}", "other work shares the cores; speeds will be low"
        )
    try:
        governor = (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        governor = ""
    if governor == "powersave":
        return Finding("processor", "note", f"{found}, governor powersave", "cpupower frequency-set -g performance")
    return Finding("processor", "ok", found)


def check_memory(root: Path = Path("/")) -> Finding:
    """Host memory, and whether the page cache holds much of it where a device would want it."""
    import torch

    from onebox.engine.plan import host_memory

    total, available = host_memory(root)
    found = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f}"
    cached = page_cache(root)
    found += f", {cached / 1e9:.1f} GB page cache"
    if available < 2e9:
        return Finding("memory", "problem", found, "end other programs; the bundled model alone wants 2 GB")
    unified = torch.cuda.is_available() and torch.cuda.get_device_properties(0).is_integrated
    if unified and cached > BUSY_CACHE * total:
        return Finding(
            "memory", "note", f"{found}; device and host share it, and CUDA counts the page cache as taken",
            "sync; echo 3 > /proc/sys/vm/drop_caches as root, before other CUDA programs start",
        )  # fmt: skip
    return Finding("memory", "ok", found)


def page_cache(root: Path = Path("/")) -> float:
    """Bytes of clean and dirty file pages."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("Cached:"):
            return float(line.split()[1]) * 1024
    return 0.0


def check_gpus(root: Path = Path("/")) -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        seen = driver_version(root)
        if seen:
            return [Finding("gpu", "problem", f"driver {seen}, no device visible", "see torch above")]
        return [
            Finding("gpu", "note", "none: models run on the CPU", "a CUDA device of capability 8.0 or more for speed")
        ]
    from onebox.engine.plan import Machine

    found = []
    for i in range(torch.cuda.device_count()):
        machine = Machine.probe(torch.device("cuda", i))
        capability = torch.cuda.get_device_capability(i)
        text = (
            f"{machine.name}, capability {capability[0]}.{capability[1]}, {machine.free / 1e9:.1f} GB free of "
            f"{machine.total / 1e9:.1f}, {machine.kind} memory, driver {driver_version(root) or 'unknown'}"
        )
        name = f"gpu {i}"
        if capability < CAPABILITY:
            found.append(Finding(name, "problem", text, "the kernels need capability 8.0; serve with --device cpu"))
        else:
            found.append(Finding(name, "ok", text))
    return found + check_clocks(query_smi())


SMI_FIELDS = (
    "index",
    "clocks.sm",
    "clocks.max.sm",
    "utilization.gpu",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)


def query_smi() -> str:
    """Rows of nvidia-smi for SMI_FIELDS, '' where it cannot be run."""
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_clocks(rows: str) -> list[Finding]:
    """Of each row: whether the device is held back, by a limit it reports or by a low clock while it works."""
    found = []
    for row in filter(str.strip, rows.splitlines()):
        parts = [part.strip() for part in row.split(",")]
        if len(parts) != len(SMI_FIELDS) or not all(part.isdigit() for part in parts[:5]):
            continue
        index, clock, highest, busy, celsius = (int(part) for part in parts[:5])
        reasons = int(parts[5], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", parts[5]) else 0
        text = f"{clock} of {highest} MHz, {busy} % busy, {celsius} C"
        if reasons & ~0x1:  # all but idle
            held = f"{text}, held back ({parts[5]})"
            found.append(
                Finding(
                    f"clocks {index}",
                    "note",
                    held,
                    "nvidia-smi -q -d PERFORMANCE says by what: heat, power or a set clock",
                )
            )
        elif busy > 50 and clock < CLOCK_SHARE * highest:
            found.append(Finding(f"clocks {index}", "note", text, "nvidia-smi -rgc as root resets a locked clock"))
        else:
            found.append(Finding(f"clocks {index}", "ok", text))
    return found


def hub_cache() -> Path:
    """Where the model hub's client keeps what it fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser()


def standing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    return next((p for p in (path, *path.parents) if p.is_dir()), Path("/"))


def check_disk(cache: Path, nbytes: int = DISK_BYTES) -> Finding:
    """Free space where checkpoints go, and how fast a file is read back once the page cache has let go of it."""
    folder = standing(cache)
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk",
            "note",
            f"{free / 1e9:.0f} GB free at {folder}, which cannot be written",
            "set HF_HOME to a folder of yours",
        )
    if free < 2 * nbytes:
        return Finding(
            "disk",
            "problem",
            f"{free / 1e9:.2f} GB free at {folder}",
            "free disk space, or set HF_HOME to another disk",
        )
    rate = read_rate(folder, nbytes)
    found = f"{free / 1e9:.0f} GB free at {folder}, {rate / 1e9:.2f} GB/s read"
    if free < LOW_DISK:
        return Finding("disk", "note", found, "a 35B build is 19 GB, a 122B one 66 GB: set HF_HOME to a larger disk")
    if rate < SLOW_DISK:
        return Finding(
            "disk",
            "note",
            found,
            f"66 GB of weights take {66e9 / rate:.0f} s to read: keep checkpoints on a faster disk",
        )
    return Finding("disk", "ok", found)


def read_rate(folder: Path, nbytes: int) -> float:
    """Bytes a second of a fresh file read back. The page cache is asked to drop it; not every file system does."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".onebox-doctor-") as file:
        for _ in range(nbytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start, read = time.perf_counter(), 0
        while part := os.read(file.fileno(), 8 << 20):
            read += len(part)
        return read / max(time.perf_counter() - start, 1e-9)


def check_hub(cache: Path) -> Finding:
    if not cache.is_dir():
        return Finding("hub cache", "ok", f"{cache} is made when something is fetched")
    fetched = [path for path in cache.iterdir() if path.name.startswith("models--")]
    partial = sum(1 for path in fetched for _ in (path / "blobs").glob("*.incomplete"))
    found = f"{len(fetched)} models at {cache}"
    if not os.access(cache, os.W_OK):
        return Finding(
            "hub cache",
            "note",
            f"{found}, which cannot be written",
            "set HF_HOME to a folder of yours, or own this one",
        )
    if partial:
        return Finding(
            "hub cache",
            "note",
            f"{found}, {partial} files not fetched to the end",
            "fetch again: it goes on where it was",
        )
    return Finding("hub cache", "ok", found)


def check_writable(folder: Path) -> Finding:
    """Where the logits of self-checks are kept."""
    at = standing(folder)
    if not os.access(at, os.W_OK):
        return Finding(
            "checks", "note", f"{folder} cannot be written: logits of self-checks are not kept", "set ONEBOX_CACHE"
        )
    return Finding("checks", "ok", f"logits of self-checks are kept in {folder}")


def check_port(host: str, port: int) -> Finding:
    """Whether a server could listen there; else a port near it where one could."""

    def free(number: int) -> OSError | None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                s.bind((host, number))
                s.listen(1)
            except OSError as e:
                return e
        return None

    error = free(port)
    if error is None:
        return Finding("port", "ok", f"{host}:{port} is free")
    other = next((n for n in range(port + 1, min(port + 1 + PORTS_TRIED, 65536)) if free(n) is None), None)
    way_out = (
        f"serve with --port {other}, or end what listens there" if other else "serve with --port 0 or another --host"
    )
    return Finding("port", "problem", f"{host}:{port}: {error.strerror or error}", way_out)


def engine_config(model: str, device: str) -> EngineConfig:
    import torch

    return EngineConfig(model=model, device=device).resolve_device(cuda_devices=torch.cuda.device_count())


def check_plan(model: str, device: str) -> Finding:
    """Whether the checkpoint fits this machine as it is now. Raises ConfigError or CheckpointError with what would."""
    from onebox.engine.plan import plan_for

    plan = plan_for(engine_config(model, device))
    found = (
        f"{Path(model).name} fits: {plan.weights / 1e9:.2f} GB of weights, {plan.used / 1e9:.2f} of "
        f"{plan.capacity / 1e9:.2f} GB, {plan.max_num_seqs} answers at a time, {plan.max_model_len} tokens each"
    )
    return Finding("plan", "note" if plan.notes else "ok", found, "; ".join(plan.notes))


def check_engine(model: str, device: str) -> Finding:
    """Load, check the logits, and answer once without drafts and once with: the text must be the same."""
    start = time.perf_counter()
    try:
        plain, drafted, tok_s = answers(model, device)
    except OneboxError:
        raise
    except Exception as e:  # whatever a broken driver, compiler or library does to a first step
        return Finding(
            "self-test",
            "problem",
            f"{type(e).__name__}: {' '.join(str(e).split())[:300]}",
            "try --device cpu; report device, driver, torch and triton",
        )
    took = time.perf_counter() - start
    if plain != drafted:
        return Finding(
            "self-test",
            "problem",
            "text with drafts differs from text without",
            "serve with 0 drafts and report device, driver, torch and triton",
        )
    same = f"{Path(model).name} loaded and answered, the same with and without drafts"
    return Finding("self-test", "ok", f"{same}, {tok_s:.0f} tokens/s, {took:.1f} s in all")


def answers(model: str, device: str) -> tuple[list[int], list[int], float]:
    """Greedy tokens after PROMPT without and with drafts, and tokens a second of the latter's decoding."""
    from dataclasses import replace

    from tokenizers import Tokenizer

    from onebox.engine.engine import Engine
    from onebox.request import Request, SamplingParams

    # room for both engines: what a plan has over goes to pages, unless it is told how much
    config = replace(engine_config(model, device), max_num_seqs=1, max_model_len=256, kv_gb=0.5, snapshots=0)
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a checkpoint to serve has its tokenizer.")
    prompt = tuple(Tokenizer.from_file(str(path)).encode(PROMPT).ids)
    params = SamplingParams(max_tokens=SELF_TEST_TOKENS, temperature=0.0, ignore_eos=True)
    first = Engine(replace(config, draft_len=0))
    second = Engine(replace(config, draft_len=None, self_check=False), first.loaded)
    said, seconds = [], 0.0
    for engine in (first, second):
        engine.add(Request("self-test", prompt, params))
        tokens = list[int]()
        while not tokens:
            tokens += [t for output in engine.step() for t in output.tokens]
        at, start = len(tokens), time.perf_counter()
        while engine.has_work:
            tokens += [t for output in engine.step() for t in output.tokens]
        seconds = time.perf_counter() - start
        said.append(tokens)
    return said[0], said[1], (len(said[1]) - at) / max(seconds, 1e-9)


def report(findings: Sequence[Finding], version: str) -> dict[str, Any]:
    """What --json prints."""
    failed = [f.name for f in findings if f.status == "problem"]
    return {"onebox": version, "ok": not failed, "problems": failed, "findings": [asdict(f) for f in findings]}
