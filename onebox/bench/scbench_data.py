"""SCBench as published: a folder, or a data set of the model hub, -> sessions.

Per task either `<task>/*.parquet` (what the hub holds) or `data/<task>.jsonl` (or `<task>.jsonl`); a row has `context`,
`multi_turns` of `input` and `answer` (and `options`, `task`, `name`), and of code `lang` and `repo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onebox.bench.scbench_tasks import MIXED, Answer, Session, Turn, max_new_tokens, needed
from onebox.errors import ConfigError

HUB = "microsoft/SCBench"


def folder_of(source: str, tasks: tuple[str, ...], *, revision: str | None = None) -> Path:
    """A local folder as it is; else the data set of that id from the hub, the files of `tasks` alone.

    Raises ConfigError.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") != 1 or source.startswith((".", "/")):
        raise ConfigError(f"{source}: no such folder, and not an id of the hub such as {HUB}.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [pattern for task in tasks for pattern in (f"{task}/*", f"data/{task}.jsonl")]
    try:
        return Path(snapshot_download(source, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        why = str(e).partition("\n")[0]
        raise ConfigError(f"{source}: not fetched from the hub ({why}); give --data a folder with its files.") from e


def sessions(folder: Path, task: str, *, most: int | None = None, turns: int | None = None) -> list[Session]:
    """The first `most` sessions of a task, with at most `turns` questions each. Raises ConfigError by file and row."""
    found = []
    for number, (where, row) in enumerate(_rows(folder, task)):
        if most is not None and number >= most:
            break
        found.append(_session(row, task, f"{where}, row {number + 1}", number, turns))
    if not found:
        raise ConfigError(f"{folder}: no row of {task}; expected {task}/*.parquet or data/{task}.jsonl with rows.")
    return found


def _rows(folder: Path, task: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    tables = sorted((folder / task).glob("*.parquet"))
    if tables:
        parquet = needed("pyarrow.parquet")
        for table in tables:
            try:
                file = parquet.ParquetFile(table)
            except (OSError, ValueError) as e:  # pyarrow's errors are both
                raise ConfigError(f"{table}: not a readable parquet file ({e}); fetch it again.") from e
            with file:
                for batch in file.iter_batches(batch_size=4):
                    for row in batch.to_pylist():
                        yield table.name, row
        return
    places = [folder / "data" / f"{task}.jsonl", folder / f"{task}.jsonl", *sorted((folder / task).glob("*.jsonl"))]
    for file in places:
        if file.is_file():
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        try:
                            yield file.name, json.loads(line)
                        except ValueError as e:
                            raise ConfigError(f"{file}, line {number}: not JSON ({e}); fetch it again.") from e
            return
    raise ConfigError(f"{folder}: nothing of {task}; expected {task}/*.parquet or data/{task}.jsonl.")


def _session(row: Mapping[str, Any], task: str, where: str, number: int, turns: int | None) -> Session:
    def field(name: str, of: Mapping[str, Any] = row) -> Any:
        if not isinstance(of, dict) or of.get(name) is None:
            raise ConfigError(f"{where}: field {name!r} of {task} is missing; is this SCBench's layout?")
        return of[name]

    found = []
    for turn in field("multi_turns")[:turns]:
        kind = field("task", turn) if task in MIXED else task
        if task in MIXED and kind not in MIXED[task]:
            raise ConfigError(f"{where}: a turn's task is {kind!r}; of {task} it is {' or '.join(MIXED[task])}.")
        options = tuple(field("options", turn)) if task == "scbench_choice_eng" else ()
        answer = _answer(field("answer", turn), kind, where)
        if options and answer not in options:
            raise ConfigError(f"{where}: the answer {answer!r} is none of the options.")
        name = str(field("name", turn)) if kind == "scbench_repoqa" else ""
        limit = max_new_tokens(task, kind)
        found.append(Turn(kind, str(field("input", turn)), answer, limit, options, name))
    code = any(turn.task == "scbench_repoqa" for turn in found)
    lang, repo = (str(field("lang")), str(field("repo"))) if code else ("", "")
    context = row.get("context") if row.get("context") is not None else field("input")
    return Session(str(row.get("id", number)), task, str(context), tuple(found), lang, repo)


def _answer(value: Any, kind: str, where: str) -> Answer:
    if isinstance(value, list):
        if kind in ("scbench_vt", "scbench_qa_eng", "scbench_qa_chn", "scbench_many_shot"):
            return tuple(map(str, value))
        if len(value) != 1:
            raise ConfigError(f"{where}: {len(value)} answers to a question of {kind}; expected one.")
        value = value[0]
    if kind == "scbench_mf":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: the answer {value!r} is not a number.")
        return value
    return str(value)
