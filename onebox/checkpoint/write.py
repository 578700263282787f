"""Build: base (and donor) -> one checkpoint folder, file by file, resumable after a kill at any moment.

A file is written under a temporary name, synced, hashed from disk and renamed; then the job file says so. The manifest
comes last, and a folder without it is not done. The same sources and options give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onebox
from onebox.checkpoint import manifest
from onebox.checkpoint.autoround import int4_to_gptq, quantize_int4
from onebox.checkpoint.fp8_block import quantize_fp8
from onebox.checkpoint.hybrid import Item, Matrix, Plan, PlanOptions, describe, folder_files, plan, recipe_for
from onebox.checkpoint.int8_head import quantize_int8
from onebox.checkpoint.names import is_vision
from onebox.checkpoint.nvfp4 import global_scale_for, quantize_nvfp4
from onebox.checkpoint.progress import Progress, Silent
from onebox.checkpoint.scheme import Scheme
from onebox.checkpoint.shards import INDEX, header_bytes
from onebox.checkpoint.sources import Source, open_base, open_donor
from onebox.checkpoint.values import WAY_OUT, is_finite
from onebox.errors import CheckpointError, ConfigError
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.weights import Packed, Weight, dequantize, tensors, with_tensors
from onebox.ledger import Build

CHUNK = 1 << 24  # bytes copied at a time
SYNC_EVERY = 1 << 28

# Name, first row and rows of a 16-bit matrix -> their levels, better than round to nearest; None: round to nearest
Quantizer = Callable[[str, int, Tensor, Scheme], Packed | None]


@dataclass(frozen=True)
class BuildOptions:
    """What to make. `recipe` is a name of the ledger's BUILDS or a Build; None chooses by the base.

    `mtp`: recipe, keep, drop, or a format for the whole drafter. `group`: columns an INT4 scale made here serves.
    """

    recipe: str | Build | None = None
    mtp: str = "recipe"
    group: int = 128
    vision: bool = True
    shard_bytes: int = 4_000_000_000
    revision: str | None = None
    donor: str | None = None
    donor_revision: str | None = None
    calibration: str | None = None  # for the manifest: what the Quantizer was made from


@dataclass(frozen=True)
class BuildResult:
    """A finished build. `errors` is the relative RMS of each matrix quantised here."""

    path: Path
    plan: Plan
    errors: dict[str, float]
    reused: int  # files that an earlier run had finished


@dataclass(frozen=True)
class Prepared:
    """Sources, checked and planned: what --dry-run shows and `build` runs."""

    base: Source
    donor: Source | None
    plan: Plan
    options: BuildOptions
    state: dict[str, dict[str, list[int]]]  # of each source when it was opened

    def fingerprint(self) -> dict[str, Any]:
        """What decides the output's bytes; the head of the manifest."""
        recipe = self.plan.recipe
        kept = ("mtp", "group", "vision", "shard_bytes", "calibration")
        options = {name: getattr(self.options, name) for name in kept}
        return {
            "onebox": onebox.__version__,
            "recipe": describe(recipe),
            "formats": asdict(recipe),
            "options": options,
            "base": self.base.describe(),
            "donor": self.donor.describe() if self.donor else None,
        }

    def identity(self) -> str:
        """A hash of the fingerprint."""
        return hashlib.sha256(_json(self.fingerprint())).hexdigest()

    def check_sources(self, out: Path, before: object) -> None:
        """Refuse to go on in `out` when a file read is not the one it was when that build began."""
        now = _state(self.base, self.donor)
        for what, files in now.items():
            old = before.get(what) if isinstance(before, dict) else None
            old = old if isinstance(old, dict) else {}
            changed = sorted(name for name in files.keys() | old.keys() if files.get(name) != old.get(name))
            if changed:
                raise ConfigError(
                    f"{out}: {changed[0]} of the {what} changed since this build began; remove {out} and build again."
                )

    def summary(self) -> Iterator[str]:
        """Totals of the plan, for people."""
        for (part, kind), size in sorted(self.plan.totals().items(), key=lambda entry: -entry[1]):
            yield f"{part:12} {kind:7} {size / 1e9:9.3f} GB"
        yield f"total {self.plan.nbytes / 1e9:.3f} GB in {len(self.plan.shards)} files, {len(self.plan.items)} items"
        yield from self.plan.donor_notes
        kept = [item for item in self.plan.items if item.note]
        for item in kept[:5]:
            yield f"{item.name}: {item.note}"
        if len(kept) > 5:
            yield f"and {len(kept) - 5} more notes (--verbose lists every tensor)"

    def seconds(self, bytes_per_s: float = 1e9) -> float:
        """A guess of the time: a timed sample of the quantisers, and reading and writing at `bytes_per_s`."""
        import time

        sample = torch.linspace(-1, 1, 1 << 18).sin().view(256, 1024)
        made = [item for item in self.plan.items if item.action == "quantize" and item.matrix]
        total = 2 * self.plan.nbytes / bytes_per_s
        for kind in {item.scheme.kind for item in made}:
            start = time.perf_counter()
            _quantize(sample, Scheme("int4", 128) if kind == "int4" else Scheme(kind), None)
            rate = sample.numel() / (time.perf_counter() - start)
            total += sum(i.matrix.n * i.matrix.k for i in made if i.matrix and i.scheme.kind == kind) / rate
        return total


