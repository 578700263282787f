"""onebox.json: what a finished build is made of. Its presence is what "done" means."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from onebox.checkpoint.shards import read_json
from onebox.errors import CheckpointError

MANIFEST = "onebox.json"
JOB = "onebox.partial.json"  # there while a build runs, gone when it is done
MARK = "onebox_build"  # config.json's word that a manifest belongs to it


def check_finished(path: Path) -> None:
    """Refuse a folder that a build has begun and not finished."""
    if (path / MANIFEST).exists():
        return
    way_out = "run its 'onebox build' again"
    if not (path / JOB).exists():
        if not (path / "config.json").exists() or MARK not in read_json(path / "config.json"):
            return
        way_out += f", or remove {MARK!r} from config.json if another tool made this folder of a build"
    raise CheckpointError(f"{path}: this build is not finished ({MANIFEST} is missing); {way_out}.")


def unmark(path: Path) -> None:
    """Let `config.json` not speak of a build: what another tool made of one is a checkpoint of its own."""
    config = read_json(path / "config.json")
    if config.pop(MARK, None) is not None:
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The manifest of a finished build."""
    value = read_json(path / MANIFEST)
    if not isinstance(value.get("base"), dict) or not _numbers(value.get("errors")):
        raise CheckpointError(
            f"{path / MANIFEST}: 'base' must be an object, 'errors' a number for each tensor; it is damaged: build "
            "again into a new folder."
        )
    return value


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, int | float) and v >= 0 for v in value.values())


def read_job(path: Path) -> dict[str, Any]:
    """The job file of an unfinished build."""
    state = read_json(path / JOB)
    shards = state.get("shards")
    if not isinstance(shards, dict) or not all(isinstance(state.get(k), dict) for k in ("fingerprint", "sources")):
        raise CheckpointError(f"{path / JOB}: not a job file of 'onebox build'; remove the folder.")
    for name, entry in shards.items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys() or not _numbers(entry.get("errors")):
            raise CheckpointError(f"{path / JOB}: {name!r} lacks its bytes, hash or errors; remove the folder.")
    return state


def digest(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, read past the page cache's back: what was read is given back."""
    sha, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 24):
                sha.update(block)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), size, len(block), os.POSIX_FADV_DONTNEED)
                size += len(block)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from None
    return {"bytes": size, "sha256": sha.hexdigest()}


def files(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {bytes, sha256} of each file the manifest vouches for; empty without a manifest."""
    if not (path / MANIFEST).exists():
        return {}
    entries = read_json(path / MANIFEST).get("files")
    if not isinstance(entries, dict) or not all(
        isinstance(e, dict) and type(e.get("bytes")) is int and isinstance(e.get("sha256"), str)
        for e in entries.values()
    ):
        raise CheckpointError(f"{path / MANIFEST}: 'files' must give bytes and sha256 of each file; it is damaged.")
    for name in entries:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(f"{path / MANIFEST}: {name!r} is no file of this folder; refused.")
    return entries


def check_sizes(path: Path) -> None:
    """Each file of the manifest is there and as long as it was; cheap enough for every start."""
    for name, entry in files(path).items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != entry["bytes"]:
            what = "missing" if found is None else f"{found} bytes"
            raise CheckpointError(
                f"{path / name}: {what}, the manifest says {entry['bytes']} bytes; run 'onebox build --verify {path}'."
            )
