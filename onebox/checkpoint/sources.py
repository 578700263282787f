"""Where a checkpoint comes from: a folder, or a repository of the model hub at a fixed revision."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.checkpoint.names import Names, canonical, part_of
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.shards import INDEX, SINGLE, read_json
from onebox.errors import CheckpointError, ConfigError
from onebox.ledger import Build

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. `revision` is a commit of the hub, None for a folder."""

    name: str
    revision: str | None
    path: Path
    reader: WeightReader

    def describe(self) -> dict[str, Any]:
        """For the manifest: name, revision, and for each file read its size and hash.

        `header_sha256` covers the header, which fixes every tensor's name, dtype, shape and place; `sha256` covers
        the file and is there when the hub's cache names it.
        """
        files: dict[str, Any] = {}
        for path in sorted({info.file for info in self.reader.shards.tensors.values()}):
            entry: dict[str, Any] = {"bytes": path.stat().st_size, "header_sha256": _header_hash(path)}
            blob = os.path.basename(os.path.realpath(path))
            if re.fullmatch(r"[0-9a-f]{64}", blob):
                entry["sha256"] = blob
            files[path.name] = entry
        config = hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()
        return {"name": self.name, "revision": self.revision, "config_sha256": config, "files": files}

    def state(self) -> dict[str, list[int]]:
        """[bytes, time of change in ns] of each file read, by name."""
        files = {info.file for info in self.reader.shards.tensors.values()} | {self.path / "config.json"}
        return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)}


def _header_hash(path: Path) -> str:
    with path.open("rb") as file:
        prefix = file.read(8)
        return hashlib.sha256(prefix + file.read(int.from_bytes(prefix, "little"))).hexdigest()


def open_base(name: str, revision: str | None) -> Source:
    """The whole checkpoint `name`."""
    if Path(name).is_dir():
        return _folder(name, revision, None)
    path, commit = _download(name, revision, [*SMALL_FILES, "*.safetensors"])
    return Source(name, commit, path, WeightReader.open(path))


def open_donor(name: str, revision: str | None, base: Source, recipe: Build) -> Source:
    """The files of `name` that hold a tensor which the recipe wants in FP8 and the base does not have so."""
    parts = ("shared", "mlp", "attention", "gdn", "experts", "mtp_experts", "mtp_dense", "head")
    in_fp8 = {part for part in parts if getattr(recipe, part) == "fp8"}
    modules = {
        module
        for module in base.reader.modules
        if part_of(f"{module}.") in in_fp8 and base.reader.scheme(module).kind != "fp8"
    }

    def wanted(stored: str) -> bool:
        return canonical(stored).rpartition(".")[0] in modules

    if Path(name).is_dir():
        return _folder(name, revision, wanted)
    path, commit = _download(name, revision, SMALL_FILES)
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        names = Names.of(weight_map if isinstance(weight_map, dict) else {}).stored.values()
        shards = sorted({str(weight_map[stored]) for stored in names if wanted(stored)}) if weight_map else []
    else:
        shards = [SINGLE]
    if not shards:
        raise CheckpointError(f"{name}: the donor holds none of the tensors that the recipe wants in FP8.")
    path, commit = _download(name, commit, [*SMALL_FILES, *shards])
    return Source(name, commit, path, WeightReader.open(path, wanted=wanted))


def _folder(name: str, revision: str | None, wanted: Callable[[str], bool] | None) -> Source:
    if revision is not None:
        raise ConfigError(f"revision {revision!r}: {name} is a folder, which has no revisions; leave the revision out.")
    path = Path(name)
    return Source(path.resolve().name, None, path, WeightReader.open(path, wanted=wanted))


def _download(name: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
    """A snapshot of a hub repository and the commit it is of."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{name}: neither a folder nor a hub id such as 'Qwen/Qwen3.5-35B-A3B'.")
    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: could not be fetched from the hub: {first}") from None
    return path, path.name