def prepare(source: str, options: BuildOptions) -> Prepared:
    """Open and check base and donor (folders or hub ids) and plan the build. Reads headers only."""
    base = open_base(source, options.revision)
    recipe = options.recipe if isinstance(options.recipe, Build) else recipe_for(base.reader, options.recipe)
    donor = open_donor(options.donor, options.donor_revision, base, recipe) if options.donor else None
    made = plan(
        base.reader,
        donor.reader if donor else None,
        PlanOptions(
            recipe, options.group, options.mtp, options.shard_bytes, options.vision, options.calibration is not None
        ),
    )
    return Prepared(base, donor, made, options, _state(base, donor))


def _state(base: Source, donor: Source | None) -> dict[str, dict[str, list[int]]]:
    return {what: source.state() for what, source in (("base", base), ("donor", donor)) if source}


def build(
    source: str,
    out: str | Path,
    options: BuildOptions | None = None,
    *,
    progress: Progress | None = None,
    quantizer: Quantizer | None = None,
) -> BuildResult:
    """Make the checkpoint folder `out` from `source`. Run again after a kill, it goes on where it was.

    Raises CheckpointError for what is wrong with a source, ConfigError for what is wrong with `out` or the options.
    """
    return run(prepare(source, options or BuildOptions()), out, progress=progress, quantizer=quantizer)


def run(
    prepared: Prepared, out: str | Path, *, progress: Progress | None = None, quantizer: Quantizer | None = None
) -> BuildResult:
    """`build` of what `prepare` gave."""
    out = Path(out)
    for source, what in ((prepared.base, "base"), (prepared.donor, "donor")):
        if source and out.resolve().is_relative_to(source.path.resolve()):
            where = "is" if out.resolve() == source.path.resolve() else "lies inside"
            raise ConfigError(f"{out}: the output folder {where} the {what} itself; choose another.")
    with _disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            return _run(prepared, out, progress or Silent(), quantizer)


def _run(prepared: Prepared, out: Path, progress: Progress, quantizer: Quantizer | None) -> BuildResult:
    made, fingerprint = prepared.plan, prepared.fingerprint()
    job = _Job.begin(out, fingerprint, prepared)
    if job is None:
        done = manifest.read(out)
        manifest.check_sizes(out)
        return BuildResult(out, made, done["errors"], len(made.shards))
    reused = job.keep_finished(made.file_names())
    files = [(f, s, sum(i.nbytes for i in s)) for f, s in zip(made.file_names(), made.shards, strict=True)]
    _check_disk(out, sum(size for f, _, size in files if f not in job.shards))
    for name, shard, size in files:
        if name in job.shards:
            progress.advance(size, name)
            continue
        errors: dict[str, float] = {}
        with _ShardWriter(out, name, shard) as writer:
            for item in shard:
                rms = _Work(item, writer, progress, quantizer).run()
                if rms is not None:
                    errors[item.name] = rms
        prepared.check_sources(out, prepared.state)
        job.finished(name, {**writer.digest, "errors": errors})
        progress.finished(name, size)
    return BuildResult(out, made, _finish(prepared, out, job, fingerprint), reused)


