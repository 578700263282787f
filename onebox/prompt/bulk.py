"""Rows of a file (JSON lines or Parquet), one of their columns compressed: part by part, each kept once it is there.

A part is so many rows. Its result is a file of its own until all parts are there; then they become the output. So a run
that was ended goes on where it was, and each row comes out once, in its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onebox.errors import ConfigError, PromptError
from onebox.prompt.command import build_compressor

PART_ROWS = 256
SUFFIXES = (".jsonl", ".parquet")
ADDED = ("tokens", "original_tokens", "error")
Text = tuple[str | None, str | None]  # what is compressed, and the question; None where a row has no text
Say = Callable[[str], None]


@dataclass(frozen=True)
class Made:
    """What became of one text: shorter, or as it was with the error that kept it so."""

    text: str | None
    tokens: int | None = None
    original_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Settings:
    """How texts are compressed, and which column they stand in; `question` is for rows that have none of their own."""

    column: str = "prompt"
    method: str = "auto"
    model: str | None = None
    rate: float | None = None
    target_tokens: int | None = None
    question: str | None = None


class Shortener:
    """Texts of a part -> what became of each. Made once a process; it holds the compressor."""

    def __init__(self, settings: Settings) -> None:
        self._options: dict[str, Any] = {"rate": settings.rate, "target_tokens": settings.target_tokens}
        self._compressor = build_compressor(settings.method, settings.model)

    def __call__(self, texts: Sequence[Text]) -> list[Made]:
        return [self._one(text, question) for text, question in texts]

    def _one(self, text: str | None, question: str | None) -> Made:
        if text is None:
            return Made(None, error="no text in this row")
        try:
            text.encode()
            done = self._compressor.compress(text, question=question, append_question=False, **self._options)
        except (PromptError, UnicodeEncodeError) as e:
            return Made(text, error=str(e))
        return Made(done.text, done.tokens, done.original_tokens)


Work = Callable[[Iterable[tuple[int, list[Text]]]], Iterable[tuple[int, list[Made]]]]


def in_here(settings: Settings) -> Work:
    """All parts one after the other, in this process."""

    def work(parts: Iterable[tuple[int, list[Text]]]) -> Iterator[tuple[int, list[Made]]]:
        shorten = Shortener(settings)
        for number, texts in parts:
            yield number, shorten(texts)

    return work


def need_arrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as e:
        raise ConfigError("Parquet files need pyarrow; install it with: pip install pyarrow") from e
    return pyarrow


def texts_of(rows: Iterable[Any], settings: Settings) -> list[Text]:
    """Column and question of rows; a row's own question goes before the one of all."""
    found: list[Text] = []
    for row in rows:
        values = row if isinstance(row, Mapping) else {}
        text, asked = values.get(settings.column), values.get("question")
        question = asked if isinstance(asked, str) and asked else settings.question
        found.append((text if isinstance(text, str) else None, question))
    return found


class JsonLines:
    """A file of JSON lines. A line that is no object comes out as an object that says so."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings

    def parts(self) -> Iterator[list[Any]]:
        """Rows, part by part; blank lines are none."""
        with self._path.open("rb") as file:
            rows: list[Any] = []
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    rows.append(json.loads(line))
                except (ValueError, RecursionError) as e:
                    rows.append({"line": number, "error": f"line {number} is not JSON: {e}"})
                if len(rows) == PART_ROWS:
                    yield rows
                    rows = []
            if rows:
                yield rows

    def texts(self, part: Any) -> list[Text]:
        return texts_of(part, self._settings)

    def write(self, path: Path, part: Any, made: Sequence[Made]) -> None:
        lines = []
        for row, done in zip(part, made, strict=True):
            whole = dict(row) if isinstance(row, dict) else {"row": row}
            if done.error is None:
                whole |= {self._settings.column: done.text}
            else:
                whole.setdefault("error", done.error)
            whole |= {"tokens": done.tokens, "original_tokens": done.original_tokens}
            lines.append(json.dumps(whole, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        path.write_bytes(b"".join(lines))

    def join(self, parts: Sequence[Path], out: Path) -> None:
        with out.open("wb") as whole:
            for path in parts:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole)


class Parquet:
    """A Parquet file: the other columns stay as they are, with their types."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings, self._arrow = path, settings, need_arrow()
        schema = self._open().schema_arrow
        wrong = "no column" if settings.column not in schema.names else ""
        if not wrong and not self._is_text(schema.field(settings.column).type):
            wrong = "no text in column"
        if wrong or any(name in schema.names for name in ADDED):
            wrong = wrong or f"a column of its own among {', '.join(ADDED)}, beside"
            raise ConfigError(f"{path}: has {wrong} {settings.column!r}; it has {', '.join(schema.names)}.")

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))

    def _open(self) -> Any:
        try:
            return self._arrow.parquet.ParquetFile(self._path)
        except self._arrow.ArrowInvalid as e:
            raise ConfigError(f"{self._path}: is no Parquet file ({' '.join(str(e).split())}).") from e

    def parts(self) -> Iterator[Any]:
        for batch in self._open().iter_batches(batch_size=PART_ROWS):
            yield self._arrow.Table.from_batches([batch])

    def texts(self, part: Any) -> list[Text]:
        names = [name for name in (self._settings.column, "question") if name in part.column_names]
        return texts_of(part.select(names).to_pylist(), self._settings)

    def write(self, path: Path, part: Any, made: Sequence[Made]) -> None:
        pa, at = self._arrow, part.column_names.index(self._settings.column)
        column = part.schema.field(at)
        table = part.set_column(at, column, pa.array([done.text for done in made], column.type))
        for name, kind in zip(ADDED, (pa.int64(), pa.int64(), pa.string()), strict=True):
            table = table.append_column(name, pa.array([getattr(done, name) for done in made], kind))
        pa.parquet.write_table(table, path)

    def join(self, parts: Sequence[Path], out: Path) -> None:
        pq = self._arrow.parquet
        with pq.ParquetWriter(out, pq.read_schema(parts[0])) as writer:
            for path in parts:
                writer.write_table(pq.read_table(path))


