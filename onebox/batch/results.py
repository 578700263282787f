"""The file of results: appended line by line, whole or not at all, and read again by the next run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.batch.jobs import ID_PREFIX
from onebox.errors import ConfigError

BEGINS = b'{"id":"' + ID_PREFIX.encode()
SYNC_S = 1.0


@dataclass(frozen=True)
class Done:
    """A result that is there: its id, its line, and whether it is an answer (status 200)."""

    id: str
    line: int
    ok: bool


def encode(value: Any) -> bytes:
    """One line of JSON; surrogates that stand alone, which UTF-8 does not have, as escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def is_ok(result: Mapping[str, Any]) -> bool:
    response = result.get("response")
    return result.get("error") is None and isinstance(response, Mapping) and response.get("status_code") == 200


def result_of(data: bytes) -> dict[str, Any] | None:
    """The result on a line, or None where there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return (
        value if isinstance(value, dict) and isinstance(value.get("custom_id"), str) and "response" in value else None
    )


class Results:
    """An open file of results, this process's alone while it is open.

    `done` maps custom_id to what is there. A last line cut off by a kill is taken away, one that only lacks its
    newline is given it. Raises ConfigError for a file that cannot be written, that another run writes, or that holds
    anything but results: nothing of it is changed then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Done] = {}
        self.repaired = 0  # bytes of a torn last line
        self._synced_s = time.monotonic()
        self._fd = self._open()
        try:
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self) -> int:
        while True:
            with self._failures():
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    os.close(fd)
                    raise ConfigError(f"{self.path}: is no plain file; results are read again by the next run.")
                self._lock(fd)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), self.path.stat()):
                        return fd
                os.close(fd)  # it was replaced between the two calls

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(fd)
            raise ConfigError(f"{self.path}: another run writes it; wait for that one, or name another file.") from e

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ConfigError(f"{self.path}: cannot be written ({e.strerror or e}).") from e

    def _read(self) -> None:
        self._size, number, data = 0, 0, b""
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                result = result_of(data)
                if result is None:
                    break
                id = result["custom_id"]
                if id in self.done:
                    raise ConfigError(
                        f"{self.path}: line {number} answers {id!r:.80} again, after line {self.done[id].line}."
                    )
                self.done[id] = Done(str(result.get("id")), number, is_ok(result))
                self._size += len(data)
            else:
                with self._failures():
                    if data and not data.endswith(b"\n"):
                        self._size += os.write(self._fd, b"\n")
                return
        if data.endswith(b"\n") or not (data.startswith(BEGINS) or BEGINS.startswith(data)):
            raise ConfigError(f"{self.path}: line {number} is no result of a batch; name another file for the results.")
        self.repaired = len(data)
        with self._failures():
            os.ftruncate(self._fd, self._size)

    def append(self, result: Mapping[str, Any]) -> None:
        """One more result. Raises ConfigError when it cannot be written; what was there is whole then."""
        data = encode(result)
        with self._failures():
            try:
                written = os.write(self._fd, data)
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(data)
            self.done[result["custom_id"]] = Done(str(result["id"]), len(self.done) + 1, is_ok(result))
            if time.monotonic() - self._synced_s > SYNC_S:  # a power cut costs a second's answers
                os.fsync(self._fd)
                self._synced_s = time.monotonic()

    def drop(self, ids: Collection[str]) -> None:
        """Take results away, all at once: a new file takes the place of the old one."""
        beside = self.path.with_name(f".{self.path.name}.new")
        with self._failures():
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            self._lock(fd)
            kept, size = dict[str, Done](), 0
            with self.path.open("rb") as old, open(fd, "ab", closefd=False) as new:
                for data in old:
                    id = json.loads(data)["custom_id"]
                    if id not in ids:
                        kept[id] = Done(self.done[id].id, len(kept) + 1, self.done[id].ok)
                        size += new.write(data)
            os.fsync(fd)
            os.replace(beside, self.path)
            os.close(self._fd)
        self._fd, self._size, self.done = fd, size, kept

    def close(self) -> None:
        with self._failures():
            os.fsync(self._fd)
            os.close(self._fd)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