def _finish(prepared: Prepared, out: Path, job: _Job, fingerprint: dict[str, Any]) -> dict[str, float]:
    """Index, config and the files beside the weights; then the manifest, which makes the folder whole."""
    made = prepared.plan
    names = made.file_names()
    weight_map = {o[0]: f for f, shard in zip(names, made.shards, strict=True) for item in shard for o in item.outputs}
    files = {name: {"bytes": job.shards[name]["bytes"], "sha256": job.shards[name]["sha256"]} for name in names}
    index = {"metadata": {"total_size": made.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    config = {**made.config, manifest.MARK: describe(made.recipe)}
    small = {INDEX: _json(index), "config.json": _json(config)}
    small |= {name: (prepared.base.path / name).read_bytes() for name in folder_files(prepared.base.path)}
    for name, data in small.items():
        _write_small(out / name, data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    errors = {k: v for name in names for k, v in job.shards[name]["errors"].items()}
    totals = {f"{part} {kind}": size for (part, kind), size in sorted(made.totals().items())}
    _write_small(out / manifest.MANIFEST, _json({**fingerprint, "bytes": totals, "files": files, "errors": errors}))
    (out / manifest.JOB).unlink()
    _sync_folder(out)
    return errors


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _write_small(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    with _disk_errors(path):
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_folder(path.parent)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """What the system says of a file, in a line with the way out."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: {error.strerror or error}; see to that and run the same command again."
        ) from None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def room(prepared: Prepared, out: str | Path) -> str:
    """Disk needed and free, for people."""
    here = next(p for p in (Path(out).resolve(), *Path(out).resolve().parents) if p.exists())
    free = shutil.disk_usage(here).free
    return f"{prepared.plan.nbytes / 1e9:.3f} GB to write, {free / 1e9:.1f} GB free at {here}"


def _check_disk(out: Path, needed: int) -> None:
    needed += needed // 100 + (1 << 20)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise ConfigError(f"{out}: {free / 1e9:.3f} GB free, {needed / 1e9:.3f} GB needed; free some space first.")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One builder a folder; the lock goes with the process, however that ends."""
    import fcntl

    fd = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{out}: another build is running in this folder; let it finish.") from None
    else:
        yield
    finally:
        os.close(fd)


@dataclass
class _Job:
    """The job file: what is being built, and which files are done."""

    out: Path
    fingerprint: dict[str, Any]
    sources: dict[str, Any]
    shards: dict[str, Any]

    @classmethod
    def begin(cls, out: Path, fingerprint: dict[str, Any], prepared: Prepared) -> _Job | None:
        """Start or resume; None when `out` already holds this very build."""
        fingerprint = json.loads(_json(fingerprint))
        if (out / manifest.MANIFEST).exists():
            done = manifest.read(out)
            if {k: done.get(k) for k in fingerprint} != fingerprint:
                raise ConfigError(f"{out}: holds another finished build; choose another folder or remove this one.")
            (out / manifest.JOB).unlink(missing_ok=True)
            return None
        if (out / manifest.JOB).exists():
            state = manifest.read_job(out)
            if state["fingerprint"] != fingerprint:
                raise ConfigError(
                    f"{out}: holds an unfinished build from other sources or options; finish that one or remove it."
                )
            prepared.check_sources(out, state["sources"])
            return cls(out, fingerprint, state["sources"], state["shards"])
        foreign = sorted(f.name for f in out.iterdir() if f.name != f".{manifest.JOB}.partial")
        if foreign:
            raise ConfigError(f"{out}: not empty ({foreign[0]}); choose a new folder.")
        job = cls(out, fingerprint, prepared.state, {})
        job._write()
        return job

    def _write(self) -> None:
        state = {"fingerprint": self.fingerprint, "sources": self.sources, "shards": self.shards}
        _write_small(self.out / manifest.JOB, _json(state))

    def keep_finished(self, names: tuple[str, ...]) -> int:
        """Forget files that are not what the job file says; remove what no run has vouched for. Gives how many stay."""
        for name in list(self.shards):
            path = self.out / name
            if (
                name not in names
                or not path.is_file()
                or manifest.digest(path) != {k: self.shards[name][k] for k in ("bytes", "sha256")}
            ):
                del self.shards[name]
        for path in self.out.iterdir():
            ours = path.name.endswith(".partial") and path.name.startswith(".")
            if ours or (path.suffix == ".safetensors" and path.name not in self.shards):
                path.unlink()
        return len(self.shards)

    def finished(self, name: str, entry: dict[str, Any]) -> None:
        self.shards[name] = entry
        self._write()


class _ShardWriter:
    """One safetensors file under a temporary name. Wide dtypes first, so that every tensor is aligned."""

    def __init__(self, out: Path, name: str, items: tuple[Item, ...]) -> None:
        self.final, self.temporary = out / name, out / f".{name}.partial"
        outputs = sorted((o for item in items for o in item.outputs), key=lambda o: -o[1].itemsize)
        header = header_bytes(outputs, {"format": "pt"})
        self.at: dict[str, int] = {}
        end = len(header)
        for tensor, dtype, shape in outputs:
            self.at[tensor] = end
            end += dtype.itemsize * math.prod(shape)
        self.size, self.dirty, self.digest = end, 0, dict[str, Any]()
        self.header = header

    def __enter__(self) -> _ShardWriter:
        with _disk_errors(self.final):
            self.fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.ftruncate(self.fd, self.size)
                self._write(self.header, 0)
            except BaseException:
                self._give_up()
                raise
        return self

    def _give_up(self) -> None:
        os.close(self.fd)
        self.temporary.unlink(missing_ok=True)  # on a full disk its room is needed

    def put(self, name: str, t: Tensor) -> None:
        data = t.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK):
            self.put_bytes(name, start, data[start : start + CHUNK])

    def put_bytes(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._write(data, self.at[name] + offset)

    def _write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        view, done = memoryview(data), 0
        with _disk_errors(self.final):
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], at + done)
            self.dirty += len(view)
            if self.dirty >= SYNC_EVERY:
                self._sync()

    def _sync(self) -> None:
        os.fdatasync(self.fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.dirty = 0

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._give_up()
            return
        with _disk_errors(self.final):
            try:
                self._sync()
                os.fsync(self.fd)
            except BaseException:
                self._give_up()
                raise
            os.close(self.fd)
            self.digest = manifest.digest(self.temporary)  # from disk: what was written is what is there
            self.temporary.rename(self.final)
            _sync_folder(self.final.parent)


@dataclass
class _Work:
    """One item, from its source to the file."""

    item: Item
    writer: _ShardWriter
    progress: Progress
    quantizer: Quantizer | None

    def run(self) -> float | None:
        """Write the item's outputs. Gives the relative RMS error when it was quantised here."""
        item, error = self.item, None
        if item.action == "copy":
            self._copy()
            return None
        matrix = item.matrix
        assert matrix is not None
        if item.action == "quantize":
            w, error = self._quantize(matrix)
            stored = _stored(w)
        else:
            loaded = matrix.reader.read_module(matrix.module)
            stored = {"weight": dequantize(loaded, torch.bfloat16)} if item.action == "dequantize" else _stored(loaded)
        for name, dtype, shape in item.outputs:
            t = stored[name.rpartition(".")[2]]
            assert t.dtype == dtype and t.shape == shape, f"{name}: planned {dtype} {shape}, made {t.dtype} {t.shape}"
            self.writer.put(name, t)
            self.progress.advance(t.numel() * t.element_size(), item.name)
        return error

    def _copy(self) -> None:
        """Bytes as they are, once their numbers mean something."""
        item, shards = self.item, self.item.reader.shards
        held: dict[str, Tensor] = {}
        if item.matrix is not None and item.scheme.kind != "16-bit":
            item.reader.read_module(item.matrix.module, held)
        for stored, (name, dtype, _) in zip(item.inputs, item.outputs, strict=True):
            size = shards.tensors[stored].nbytes
            if stored in held:
                self.writer.put(name, held[stored])
                self.progress.advance(size, item.name)
                continue
            for start in range(0, size, CHUNK):
                data = shards.read_bytes(stored, start, min(CHUNK, size - start))
                if not is_vision(stored) and not is_finite(torch.frombuffer(data, dtype=dtype)):
                    raise CheckpointError(f"{stored}: holds NaN or Inf; {WAY_OUT}.")
                self.writer.put_bytes(name, start, data)
                self.progress.advance(len(data), item.name)

    def _quantize(self, matrix: Matrix) -> tuple[Packed, float]:
        """All rows, a chunk at a time: no more than the result and a chunk is in memory."""
        scheme, n = self.item.scheme, matrix.n
        global_scale = self._global_scale(matrix) if scheme.kind == "nvfp4" else None
        result: Packed | None = None
        lost = total = 0.0
        for start, stored in matrix.chunks():
            x = stored.float()
            energy = _energy(x)
            if not math.isfinite(energy):  # NaN, Inf, or squares past fp32
                if not bool(x.isfinite().all()):
                    name = matrix.reader.published(matrix.module)
                    raise CheckpointError(f"{name}: holds NaN or Inf; {WAY_OUT}.")
                energy = float(x.double().square().sum())
            w = self._levels(start, x, global_scale)
            lost += _energy(dequantize(w).sub_(x))
            total += energy
            if x.shape[0] == n:
                result = w
                break
            result = _put_rows(result, w, start, n)
        assert result is not None, f"{matrix.module}: no rows"
        return result, float(f"{math.sqrt(lost / total) if total else 0.0:.4g}")

    def _levels(self, start: int, x: Tensor, global_scale: Tensor | None) -> Packed:
        name, scheme = self.item.name, self.item.scheme
        try:
            better = self.quantizer(name, start, x, scheme) if self.quantizer else None
            return better if better is not None else _quantize(x, scheme, global_scale)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def _global_scale(self, matrix: Matrix) -> Tensor:
        largest = torch.zeros(())
        for each in (matrix, self.item.partner):
            for _, x in each.chunks() if each else ():
                largest = torch.maximum(largest, x.abs().amax().float())
        return global_scale_for(largest)


def _energy(x: Tensor) -> float:
    """Sum of squares: rows in fp32, their sums in fp64."""
    return float(x.square().sum(-1).double().sum())


def _quantize(x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> Packed:
    if scheme.kind == "int4":
        return quantize_int4(x, scheme.group)
    if scheme.kind == "fp8":
        return quantize_fp8(x, scheme.block)
    return quantize_int8(x) if scheme.kind == "int8" else quantize_nvfp4(x, global_scale)


def _put_rows(into: Packed | None, w: Packed, start: int, n: int) -> Packed:
    """Rows [start, ...) of a container of `n` rows, which is made at the first call."""

    def height(name: str, count: int) -> int:
        return -(-count // w.block[0]) if isinstance(w, Fp8Weight) and name == "scale" else count

    values = {name: t for name, t in tensors(w).items() if name != "global_scale"}
    if into is None:
        into = with_tensors(w, {name: t.new_empty((height(name, n), *t.shape[1:])) for name, t in values.items()})
    for name, t in values.items():
        at = height(name, start)
        tensors(into)[name][at : at + t.shape[0]] = t
    return into


def _stored(w: Weight) -> dict[str, Tensor]:
    """A container as the output's tensors, by suffix."""
    if isinstance(w, Int4Weight):
        return int4_to_gptq(w)
    if isinstance(w, Fp8Weight):
        return {"weight": w.q, "weight_scale_inv": w.scale}
    if isinstance(w, Int8Weight):
        return {"weight": w.q, "weight_scale": w.scale[:, None]}
    if isinstance(w, Nvfp4Weight):
        return {"weight": w.q, "weight_scale": w.scale, "weight_scale_2": w.global_scale}
    return {"weight": w}