def opened(source: Path, out: Path, settings: Settings) -> JsonLines | Parquet:
    """Raises ConfigError for files that cannot be an input and its output."""
    for path in (source, out):
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: must end in {' or '.join(SUFFIXES)}.")
    if source.suffix != out.suffix:
        raise ConfigError(f"{source} and {out} must be of one kind.")
    if out.exists():
        raise ConfigError(f"{out}: is there already; take it away, or name another file.")
    try:
        source.open("rb").close()
    except OSError as e:
        raise ConfigError(f"{source}: cannot be read ({e.strerror or e}).") from e
    return (JsonLines if source.suffix == ".jsonl" else Parquet)(source, settings)


def stamp(source: Path, settings: Settings) -> str:
    """What makes two runs one: the input's bytes and the settings."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return json.dumps({"input": digest, "rows": PART_ROWS, **asdict(settings)}, sort_keys=True)


def begun(folder: Path, stamped: str) -> None:
    """The folder of parts, made or found. Raises ConfigError when it is another run's."""
    told = folder / "run.json"
    folder.mkdir(exist_ok=True)
    if not told.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: holds something else; take it away, or name another --out.")
    if told.exists() and told.read_text("utf-8") != stamped:
        raise ConfigError(f"{folder}: holds parts of another input or of other settings; take it away to begin anew.")
    placed(told, lambda path: path.write_text(stamped, "utf-8"))


def placed(path: Path, write: Callable[[Path], object]) -> None:
    """A file that is there whole or not at all, also after a power cut."""
    beside = path.with_name(f"{path.name}.new")
    write(beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)


def compress_file(source: Path, out: Path, settings: Settings, work: Work, say: Say) -> int:
    """Every row of `source` with its column compressed -> `out`. How many rows have an error. Raises OneboxError."""
    if source.resolve() == out.resolve():
        raise ConfigError(f"{source}: cannot be input and output at once.")
    kind = opened(source, out, settings)
    folder = out.with_name(f"{out.name}.parts")
    begun(folder, stamp(source, settings))
    left: dict[int, Any] = {}

    def path_of(number: int) -> Path:
        return folder / f"{number:08d}{out.suffix}"

    def waiting() -> Iterator[tuple[int, list[Text]]]:
        for number, part in enumerate(kind.parts()):
            if not path_of(number).exists():
                left[number] = part
                yield number, kind.texts(part)

    errors = rows = 0
    for number, made in work(waiting()):
        part = left.pop(number, None)
        if part is None:
            continue  # told twice
        placed(path_of(number), lambda path, part=part, made=made: kind.write(path, part, made))  # type: ignore[misc]
        rows += len(made)
        errors += sum(done.error is not None for done in made)
        say(f"{rows} rows done, part {number + 1}")
    paths = [path_of(number) for number, _ in enumerate(kind.parts())]
    if missing := [path.name for path in paths if not path.exists()]:
        raise ConfigError(f"{folder}: lacks {missing[0]}; run it again to go on.")
    if not paths:
        raise ConfigError(f"{source}: has no rows.")
    placed(out, lambda path: kind.join(paths, path))
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return errors
