"""Read a finished build again, all of it, and say whether it can be vouched for."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from onebox.checkpoint import manifest
from onebox.checkpoint.hybrid import MATRICES, Matrix
from onebox.checkpoint.names import is_activation_scale, part_of
from onebox.checkpoint.progress import Progress, Silent
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.shards import Shards
from onebox.checkpoint.sources import open_base
from onebox.checkpoint.values import is_finite
from onebox.errors import CheckpointError
from onebox.kernels.int8_ref import Int8Weight

# A matrix further than this from what it was made of is damaged, not rounded. Of Gaussian weights a format loses about
# a third of it (INT4 0.097, NVFP4 0.087, FP8 0.026, INT8 0.008).
LIMITS = {"int4": 0.3, "nvfp4": 0.3, "fp8": 0.08, "int8": 0.05, "16-bit": 0.01}


@dataclass(frozen=True)
class VerifyReport:
    """What was read. `errors` is relative RMS to the source (measured now, or by the build when none was given)."""

    path: Path
    files: int
    nbytes: int
    tensors: int
    errors: dict[str, float]
    measured: bool

    def worst(self, count: int = 10) -> list[tuple[str, float]]:
        return sorted(self.errors.items(), key=lambda entry: -entry[1])[:count]

    def lines(self) -> Iterator[str]:
        size = f"{self.nbytes / 1e9:.3f} GB"
        yield f"{self.path}: {self.files} files, {self.tensors} tensors, {size}: all as the manifest says"
        if self.errors:
            yield "largest errors " + ("to the source:" if self.measured else "when built:")
            for name, error in self.worst():
                yield f"  {error:8.4f}  {name}"


def verify(
    path: str | Path,
    source: str | None = None,
    revision: str | None = None,
    *,
    progress: Progress | None = None,
) -> VerifyReport:
    """Headers, hashes, NaN and Inf, scales, and with `source` each matrix against the one it was made from.

    Raises CheckpointError naming the file or the tensor at fault.
    """
    path, progress = Path(path), progress or Silent()
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {found}; expected a checkpoint folder.")
    manifest.check_finished(path)
    if not (path / manifest.MANIFEST).exists():
        raise CheckpointError(f"{path}: no {manifest.MANIFEST}; only what 'onebox build' made can be verified.")
    done = manifest.read(path)
    files = manifest.files(path)
    manifest.check_sizes(path)
    for name, entry in files.items():
        if manifest.digest(path / name)["sha256"] != entry["sha256"]:
            raise CheckpointError(f"{path / name}: its bytes are not what the manifest says; build it again.")
        progress.advance(entry["bytes"], name)
    for file in path.glob("*.safetensors"):
        if file.name not in files:
            raise CheckpointError(f"{file}: the manifest does not name this file; remove it.")
    reader = WeightReader.open(path)
    try:
        errors = dict(done["errors"])
        _scan(reader, errors, progress)
        if source is not None:
            origin = open_base(source, revision)
            made_of_it = done["base"].get("config_sha256") == origin.describe()["config_sha256"]
            errors = _compare(reader, origin.reader, progress, LIMITS if made_of_it else {**LIMITS, "16-bit": 0.3})
    finally:
        reader.shards.close()
    total = sum(entry["bytes"] for entry in files.values())
    return VerifyReport(path, len(files), total, len(reader.shards.tensors), errors, source is not None)


def _scan(reader: WeightReader, made: Container[str], progress: Progress) -> None:
    """Every tensor, a module at a time; `made` are those quantised by the build."""
    for module, parts in reader.modules.items():
        if module and part_of(f"{module}.") in MATRICES and not module.endswith(".experts"):
            reader.check_module(module)
            if reader.scheme(module).kind != "16-bit":
                w = reader.read_module(module)
                if isinstance(w, Int8Weight) and module in made and int(w.q.min()) < -127:
                    raise CheckpointError(
                        f"{reader.published(module)}: holds -128, which no build writes; build it again."
                    )
                continue
        for stored in parts.values():
            if is_activation_scale(stored):
                continue
            info, step = reader.shards.tensors[stored], 1 << 23
            count = math.prod(info.shape)
            for start in range(0, count, step):
                t = reader.shards.read_part(stored, start, (min(step, count - start),))
                if not is_finite(t):
                    raise CheckpointError(f"{stored}: holds NaN or Inf; build it again from sound weights.")
                progress.advance(0, stored)


def _compare(
    built: WeightReader, source: WeightReader, progress: Progress, limits: dict[str, float]
) -> dict[str, float]:
    """Relative RMS of each matrix to its source. 16-bit tensors that are no matrix must be equal."""
    errors: dict[str, float] = {}
    for module, parts in built.modules.items():
        part = part_of(f"{module}.")
        if part not in MATRICES or module.endswith(".experts"):
            for suffix, stored in parts.items():
                theirs = source.names.stored.get(f"{module}.{suffix}" if module else suffix)
                if theirs is None:
                    raise CheckpointError(f"{stored}: the source holds no such tensor.")
                if not _equal(built.shards, stored, source.shards, theirs):
                    raise CheckpointError(f"{stored}: differs from the source, which it should copy.")
            continue
        tied = module == "lm_head" and "lm_head" not in source.modules
        ours, theirs_matrix = Matrix.of(built, module), Matrix.of(source, "embed_tokens" if tied else module)
        if (ours.n, ours.k) != (theirs_matrix.n, theirs_matrix.k):
            raise CheckpointError(
                f"{built.published(module)}: {ours.n} x {ours.k}, in the source {theirs_matrix.n} x {theirs_matrix.k}."
            )
        lost = total = 0.0
        for (_, a), (_, b) in zip(ours.chunks(), theirs_matrix.chunks(), strict=True):
            lost += float((a.double() - b.double()).square().sum())
            total += float(b.double().square().sum())
            progress.advance(0, module)
        error = math.sqrt(lost / total) if total else math.sqrt(lost)
        if error > max(limits[ours.scheme.kind], limits[theirs_matrix.scheme.kind]):
            raise CheckpointError(
                f"{built.published(module)}: {error:.3f} from the source (relative RMS); {ours.scheme} stays below "
                f"{limits[ours.scheme.kind]}."
            )
        if ours.scheme.kind != "16-bit":
            errors[module] = error
    return errors


def _equal(a: Shards, name_a: str, b: Shards, name_b: str) -> bool:
    ours, theirs, step = a.tensors[name_a], b.tensors[name_b], 1 << 24
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and all(
        a.read_bytes(name_a, start, min(step, ours.nbytes - start))
        == b.read_bytes(name_b, start, min(step, ours.nbytes - start))
        for start in range(0, ours.nbytes, step)
    )
